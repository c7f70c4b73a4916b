"""The schema of a table: its columns by name, what each holds, and the classes in order.

A schema also holds what preparation needs: the count, mean and standard deviation of numbers, and the values of categories.
Each site describes its own training rows. `merge` pools the descriptions, so no value leaves a site. A category value that occurs
in fewer than MINIMUM training rows of a site is never listed by it, and counts as "other".
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import tomli_w

from kilter.errors import Mistake

Kind = Literal["number", "category", "date", "empty"]
KINDS: tuple[str, ...] = get_args(Kind)
HOLDS = {"number": "numbers", "category": "words", "date": "dates", "empty": "no values"}
MINIMUM = 5  # a category value in fewer training rows of a site stays at that site
MOST_COLUMNS, MOST_VALUES = 10_000, 1000
WHOLE = 2**53


@dataclass(frozen=True)
class Column:
    """One column of features."""

    name: str
    kind: Kind
    values: tuple[str, ...] = ()  # of a category, in order
    count: int = 0  # training rows that have a value
    mean: float = 0.0  # of numbers; dates are days since 1970
    std: float = 0.0

    @property
    def width(self) -> int:
        """How many numbers of a prepared row come from this column."""
        return len(self.values) + 1 if self.kind == "category" else 1

    def plain(self) -> dict[str, object]:
        """As JSON or TOML, without fields that do not apply."""
        core: dict[str, object] = {"name": self.name, "kind": self.kind, "count": self.count}
        if self.kind == "category":
            return core | {"values": list(self.values)}
        return core | ({"mean": self.mean, "std": self.std} if self.kind in ("number", "date") else {})

    @staticmethod
    def parse(value: object) -> Column:
        """A column from plain values; a ValueError says what is wrong."""
        if not isinstance(value, Mapping):
            raise ValueError("a column is not a table of fields")
        name, kind, values = value.get("name"), value.get("kind"), value.get("values", [])
        if not _is_text(name) or not isinstance(name, str):
            raise ValueError("a column has no usable name")
        if kind not in KINDS:
            raise ValueError(f"column '{name}' has none of the kinds {', '.join(KINDS)}")
        if not isinstance(values, list | tuple) or len(values) > MOST_VALUES or not all(map(_is_text, values)):
            raise ValueError(f"column '{name}' has impossible values")
        if len(set(values)) < len(values):
            raise ValueError(f"column '{name}' lists a value twice")
        count, mean, std = (value.get(key, 0) for key in ("count", "mean", "std"))
        if type(count) is not int or not 0 <= count < WHOLE or not _is_number(mean) or not _is_number(std) or std < 0:
            raise ValueError(f"column '{name}' has an impossible count, mean or std")
        return Column(name, kind, tuple(str(v) for v in values), count, float(mean), float(std))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Schema:
    """The columns of features in order, the column of the labels, and the classes in order."""

    columns: tuple[Column, ...]
    target: str
    classes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def width(self) -> int:
        """The length of a prepared row."""
        return sum(column.width for column in self.columns)

    def mismatch(self, own: Schema) -> str:
        """Why data with the schema `own` does not fit this schema; empty if it does. The order of columns does not matter."""
        theirs = {column.name: column for column in own.columns}
        reasons = _listing("is missing", [n for n in self.names if n not in theirs])
        reasons += _listing("is not expected (leave it out with --drop)", [n for n in theirs if n not in self.names])
        for column in self.columns:
            kind = theirs[column.name].kind if column.name in theirs else "empty"
            if "empty" not in (kind, column.kind) and kind != column.kind:
                reasons.append(f"column '{column.name}' holds {HOLDS[kind]} instead of {HOLDS[column.kind]}")
        if own.target != self.target:
            reasons.append(f"the label is in column '{own.target}' instead of '{self.target}'")
        foreign = [c for c in own.classes if c not in self.classes]
        if foreign:
            reasons.append(f"unknown {'class' if len(foreign) == 1 else 'classes'} {quoted(foreign)}")
        return "; ".join(reasons)

    def plain(self) -> dict[str, object]:
        """As JSON or TOML."""
        return {
            "target": self.target,
            "classes": list(self.classes),
            "columns": [column.plain() for column in self.columns],
        }

    @staticmethod
    def parse(value: object) -> Schema:
        """A schema from plain values; a ValueError says what is wrong."""
        if not isinstance(value, Mapping):
            raise ValueError("it is not a table of fields")
        target, classes, columns = value.get("target"), value.get("classes"), value.get("columns")
        if not _is_text(target):
            raise ValueError("it has no target, the name of the column of the labels")
        if not isinstance(classes, list | tuple) or not classes or not all(map(_is_text, classes)):
            raise ValueError("it has no list of classes")
        if not isinstance(columns, list | tuple) or not 0 < len(columns) <= MOST_COLUMNS:
            raise ValueError("it has no list of columns")
        schema = Schema(tuple(map(Column.parse, columns)), str(target), tuple(str(c) for c in classes))
        if len({*schema.names, schema.target}) <= len(schema.columns) or len(set(classes)) < len(classes):
            raise ValueError("it names a column or class twice")
        return schema

    def text(self) -> str:
        """The text of schema.toml."""
        return tomli_w.dumps(self.plain())

    @staticmethod
    def read(path: str | Path) -> Schema:
        """Read a schema from a TOML file."""
        try:
            return Schema.parse(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise Mistake(f"The schema '{path}' cannot be read: {error.strerror}.") from None
        except ValueError as error:  # also what tomllib and a wrong encoding raise
            raise Mistake(f"'{path}' is not a schema: {error}.") from None


def _listing(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"column {quoted(names)} {what}" if len(names) == 1 else f"columns {quoted(names)}: each {what}"]


def quoted(names: Sequence[str], most: int = 5) -> str:
    """'a', 'b' and 3 more."""
    some = ", ".join(f"'{name}'" for name in names[:most])
    return some if len(names) <= most else f"{some} and {len(names) - most} more"


def class_order(labels: Sequence[str]) -> tuple[str, ...]:
    """The different labels in order: as numbers if all are whole numbers, else by name."""
    distinct = sorted(set(labels))
    try:
        return tuple(sorted(distinct, key=int))
    except ValueError:
        return tuple(distinct)


def merge(schemas: Sequence[Schema]) -> Schema:
    """The schema of all rows together, from the schemas of the parts. The order of columns is that of the first part.

    Means and deviations of numbers equal those of the pooled rows, up to rounding. Category values and classes are united.
    """
    first = schemas[0]
    by_name = [{column.name: column for column in schema.columns} for schema in schemas]
    for schema in schemas[1:]:
        reason = replace(first, classes=schema.classes).mismatch(schema)
        if reason:
            raise Mistake(f"The tables do not fit together: {reason}.")
    columns = tuple(_merge_columns([columns[name] for columns in by_name]) for name in first.names)
    return Schema(columns, first.target, class_order([c for schema in schemas for c in schema.classes]))


def _merge_columns(columns: Sequence[Column]) -> Column:
    filled = [column for column in columns if column.kind != "empty"]
    if not filled:
        return columns[0]
    if len({column.kind for column in filled}) > 1:
        held = " and ".join(sorted({HOLDS[column.kind] for column in filled}))
        raise Mistake(f"Column '{columns[0].name}' holds {held} in different tables: use one kind in all.")
    count = sum(column.count for column in filled)
    if filled[0].kind == "category":
        values = sorted({value for column in filled for value in column.values})
        return Column(filled[0].name, "category", tuple(values), count)
    if count == 0:
        return filled[0]
    mean = math.fsum(column.count * column.mean for column in filled) / count
    spread = math.fsum(column.count * (column.std**2 + (column.mean - mean) ** 2) for column in filled) / count
    return Column(filled[0].name, filled[0].kind, (), count, mean, math.sqrt(spread))
