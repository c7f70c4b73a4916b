"""What the tests of the network share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from place import SITES, Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes places, and ends whatever still runs in them."""
    made: list[Place] = []

    def make(sites: tuple[str, ...] = SITES, **experiment: Any) -> Place:
        made.append(Place(tmp_path / f"place{len(made)}", experiment, sites))
        return made[-1]

    yield make
    for one in made:
        one.end()
