"""What tests of runtimes share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2], ids=["here", "workers"])
def workers(request: pytest.FixtureRequest) -> int:
    return request.param
