"""Checks of single values that arrived over the network: text, names, numbers, lists. `kilter.net.messages` is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kilter.errors import Malformed, Mistake
from kilter.net.names import HEX as HEX
from kilter.net.names import RESERVED as RESERVED
from kilter.net.names import check_name as check_name
from kilter.net.names import printable as printable
from kilter.runtimes.step_names import StepName

MOST_ROUNDS = 2**40
MOST_SITES = 10_000

Place = tuple[int, int]  # (round, call within the round)


class Fields:
    """Reads the fields of a head, each checked."""

    def __init__(self, head: Mapping[str, object], what: str) -> None:
        self._head, self._what = head, what

    def bad(self, key: str, wanted: str) -> Malformed:
        return Malformed(f"{self._what}: {key} is not {wanted}")

    def text(self, key: str, longest: int = 200, optional: bool = False) -> str:
        value = self._head.get(key)
        if optional and value is None:
            return ""
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise self.bad(key, "a short text")
        return value

    def name(self, key: str) -> str:
        return check_name(self.text(key, 64))

    def identifier(self, key: str) -> str:
        value = self.text(key, 64)
        if not HEX.fullmatch(value):
            raise self.bad(key, "an identifier")
        return value

    def integer(self, key: str, least: int = 0, most: int = MOST_ROUNDS) -> int:
        value = self._head.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.bad(key, f"a whole number from {least} to {most}")
        return value

    def flag(self, key: str) -> bool:
        value = self._head.get(key, False)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def place(self) -> Place:
        return self.integer("round"), self.integer("seq")

    def step(self) -> StepName:
        try:
            return StepName.parse(self.text("step"))
        except Mistake as e:
            raise Malformed(str(e).rstrip(".")) from None

    def names(self, key: str) -> tuple[str, ...]:
        value = self._head.get(key, [])
        if not isinstance(value, list) or len(value) > MOST_SITES or not all(isinstance(v, str) for v in value):
            raise self.bad(key, "a list of names")
        return tuple(check_name(v) for v in value)

    def table(self, key: str) -> dict[str, object]:
        value = self._head.get(key)
        if not isinstance(value, dict) or len(value) > MOST_SITES:
            raise self.bad(key, "a table")
        return value

    def optional_place(self, key: str) -> Place | None:
        value = self._head.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2:
            raise self.bad(key, "a place")
        both = Fields({"round": value[0], "seq": value[1]}, f"{self._what}: {key}")
        return both.place()


def finite(value: object) -> float | None:
    """A finite number as a float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) > 2**1000:
        return None
    return float(value) if math.isfinite(value) else None
