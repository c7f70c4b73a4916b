"""What a row looks like at a site: what servers and sites must agree on before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kilter.data import Schema
from kilter.net.fields import finite
from kilter.records.wire import Malformed


@dataclass(frozen=True)
class DataDescription:
    """What a row looks like. It contains no row and no number of rows."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...] | None = None  # of colour images, by channel
    std: tuple[float, ...] | None = None
    schema: Schema | None = None  # of a table: columns by name, pooled means and deviations, category values

    def plain(self) -> dict[str, object]:
        """As JSON."""
        mean, std = (None if v is None else list(v) for v in (self.mean, self.std))
        core = {"shape": list(self.shape), "classes": list(self.classes), "mean": mean, "std": std}
        return core | ({} if self.schema is None else {"schema": self.schema.plain()})

    @staticmethod
    def parse(value: object) -> DataDescription:
        if not isinstance(value, dict):
            raise Malformed("the description of the data is not a table")
        shape, classes = _items(value, "shape", 3), _items(value, "classes", 100_000)
        if not shape or not all(type(n) is int and 0 < n < 2**24 for n in shape):
            raise Malformed("the description of the data has an impossible shape")
        if not classes or not all(isinstance(c, str) and len(c) <= 200 and c.isprintable() for c in classes):
            raise Malformed("the description of the data has impossible class names")
        return DataDescription(
            tuple(n for n in shape if isinstance(n, int)),
            tuple(c for c in classes if isinstance(c, str)),
            _channels(value, "mean"),
            _channels(value, "std"),
            _schema(value),
        )


def _items(value: Mapping[str, object], key: str, most: int) -> list[object]:
    items = value.get(key)
    if not isinstance(items, list | tuple) or len(items) > most:
        raise Malformed(f"the description of the data has no usable {key}")
    return list(items)


def _channels(value: Mapping[str, object], key: str) -> tuple[float, ...] | None:
    if value.get(key) is None:
        return None
    numbers = [finite(n) for n in _items(value, key, 1000)]
    if any(n is None for n in numbers):
        raise Malformed(f"the description of the data has an impossible {key}")
    return tuple(n for n in numbers if n is not None)


def _schema(value: Mapping[str, object]) -> Schema | None:
    if value.get("schema") is None:
        return None
    try:
        schema = Schema.parse(value["schema"])
    except ValueError as error:
        raise Malformed(f"the description of the data has an impossible schema: {error}") from None
    if list(schema.classes) != _items(value, "classes", 100_000) or [schema.width] != _items(value, "shape", 3):
        raise Malformed("the description of the data has a schema of another shape or with other classes")
    return schema
