"""Every accuracy, difference and traffic that a page on a method quotes occurs in the committed results of the study it names.

A block of text that quotes numbers starts with a line `<!-- study: NAME/PRESET -->` and ends at the next empty line.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "methods").glob("*.md"))]
BLOCK = re.compile(r"^<!-- study: ([\w.-]+)/([\w-]+) -->\n(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"([+-]?\d+\.\d+) (%|points?|MB)")


@cache
def numbers(study: str, preset: str) -> dict[str, set[str]]:
    """The study's numbers, as text with one digit, by unit."""
    results = json.loads((ROOT / "experiments" / study / "results" / preset / "results.json").read_text())
    shares = ("_mean", "_std", "worst_tenth", "target", "_client")
    actual: dict[str, set[str]] = {"%": set(), "point": set(), "MB": set()}
    for line in results["lines"]:
        for key, value in line.items():
            if not isinstance(value, int | float):
                continue
            if key == "bytes":
                actual["MB"].add(f"{value / 1e6:.1f}")
            elif "_difference" in key:
                actual["point"] |= {f"{100 * value:+.1f}", f"{100 * value:.1f}", f"{-100 * value:.1f}"}
            elif key.endswith(shares):
                actual["%"].add(f"{100 * value:.1f}")
        for run in line["runs"]:
            for variant in run.get("variants", {}).values():
                actual["%"] |= {f"{100 * v:.1f}" for v in variant.values() if isinstance(v, float)}
    return actual


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_quoted_number_is_in_the_study(page: Path) -> None:
    text = page.read_text()
    for study, preset, block in BLOCK.findall(text):
        known = numbers(study, preset)
        for value, unit in QUOTED.findall(block):
            assert value in known[unit.rstrip("s") if unit != "MB" else unit], (
                f"{value} {unit} is not in {study}/{preset}"
            )
    outside = BLOCK.sub("", text)
    stray = [f"{value} {unit}" for value, unit in QUOTED.findall(outside) if unit != "MB"]
    assert not stray, f"{page.name} quotes {stray} without naming a study"


def test_a_number_that_no_study_has_is_found() -> None:
    assert "99.9" not in numbers("slfed", "laptop")["%"]
    assert "70.6" in numbers("slfed", "laptop")["%"]
