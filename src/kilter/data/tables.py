"""Read tables with pyarrow: CSV (any separator, with or without BOM, decimal commas) and Parquet, one file or one per client.

Empty cells, NA, N/A, NaN, null, None and ? are gaps. Columns are matched by name, never by position.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from kilter.data.schema import quoted
from kilter.errors import Mistake

SUFFIXES = (".csv", ".tsv", ".parquet")
GAPS = ("", "NA", "N/A", "na", "n/a", "NaN", "nan", "NULL", "null", "None", "?")
SEPARATORS = ",;\t|"
DECIMAL_COMMA, DECIMAL_POINT = re.compile(r"^\s*-?\d+,\d+\s*$"), re.compile(r"^\s*-?\d+\.\d+\s*$")


@dataclass(frozen=True)
class TableOptions:
    """How to read a user's table."""

    label: str = ""  # the column of the labels; empty: label or y
    client: str = ""  # the column of the clients; empty: client or group, if there is one
    drop: tuple[str, ...] = ()  # columns to leave out
    test_file: str = ""  # a table of test rows
    test_size: float = 0.0  # the share of test rows; 0: one row in five
    text: tuple[str, ...] = ()  # columns of free text
    tokenizer: str = ""  # a tokenizer file (Hugging Face tokenizers) for the texts; empty: words
    prepare: str = ""  # how to prepare the columns, such as fill=median,clip=0.01
    task: str = ""  # what the label is (kilter.data.targets); empty: the name or number of a class
    event: str = ""  # the column of the event, for the task survival
    image_size: str = ""  # of images: 64 or 64x48; empty: their own
    image_mode: str = ""  # of images: grey or rgb; empty: grey if all are


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
        cleaned = {str(key): _clean(Path(name), str(key), column) for key, column in columns.items()}
        lengths = {len(column) for column in cleaned.values()} or {0}
        return Table(cleaned, (Path(name),), (lengths.pop(),), ("",))

    @property
    def decimal_commas(self) -> bool:
        """Whether a comma in a cell can be a decimal comma: not where commas separate cells."""
        return not set(self.separators) <= {",", ""}

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


def read_table(files: list[Path], drop: tuple[str, ...] = ()) -> Table:
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
    joined = {name: _join([columns[name] for columns, _ in tables]) for name in names}
    lengths = tuple(len(next(iter(columns.values()), ())) for columns, _ in tables)
    return Table(joined, tuple(files), lengths, tuple(separator for _, separator in tables))


def _join(columns: list[pa.ChunkedArray]) -> pa.ChunkedArray:
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
    return {name: _clean(path, name, column) for name, column in zip(names, table.columns, strict=True)}, separator


def _read_parquet(path: Path) -> pa.Table:
    try:
        return parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise Mistake(f"'{path}' cannot be read as a Parquet file ({reason}): save it again.") from None


def _read_csv(path: Path) -> tuple[pa.Table, str]:
    """A CSV file and its separator. A row with too many or too few cells is refused with its line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next((line.rstrip("\r\n") for line in file if line.strip()), "")
            sample = [line for line, _ in zip(file, range(1000), strict=False)]
        separator = max(SEPARATORS, key=header.count)
        names = next(csv.reader([header], delimiter=separator), []) if header else []
        if not header or len({name.strip() for name in names}) < len(names):
            return pa.table([pa.array([], pa.string()) for _ in names], names=names), separator
        comma = separator != "," and _has_decimal_commas(sample, separator)
        table, invalid = _parse_csv(path, separator, comma, threads=True)
        if table is None or invalid:
            table, invalid = _parse_csv(path, separator, comma, threads=False)
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise Mistake(f"'{path}' cannot be read as a csv file ({reason}): save it as UTF-8 text.") from None
    if invalid:
        row, cells = invalid[0]
        line = line_number(path, separator, row - 2)  # the header is row 1
        raise Mistake(f"'{path}', line {line}, has {cells} cells and the first line has {len(names)}: correct it.")
    assert table is not None
    return table, separator


def _has_decimal_commas(lines: list[str], separator: str) -> bool:
    """Whether the numbers of these lines have decimal commas, and none has a decimal point."""
    cells = [cell for row in csv.reader(lines, delimiter=separator) for cell in row]
    return any(map(DECIMAL_COMMA.match, cells)) and not any(map(DECIMAL_POINT.match, cells))


def _parse_csv(
    path: Path, separator: str, decimal_comma: bool, threads: bool
) -> tuple[pa.Table | None, list[tuple[int, int]]]:
    """The table, and (row, cells) of rows with another number of cells. pyarrow infers the type of each column.

    With threads it is fast and gives no row numbers, and line breaks inside of quotes may make it fail: None.
    """
    invalid: list[tuple[int, int]] = []

    def skip(row: arrow_csv.InvalidRow) -> str:
        invalid.append((row.number or 0, row.actual_columns))
        return "skip"

    try:
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(use_threads=threads),
            parse_options=arrow_csv.ParseOptions(
                delimiter=separator, newlines_in_values=not threads, invalid_row_handler=skip
            ),
            convert_options=arrow_csv.ConvertOptions(
                null_values=GAPS,
                strings_can_be_null=True,
                true_values=[],
                false_values=[],
                decimal_point="," if decimal_comma else ".",
            ),
        )
    except pa.ArrowInvalid:
        if not threads:
            raise
        return None, invalid
    return table, invalid


def _clean(path: Path, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers and dates as they are; everything else as trimmed text in which gaps are null."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return column
    try:
        text = column.cast(pa.string())
    except pa.ArrowException:
        raise Mistake(
            f"'{path}', column '{name}', holds {column.type}: only numbers, words and dates can be used, so leave it "
            f"out (--drop {name})."
        ) from None
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(GAPS)), pa.scalar(None, pa.string()), trimmed)


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as text; whole numbers have no decimal point."""
    return column.cast(pa.string())
