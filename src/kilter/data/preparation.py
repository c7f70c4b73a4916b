"""Preparation: how raw columns become numbers, fitted on the training rows of all clients.

Each client computes statistics of its own training rows (`Dataset.statistics`); `fit` pools them into one preparation for all.

- A number is limited to the quantiles `clip` and 1 - `clip`, a gap is filled, and then it becomes (x - mean) / std. The mean and
  deviation are those of the values before clipping and filling.
- A date is a number of days. With `parts`, the sine and cosine of its month and weekday follow.
- A category has one column for each value in the statistics and one for "other". A gap is 0 in all, or the most frequent value.
  With `embed`, it is one number, the place of the value, for which the network learns a vector.
- Columns of a time series share one mean and deviation. Rows become (channels, time, 1).
- A text is a vector of word counts of length 1. Words are hashed, or looked up in a vocabulary.
- Colour images are standardised by channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from kilter.data.columns import Columns
from kilter.data.encoding import encode_column
from kilter.data.prepare_settings import is_decimal
from kilter.data.schema import Column, Schema, is_finite, is_label, quoted, read_plain, same_kind
from kilter.data.statistics import (
    ColumnStatistics,
    is_count,
    pool,
    pool_column,
    quantile,
    summarise,
)
from kilter.errors import Mistake

FILE = "preparation.toml"
Plain = Mapping[str, object]  # statistics as they travel
PlainInput = tuple[str, tuple[int, ...], int, int]  # an input by name: kilter.models.inputs.Input


@dataclass(frozen=True)
class FittedColumn:
    """A column of the schema with what its preparation needs."""

    column: Column
    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    values: tuple[str, ...] = ()  # of a category or vocabulary, in order
    fill: float | str | None = None  # what replaces a gap; None: nothing does
    low: float | None = None  # limits of clipped numbers
    high: float | None = None
    counts: tuple[int, ...] = ()  # of a counted target: rows with each of the values

    @property
    def width(self) -> int:
        """How many numbers of a prepared row come from this column."""
        kind = self.column.kind
        if kind == "category":
            return 1 if self.column.embed else len(self.values) + 1
        if kind == "text" and self.column.sequence:
            return self.column.sequence
        if kind == "text":
            return (self.column.vocabulary and len(self.values)) or self.column.width
        return 5 if kind == "date" and self.column.parts else 1

    @property
    def places(self) -> int:
        """Of a category that is embedded: its values, the gap and "other"; otherwise 0."""
        return len(self.values) + 2 if self.column.kind == "category" and self.column.embed else 0

    def plain(self) -> dict[str, object]:
        fitted = {"count": self.count, "mean": self.mean, "std": self.std, "values": list(self.values)}
        optional = {"fill": self.fill, "low": self.low, "high": self.high, "counts": list(self.counts) or None}
        return self.column.plain() | {"fitted": fitted | {k: v for k, v in optional.items() if v is not None}}

    @staticmethod
    def parse(value: object) -> FittedColumn:
        """From plain values; a ValueError says what is wrong."""
        column = Column.parse(value)
        fitted = value.get("fitted") if isinstance(value, Mapping) else None
        if not isinstance(fitted, Mapping):
            raise ValueError(f"column '{column.name}' has no table of fitted values")
        moments = ColumnStatistics.parse({k: fitted[k] for k in ("count", "mean", "std") if k in fitted})
        values = fitted.get("values", [])
        if not isinstance(values, list | tuple) or not all(map(is_label, values)) or len(set(values)) < len(values):
            raise ValueError(f"column '{column.name}' has impossible values")
        fill, low, high = (fitted.get(key) for key in ("fill", "low", "high"))
        if not (fill is None or is_finite(fill) or is_label(fill)) or not all(
            limit is None or is_finite(limit) for limit in (low, high)
        ):
            raise ValueError(f"column '{column.name}' has an impossible fill, low or high")
        counts = fitted.get("counts", [])
        if (
            not isinstance(counts, list | tuple)
            or not all(map(is_count, counts))
            or len(counts) not in (0, len(values))
        ):
            raise ValueError(f"column '{column.name}' has impossible counts")
        moment = (moments.count, moments.mean, moments.std)
        return FittedColumn(column, *moment, tuple(values), fill, low, high, tuple(counts))


@dataclass(frozen=True)
class Preparation:
    """The fitted preparation of a table: the same for every client."""

    columns: tuple[FittedColumn, ...]
    target: str
    classes: tuple[str, ...]
    task: str = ""
    targets: tuple[FittedColumn, ...] = ()  # columns of the target, with their pooled statistics

    @property
    def schema(self) -> Schema:
        columns, targets = (tuple(fitted.column for fitted in part) for part in (self.columns, self.targets))
        return Schema(columns, self.target, self.classes, self.task, targets)

    @property
    def target_moments(self) -> tuple[float, float]:
        """The pooled mean and deviation of the target, if it is a number; else 0 and 1."""
        first = self.targets[0] if self.targets and self.targets[0].column.kind == "number" else None
        return (first.mean, first.std or 1.0) if first else (0.0, 1.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a prepared row: (numbers,), or (channels, time, 1) if some columns are time series."""
        steps = self.schema.steps
        if not steps:
            return (sum(fitted.width for fitted in self.columns),)
        series = {fitted.column.series for fitted in self.columns} - {""}
        return len(series) + sum(fitted.width for fitted in self.columns if not fitted.column.series), steps, 1

    @property
    def inputs(self) -> tuple[PlainInput, ...]:
        """The columns that lie side by side in a prepared row; none if there are time series."""
        if self.schema.steps:
            return ()
        return tuple((f.column.name, (f.width,), f.places, f.column.embed if f.places else 0) for f in self.columns)

    @property
    def class_counts(self) -> list[int]:
        """How many training rows of all clients have each class, where this was asked; else empty."""
        counted = [fitted for fitted in self.targets if fitted.column.kind == "category" and fitted.counts]
        return [dict(zip(f.values, f.counts, strict=True)).get(c, 0) for f in counted[:1] for c in self.classes]

    def apply(self, raw: Columns) -> NDArray[np.float32]:
        """Prepared rows. Columns are found by name; a Mistake names what is missing."""
        missing = [f.column.name for f in self.columns if f.column.name not in raw]
        if missing:
            raise Mistake(f"The data has no column {quoted(missing)}, which the model needs: add it.")
        for fitted in self.columns:
            kind = raw[fitted.column.name].kind
            if not same_kind(fitted.column.kind, kind):
                raise Mistake(
                    f"Column '{fitted.column.name}' holds a {kind}, and the model needs a {fitted.column.kind}."
                )
        rows = len(next(iter(raw.values())).cells)
        if self.schema.steps:
            return self._apply_series(raw, rows)
        x = np.zeros((rows, *self.shape), dtype=np.float32)
        at = 0
        for fitted in self.columns:
            encode_column(x[:, at : at + fitted.width], fitted, raw[fitted.column.name])
            at += fitted.width
        return x

    def _apply_series(self, raw: Columns, rows: int) -> NDArray[np.float32]:
        """(rows, channels, time, 1). A column that is no time series has the same value at every time."""
        x = np.zeros((rows, *self.shape), dtype=np.float32)
        channel_of: dict[str, int] = {}
        time: dict[str, int] = {}
        at = len({fitted.column.series for fitted in self.columns} - {""})  # other columns come after the series
        for fitted in self.columns:
            name, cells = fitted.column.series, np.zeros((rows, fitted.width), dtype=np.float32)
            encode_column(cells, fitted, raw[fitted.column.name])
            if name:
                channel = channel_of.setdefault(name, len(channel_of))
                x[:, channel, time.setdefault(name, 0)] = cells
                time[name] += 1
            else:
                x[:, at : at + fitted.width, :, 0] = cells[:, :, None]
                at += fitted.width
        return x

    def plain(self) -> dict[str, object]:
        columns = [fitted.plain() for fitted in self.columns]
        targets = [fitted.plain() for fitted in self.targets]
        head: dict[str, object] = {"target": self.target, "classes": list(self.classes)}
        head |= {"task": self.task} if self.task else {}
        return head | {"columns": columns} | ({"targets": targets} if targets else {})

    @staticmethod
    def parse(value: object) -> Preparation:
        """From plain values; a ValueError says what is wrong."""
        schema = Schema.parse(value)
        columns: Any = value["columns"] if isinstance(value, Mapping) else ()
        targets: Any = value.get("targets", ()) if isinstance(value, Mapping) else ()
        fitted, fitted_targets = (tuple(map(FittedColumn.parse, part)) for part in (columns, targets))
        return Preparation(fitted, schema.target, schema.classes, schema.task, fitted_targets)

    def text(self) -> str:
        """The text of preparation.toml."""
        return tomli_w.dumps(self.plain())

    @staticmethod
    def load(folder: str | Path) -> Preparation:
        """Read the preparation of a run from its folder."""
        return Preparation.read(Path(folder) / FILE)

    @staticmethod
    def read(path: str | Path) -> Preparation:
        """Read a preparation from a TOML file."""
        try:
            return Preparation.parse(read_plain(path))
        except ValueError as error:
            raise Mistake(f"'{path}' is not a fitted preparation: {error}.") from None


def read_schema(path: str | Path) -> Schema | Preparation:
    """A schema, or the fitted preparation of a run."""
    try:
        columns = read_plain(path).get("columns")
    except ValueError:
        columns = None
    fitted = isinstance(columns, list) and any(isinstance(c, Mapping) and "fitted" in c for c in columns)
    return Preparation.read(path) if fitted else Schema.read(path)


def code_columns(schema: Schema | Preparation) -> tuple[str, ...]:
    """The columns that may hold numbers as codes of categories: of a fitted preparation, those whose values are numbers."""
    if isinstance(schema, Schema):
        return tuple(c.name for c in schema.columns if c.kind == "category")
    fitted = [f for f in schema.columns if f.column.kind == "category" and f.values]
    return tuple(f.column.name for f in fitted if all(map(is_decimal, f.values)))


@dataclass(frozen=True)
class ImagePreparation:
    """The mean and standard deviation of each channel; the task applies them (`kilter.tasks`)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def plain(self) -> dict[str, object]:
        return {"mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def parse(value: object) -> ImagePreparation:
        """From plain values; a ValueError says what is wrong."""
        lists = [value.get(key) for key in ("mean", "std")] if isinstance(value, Mapping) else []
        numbers = [tuple(map(float, n)) for n in lists if isinstance(n, list | tuple) and all(map(is_finite, n))]
        if len(numbers) != 2 or not 0 < len(numbers[0]) == len(numbers[1]) <= 1000 or min(numbers[1]) <= 0:
            raise ValueError("it has no mean and std of the channels")
        return ImagePreparation(*numbers)


AnyPreparation = Preparation | ImagePreparation


def parse_preparation(value: object) -> AnyPreparation:
    """Of a table or of images, from plain values; a ValueError says what is wrong."""
    of_table = isinstance(value, Mapping) and "columns" in value
    return Preparation.parse(value) if of_table else ImagePreparation.parse(value)


# Fitting --------------------------------------------------------------------------------------------------------------


def check_statistics(value: object, schema: Schema | None) -> Plain:
    """Statistics that arrived; a ValueError says what is wrong."""
    if schema is None:
        ImagePreparation.parse(value)
        if not isinstance(value, Mapping) or not is_count(value.get("count")) or not value["count"]:
            raise ValueError("its statistics have no count")
        return value
    columns = value.get("columns") if isinstance(value, Mapping) else None
    if (
        not isinstance(value, Mapping)
        or not isinstance(columns, Mapping)
        or set(columns) != {c.name for c in schema.measured}
    ):
        raise ValueError("its statistics are not those of the columns")
    for column in columns.values():
        ColumnStatistics.parse(column)
    return value


def fit(schema: Schema, parts: Sequence[Plain]) -> Preparation:
    """One preparation of a table for all clients, from their statistics."""
    by_part: list[Any] = [part["columns"] for part in parts]
    pooled = pool([{name: ColumnStatistics.parse(column) for name, column in part.items()} for part in by_part])
    return _fitted(schema, pooled)


def fit_whole(raw: Columns, schema: Schema, rows: NDArray[np.int64]) -> Preparation:
    """The preparation for one table, from these rows."""
    return _fitted(schema, pool([summarise(raw, schema, rows)]))


def _fitted(schema: Schema, pooled: Mapping[str, ColumnStatistics]) -> Preparation:
    by_series: dict[str, list[str]] = {}
    for column in schema.columns:
        if column.series:
            by_series.setdefault(column.series, []).append(column.name)
    for names in by_series.values():  # one mean and deviation for all times
        pooled = {**pooled, **dict.fromkeys(names, pool_column([pooled[name] for name in names]))}
    columns, targets = (
        tuple(_fit_column(c, pooled[c.name]) for c in part) for part in (schema.columns, schema.targets)
    )
    return Preparation(columns, schema.target, schema.classes, schema.task, targets)


def _fit_column(column: Column, known: ColumnStatistics) -> FittedColumn:
    frequent = max(known.values, key=lambda value: known.values[value], default=None)
    if column.kind == "category":
        values, word = tuple(sorted(known.values)), frequent if column.fill == "most-frequent" else None
        counts = tuple(known.values[value] for value in values) if column.least == 1 else ()
        return FittedColumn(column, known.count, values=values, fill=word, counts=counts)
    if column.kind == "text":
        words = sorted(known.values, key=lambda word: (-known.values[word], word))[: column.vocabulary]
        return FittedColumn(column, known.count, values=tuple(sorted(words)))
    fill = {
        "mean": known.mean,
        "median": quantile(known.sketch, 0.5) if known.sketch else known.mean,
        "most-frequent": known.mean if frequent is None else float(frequent),
    }.get(column.fill, 0.0)
    low = high = None
    if column.clip and known.sketch:
        low, high = quantile(known.sketch, column.clip), quantile(known.sketch, 1 - column.clip)
    return FittedColumn(column, known.count, known.mean, known.std, (), fill, low, high)


def fit_channels(parts: Sequence[Plain]) -> ImagePreparation:
    """One normalisation of images for all clients, from their statistics."""
    counts = np.array([part["count"] for part in parts], dtype=np.float64)
    means, stds = (np.array([part[key] for part in parts], dtype=np.float64) for key in ("mean", "std"))
    share = (counts / counts.sum())[:, None]
    mean = (share * means).sum(0)
    std = np.sqrt(np.maximum((share * (stds**2 + means**2)).sum(0) - mean**2, 1e-12))
    return ImagePreparation(tuple(mean.tolist()), tuple(std.tolist()))
