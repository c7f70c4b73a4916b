"""What is said about every method: on the page and in the terminal."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kilter.errors import Mistake
from kilter.methods import methods
from kilter.options import PACKAGE, ClassSource, read_classes
from kilter.report.method_costs import Cost, federation, instance
from kilter.report.methods import describe, descriptions, table

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", methods())
def test_every_method_is_on_the_page_with_a_law(name: str) -> None:
    method = descriptions()[name]
    words = [f"`{name}`", method.paper, method.keeps, method.sends]
    assert re.search(rf"^\| {re.escape(' | '.join(words))} \| [\d.]+.* \| .+ \|$", PAGE, re.MULTILINE), words
    assert re.search(rf"^- \*\*`{name}`\*\* .{{20,}}", PAGE, re.MULTILINE)


def test_every_method_is_described() -> None:
    assert list(descriptions()) == sorted(methods(), key=lambda name: name.replace("-", "_"))
    for method in descriptions().values():
        assert min(map(len, (method.paper, method.keeps, method.sends))) > 3


def test_a_description_is_read_from_the_docstrings() -> None:
    assert descriptions()["scaffold"].keeps == "its control variate c_i"
    assert descriptions()["fedrep"].sends == "its body, and how many rows it trained on"
    assert describe(read_classes(PACKAGE / "core.py")["Method"]).keeps == ""


@pytest.mark.parametrize("name", methods())
def test_the_tasks_are_those_that_the_class_declares(name: str) -> None:
    described = descriptions()[name]
    assert (frozenset(described.tasks), described.tasks_reason) == (methods()[name].tasks, methods()[name].tasks_reason)
    assert bool(described.tasks) == bool(described.tasks_reason)


UNDER = {
    "star": "star",
    "rotating": "rotating",
    "aggregators:2": "groups (aggregators:2)",
    "full": "the full graph of peers",
    "ring": "any graph of peers",
}


@pytest.mark.parametrize("name", methods())
def test_the_topologies_are_those_a_runtime_accepts(name: str) -> None:
    accepted = []
    for spec, text in UNDER.items():
        try:
            federation(spec).bind(instance(methods()[name]))
        except Mistake:
            continue
        accepted.append(text)
    if UNDER["ring"] in accepted:  # any graph: the full one too
        accepted.remove(UNDER["full"])
    assert descriptions()[name].topologies == tuple(accepted)


def test_methods_of_other_packages_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "their_method.py").write_text(
        '"""Theirs."""\nclass Theirs:\n    """One.\n\n    Keeps: little.  Sends: less.\n    """\n    a: int = option(1, "A.")\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("theirs", "their_method:Theirs", "kilter.methods")
    monkeypatch.setattr("kilter.report.methods.entry_points", lambda group: [point])
    theirs = descriptions()["theirs"]
    assert (theirs.paper, theirs.keeps, theirs.sends) == ("Theirs", "little", "less")
    assert [s.name for s in theirs.settings] == ["a"]


def test_the_table_shows_settings_and_costs() -> None:
    rows = table({"fedprox": descriptions()["fedprox"]}, {"fedprox": Cost(1, 0)})
    text = str(rows.columns[1]._cells[0])
    assert "keeps: nothing" in text
    assert "costs: 1.00 x FedAvg's bytes a round" in text
    assert "--set mu=0.01  Strength of the proximal term; 0 is FedAvg." in text


def test_a_class_without_settings_or_needs() -> None:
    source = ClassSource("A", "Paper.", "Keeps: a. Sends: b.", {}, frozenset())
    assert describe(source).topologies == ("star", "rotating", UNDER["aggregators:2"], "any graph of peers")
