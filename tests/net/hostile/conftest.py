"""Attacks: every test in this folder is marked `hostile` and run by `make test-hostile`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.hostile)
            item.add_marker(pytest.mark.timeout(900))
