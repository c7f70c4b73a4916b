"""What all tests share. Hypothesis tries the same examples in every run of CI, so a red build can be repeated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from kilter.fast import stack
from kilter.runtimes.simulation import Simulation
from small import federation

settings.register_profile("kilter", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("kilter"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "kilter")
torch.set_num_threads(1)
stack.strict = True  # an unexpected error in a stack is a bug, not a reason to train one by one


STARTS_PROCESSES = {"place", "hub_place"}  # fixtures with which a test starts servers and sites
ALWAYS = "test_star_gives_the_numbers_of_the_simulation[fedavg]"  # one deployed run stays in `make test`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start servers and sites as processes: `make test-processes` runs them."""
    for item in items:
        starts = STARTS_PROCESSES & set(getattr(item, "fixturenames", ())) and item.path.parent.name in ("net", "hub")
        if starts and item.name != ALWAYS:
            item.add_marker("processes")


@pytest.fixture(autouse=True)
def _same_dice() -> None:
    """No test depends on the chance another one used up."""
    torch.manual_seed(0)


@pytest.fixture
def fed() -> Iterator[Simulation]:
    """Four clients of digits with skewed labels and amounts, under a star."""
    with federation() as made:
        yield made


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets; a test that needs it is skipped where there is none."""
    folder = os.environ.get("KILTER_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("KILTER_DATA names no folder of data sets (see the README): real data is not tested here")
    return Path(folder)
