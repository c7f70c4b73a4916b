"""Published results can be read back: tables drawn from results.json are those that were published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kilter.study.grid import Study
from kilter.study.stored import restore
from kilter.study.tables import numbers

PUBLISHED = sorted((Path(__file__).parents[2] / "experiments").glob("*/results/*/results.json"))


@pytest.mark.parametrize("stored", PUBLISHED, ids=lambda p: f"{p.parts[-4]}-{p.parts[-2]}")
def test_the_published_numbers_follow_from_the_published_runs(stored: Path) -> None:
    preset = "" if stored.parent.name == "default" else stored.parent.name
    results, origin = restore(stored.parent, Study.read(stored.parents[2] / "study.toml", preset))
    lines = json.loads(stored.read_text())["lines"]
    again = [numbers(results, cell, line) for cell in results.cells for line in cell.lines]
    assert len(lines) == len(again)
    for published, line in zip(lines, again, strict=True):
        for key, value in line.items():
            assert published[key] == (pytest.approx(value, abs=1e-9) if isinstance(value, float) else value), key
    assert origin["commit"]
