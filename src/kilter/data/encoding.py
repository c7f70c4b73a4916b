"""How the cells of one column become numbers of a prepared row."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kilter.data.columns import Parsed
from kilter.data.statistics import words_of

if TYPE_CHECKING:
    from kilter.data.preparation import FittedColumn


BLOCK = 2**16  # rows of numbers that are prepared at a time


def encode_column(x: NDArray[np.float32], fitted: FittedColumn, parsed: Parsed) -> None:
    """Write the numbers of one column into `x`, which is 0."""
    kind = fitted.column.kind
    if "empty" in (kind, parsed.kind):
        return  # nothing is known about this column here: every cell is a gap
    if kind == "category" and fitted.column.embed:
        x[:, 0] = _places(fitted, parsed) + 1
    elif kind == "category":
        _one_hot(x, fitted, parsed)
    elif kind == "text" and fitted.column.sequence:
        _token_ids(x, fitted, parsed)
    elif kind == "text":
        _count_words(x, fitted, parsed)
    else:
        for start in range(0, len(x), BLOCK):
            _numbers(x[start : start + BLOCK], fitted, parsed.cells[start : start + BLOCK].astype(np.float64))


def _numbers(x: NDArray[np.float32], fitted: FittedColumn, cells: NDArray[np.float64]) -> None:
    """Numbers or days, limited, without gaps and standardised. `cells` are changed."""
    days = cells.copy() if fitted.width == 5 else None
    if fitted.low is not None and fitted.high is not None:
        np.clip(cells, fitted.low, fitted.high, out=cells)  # NaN stays
    cells[~np.isfinite(cells)] = fitted.fill or 0.0
    if fitted.column.scale:
        cells -= fitted.mean
        cells /= fitted.std or 1.0
    x[:, 0] = cells
    if days is not None:
        _date_parts(x[:, 1:], days)


def _places(fitted: FittedColumn, parsed: Parsed) -> NDArray[np.int32]:
    """The place of each cell among the fitted values; "other" comes after the last, and a gap is -1 unless it is filled."""
    place = {value: at for at, value in enumerate(fitted.values)}
    other = len(fitted.values)
    places = np.array(
        [*(place.get(word, other) for word in parsed.words), place.get(str(fitted.fill), -1)], dtype=np.int32
    )
    return places[parsed.cells]  # -1, a gap, is the last place


def _one_hot(x: NDArray[np.float32], fitted: FittedColumn, parsed: Parsed) -> None:
    at = _places(fitted, parsed)
    for start in range(0, len(x), BLOCK):
        places, block = at[start : start + BLOCK], x[start : start + BLOCK]
        filled = np.flatnonzero(places >= 0)
        block[filled, places[filled]] = 1


def _date_parts(x: NDArray[np.float32], days: NDArray[np.float64]) -> None:
    known = np.flatnonzero(np.isfinite(days))
    dates = np.floor(days[known]).astype("datetime64[D]")
    month = dates.astype("datetime64[M]").astype(np.int64) % 12 / 12
    weekday = (np.floor(days[known]) + 3) % 7 / 7  # 1970-01-01 was a Thursday
    for at, turn in enumerate((month, weekday)):
        x[known, 2 * at], x[known, 2 * at + 1] = np.sin(2 * np.pi * turn), np.cos(2 * np.pi * turn)


def _token_ids(x: NDArray[np.float32], fitted: FittedColumn, parsed: Parsed) -> None:
    """The first tokens of each text as numbers from 1 to `width` - 1, by hashing; 0 is padding."""
    length, tokens = fitted.column.sequence, fitted.column.width
    known: dict[str, int] = {}
    texts = np.zeros((len(parsed.words) + 1, length), dtype=np.float32)  # the last row, of a gap, is empty
    for at, text in enumerate(parsed.words):
        words = words_of(text)[:length]
        if fitted.column.ids:
            texts[at, : len(words)] = [int(word) + 1 for word in words]
            continue
        for word in words:
            if word not in known:
                known[word] = 1 + int.from_bytes(blake2b(word.encode(), digest_size=8).digest()) % (tokens - 1)
        texts[at, : len(words)] = [known[word] for word in words]
    x[:] = texts[parsed.cells]


def _count_words(x: NDArray[np.float32], fitted: FittedColumn, parsed: Parsed) -> None:
    from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer
    from sklearn.preprocessing import normalize

    if fitted.column.vocabulary:
        if not fitted.values:
            return
        counter = CountVectorizer(analyzer=words_of, vocabulary=list(fitted.values), dtype=np.float32)
    else:
        counter = HashingVectorizer(
            analyzer=words_of, n_features=fitted.width, alternate_sign=False, norm=None, dtype=np.float32
        )
    vectors = normalize(counter.transform(parsed.words))
    known = np.flatnonzero(parsed.cells >= 0)
    for start in range(0, len(known), 4096):
        some = known[start : start + 4096]
        x[some] = vectors[parsed.cells[some]].toarray()
