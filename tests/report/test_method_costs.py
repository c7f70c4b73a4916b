"""What methods send, measured: as their papers say."""

from __future__ import annotations

from kilter.methods import methods
from kilter.report.method_costs import Cost, costs


def test_costs_are_those_of_the_papers() -> None:
    names = ("fedavg", "scaffold", "feddc", "fedem", "fedrep", "solo", "fedmd")
    measured = costs({n: methods()[n] for n in names})
    rounds = {n: round(c.round, 2) for n, c in measured.items()}
    assert rounds | {"fedrep": 1} == {
        "fedavg": 1, "scaffold": 2, "feddc": 2, "fedem": 3, "fedrep": 1, "solo": 0, "fedmd": rounds["fedmd"]
    }  # fmt: skip
    assert 0.9 < rounds["fedrep"] < 1
    assert rounds["fedmd"] < 0.1 > measured["fedmd"].once > measured["fedmd"].round


def test_a_cost_in_words() -> None:
    assert str(Cost(1, 0.001)) == "1.00 x FedAvg's bytes a round"
    assert str(Cost(2, 0.5)) == "2.00 x FedAvg's bytes a round, and 0.50 x once"
