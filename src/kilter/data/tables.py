"""Tables of one file, or of one file per client. Columns are matched by name, never by position."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kilter.data.schema import quoted
from kilter.data.table_file import SUFFIXES, check_printable, check_type, clean, line_number, read_file
from kilter.errors import Mistake, unknown


@dataclass(frozen=True)
class TableOptions:
    """How to read a user's table."""

    label: str = ""  # the column of the labels; empty: label or y
    client: str = ""  # the column of the clients; empty: client or group, if there is one
    drop: tuple[str, ...] = ()  # columns to leave out
    test_file: str = ""  # a table of test rows
    test_size: float = 0.0  # the share of test rows; 0: one row in five
    text: tuple[str, ...] = ()  # columns of free text
    series: tuple[str, ...] = ()  # columns of time series, as patterns
    tokenizer: str = ""  # a tokenizer file (Hugging Face tokenizers) for the texts; empty: words
    prepare: str = ""  # how to prepare the columns, such as fill=median,clip=0.01
    task: str = ""  # what the label is (kilter.data.targets); empty: the name or number of a class
    event: str = ""  # the column of the event, for the task survival
    image_size: str = ""  # of images: 64 or 64x48; empty: their own
    image_mode: str = ""  # of images: grey or rgb; empty: grey if all are
    categories: tuple[str, ...] = ()  # columns of numbers that are codes of categories, as the user's schema says

    def chosen(self) -> list[str]:
        """The names of the options that are set, but `task`, which other data have, too."""
        return [f.name for f in fields(self) if f.name != "task" and getattr(self, f.name) != f.default]


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, as pyarrow read them: numbers, dates or text, with null for gaps."""

    columns: dict[str, pa.ChunkedArray]
    files: tuple[Path, ...]
    lengths: tuple[int, ...]  # rows of each file
    separators: tuple[str, ...]  # of each file; empty for Parquet

    @staticmethod
    def of(name: str, columns: Mapping[str, pa.ChunkedArray]) -> Table:
        """A table that is in memory already."""
        check_printable(name, list(map(str, columns)))
        cleaned = {str(key): clean(column) for key, column in columns.items()}
        lengths = {len(column) for column in cleaned.values()} or {0}
        return Table(cleaned, (Path(name),), (lengths.pop(),), ("",))

    @property
    def decimal_commas(self) -> bool:
        """Whether a comma in a cell can be a decimal comma: not where commas separate cells."""
        return not set(self.separators) <= {",", ""}

    def first(self, files: int) -> Table:
        """The rows of the first files. They share the memory of this table."""
        lengths = self.lengths[:files]
        columns = {name: column.slice(0, sum(lengths)) for name, column in self.columns.items()}
        return Table(columns, self.files[:files], lengths, self.separators[:files])

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def name(self) -> str:
        """How messages call the table."""
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)

    def place(self, row: int) -> str:
        """Where a row is: 'data.csv', line 7."""
        at = int(np.searchsorted(np.cumsum(self.lengths), row, side="right"))
        row -= sum(self.lengths[:at])
        if not self.separators[at]:
            return f"'{self.files[at]}', row {row + 1}"
        return f"'{self.files[at]}', line {line_number(self.files[at], self.separators[at], row)}"

    def places(self, rows: NDArray[np.int64], most: int = 3) -> str:
        """Where the first rows of a list are, and how many more there are."""
        some = ", ".join(self.place(int(row)) for row in rows[:most])
        return some if len(rows) <= most else f"{some} and {len(rows) - most} more"


def table_files(path: Path) -> tuple[list[Path], Path | None]:
    """The files of a table, and its test file. A folder holds data.csv, or train.csv and test.csv, or one file per client."""
    if path.is_file():
        return [path], None
    files = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    by_stem = {file.stem: file for file in files}
    if len(by_stem) < len(files):
        raise Mistake(f"Folder '{path}' has two tables of the same name: keep one of them.")
    named = next((names for names in (["data"], ["train", "test"]) if set(names) <= set(by_stem)), [])
    others = [file.name for file in files if file.stem not in named]
    if named and others:
        raise Mistake(
            f"Folder '{path}' has {quoted([by_stem[name].name for name in named])}, and {quoted(others)} would not be read: give "
            "the path of the file to read, or move the others away."
        )
    if named:
        return [by_stem[named[0]]], by_stem["test"] if len(named) > 1 else None
    return files, None


def other_tables(path: Path) -> tuple[str, ...]:
    """A note about files of a folder that are not read."""
    if not path.is_dir():
        return ()
    others = sorted(
        f.name + "/" * f.is_dir() for f in path.iterdir() if f.suffix.lower() not in SUFFIXES and f.name[0] != "."
    )
    return (f"Not read, because they are no tables ({', '.join(SUFFIXES)}): {quoted(others)}.",) if others else ()


def read_table(files: list[Path], drop: tuple[str, ...] = ()) -> Table:
    """Read files with the same columns, in any order, as one table, without the columns in `drop`."""
    tables = [read_file(path) for path in files]
    empty = [path for path, (columns, _) in zip(files, tables, strict=True) if not rows_of(columns)]
    if empty and len(files) > 1:
        raise Mistake(f"'{empty[0]}' has no rows: add some, or leave the file out.")
    check_dropped(files[0], drop, {name for columns, _ in tables for name in columns})
    names = [name for name in tables[0][0] if name not in drop]
    for path, (columns, _) in zip(files, tables, strict=True):
        missing = [name for name in names if name not in columns]
        extra = [name for name in columns if name not in names and name not in drop]
        if missing or extra:
            has = f"no column {quoted(missing)}" if missing else f"another column, {quoted(extra)}"
            raise Mistake(
                f"'{path}' has {has}, unlike '{files[0].name}': use the same columns in all files (--drop leaves some out)."
            )
        for name in names:
            check_type(path, name, columns[name])
    joined = {name: join([columns[name] for columns, _ in tables]) for name in names}
    lengths = tuple(rows_of(columns) for columns, _ in tables)
    return Table(joined, tuple(files), lengths, tuple(separator for _, separator in tables))


def rows_of(columns: Mapping[str, pa.ChunkedArray]) -> int:
    """The number of rows of columns."""
    return len(next(iter(columns.values()), ()))


def without(table: Table, columns: tuple[str, ...]) -> Table:
    """The same table without some columns. Those that stay have to hold numbers, words or dates."""
    check_dropped(table.name, columns, table.columns)
    kept = {name: column for name, column in table.columns.items() if name not in columns}
    for name, column in kept.items():
        check_type(table.name, name, column)
    return replace(table, columns=kept)


def check_dropped(source: object, drop: tuple[str, ...], names: Collection[str]) -> None:
    """Refuse to leave out a column that does not exist: a mistyped name would let a column through."""
    for name in drop:
        if name not in names:
            raise unknown(f"column for --drop in '{source}'", name, names)


def join(columns: list[pa.ChunkedArray]) -> pa.ChunkedArray:
    """One column from the columns of several files, which may differ in type."""
    types = {column.type for column in columns}
    if len(types) > 1:
        kinds = {column.type for column in columns if column.null_count < len(column)}
        if len(kinds) == 1:  # the other files have only gaps
            columns = [pa.nulls(len(c), next(iter(kinds))) if c.type not in kinds else c for c in columns]
            columns = [pa.chunked_array([c]) if isinstance(c, pa.Array) else c for c in columns]
        elif all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
            columns = [column.cast(pa.float64(), safe=False) for column in columns]
        else:
            columns = [as_text(column) for column in columns]
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as text, with null for gaps; whole numbers have no decimal point."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(pa.string())
