"""What the tests of the hub share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_here import HubHere
from hub_place import HubPlace


@pytest.fixture
def hub_place(tmp_path: Path) -> Iterator[Callable[..., HubPlace]]:
    """Makes places with a hub, and ends whatever still runs in them."""
    places: list[HubPlace] = []

    def make(*sites: str) -> HubPlace:
        places.append(HubPlace(tmp_path / f"hub{len(places)}", sites or ("a", "b")))
        return places[-1]

    yield make
    for place in places:
        place.end()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubHere]:
    hub = HubHere(tmp_path, monkeypatch)
    yield hub
    hub.close()
