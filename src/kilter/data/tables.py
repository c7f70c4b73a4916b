"""Read tables with pyarrow: CSV (any separator, with or without BOM, decimal commas) and Parquet, one file or one per client.

Columns are read as text and then parsed as a whole: numbers, dates (2024-03-31 or 31.03.2024) or words. Empty cells, NA, N/A, NaN,
null, None and ? are gaps. Columns are matched by name, never by position.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from kilter.data.schema import Kind, quoted
from kilter.errors import Mistake, unknown

SUFFIXES = (".csv", ".tsv", ".parquet")
GAPS = ("", "NA", "N/A", "na", "n/a", "NaN", "nan", "NULL", "null", "None", "?")
SEPARATORS = ",;\t|"
LABELS, CLIENTS = ("label", "y"), ("client", "group")  # columns that are recognised by name


@dataclass(frozen=True)
class TableOptions:
    """How to read a user's table."""

    label: str = ""  # the column of the labels; empty: label or y
    client: str = ""  # the column of the clients; empty: client or group, if there is one
    drop: tuple[str, ...] = ()  # columns to leave out
    test_file: str = ""  # a table of test rows
    test_size: float = 0.0  # the share of test rows; 0: one row in five


@dataclass(frozen=True, eq=False)
class TextTable:
    """A table whose cells are all text; gaps are null. `origin` tells the file and row of each row."""

    columns: dict[str, pa.ChunkedArray]
    files: tuple[Path, ...]
    lengths: tuple[int, ...]  # rows of each file
    separators: tuple[str, ...]  # of each file; empty for Parquet

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


def line_number(path: Path, separator: str, row: int) -> int:
    """The line of a CSV file where data row `row` (from 0) ends; empty lines and line breaks in cells count."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=separator)
        records = (reader.line_num for cells in reader if cells)
        for number, line in enumerate(records):
            if number == row + 1:
                return line
    return row + 2


def table_files(path: Path) -> tuple[list[Path], Path | None]:
    """The files of a table, and its test file. A folder holds data.csv, or train.csv and test.csv, or one file per client."""
    if path.is_file():
        return [path], None
    files = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    by_stem = {file.stem: file for file in files}
    if len(by_stem) < len(files):
        raise Mistake(f"Folder '{path}' has two tables of the same name: keep one of them.")
    if "data" in by_stem:
        return [by_stem["data"]], None
    if {"train", "test"} <= set(by_stem):
        return [by_stem["train"]], by_stem["test"]
    return files, None


def read_table(files: list[Path], drop: tuple[str, ...] = ()) -> TextTable:
    """Read files with the same columns, in any order, as one table. The columns in `drop` are left out if they are there."""
    tables = [_read_file(path) for path in files]
    names = [name for name in tables[0][0] if name not in drop]
    for path, (columns, _) in zip(files, tables, strict=True):
        missing = [name for name in names if name not in columns]
        extra = [name for name in columns if name not in names and name not in drop]
        if missing or extra:
            has = f"no column {quoted(missing)}" if missing else f"another column, {quoted(extra)}"
            raise Mistake(
                f"'{path}' has {has}, unlike '{files[0].name}': use the same columns in all files (--drop leaves some out)."
            )
    joined = {
        name: pa.chunked_array([c for columns, _ in tables for c in columns[name].chunks], pa.string())
        for name in names
    }
    lengths = tuple(len(next(iter(columns.values()), ())) for columns, _ in tables)
    return TextTable(joined, tuple(files), lengths, tuple(separator for _, separator in tables))


def _read_file(path: Path) -> tuple[dict[str, pa.ChunkedArray], str]:
    """The columns of a file as text, and its separator."""
    if not path.is_file():
        raise Mistake(f"There is no file '{path}': give the path of a .csv, .tsv or .parquet file.")
    table, separator = (_read_parquet(path), "") if path.suffix.lower() == ".parquet" else _read_csv(path)
    names = [name.strip() for name in table.column_names]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Mistake(f"'{path}' has two columns of the same name, '{twice}', in its first line: rename one.")
    if "" in names:
        raise Mistake(f"'{path}' has a column without a name, number {names.index('') + 1}: name it.")
    return {name: _clean(column) for name, column in zip(names, table.columns, strict=True)}, separator


def _read_parquet(path: Path) -> pa.Table:
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise Mistake(f"'{path}' cannot be read as a Parquet file ({reason}): save it again.") from None
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns.append(column.cast(pa.string()))
        except pa.ArrowException:
            raise Mistake(
                f"'{path}', column '{name}', holds {column.type}: only numbers, words and dates can be used, so leave it "
                f"out (--drop {name})."
            ) from None
    return pa.table(columns, names=table.column_names)


def _read_csv(path: Path) -> tuple[pa.Table, str]:
    """A CSV file as text, and its separator. A row with too many or too few cells is refused with its line."""
    invalid: list[tuple[int, int]] = []  # (row, cells)

    def skip(row: arrow_csv.InvalidRow) -> str:
        invalid.append((row.number or 0, row.actual_columns))
        return "skip"

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next((line.rstrip("\r\n") for line in file if line.strip()), "")
        separator = max(SEPARATORS, key=header.count)
        names = next(csv.reader([header], delimiter=separator), []) if header else []
        if not header or len({name.strip() for name in names}) < len(names):
            return pa.table([pa.array([], pa.string()) for _ in names], names=names), separator
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(use_threads=False),
            parse_options=arrow_csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=skip
            ),
            convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise Mistake(f"'{path}' cannot be read as a csv file ({reason}): save it as UTF-8 text.") from None
    if invalid:
        row, cells = invalid[0]
        line = line_number(path, separator, row - 2)  # the header is row 1
        raise Mistake(f"'{path}', line {line}, has {cells} cells and the first line has {len(names)}: correct it.")
    return table, separator


def _clean(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trim white space; what stands for a gap becomes null."""
    trimmed = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(GAPS)), pa.scalar(None, pa.string()), trimmed)


# Which columns are the label and the client ---------------------------------------------------------------------------


def label_column(table: TextTable, label: str) -> str:
    """The name of the column of the labels."""
    if label:
        if label not in table.columns:
            raise unknown(f"column for --label in '{table.name}'", label, table.columns)
        return label
    there = [name for name in LABELS if name in table.columns]
    if len(there) > 1:
        raise Mistake(f"'{table.name}' has both 'label' and 'y': name the column of the labels with --label.")
    if not there:
        raise Mistake(
            f"'{table.name}' has no column 'label' or 'y' (it has {quoted(list(table.columns)) or 'none'}): "
            "name the column of the labels with --label."
        )
    return there[0]


def client_column(table: TextTable, client: str) -> str:
    """The name of the column of the clients; empty if there is none."""
    if client:
        if client not in table.columns:
            raise unknown(f"column for --client in '{table.name}'", client, table.columns)
        return client
    there = [name for name in CLIENTS if name in table.columns]
    if len(there) > 1:
        raise Mistake(f"'{table.name}' has both 'client' and 'group': name the column of the clients with --client.")
    return there[0] if there else ""


def words(table: TextTable, column: str, what: str) -> NDArray[np.str_]:
    """A column of names without gaps. Whole numbers are written without a decimal point."""
    cells = table.columns[column]
    gaps = np.flatnonzero(cells.is_null().to_numpy())
    if len(gaps):
        raise Mistake(
            f"Column '{column}' has no {what} in {table.places(gaps)}: fill in or remove {len(gaps)} rows like this."
        )
    numbers = as_numbers(cells, ",")
    if numbers is not None and (np.abs(numbers) < 2**53).all() and (numbers == np.floor(numbers)).all():
        return numbers.astype(np.int64).astype(str)
    return np.array(cells.to_pylist(), dtype=str)


# Parsing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Parsed:
    """A column of features: numbers (NaN for gaps; dates as days since 1970) or words (empty for gaps)."""

    kind: Kind
    cells: NDArray[np.float64] | NDArray[np.str_]


def parse_column(table: TextTable, name: str) -> Parsed:
    """Find out what a column holds, and parse it."""
    cells = table.columns[name]
    if cells.null_count == len(cells):
        return Parsed("empty", np.full(len(cells), np.nan))
    separators = set(table.separators)
    numbers = as_numbers(cells, "," if separators <= {",", ""} else "")
    if numbers is not None:
        infinite = np.flatnonzero(np.isinf(numbers))
        if len(infinite):
            raise Mistake(f"Column '{name}' holds an infinite number in {table.places(infinite)}: correct it.")
        return Parsed("number", numbers)
    days = as_days(cells)
    if days is not None:
        return Parsed("date", days)
    return Parsed("category", np.array(cells.fill_null("").to_pylist(), dtype=str))


def as_numbers(cells: pa.ChunkedArray, separator: str) -> NDArray[np.float64] | None:
    """Numbers, with decimal points, or with decimal commas unless commas separate cells; None if a cell is no number."""
    candidates = [cells]
    if separator != ",":
        candidates.append(pc.replace_substring(cells, ",", "."))
    for candidate in candidates:
        try:
            numbers = candidate.cast(pa.float64()).fill_null(float("nan")).to_numpy()
        except pa.ArrowInvalid:
            continue
        return np.asarray(numbers, dtype=np.float64)
    return None


def as_days(cells: pa.ChunkedArray) -> NDArray[np.float64] | None:
    """Dates as days since 1970; None if a cell is no date."""
    for form in ("seconds", "nanoseconds", "%d.%m.%Y"):
        try:
            if form.startswith("%"):
                stamps = pc.strptime(cells, format=form, unit="s")
            else:
                stamps = cells.cast(pa.timestamp("s" if form == "seconds" else "ns"))
        except pa.ArrowInvalid:
            continue
        seconds = stamps.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).cast(pa.float64())
        return np.asarray(seconds.fill_null(float("nan")).to_numpy(), dtype=np.float64) / 86400
    return None


def first_word_among_numbers(cells: NDArray[np.str_]) -> int | None:
    """The row of the first cell that is no number, if most cells are numbers."""
    numeric = np.array([is_number(str(cell)) for cell in cells])
    others = np.flatnonzero(~numeric & (cells != ""))
    return int(others[0]) if 0 < len(others) < numeric.sum() else None


def is_number(text: str) -> bool:
    """Whether a cell is a number, with a decimal point or comma."""
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True
