"""The schema of a table: its columns by name, what each holds, how to prepare it, and the classes in order.

A schema says nothing about single values. The statistics that preparation needs (`kilter.data.statistics`) are computed later, from
the training rows of all clients.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

import tomli_w

from kilter.errors import Mistake

Kind = Literal["number", "category", "date", "text", "empty"]
Fill = Literal["mean", "median", "most-frequent", "none"]
KINDS: tuple[str, ...] = get_args(Kind)
FILLS: tuple[str, ...] = get_args(Fill)
HOLDS = {"number": "numbers", "category": "words", "date": "dates", "text": "texts", "empty": "no values"}
MINIMUM = 5  # a category value in fewer training rows of a site never leaves that site
MOST_COLUMNS = 10_000


@dataclass(frozen=True)
class Column:
    """One column of features, and how to prepare it."""

    name: str
    kind: Kind
    fill: Fill = "mean"  # what replaces a gap; a gap in categories stays one unless this is most-frequent
    scale: bool = True  # subtract the mean and divide by the standard deviation
    clip: float = 0.0  # limit numbers to the quantiles clip and 1 - clip; 0: leave them as they are
    parts: bool = False  # of a date: also year, month and weekday
    embed: int = 0  # of a category: learn a vector of this many numbers for each value; 0: one column for each value
    series: str = ""  # of a number: the time series it belongs to; its columns are in the order of time
    least: int = MINIMUM  # a category value or word in fewer training rows of a site counts as "other"
    width: int = 1024  # of a text: how many numbers its words are hashed to
    vocabulary: int = 0  # of a text: use this many frequent words instead of hashing; 0: hash
    tokenizer: str = ""  # of a text: the digest of the tokenizer file; empty: words
    ids: bool = False  # of a text in order: number tokens as the tokenizer file does (plus 1), instead of hashing them
    sequence: int = 0  # of a text: this many tokens in order, as numbers below `width`; 0: count words

    def plain(self) -> dict[str, object]:
        """As JSON or TOML: only what differs from the defaults."""
        names = [f.name for f in fields(Column)[2:] if getattr(self, f.name) != f.default]
        return {"name": self.name, "kind": self.kind} | {name: getattr(self, name) for name in names}

    @staticmethod
    def parse(value: object) -> Column:
        """A column from plain values; a ValueError says what is wrong."""
        if not isinstance(value, Mapping):
            raise ValueError("a column is not a table of fields")
        name, kind = value.get("name"), value.get("kind")
        if not isinstance(name, str) or not is_label(name):
            raise ValueError("a column has no usable name")
        if kind not in KINDS:
            raise ValueError(f"column '{name}' has none of the kinds {', '.join(KINDS)}")
        known = {f.name: f.default for f in fields(Column)[2:]}
        unknown = [str(key)[:50] for key in value if key not in (*known, "name", "kind", "fitted")]
        if unknown:
            raise ValueError(f"column '{name}' has an unknown field '{unknown[0]}'")
        options = {key: value[key] for key in known if key in value}
        for key, setting in options.items():
            if not _fits(key, setting):
                raise ValueError(f"column '{name}' has an impossible {key}")
        return Column(name, kind, **options)


SETTINGS = {f.name: f.default for f in fields(Column) if f.name not in ("name", "kind", "tokenizer")}


def _fits(key: str, value: object) -> bool:
    if key == "fill":
        return value in FILLS
    if key == "series":
        return value == "" or is_label(value)
    if key in ("scale", "parts", "ids"):
        return isinstance(value, bool)
    if key == "tokenizer":
        return (isinstance(value, str) and len(value) <= 64 and value.isalnum()) or value == ""
    if key == "clip":
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 0.5
    low, high = {
        "least": (1, 2**40),
        "width": (8, 2**16),
        "vocabulary": (0, 2**16),
        "sequence": (0, 2**16),
        "embed": (0, 1024),
    }[key]
    return type(value) is int and low <= value <= high


def is_label(value: object) -> bool:
    """Whether this is a name as columns, classes and categories have them."""
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def is_finite(value: object) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Schema:
    """The columns of features in order, the column of the labels, and the classes in order."""

    columns: tuple[Column, ...]
    target: str
    classes: tuple[str, ...]
    task: str = ""  # what the label is, where it is not a class: see kilter.data.targets
    targets: tuple[Column, ...] = ()  # columns of the target whose statistics are pooled

    @property
    def measured(self) -> tuple[Column, ...]:
        """The columns whose statistics are pooled."""
        return (*self.columns, *self.targets)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def steps(self) -> int:
        """The length of its time series; 0 if it has none."""
        lengths = Counter(column.series for column in self.columns if column.series)
        return max(lengths.values(), default=0)

    def mismatch(self, own: Schema) -> str:
        """Why data with the schema `own` does not fit this schema; empty if it does. The order of columns does not matter."""
        theirs = {column.name: column for column in own.columns}
        reasons = _listing("is missing", [n for n in self.names if n not in theirs])
        reasons += _listing("is not expected (leave it out with --drop)", [n for n in theirs if n not in self.names])
        for column in self.columns:
            kind = theirs[column.name].kind if column.name in theirs else "empty"
            if not same_kind(column.kind, kind):
                reasons.append(f"column '{column.name}' holds {HOLDS[kind]} instead of {HOLDS[column.kind]}")
            elif kind == column.kind == "text" and theirs[column.name].tokenizer != column.tokenizer:
                reasons.append(f"column '{column.name}' is tokenised with another file (--tokenizer)")
        if own.target != self.target:
            reasons.append(f"the label is in column '{own.target}' instead of '{self.target}'")
        if own.task != self.task:
            reasons.append(
                f"the task is '{own.task or 'multi-class'}' instead of '{self.task or 'multi-class'}' (--task)"
            )
        if [c.name for c in own.targets if c.kind == "number"] != [c.name for c in self.targets if c.kind == "number"]:
            reasons.append("the target is in other columns (--label, --event)")
        foreign = [c for c in own.classes if c not in self.classes]
        if foreign:
            reasons.append(f"unknown {'class' if len(foreign) == 1 else 'classes'} {quoted(foreign)}")
        return "; ".join(reasons)

    def plain(self) -> dict[str, object]:
        """As JSON or TOML."""
        return {
            "target": self.target,
            "classes": list(self.classes),
            **({"task": self.task} if self.task else {}),
            "columns": [column.plain() for column in self.columns],
            **({"targets": [column.plain() for column in self.targets]} if self.targets else {}),
        }

    @staticmethod
    def parse(value: object) -> Schema:
        """A schema from plain values; a ValueError says what is wrong."""
        if not isinstance(value, Mapping):
            raise ValueError("it is not a table of fields")
        target, classes, columns = value.get("target"), value.get("classes"), value.get("columns")
        if not is_label(target):
            raise ValueError("it has no target, the name of the column of the labels")
        if not isinstance(classes, list | tuple) or not classes or not all(map(is_label, classes)):
            raise ValueError("it has no list of classes")
        if not isinstance(columns, list | tuple) or not 0 < len(columns) <= MOST_COLUMNS:
            raise ValueError("it has no list of columns")
        task, targets = value.get("task", ""), value.get("targets", [])
        if not isinstance(task, str) or not (task == "" or is_label(task)):
            raise ValueError("its task is no name")
        if not isinstance(targets, list | tuple) or len(targets) > MOST_COLUMNS:
            raise ValueError("its targets are not a list of columns")
        schema = Schema(
            tuple(map(Column.parse, columns)),
            str(target),
            tuple(str(c) for c in classes),
            task,
            tuple(map(Column.parse, targets)),
        )
        if len({*schema.names, schema.target}) <= len(schema.columns) or len(set(classes)) < len(classes):
            raise ValueError("it names a column or class twice")
        if problem := schema.series_problem():
            raise ValueError(problem)
        return schema

    def series_problem(self) -> str:
        """What is wrong with the time series; empty if nothing is."""
        for column in self.columns:
            if column.series and column.kind not in ("number", "empty"):
                return f"column '{column.name}' of the series '{column.series}' holds {HOLDS[column.kind]}, not numbers"
        lengths = Counter(column.series for column in self.columns if column.series)
        for name, length in lengths.items():
            if length != self.steps:
                longest = next(other for other in lengths if lengths[other] == self.steps)
                return f"the series '{name}' has {length} columns and '{longest}' has {self.steps}"
        return ""

    def text(self) -> str:
        """The text of schema.toml."""
        return tomli_w.dumps(self.plain())

    @staticmethod
    def read(path: str | Path) -> Schema:
        """Read a schema from a TOML file."""
        try:
            return Schema.parse(read_plain(path))
        except ValueError as error:  # also what tomllib and a wrong encoding raise
            raise Mistake(f"'{path}' is not a schema: {error}.") from None


def read_plain(path: str | Path) -> dict[str, object]:
    """The fields of a TOML file; a ValueError if it is none."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Mistake(f"The schema '{path}' cannot be read: {error.strerror}.") from None


def same_kind(expected: str, kind: str) -> bool:
    """Whether a column of this kind can be prepared as expected. An empty column fits any kind; words fit a text."""
    return "empty" in (expected, kind) or expected == kind or {expected, kind} == {"text", "category"}


def _listing(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"column {quoted(names)} {what}" if len(names) == 1 else f"columns {quoted(names)}: each {what}"]


def quoted(names: Sequence[str], most: int = 5) -> str:
    """'a', 'b' and 3 more."""
    some = ", ".join(f"'{name}'" for name in names[:most])
    return some if len(names) <= most else f"{some} and {len(names) - most} more"


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """The classes that a user lists: at least one, each once."""
    if isinstance(classes, str) or not classes or len(set(classes)) < len(classes):
        raise Mistake(f"classes are {classes!r}: list the names of all classes, each once.")
    return tuple(classes)


def class_order(labels: Sequence[str]) -> tuple[str, ...]:
    """The different labels in order: as numbers if all are whole numbers, else by name."""
    distinct = sorted(set(labels))
    try:
        return tuple(sorted(distinct, key=int))
    except ValueError:
        return tuple(distinct)


def conflict(one: Schema, other: Schema) -> str:
    """How two schemas want the same columns to be prepared differently; empty if they do not. A default wants nothing."""
    theirs = {column.name: column for column in other.columns}
    for column in one.columns:
        for name, default in SETTINGS.items():
            values = [getattr(c, name) for c in (column, theirs.get(column.name, column))]
            if len({default, *values}) == 3:
                option = "--series" if name == "series" else "--prepare"
                return f"column '{column.name}' has {name} {values[1]} instead of {values[0]} ({option})"
    if one.steps and other.steps and _series(one) != _series(other):
        return "the time series are in other columns (--series)"
    return ""


def _series(schema: Schema) -> list[str]:
    return [column.name for column in schema.columns if column.series]


def merge(schemas: Sequence[Schema]) -> Schema:
    """One schema for several tables; classes are united.

    Columns are prepared as any of the schemas says. Their order is that of the first schema, or of the first with time series.
    """
    first = next((schema for schema in schemas if schema.steps), schemas[0])
    for schema in schemas:
        reason = replace(first, classes=schema.classes).mismatch(schema) or conflict(first, schema)
        if reason:
            raise Mistake(f"The tables do not fit together: {reason}.")
    by_name = [{column.name: column for column in schema.columns} for schema in schemas]
    columns = tuple(_merge_columns([columns[name] for columns in by_name]) for name in first.names)
    classes = class_order([c for schema in schemas for c in schema.classes]) if not first.task else first.classes
    return Schema(columns, first.target, classes, first.task, first.targets)


def with_series(schema: Schema, patterns: Sequence[str]) -> Schema:
    """The schema with time series: the columns that match one of the patterns, such as hr_*, in the order of their numbers.

    >>> columns = tuple(Column(name, "number") for name in ("hr_10", "age", "hr_9"))
    >>> [(c.name, c.series) for c in with_series(Schema(columns, "y", ("a",)), ["hr_*"]).columns]
    [('hr_9', 'hr'), ('hr_10', 'hr'), ('age', '')]
    """
    columns: list[Column] = []
    for pattern in patterns:
        matching = [c for c in schema.columns if fnmatchcase(c.name, pattern) and c not in columns]
        if not matching:
            raise Mistake(f"No column matches --series '{pattern}': the table has {quoted(schema.names)}.")
        name = pattern.replace("*", "").rstrip("_.- ") or pattern
        ordered = sorted(matching, key=lambda c: [int(n) for n in re.findall(r"\d+", c.name)][-1:])
        columns += [replace(column, series=name) for column in ordered]
    named = {column.name for column in columns}
    others = (replace(c, series="") for c in schema.columns if c.name not in named)
    changed = replace(schema, columns=(*columns, *others))
    if problem := changed.series_problem():
        raise Mistake(f"--series: {problem}.")
    return changed


def _merge_columns(columns: Sequence[Column]) -> Column:
    kinds = {column.kind for column in columns} - {"empty"}
    if not kinds:
        return columns[0]
    if len(kinds) > 1 and kinds != {"text", "category"}:
        held = " and ".join(sorted(HOLDS[kind] for kind in kinds))
        raise Mistake(f"Column '{columns[0].name}' holds {held} in different tables: use one kind in all.")
    usual = next(column for column in columns if column.kind == ("text" if "text" in kinds else min(kinds)))
    settings: dict[str, object] = {}
    for column in reversed(columns):  # the first that sets something wins
        settings |= {name: value for name, value in column.plain().items() if name in SETTINGS}
    return Column.parse(usual.plain() | settings)
