"""What a row looks like at a site: what servers and sites must agree on before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kilter.data import Dataset, Schema
from kilter.data.preparation import AnyPreparation, ImagePreparation, PlainInput, Preparation
from kilter.data.row_facts import RowFacts
from kilter.data.schema import is_label
from kilter.records.wire import Malformed
from kilter.tasks.kinds import KINDS


@dataclass(frozen=True)
class DataDescription:
    """What a row looks like. It contains no row, no number of rows and no statistic."""

    shape: tuple[int, ...]  # of a table: the number of its columns
    classes: tuple[str, ...]
    normalised: bool = False  # colour images, which are standardised by channel
    schema: Schema | None = None  # of a table: columns by name, with their kinds
    task: str = ""  # of arrays: what they are for, where it is not a class
    inputs: tuple[PlainInput, ...] = ()  # of arrays x.NAME: what lies side by side in a row

    @staticmethod
    def of(dataset: Dataset) -> DataDescription:
        """What a row of this data set looks like."""
        shape = tuple(dataset.x.shape[1:]) if dataset.schema is None else (len(dataset.schema.columns),)
        task = "" if dataset.schema else dataset.task
        return DataDescription(shape, dataset.classes, dataset.mean is not None, dataset.schema, task, dataset.arrays)

    @property
    def needs_statistics(self) -> bool:
        """Whether the data is prepared with statistics of all sites before the first round."""
        return self.normalised or self.schema is not None

    def row_facts(self, preparation: AnyPreparation | None) -> RowFacts:
        """What a method needs to know about prepared rows; a Mistake or Malformed if the preparation is for other data."""
        shape, mean, std = self.shape, None, None
        if isinstance(preparation, Preparation) and preparation.schema == self.schema:
            shape = preparation.shape
        elif isinstance(preparation, ImagePreparation) and self.normalised and len(preparation.mean) == self.shape[0]:
            mean, std = preparation.mean, preparation.std
        elif preparation is not None:
            raise Malformed("the preparation belongs to other columns or channels than the terms")
        target, task, outputs = (0.0, 1.0), self.task, len(self.classes)
        counts: tuple[int, ...] = ()
        if self.schema is not None:
            task = self.schema.task or ("binary" if len(self.classes) == 2 else "")
            outputs = self.schema.columns[0].width if task == "next-token" else outputs
        if isinstance(preparation, Preparation):
            target, counts = preparation.target_moments, tuple(preparation.class_counts)
        return {
            "shape": shape,
            "classes": outputs,
            "names": self.classes,
            "mean": mean,
            "std": std,
            "task": task,
            "target": target,
            "class_counts": counts,
            "inputs": preparation.inputs if isinstance(preparation, Preparation) else self.inputs,
        }

    def plain(self) -> dict[str, object]:
        """As JSON."""
        core: dict[str, object] = {
            "shape": list(self.shape),
            "classes": list(self.classes),
            "normalised": self.normalised,
        }
        core |= {"task": self.task} if self.task else {}
        core |= {"inputs": [[name, list(shape), *rest] for name, shape, *rest in self.inputs]} if self.inputs else {}
        return core | ({} if self.schema is None else {"schema": self.schema.plain()})

    @staticmethod
    def parse(value: object) -> DataDescription:
        if not isinstance(value, dict):
            raise Malformed("the description of the data is not a table")
        shape, classes = _items(value, "shape", 3), _items(value, "classes", 100_000)
        if not shape or not all(type(n) is int and 0 < n < 2**24 for n in shape):
            raise Malformed("the description of the data has an impossible shape")
        if not classes or not all(isinstance(c, str) and len(c) <= 200 and c.isprintable() for c in classes):
            raise Malformed("the description of the data has impossible class names")
        if not isinstance(value.get("normalised"), bool) or (value["normalised"] and len(shape) != 3):
            raise Malformed("the description of the data does not say whether images are normalised")
        return DataDescription(
            tuple(n for n in shape if isinstance(n, int)),
            tuple(c for c in classes if isinstance(c, str)),
            value["normalised"],
            _schema(value),
            _task(value),
            _inputs(value),
        )


def _inputs(value: Mapping[str, object]) -> tuple[PlainInput, ...]:
    inputs: list[PlainInput] = []
    for item in _items(value, "inputs", 10_000) if "inputs" in value else []:
        match item:
            case [str(name), [*shape], 0, 0] if (
                is_label(name) and shape and len(shape) <= 4 and all(type(n) is int and 0 < n < 2**24 for n in shape)
            ):
                inputs.append((name, tuple(n for n in shape if isinstance(n, int)), 0, 0))
            case _:
                raise Malformed("the description of the data has impossible inputs")
    return tuple(inputs)


def _task(value: Mapping[str, object]) -> str:
    task = value.get("task", "")
    if not isinstance(task, str) or (task and task not in KINDS):
        raise Malformed("the description of the data names an unknown task")
    return task


def _items(value: Mapping[str, object], key: str, most: int) -> list[object]:
    items = value.get(key)
    if not isinstance(items, list | tuple) or len(items) > most:
        raise Malformed(f"the description of the data has no usable {key}")
    return list(items)


def _schema(value: Mapping[str, object]) -> Schema | None:
    if value.get("schema") is None:
        return None
    try:
        schema = Schema.parse(value["schema"])
    except ValueError as error:
        raise Malformed(f"the description of the data has an impossible schema: {error}") from None
    if list(schema.classes) != _items(value, "classes", 100_000) or [len(schema.columns)] != _items(value, "shape", 3):
        raise Malformed("the description of the data has a schema of another shape or with other classes")
    return schema
