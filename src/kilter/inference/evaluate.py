"""A model on the data of a site that did not take part: as it is, and after a few steps of training there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kilter.core import Batch, Fit, Params, Rows, Tree
from kilter.data import Dataset, TableOptions, load
from kilter.data.files import is_table
from kilter.data.image_folders import is_image_folder
from kilter.data.preparation import code_columns
from kilter.data.schema import quoted
from kilter.data.tables import read_table, table_files
from kilter.errors import Mistake
from kilter.inference.model_folder import SavedModel
from kilter.records.types import Metrics
from kilter.seeds import derive
from kilter.train import run_one


@dataclass(frozen=True)
class NewSite:
    """What a model achieves at a new site, on the same test rows."""

    train_rows: int
    test_rows: int
    received: Metrics  # the model as it is
    tuned: Metrics | None  # after fine-tuning on the training rows


def new_site_data(model: SavedModel, data: str | Path, options: TableOptions) -> Dataset:
    """The labelled rows of a new site, prepared as in training."""
    facts = model.info.facts
    task = str(facts.get("task") or "")
    classification = task in ("", "binary", "multi-class")
    options = replace(options, task="" if classification else task)
    path = Path(data).expanduser()
    if len(model.shape) == 3 and (is_image_folder(path) or is_table(path)):  # arrays have their size already
        size, mode = f"{model.shape[1]}x{model.shape[2]}", "rgb" if model.shape[0] == 3 else "grey"
        options = replace(options, image_size=size, image_mode=mode)
    classes = None if not classification or model.preparation is not None else tuple(model.classes)
    if model.preparation is not None:
        options = replace(options, categories=code_columns(model.preparation))
    options = replace(options, drop=(*options.drop, *_not_needed(model, path, options)))
    dataset = load(data, classes=classes, schema=model.preparation, table=options)
    shape = tuple(dataset.x.shape[1:])
    if shape != model.shape:
        raise Mistake(f"Rows of '{data}' have the shape {shape}, and the model needs {model.shape}.")
    foreign = [c for c in dataset.classes if c not in model.classes] if classification else []
    if foreign:
        raise Mistake(f"'{data}' has classes that the model does not know: {quoted(foreign)}.")
    return dataset


def _not_needed(model: SavedModel, path: Path, options: TableOptions) -> list[str]:
    """Columns of a table that are neither inputs nor targets of the model."""
    if model.preparation is None or not is_table(path):
        return []
    schema = model.preparation.schema
    targets = {
        schema.target,
        *schema.classes,
        *(c.name for c in schema.targets),
        *options.label.split(","),
        options.event,
    }
    files, _ = table_files(path)
    return [name for name in read_table(files).columns if name not in targets and name not in schema.names]


def evaluate_at_new_site(model: SavedModel, dataset: Dataset, steps: int, lr: float = 0.0) -> NewSite:
    """Evaluate on the data's test rows; with `steps`, also after so many steps of training on its training rows."""
    tables = {"x": dataset.x, "y": dataset.y}
    train, test = Rows(tables, dataset.train), Rows(tables, dataset.test)
    received = model.task.evaluate(model.params, test)
    tuned = model.task.evaluate(fine_tune(model, train, steps, lr), test) if steps else None
    return NewSite(len(train), len(test), received, tuned)


def fine_tune(model: SavedModel, rows: Rows, steps: int, lr: float = 0.0) -> Params:
    """The model after this many steps of the run's optimiser on these rows."""
    task = model.task
    plan = replace(model.plan, epochs=1, lr=lr or model.plan.lr, schedule="constant", warmup=0, accumulate=1)
    batch = min(plan.batch or len(rows), len(rows))
    order = torch.cat(
        [
            torch.randperm(len(rows), generator=torch.Generator().manual_seed(derive("fine-tune", epoch)))[
                : len(rows) // batch * batch
            ]
            for epoch in range(-(-steps * batch // max(len(rows) // batch * batch, 1)))
        ]
    )[: steps * batch]

    def loss(params: Params, rows: Batch, _: Tree) -> Tensor:
        return task.loss(params, rows)

    fit = Fit(loss, model.params, rows.take(order), replace(plan, batch=batch), derive("fine-tune"))
    return run_one(fit).params
