"""Statistics of columns: what each client computes over its training rows, and how they are pooled.

A client sends counts, means and deviations of numbers, the counts of category values, and, if gaps become the median or numbers are
clipped, a quantile sketch. Rows never leave it. Pooled counts, means and deviations equal those of the joined table up to rounding.
Pooled quantiles are the same as those of a sketch of the joined table: within ACCURACY of the exact value, relative to it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kilter.data.columns import Parsed
from kilter.data.schema import Column, Schema, is_finite, is_label

MOST_VALUES = 1000  # category values of a column
MOST_WORDS = 50_000  # words of a text column
ACCURACY = 0.01  # relative error of a quantile
SMALLEST, LARGEST = 1e-9, 1e15  # absolute values outside are counted as 0 or as LARGEST
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_SHIFT = 2 - math.floor(math.log(SMALLEST) / math.log(_GAMMA))  # makes bucket numbers of positive values positive
WHOLE = 2**53
WORD = re.compile(r"\w+")
TOKEN = "\x1f"  # separates the tokens of a text that a tokenizer file has divided


@dataclass(frozen=True)
class ColumnStatistics:
    """What is known about one column of some rows."""

    count: int = 0  # rows with a value
    mean: float = 0.0
    std: float = 0.0
    values: Mapping[str, int] = field(default_factory=dict)  # rows with this category, most frequent number or word
    sketch: Mapping[int, int] = field(default_factory=dict)  # rows in each bucket of a logarithmic scale

    def plain(self) -> dict[str, object]:
        """As it travels and as it is saved."""
        plain: dict[str, object] = {"count": self.count}
        if self.mean or self.std:
            plain |= {"mean": self.mean, "std": self.std}
        if self.values:
            plain["values"] = dict(self.values)
        if self.sketch:
            plain["sketch"] = {str(bucket): count for bucket, count in sorted(self.sketch.items())}
        return plain

    @staticmethod
    def parse(value: object) -> ColumnStatistics:
        """From plain values; a ValueError says what is wrong."""
        if not isinstance(value, Mapping) or not set(value) <= {"count", "mean", "std", "values", "sketch"}:
            raise ValueError("statistics of a column are not a table of known fields")
        count, mean, std = (value.get(key, 0) for key in ("count", "mean", "std"))
        if not is_count(count) or not is_finite(mean) or not is_finite(std) or std < 0:
            raise ValueError("statistics of a column have an impossible count, mean or std")
        values, sketch = value.get("values", {}), value.get("sketch", {})
        if not _is_counter(values, MOST_WORDS) or not all(map(is_label, values)):
            raise ValueError("statistics of a column have impossible values")
        if not _is_counter(sketch, 10_000) or not all(re.fullmatch(r"-?\d{1,5}", str(bucket)) for bucket in sketch):
            raise ValueError("statistics of a column have an impossible sketch")
        buckets = {int(bucket): n for bucket, n in sketch.items()}
        return ColumnStatistics(count, float(mean), float(std), dict(values), buckets)


def is_count(value: object) -> bool:
    """Whether this can be a number of rows."""
    return type(value) is int and 0 <= value < WHOLE


def _is_counter(value: object, most: int) -> bool:
    return isinstance(value, Mapping) and len(value) <= most and all(is_count(n) for n in value.values())


Statistics = Mapping[str, ColumnStatistics]  # by column


# What a client computes -----------------------------------------------------------------------------------------------


def summarise(
    columns: Mapping[str, Parsed], schema: Schema, rows: NDArray[np.int64], minimum: int = 1
) -> dict[str, ColumnStatistics]:
    """The statistics of these rows. A value that occurs in fewer than `least` rows of a column, or `minimum`, is not named.

    A column with fewer values than that is described as empty, because a mean of so few values would show them.
    """
    return {c.name: _summarise_column(c, columns[c.name], rows, max(c.least, minimum)) for c in schema.measured}


def _summarise_column(column: Column, parsed: Parsed, rows: NDArray[np.int64], least: int) -> ColumnStatistics:
    if "empty" in (column.kind, parsed.kind):
        return ColumnStatistics()
    cells = parsed.cells[rows]
    if column.kind in ("category", "text"):
        codes, counts = np.unique(cells[cells >= 0].astype(np.int64), return_counts=True)
        if column.kind == "text":
            words = word_counts(parsed, codes, counts) if column.vocabulary else {}
            return ColumnStatistics(int(counts.sum()), values=frequent(words, least, MOST_WORDS))
        values = {parsed.words[code]: int(n) for code, n in zip(codes, counts, strict=True)}
        return ColumnStatistics(int(counts.sum()), values=frequent(values, least, MOST_VALUES))
    numbers = cells[np.isfinite(cells)].astype(np.float64, copy=False)
    if len(numbers) < max(least, 1):
        return ColumnStatistics()
    values = {}
    if column.fill == "most-frequent":
        distinct, counts = np.unique(numbers, return_counts=True)
        values = frequent({repr(float(v)): int(n) for v, n in zip(distinct, counts, strict=True)}, least, MOST_VALUES)
    needs_sketch = column.fill == "median" or column.clip > 0
    sketch = sketch_of(numbers) if needs_sketch else {}
    return ColumnStatistics(len(numbers), float(numbers.mean()), float(numbers.std()), values, sketch)


def frequent(counts: Mapping[str, int], least: int, most: int) -> dict[str, int]:
    """The values with at least `least` rows; at most `most` of them, the most frequent ones."""
    listed = [(value, n) for value, n in counts.items() if n >= least and is_label(value)]
    return dict(sorted(sorted(listed, key=lambda item: (-item[1], item[0]))[:most]))


def word_counts(parsed: Parsed, codes: NDArray[np.int64], counts: NDArray[np.int64]) -> Counter[str]:
    """In how many rows each word occurs."""
    rows: Counter[str] = Counter()
    for code, count in zip(codes, counts, strict=True):
        rows.update(dict.fromkeys(words_of(parsed.words[code]), int(count)))
    return rows


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, or its tokens if a tokenizer has divided it."""
    return [t for t in text.split(TOKEN) if t] if TOKEN in text else WORD.findall(text.lower())


# Quantiles (a DDSketch: Masson, Rim and Lee, 2019) ---------------------------------------------------------------------


def sketch_of(numbers: NDArray[np.float64]) -> dict[int, int]:
    """How many numbers fall into each bucket. The limits of buckets grow by a constant factor."""
    size = np.clip(np.abs(numbers), SMALLEST, LARGEST)
    buckets = np.sign(numbers) * (np.ceil(np.log(size) / math.log(_GAMMA)) + _SHIFT)
    buckets[np.abs(numbers) < SMALLEST] = 0
    distinct, counts = np.unique(buckets.astype(np.int64), return_counts=True)
    return dict(zip(distinct.tolist(), counts.tolist(), strict=True))


def quantile(sketch: Mapping[int, int], share: float) -> float:
    """The value below which this share of the numbers lies: within ACCURACY of the exact one, relative to it."""
    rank = share * (sum(sketch.values()) - 1)
    buckets = sorted(sketch)
    totals = np.cumsum([sketch[bucket] for bucket in buckets])
    bucket = buckets[int(np.searchsorted(totals, rank, side="right"))]
    if bucket == 0:
        return 0.0
    return math.copysign(2 * _GAMMA ** (abs(bucket) - _SHIFT) / (_GAMMA + 1), bucket)


# Pooling --------------------------------------------------------------------------------------------------------------


def pool(parts: Sequence[Statistics]) -> dict[str, ColumnStatistics]:
    """The statistics of all rows together, from those of the parts."""
    return {name: pool_column([part[name] for part in parts]) for name in parts[0]}


def pool_column(parts: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """The statistics of one column, from those of its parts."""
    count = sum(part.count for part in parts)
    values: Counter[str] = Counter()
    sketch: Counter[int] = Counter()
    for part in parts:
        values.update(part.values)
        sketch.update(part.sketch)
    if count == 0:
        return ColumnStatistics()
    mean = math.fsum(part.count * part.mean for part in parts) / count
    spread = math.fsum(part.count * (part.std**2 + (part.mean - mean) ** 2) for part in parts) / count
    return ColumnStatistics(count, mean, math.sqrt(spread), dict(sorted(values.items())), dict(sketch))
