"""What a method needs to know about rows, wherever they are: to build its network, its loss and its predictions."""

from __future__ import annotations

from typing import TypedDict

import torch

from kilter.data.preparation import PlainInput
from kilter.data.schema import Schema, quoted
from kilter.data.split import Split
from kilter.errors import Mistake

READ_TOKENS = ("transformer", "lstm", "causal-transformer")  # networks for texts whose words stay in order
READ_NUMBERS = ("mlp", "linear")


class RowFacts(TypedDict):
    """What a method needs to know about the rows."""

    shape: tuple[int, ...]  # of one sample
    classes: int  # or labels, or tokens
    names: tuple[str, ...]  # of the classes or labels
    mean: tuple[float, ...] | None  # by channel
    std: tuple[float, ...] | None
    task: str  # what the data is for; empty: one of several classes
    target: tuple[float, float]  # mean and deviation of a numeric target
    class_counts: tuple[int, ...]  # training rows of each class, where the loss needs them
    inputs: tuple[PlainInput, ...]  # the parts of a row by name


def row_facts(split: Split, count: bool) -> RowFacts:
    """The facts of these rows; with `count`, how many training rows of all clients have each class."""
    dataset = split.dataset
    if dataset.task == "" and len(dataset.classes) == 1:
        raise Mistake(
            f"Every row of '{dataset.name}' has the label '{dataset.classes[0]}', so there is nothing to learn."
        )
    counts: list[int] = []
    if count:
        rows = torch.cat([data.train.index for data in split.clients.values()])
        counts = torch.bincount(dataset.labels[rows], minlength=len(dataset.classes)).tolist()
    return {
        "shape": tuple(dataset.x.shape[1:]),
        "classes": dataset.outputs,
        "names": dataset.classes,
        "mean": dataset.mean,
        "std": dataset.std,
        "task": dataset.task or ("binary" if dataset.schema and len(dataset.classes) == 2 else ""),
        "target": dataset.target_moments,
        "class_counts": tuple(counts),
        "inputs": dataset.inputs,
    }


def check_reader(model: str, schema: Schema | None) -> None:
    """Refuse a network for tokens where a table has other columns, and a network for numbers where it has tokens."""
    name = model.partition(":")[0]
    columns = schema.columns if schema else ()
    in_order = [c.name for c in columns if c.kind == "text" and c.sequence]
    if name in READ_NUMBERS and in_order:
        raise Mistake(
            f"The model {name} cannot read the words of {quoted(in_order)} in order: choose transformer or lstm, or leave out "
            "--task text and sequence, so that words are counted."
        )
    if name not in READ_TOKENS or len(in_order) == len(columns):
        return
    others = [c.name for c in columns if c.name not in in_order]
    if not any(c.kind == "text" for c in columns):
        raise Mistake(
            f"The model {name} reads words in order, and no column has texts: name it (--text), or choose mlp."
        )
    if all(c.kind == "text" for c in columns):
        raise Mistake(
            f"The model {name} reads words in order, and those of {quoted(others)} are counted: use --task text, or mlp."
        )
    raise Mistake(
        f"The model {name} reads words in order, and the table also has {quoted(others)}: leave them out (--drop), name the "
        "column of clients (--client), or choose mlp without --task text."
    )
