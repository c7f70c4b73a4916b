"""Every accuracy, difference and traffic that README or a page on a method quotes is in the results of the study it names.

A block of text that quotes numbers starts with a line `<!-- study: NAME/PRESET -->` and ends at the next empty line. A row of the
README's table of results names its studies by links to their notes; the method's study at laptop size is one of them, too.
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
QUOTED = re.compile(r"([+-]?\d+(?:\.\d+)?) (%|points?\b|MB\b|GB\b)")
RESULTS = re.compile(r"<!-- results -->\n(.*?)<!-- end of results -->", re.DOTALL)
NOTES = re.compile(r"\(experiments/([\w-]+)/results/([\w-]+)/NOTES\.md\)")
PAGE = re.compile(r"\(docs/methods/(\w+)\.md\)")
COUNTED_BY_HAND = {"93 %"}  # the weight of FedEP's outlier, METHODS E6: a test of the method pins it
UNITS = {"%": 100, "points": 100, "MB": 1e-6, "GB": 1e-9}  # factors, as in the tables


@cache
def numbers(study: str, preset: str) -> dict[str, frozenset[float]]:
    """The study's numbers by unit."""
    results = json.loads((ROOT / "experiments" / study / "results" / preset / "results.json").read_text())
    shares = ("_mean", "_std", "worst_tenth", "target", "_client")
    actual: dict[str, set[float]] = {"%": set(), "points": set(), "bytes": set()}
    for line in results["lines"]:
        for key, value in line.items():
            if not isinstance(value, int | float):
                continue
            if key == "bytes":
                actual["bytes"].add(value)
            elif "_difference" in key:
                actual["points"].add(value)
            elif key.endswith(shares):
                actual["%"].add(value)
        for run in line["runs"]:
            for variant in run.get("variants", {}).values():
                actual["%"] |= {v for v in variant.values() if isinstance(v, float)}
    return {unit: frozenset(values) for unit, values in actual.items()}


def is_known(value: str, unit: str, studies: list[tuple[str, str]]) -> bool:
    """Whether a number is one of these studies', rounded to as many digits as it has. A difference without a sign has either."""
    unit = "points" if unit.startswith("point") else unit
    digits = len(value.partition(".")[2])
    for study in studies:
        known = numbers(*study)["bytes" if unit in ("MB", "GB") else unit]
        written = {f"{v * UNITS[unit]:+.{digits}f}" for v in known}
        if unit == "points" and value[0] not in "+-":
            written |= {f"{-v * UNITS[unit]:+.{digits}f}" for v in known}
        if (value if value[0] in "+-" else f"+{value}") in written:
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_quoted_number_is_in_the_study(page: Path) -> None:
    text = page.read_text()
    for study, preset, block in BLOCK.findall(text):
        for value, unit in QUOTED.findall(block):
            assert is_known(value, unit, [(study, preset)]), f"{value} {unit} is not in {study}/{preset}"
    outside = RESULTS.sub("", BLOCK.sub("", text))
    stray = {f"{value} {unit}" for value, unit in QUOTED.findall(outside)} - COUNTED_BY_HAND
    assert not stray, f"{page.name} quotes {stray} without naming a study"


def rows_of_readme() -> list[str]:
    (table,) = RESULTS.findall((ROOT / "README.md").read_text())
    return [row for row in table.splitlines() if "](" in row]


@pytest.mark.parametrize("row", rows_of_readme(), ids=lambda row: row[:12])
def test_the_results_in_readme_are_those_of_the_studies_that_the_row_names(row: str) -> None:
    studies = [*NOTES.findall(row), *((page, "laptop") for page in PAGE.findall(row))]
    assert studies
    for value, unit in QUOTED.findall(row):
        assert is_known(value, unit, studies), f"{value} {unit} is in none of {studies}"


def test_a_number_that_no_study_has_is_found() -> None:
    laptop = [("slfed", "laptop")]
    assert is_known("70.6", "%", laptop)
    assert not is_known("99.9", "%", laptop)
    near = [("feddisk", "near")]
    assert is_known("1.91", "GB", near)
    assert is_known("379", "MB", near)
    assert not is_known("378", "MB", near)
    assert is_known("-26.3", "points", near)
    assert is_known("26", "points", near)
    assert not is_known("+26.3", "points", near)
