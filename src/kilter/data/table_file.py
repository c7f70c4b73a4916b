"""Read one file of a table with pyarrow: CSV (any separator, with or without BOM, decimal commas) or Parquet.

Empty cells, NA, N/A, NaN, null, None and ? are gaps. A large CSV file is read block by block, straight into the arrays of its
columns (`kilter.data.growing_column`), so that reading it takes little more memory than its columns.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from kilter.data.growing_column import GrowingColumn
from kilter.data.schema import is_label
from kilter.errors import Mistake

SUFFIXES = (".csv", ".tsv", ".parquet")
GAPS = ("", "NA", "N/A", "na", "n/a", "NaN", "nan", "NULL", "null", "None", "?")
SEPARATORS = ",;\t|"
SAMPLE = 1000  # lines that tell how numbers are written
BLOCK = 2**25  # bytes of a CSV file that are parsed at a time
NOT_SPACE = re.compile(rb"\S")
INDEX = "__index_level_"  # of columns in which pandas keeps the index of a frame
NUMBER = re.compile(r"\s*[-+]?(\d+[.,]?\d*|[.,]\d+)(e[-+]?\d+)?\s*$", re.IGNORECASE)
BOM = b"\xef\xbb\xbf"
DECIMAL_COMMA, DECIMAL_POINT = re.compile(r"^\s*-?\d+,\d+\s*$"), re.compile(r"^\s*-?\d+\.\d+\s*$")
csv.field_size_limit(2**30)  # characters in a cell; the module's own limit, 131,072, is for the whole process
Cells = dict[str, pa.ChunkedArray]  # columns by name, with null or NaN for gaps


def read_file(path: Path) -> tuple[Cells, str]:
    """The columns of a file, and its separator (empty for Parquet)."""
    if not path.is_file():
        raise Mistake(f"There is no file '{path}': give the path of a .csv, .tsv or .parquet file.")
    if path.suffix.lower() == ".parquet":
        table = _read_parquet(path)
        return _named(path, table.column_names, table.columns), ""
    return _read_csv(path)


def clean(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers and dates as they are; everything else as trimmed text in which gaps are null, if it can be text."""
    if pa.types.is_dictionary(column.type):
        words = [c.dictionary.cast(pa.string()).take(c.indices) for c in column.chunks]
        column = pa.chunked_array(words, pa.string())
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return column
    try:
        text = column.cast(pa.string())
    except pa.ArrowException:
        return column  # check_type refuses it, unless it is left out
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(GAPS)), pa.scalar(None, pa.string()), trimmed)


def check_type(source: object, name: str, column: pa.ChunkedArray) -> None:
    """Refuse a column that `clean` could not read."""
    kind = column.type
    if (
        pa.types.is_binary(kind)
        or pa.types.is_nested(kind)
        or not (pa.types.is_primitive(kind) or pa.types.is_string(kind) or pa.types.is_null(kind))
    ):
        raise Mistake(
            f"'{source}', column '{name}', holds {kind}: only numbers, words and dates can be used, so leave it out "
            f"(--drop {name})."
        )


def line_number(path: Path, separator: str, row: int) -> int:
    """The line of a CSV file where data row `row` (from 0) ends; empty lines and line breaks in cells count."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=separator)
        records = (reader.line_num for cells in reader if cells)
        for number, line in enumerate(records):
            if number == row + 1:
                return line
    return row + 2


def _named(path: Path, names: list[str], columns: list[pa.ChunkedArray]) -> Cells:
    return {name: clean(c) for name, c in zip(_check_names(path, names), columns, strict=True)}


def _check_names(path: Path, names: list[str]) -> list[str]:
    """The names of columns without spaces around them: none is empty, and none occurs twice."""
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Mistake(f"'{path}' has two columns of the same name, '{twice}', in its first line: rename one.")
    if "" in names:
        advice = "name it (pandas writes such a column without index=False)" if names[0] == "" else "name it"
        raise Mistake(f"'{path}' has a column without a name, number {names.index('') + 1}: {advice}.")
    return check_printable(path, names)


def check_printable(source: object, names: list[str]) -> list[str]:
    """The names of columns, if a schema can hold them."""
    for at, name in enumerate(names):
        if not is_label(name):
            raise Mistake(
                f"'{source}' has a column whose name is longer than 200 characters or not printable, number {at + 1}: rename it."
            )
    return names


def _check_header(path: Path, names: list[str]) -> list[str]:
    """The names of columns in the first line of a CSV file. Numbers that do not count the columns are a row of data."""
    numbers = [int(name) for name in names if name.strip().isdecimal()]
    counts_columns = len(numbers) == len(names) and numbers == list(range(numbers[0], numbers[0] + len(names)))
    if names and all(NUMBER.match(name) for name in names) and not counts_columns:
        raise Mistake(f"'{path}' has only numbers in its first line: this line must name the columns.")
    return _check_names(path, names)


def _read_parquet(path: Path) -> pa.Table:
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].replace(f" '{path}'", "")
        raise Mistake(f"'{path}' cannot be read as a Parquet file ({reason}): save it again.") from None
    return table.drop_columns([name for name in table.column_names if name.startswith(INDEX)])


# CSV ------------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> tuple[Cells, str]:
    """The columns of a CSV file, and its separator. A row with too many or too few cells is refused with its line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next((line.rstrip("\r\n") for line in file if line.strip()), "")
            sample = [line for line, _ in zip(file, range(SAMPLE), strict=False)]
        if any("\0" in line for line in (header, *sample)):
            raise Mistake(f"'{path}' is not text: it has zero bytes. Save it as a CSV file in UTF-8.")
        if not header:
            raise Mistake(f"'{path}' is empty: its first line must name the columns.")
        separator = max(SEPARATORS, key=header.count)
        names = _check_header(path, next(csv.reader([header], delimiter=separator), []))
        if not names:
            return {}, separator
        if len(sample) < SAMPLE and not any(line.strip() for line in sample):
            return {name: pa.chunked_array([pa.nulls(0)]) for name in names}, separator
        form = CsvForm(separator, separator != "," and _has_decimal_commas(sample, separator))
        if path.stat().st_size > BLOCK and header.count('"') % 2 == 0:
            columns = _read_blocks(path, names, form)
            if columns is not None:
                return columns, separator
        table, invalid = form.parse(path, threads=True)
        if table is None or invalid:
            table, invalid = form.parse(path, threads=False)
    except UnicodeDecodeError:
        raise _not_text(path) from None
    except (OSError, csv.Error, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        if "straddl" in reason:  # pyarrow reads a file in blocks
            raise Mistake(f"'{path}' has a line of more than a million characters: check its quotes.") from None
        raise Mistake(f"'{path}' cannot be read as a csv file ({reason}): save it as UTF-8 text.") from None
    if invalid:
        row, cells = invalid[0]
        line = line_number(path, separator, row - 2)  # the header is row 1
        raise Mistake(f"'{path}', line {line}, has {cells} cells and the first line has {len(names)}: correct it.")
    assert table is not None
    if any(pa.types.is_binary(column.type) for column in table.columns):
        raise _not_text(path)
    return _named(path, table.column_names, table.columns), separator


def _not_text(path: Path) -> Mistake:
    """A Mistake that names the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return Mistake(f"'{path}', line {number}, is not UTF-8 text: save the file as CSV in UTF-8.")
    return Mistake(f"'{path}' is not UTF-8 text: save it as CSV in UTF-8.")


def _has_decimal_commas(lines: list[str], separator: str) -> bool:
    """Whether the numbers of these lines have decimal commas, and none has a decimal point."""
    cells = [cell for row in csv.reader(lines, delimiter=separator) for cell in row]
    return any(map(DECIMAL_COMMA.match, cells)) and not any(map(DECIMAL_POINT.match, cells))


class CsvForm:
    """How a CSV file is written, and how to parse it or a part of it."""

    def __init__(self, separator: str, decimal_comma: bool) -> None:
        self.separator, self.decimal_point = separator, "," if decimal_comma else "."

    def parse(
        self, source: Path | pa.Buffer, threads: bool, names: list[str] | None = None
    ) -> tuple[pa.Table | None, list[tuple[int, int]]]:
        """The table, and (row, cells) of rows with another number of cells. pyarrow infers the type of each column.

        With threads it is fast and gives no row numbers, and line breaks inside of quotes may make it fail: None. `names` are
        those of the columns, if the source has no header.
        """
        invalid: list[tuple[int, int]] = []

        def skip(row: arrow_csv.InvalidRow) -> str:
            invalid.append((row.number or 0, row.actual_columns))
            return "skip"

        try:
            table = arrow_csv.read_csv(
                source if isinstance(source, Path) else pa.BufferReader(source),
                read_options=arrow_csv.ReadOptions(use_threads=threads, column_names=names),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self.separator, newlines_in_values=not threads, invalid_row_handler=skip
                ),
                convert_options=arrow_csv.ConvertOptions(
                    null_values=GAPS,
                    strings_can_be_null=True,
                    true_values=[],
                    false_values=[],
                    decimal_point=self.decimal_point,
                ),
            )
        except pa.ArrowInvalid:
            if not threads:
                raise
            return None, invalid
        return table, invalid


def _read_blocks(path: Path, names: list[str], form: CsvForm) -> Cells | None:
    """The columns of a file without line breaks in cells; None if it has to be read as a whole.

    It has to if a column holds numbers in one block and words in another, or if a row has another number of cells.
    """
    columns: list[GrowingColumn] = []
    size = path.stat().st_size
    with path.open("rb") as file:
        while not file.readline().removeprefix(BOM).strip():
            pass  # empty lines before the header
        first = file.tell()
        while data := file.read(BLOCK):
            end = data.rfind(b"\n") + 1 if file.tell() < size else len(data)
            if not end:
                return None  # a line longer than a block
            file.seek(end - len(data), 1)
            if not NOT_SPACE.search(data, 0, end):
                continue
            table, invalid = form.parse(pa.py_buffer(data)[:end], True, names)
            if table is None or invalid:
                return None
            if not columns:
                rows = int(len(table) * (size - first) / end * 1.01) + 1000
                columns = [GrowingColumn(rows) for _ in names]
            for column, cells in zip(columns, table.columns, strict=True):
                if not column.add(cells.type, clean(cells)):
                    return None
    cells = {name: column.finish() for name, column in zip(names, columns, strict=True)} if columns else None
    pa.default_memory_pool().release_unused()  # the memory of the blocks
    return cells
