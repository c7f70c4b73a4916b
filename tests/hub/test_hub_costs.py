"""What a hub costs, measured by its benchmark at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from place import free_ports

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_idle_agents_and_long_lists_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import hub

    costs = hub.measure(agents=40, seconds=4.0, jobs=1000, port=free_ports(1)[0])
    assert costs["megabytes"] < 300
    assert costs["cpu_percent"] < 10  # the target is 5; other work on the machine only adds to it
    assert costs["list_seconds"] < 0.3


def test_the_published_numbers_meet_the_targets() -> None:
    costs = json.loads((BENCHMARKS / "results/hub.json").read_text())
    assert (costs["agents"], costs["seconds"], costs["jobs"]) == (200, 600, 1000)
    assert costs["cpu_percent"] < 5
    assert costs["megabytes"] < 300
    assert costs["list_seconds"] < 0.3
