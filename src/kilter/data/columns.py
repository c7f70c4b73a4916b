"""Columns of a table, parsed: numbers, dates, words or texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kilter.data.schema import Column, Kind, Schema
from kilter.data.tables import Table, as_text
from kilter.errors import Mistake

LARGEST = 1e38  # of numbers, which become 32-bit floats
STARTS_WITH_DATE = re.compile(r"\s*\d{1,4}[./-]\d{1,2}[./-]\d{1,4}")


@dataclass(frozen=True, eq=False)
class Parsed:
    """A column of features. Numbers and dates (days since 1970) are float64 cells, with NaN for gaps.

    Of categories and texts, a cell is the place of its text in `words`, or -1 for a gap.
    """

    kind: Kind
    cells: NDArray[np.float64] | NDArray[np.int64] | NDArray[np.int32]
    words: tuple[str, ...] = ()

    @staticmethod
    def of_words(texts: Sequence[str], kind: Kind = "category") -> Parsed:
        """A column of words; an empty text is a gap."""
        distinct, cells = np.unique(np.array(texts, dtype=str), return_inverse=True)
        places = np.cumsum(distinct != "") - 1
        places[distinct == ""] = -1
        return Parsed(kind, places[cells].astype(np.int64), tuple(str(w) for w in distinct if w != ""))


Columns = Mapping[str, Parsed]


def parse_column(table: Table, name: str, text: bool = False, codes: bool = False) -> Parsed:
    """Find out what a column holds, and parse it. With `text`, it is free text; with `codes`, numbers are categories."""
    cells = table.columns[name]
    if cells.null_count == len(cells):
        return Parsed("empty", np.full(len(cells), np.nan))
    if text:
        return _encode(as_text(cells), "text")
    numbers = as_numbers(cells, table.decimal_commas)
    if numbers is not None:
        if np.isnan(numbers).all():
            return Parsed("empty", numbers)
        if max(np.fmax.reduce(numbers), -np.fmin.reduce(numbers)) > LARGEST:
            large = np.flatnonzero(np.abs(numbers) > LARGEST)
            what = (
                "an infinite number" if np.isinf(numbers[large[0]]) else f"{numbers[large[0]]:g}, which is too large,"
            )
            raise Mistake(f"Column '{name}' holds {what} in {table.places(large)}: correct it.")
        return _encode(as_text(cells), "category") if codes else Parsed("number", numbers)
    days = as_days(cells)
    if days is not None:
        return Parsed("date", days)
    return _encode(as_text(cells), "category")


def _encode(texts: pa.ChunkedArray, kind: Kind) -> Parsed:
    encoded = texts.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    codes = np.asarray(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int32)
    return Parsed(kind, codes, tuple(encoded.dictionary.to_pylist()))


def as_numbers(cells: pa.ChunkedArray, decimal_commas: bool) -> NDArray[np.float64] | None:
    """Numbers with decimal points, or with decimal commas where these cannot separate cells; None if a cell is no number."""
    if pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type) or pa.types.is_decimal(cells.type):
        return _float64(cells.cast(pa.float64(), safe=False))
    if not pa.types.is_string(cells.type):
        return None
    candidates = [cells, *([pc.replace_substring(cells, ",", ".")] if decimal_commas else [])]
    for candidate in candidates:
        try:
            return _float64(candidate.cast(pa.float64()))
        except pa.ArrowInvalid:
            continue
    return None


def _float64(cells: pa.ChunkedArray) -> NDArray[np.float64]:
    shared = cells.num_chunks == 1  # without nulls, numpy reads pyarrow's memory
    return np.asarray(cells.chunk(0).to_numpy(False) if shared else cells.to_numpy(), dtype=np.float64)  # null: NaN


def as_days(cells: pa.ChunkedArray) -> NDArray[np.float64] | None:
    """Dates as days since 1970; None if a cell is no date."""
    if pa.types.is_date(cells.type) or pa.types.is_timestamp(cells.type):
        return _days(cells.cast(pa.timestamp("ms", getattr(cells.type, "tz", None)), safe=False))
    if not pa.types.is_string(cells.type):
        return None
    if not (len(cells) and STARTS_WITH_DATE.match(next((c.as_py() for c in cells if c.is_valid), ""))):
        return None
    for texts in (cells, _iso_dates(cells)):
        for kind in (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("s", "UTC")):
            try:
                return _days(texts.cast(kind))
            except pa.ArrowInvalid:
                continue
    return None


def _iso_dates(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """31.03.2024 and 2024/3/31, perhaps with a time, as 2024-03-31; everything else as it is."""
    iso = pc.replace_substring_regex(cells, r"^(\d{1,2})\.(\d{1,2})\.(\d{4})($|[ T])", r"\3-\2-\1\4")
    iso = pc.replace_substring_regex(iso, r"^(\d{4})/(\d{1,2})/(\d{1,2})($|[ T])", r"\1-\2-\3\4")
    iso = pc.replace_substring_regex(iso, r"^(\d{4})-(\d)-", r"\1-0\2-")
    return pc.replace_substring_regex(iso, r"^(\d{4}-\d{2})-(\d)($|[ T])", r"\1-0\2\3")


def _days(stamps: pa.ChunkedArray) -> NDArray[np.float64]:
    seconds = stamps.cast(pa.timestamp("s", getattr(stamps.type, "tz", None)), safe=False).cast(pa.int64())
    return _float64(seconds.cast(pa.float64())) / 86400


def fit_kinds(columns: dict[str, Parsed], schema: Schema) -> dict[str, Parsed]:
    """The columns with the kinds that a schema names: a column of words may be a text there, and the other way round."""
    kinds = {column.name: column.kind for column in schema.columns}
    return {
        name: Parsed(kinds[name], parsed.cells, parsed.words)
        if {parsed.kind, kinds.get(name, parsed.kind)} == {"text", "category"}
        else parsed
        for name, parsed in columns.items()
    }


def infer(columns: Columns, target: str, classes: tuple[str, ...], defaults: Column) -> Schema:
    """The schema of parsed columns; `defaults` says how to prepare them."""
    options = {key: value for key, value in defaults.plain().items() if key not in ("name", "kind")}
    return Schema(
        tuple(Column.parse({"name": name, "kind": parsed.kind, **options}) for name, parsed in columns.items()),
        target,
        classes,
    )
