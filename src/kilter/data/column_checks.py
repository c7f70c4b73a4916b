"""Columns that a table can hold but training should not read as they are: each is refused in one sentence, or noted."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kilter.data.columns import Parsed, as_days, as_numbers
from kilter.data.prepare_settings import is_decimal
from kilter.data.schema import quoted
from kilter.data.tables import Table
from kilter.errors import Mistake

MOST_CATEGORIES = 100  # a column of words with more different values is free text
FEW_CODES = 20  # a column of words may hold this many different numbers, such as the grades 1 to 4 and 'unknown'
NUMBER = r"^[-+]?[0-9][0-9.,]*$"
DATE = re.compile(r"(\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{2}(\d{2})?)([ T].*)?")


def check_words(table: Table, name: str, parsed: Parsed, declared: bool) -> None:
    """Refuse a column of words that holds free text, dates that cannot be read, or a few words among numbers.

    Where a schema declares that they are categories, only free text is refused.
    """
    numeric = np.array([is_decimal(word.replace(",", ".")) for word in parsed.words])
    if len(parsed.words) > MOST_CATEGORIES or (numeric.sum() > FEW_CODES and not declared):
        _refuse_words_among_numbers(table, name, parsed, numeric)
    dates = np.array([DATE.fullmatch(word) is not None for word in parsed.words])
    if dates.mean() > 0.5 and not declared:
        unknown = [as_days(pa.chunked_array([[word]])) is None for word in parsed.words]
        row, word = _first(parsed, np.array(unknown))
        raise Mistake(
            f"Column '{name}' holds '{word}' in {table.place(row)}, which is not a date that Kilter reads: write dates as "
            f"2024-03-31 or 31.03.2024, or leave the column out (--drop {name})."
        )
    if len(parsed.words) > MOST_CATEGORIES:
        raise Mistake(
            f"Column '{name}' of '{table.name}' holds {len(parsed.words)} different words, too many for categories: "
            f"leave it out (--drop {name}), or use it as text (--text {name})."
        )


def _first(parsed: Parsed, chosen: NDArray[np.bool_]) -> tuple[int, str]:
    """The first row that holds one of these words, and the word."""
    row = int(np.flatnonzero(np.append(chosen, False)[parsed.cells])[0])  # -1, a gap, is the last place
    return row, parsed.words[parsed.cells[row]]


def _refuse_words_among_numbers(table: Table, name: str, parsed: Parsed, numeric: NDArray[np.bool_]) -> None:
    words = int(np.append(~numeric, False)[parsed.cells].sum())
    if 0 < words < int((parsed.cells >= 0).sum()) - words:
        row, word = _first(parsed, ~numeric)
        raise Mistake(
            f"Column '{name}' holds '{word}' in {table.place(row)}, and most other cells are "
            f"numbers: correct it, empty it, or leave the column out (--drop {name})."
        )


def check_same_kind(table: Table, name: str) -> None:
    """Refuse a column that holds numbers or dates in one file and words in another."""
    start, kinds = 0, dict[str, str]()
    for file, rows in zip(table.files, table.lengths, strict=True):
        kind = _kind(table.columns[name].slice(start, rows).drop_null(), table.decimal_commas)
        kinds.setdefault(kind, file.name)
        start += rows
    kinds.pop("", None)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise Mistake(
            f"Column '{name}' holds {one} in '{first}' and {other} in '{second}': write the same everywhere, or leave it "
            f"out (--drop {name})."
        )


def _kind(cells: pa.ChunkedArray, decimal_commas: bool) -> str:
    """Numbers, dates or words; empty if there are no cells, or some numbers among words."""
    if len(cells) == 0:
        return ""
    if as_numbers(cells, decimal_commas) is not None:
        return "numbers"
    if as_days(cells) is not None:
        return "dates"
    some = pa.types.is_string(cells.type) and pc.any(pc.match_substring_regex(cells, NUMBER)).as_py()
    return "" if some else "words"


def alike(what: str, names: Sequence[str]) -> list[str]:
    """A note if names differ only in upper and lower case.

    >>> alike("classes", ["ill", "Ill", "well"])
    ["The classes 'ill', 'Ill' differ only in upper and lower case: they count as different ones."]
    """
    by_folded: dict[str, list[str]] = {}
    for name in names:
        by_folded.setdefault(name.casefold(), []).append(name)
    same = [group for group in by_folded.values() if len(group) > 1]
    return [
        f"The {what} {quoted(group)} differ only in upper and lower case: they count as different ones."
        for group in same[:3]
    ]
