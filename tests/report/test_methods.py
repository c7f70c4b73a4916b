"""What is said of every method: on the page, in the terminal, and as measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kilter.core import Method
from kilter.methods import methods
from kilter.report.methods import Cost, about, costs, price, table, topologies

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", methods())
def test_every_method_is_on_the_page_with_a_law(name: str) -> None:
    assert re.search(rf"^\| `{name}` \| .+ \| .+ \| .+ \| [\d.]+.* \| .+ \|$", PAGE, re.MULTILINE)
    assert re.search(rf"^- \*\*`{name}`\*\* .{{20,}}", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", methods())
def test_every_file_says_what_is_kept_and_sent(name: str) -> None:
    said = about(methods()[name])
    assert min(map(len, (said.paper, said.keeps, said.sends))) > 3
    assert topologies(methods()[name])


def test_about() -> None:
    assert about(methods()["scaffold"]).keeps == "its control variate c_i"
    assert about(methods()["fedrep"]).sends == "its body, and how many rows it trained on"
    assert about(Method).keeps == ""


def test_topologies() -> None:
    assert topologies(methods()["fedavg"]) == ["star", "rotating", "any graph of peers"]
    assert topologies(methods()["feddc"]) == ["star", "rotating"]


def test_costs_are_those_of_the_papers() -> None:
    names = ("fedavg", "scaffold", "feddc", "fedem", "fedrep", "solo", "fedmd")
    found = costs({n: methods()[n] for n in names})
    rounds = {n: round(c.round, 2) for n, c in found.items()}
    assert rounds | {"fedrep": 1} == {
        "fedavg": 1, "scaffold": 2, "feddc": 2, "fedem": 3, "fedrep": 1, "solo": 0, "fedmd": rounds["fedmd"]
    }  # fmt: skip
    assert 0.9 < rounds["fedrep"] < 1
    assert rounds["fedmd"] < 0.1 > found["fedmd"].once > found["fedmd"].round


def test_prices_and_the_table() -> None:
    assert price(Cost(1, 0.001)) == "1.00 x FedAvg's bytes a round"
    assert price(Cost(2, 0.5)) == "2.00 x FedAvg's bytes a round, and 0.50 x once"
    found = table({"fedprox": methods()["fedprox"]}, measured=True)
    text = str(found.columns[1]._cells[0])
    assert "keeps: nothing" in text
    assert "costs: 1.00 x" in text
    assert "--set mu=0.01  Strength of the proximal term; 0 is FedAvg." in text
