"""Prepare tables for training: gaps filled, numbers standardised, categories one-hot.

A number becomes (x - mean) / std with the mean and deviation of all clients' training rows; a gap becomes 0, the mean. A date is a
number of days. A category has one column for each value in the schema and one for "other"; a gap is 0 in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kilter.data.holdout import Index, hold_out, hold_out_share
from kilter.data.schema import MINIMUM, MOST_VALUES, Column, Schema, class_order, merge, quoted
from kilter.data.tables import (
    Parsed,
    TableOptions,
    TextTable,
    client_column,
    first_word_among_numbers,
    is_number,
    label_column,
    parse_column,
    read_table,
    table_files,
    words,
)
from kilter.errors import Mistake

MOST_CLASSES = 100
MOST_WORDS = 100  # a column of words with more different values is free text


@dataclass(frozen=True, eq=False)
class PreparedTable:
    """A table as arrays."""

    x: NDArray[np.float32]
    y: Index
    train: Index
    test: Index
    groups: Index | None
    group_names: tuple[str, ...]
    schema: Schema
    own: Schema  # what this table alone says about itself
    client: str  # where the clients come from; empty: the table names none


def load_table(
    path: Path, options: TableOptions, schema: Schema | None = None, classes: tuple[str, ...] | None = None
) -> PreparedTable:
    """Read and prepare a table. With `schema`, columns are matched by name and prepared as it says."""
    label = options.label or (schema.target if schema else "")
    files, test_file = table_files(path)
    if not files:
        raise Mistake(f"Folder '{path}' has no tables (.csv, .tsv, .parquet): put one file per client there.")
    extra = options.test_file or (str(test_file) if test_file else "")
    table = read_table(files, options.drop)
    whole = read_table([*files, Path(extra).expanduser()], options.drop) if extra else table
    first = len(table)
    target = label_column(table, label)
    client = client_column(table, options.client) if len(files) == 1 or options.client else ""
    features = [name for name in table.columns if name not in (target, client)]
    if len(table) == 0 or not features:
        raise Mistake(
            f"'{table.name}' has {len(table)} rows and {len(features)} feature columns: it needs at least one of each."
        )
    y, names = _labels(whole, target, classes or (schema.classes if schema else None), first)
    groups, group_names = _clients(whole, client, files)
    if extra:
        train, test = np.arange(first), np.arange(first, len(whole))
    elif options.test_size:
        train, test = hold_out_share(y, groups, options.test_size)
    else:
        train, test = hold_out(y, groups)
    parsed = {name: parse_column(whole, name) for name in features}
    _refuse_free_text(whole, parsed)
    own = _fit(parsed, target, names, train, groups)
    if schema is not None:
        reason = schema.mismatch(own)
        if reason:
            raise Mistake(f"'{table.name}' does not fit the schema: {reason}.")
    x = prepare(parsed, schema or own)
    source = f"column '{client}'" if client else "files" if groups is not None else ""
    return PreparedTable(x, y, train, test, groups, group_names, schema or own, own, source)


def _labels(
    table: TextTable, target: str, classes: tuple[str, ...] | None, first: int
) -> tuple[Index, tuple[str, ...]]:
    """Class numbers and class names: the labels that occur, unless the classes are listed."""
    labels = words(table, target, "label")
    occurring = class_order(labels.tolist())
    names = classes or occurring
    foreign = [label for label in occurring if label not in names]
    if foreign:
        raise Mistake(
            f"'{table.name}': label '{foreign[0]}' is not among the classes {quoted(names)}: correct one or the other."
        )
    if classes is None and len(names) > MOST_CLASSES:
        raise Mistake(
            f"Column '{target}' of '{table.name}' has {len(names)} different labels, too many for classes: "
            "name another column with --label."
        )
    if classes is None and any("." in name and is_number(name) for name in names):
        raise Mistake(
            f"Column '{target}' of '{table.name}' holds labels that are not whole numbers, such as "
            f"'{next(n for n in names if '.' in n)}': a label is the name or number of a class."
        )
    untrained = sorted(set(labels[first:].tolist()) - set(labels[:first].tolist()))
    if untrained:
        raise Mistake(
            f"The test rows of '{table.name}' have the class {quoted(untrained)}, which no training row has: "
            "remove these rows or add training rows."
        )
    number = {name: at for at, name in enumerate(names)}
    return np.array([number[label] for label in labels.tolist()], dtype=np.int64), names


def _clients(table: TextTable, column: str, files: list[Path]) -> tuple[Index | None, tuple[str, ...]]:
    """The client of each row: from a column, or from the file if there are several."""
    if column:
        names, numbers = np.unique(words(table, column, "client"), return_inverse=True)
        return numbers.astype(np.int64), tuple(str(name) for name in names)
    if len(files) == 1:
        return None, ()
    if len(table.files) > len(files):
        raise Mistake(
            f"The rows of the test file '{table.files[-1]}' belong to no client: name their column with --client, or "
            "leave out --test-file."
        )
    return np.repeat(np.arange(len(files)), table.lengths).astype(np.int64), tuple(file.stem for file in files)


def _refuse_free_text(table: TextTable, parsed: Mapping[str, Parsed]) -> None:
    for name, column in parsed.items():
        if column.kind != "category":
            continue
        different = len(np.unique(column.cells))
        if different <= MOST_WORDS:
            continue
        cells = column.cells.astype(str)
        row = first_word_among_numbers(cells)
        if row is not None:
            raise Mistake(
                f"Column '{name}' holds '{cells[row]}' in {table.place(row)}, and most other cells are numbers: "
                f"correct it, empty it, or leave the column out (--drop {name})."
            )
        raise Mistake(
            f"Column '{name}' of '{table.name}' holds {different} different words, too many for categories: "
            f"leave it out (--drop {name})."
        )


# Fitting and applying -------------------------------------------------------------------------------------------------


def _fit(
    parsed: Mapping[str, Parsed], target: str, classes: tuple[str, ...], train: Index, groups: Index | None
) -> Schema:
    """The schema of the training rows: each client describes its own, and the descriptions are merged."""
    parts = [train] if groups is None else [train[groups[train] == g] for g in np.unique(groups[train])]
    return merge([describe_rows(parsed, target, classes, rows) for rows in parts])


def describe_rows(parsed: Mapping[str, Parsed], target: str, classes: tuple[str, ...], rows: Index) -> Schema:
    """What one client says about these rows of its table."""
    return Schema(tuple(describe_column(name, column, rows) for name, column in parsed.items()), target, classes)


def describe_column(name: str, column: Parsed, rows: Index) -> Column:
    """The count, mean and deviation of numbers, or the values of a category that occur at least MINIMUM times."""
    cells = column.cells[rows]
    if column.kind == "category":
        values, counts = np.unique(cells[cells != ""], return_counts=True)
        listed = values[counts >= MINIMUM].tolist()[:MOST_VALUES]
        return Column(name, "category", tuple(map(str, listed)), int(counts.sum()))
    numbers = cells.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers) == 0:
        return Column(name, column.kind)
    return Column(name, column.kind, (), len(numbers), float(numbers.mean()), float(numbers.std()))


def prepare(parsed: Mapping[str, Parsed], schema: Schema) -> NDArray[np.float32]:
    """Rows as the schema prepares them; columns in the schema's order, found by name."""
    rows = len(next(iter(parsed.values())).cells)
    x = np.zeros((rows, schema.width), dtype=np.float32)
    at = 0
    for column in schema.columns:
        cells = parsed[column.name].cells
        if parsed[column.name].kind == "empty" or column.kind == "empty":
            pass  # nothing is known about this column here: every cell is a gap
        elif column.kind == "category":
            codes = {value: at + offset for offset, value in enumerate(column.values)}
            other = at + len(column.values)
            filled = np.flatnonzero(cells != "")
            x[filled, [codes.get(str(cell), other) for cell in cells[filled]]] = 1
        else:
            scaled = (cells.astype(np.float64) - column.mean) / (column.std or 1.0)
            x[:, at] = np.where(np.isfinite(scaled), scaled, 0)
        at += column.width
    return x


def explain(schema: Schema, client_source: str) -> list[str]:
    """What happens to the columns of a table, in plain words, and how to change it."""
    by_kind: dict[str, list[str]] = {}
    for column in schema.columns:
        by_kind.setdefault(column.kind, []).append(column.name)
    treatment = {
        "number": "standardised with the mean and deviation of all clients' training rows",
        "date": "days, standardised",
        "category": f"one-hot; values in fewer than {MINIMUM} training rows of every client are 'other'",
        "empty": "no values, always 0",
    }
    lines = [f"Label: {schema.target} (classes {quoted(schema.classes)}). Change it with --label."]
    for kind, names in by_kind.items():
        title = {"number": "Numbers", "date": "Dates", "category": "Categories", "empty": "Empty columns"}[kind]
        lines.append(f"{title}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''} ({treatment[kind]}).")
    lines.append("Gaps become the mean. Leave columns out with --drop; prepare other data the same way with --schema.")
    if client_source:
        lines.append(f"Clients are named by {client_source}: --partition natural --clients 0 uses them.")
    return lines
