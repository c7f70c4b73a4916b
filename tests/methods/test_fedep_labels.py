"""FedEP with degenerate labels, and with nodes that send false summaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from kilter.core import Data, Node, Rows
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedep import (
    FedEP,
)
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from small import SHAPE, federation, linear_task, method, near, same, skewed, table

MODES = ("blend", "kl", "code", "code_exact")


E2 = [
    {"rows": n, "classes": 10, "theta": torch.tensor(theta, dtype=torch.float64)}
    for n, theta in (
        (100, [[0.2, 9, 0.1], [0.8, 1.18181818, 1.33]]),
        (200, [[0.3, 4, 0.1], [0.7, 5.118, 1.33]]),
    )
]
MODELS = ("bin", "density", "hist")


def run(made: Any, fed: Simulation, rounds: int = 2) -> Any:
    with fed:
        return federate(made, fed, rounds)


def with_labels(*labels: list[int]) -> Simulation:
    """One node for each list of labels, features random."""
    made = {}
    for k, some in enumerate(labels):
        x = torch.rand(len(some), *SHAPE, generator=torch.Generator().manual_seed(k))
        made[f"n{k}"] = table(x=x, y=torch.tensor(some))
    return Simulation(made)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "labels",
    [
        ([3] * 8,),  # one client, one class
        ([3] * 8, [3] * 8),  # one class only
        ([7], [2, 2, 3]),  # one sample
        ([0, 1, 2] * 3, [0, 1, 2] * 3, [0, 1, 2] * 3),  # all equal; nobody has classes 3 to 9
        ([9] * 8, list(range(10))),
    ],
)
def test_degenerate_labels(mode, model, labels):
    with with_labels(*labels) as fed:
        result = federate(method("fedep", alpha_mode=mode, label_model=model), fed, 1)
        alpha = list(fed.states["server"]["alpha"].values())
    assert sum(alpha) == pytest.approx(1)
    if len({tuple(some) for some in labels}) == 1:
        assert alpha == pytest.approx([1 / len(labels)] * len(labels), abs=1e-6)
    assert all(bool(torch.isfinite(v).all()) for v in result.state.values())
    assert result.rounds[1].failures == result.rounds[1].notes == []


def test_a_small_client_does_not_dominate_by_default():
    with with_labels([0] * 10, list(range(10)) * 9) as fed:
        federate(method("fedep"), fed, 1)
        small, large = fed.states["server"]["alpha"].values()
    assert small < 0.25 < large


def test_labels_must_be_classes_of_the_network():
    with pytest.raises(Mistake, match="one output for every class"):
        run(method("fedep", task=Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))), federation())
    vectors = {"a": table(x=torch.zeros(2, 1), y=torch.zeros(2, 2))}
    with pytest.raises(Mistake, match="class numbers"):
        run(method("fedep", task=linear_task([0.0, 0.0])), Simulation(vectors))


FALSE_SUMMARIES: dict[str, tuple[dict[str, Any], str]] = {
    "negative weights": ({"theta": torch.tensor([[-1.0, 1, 1], [2, 1, 1]] + [[0, 0, 0]] * 3).double()}, "weights"),
    "not a number": ({"theta": torch.full((5, 3), float("nan")).double()}, "finite"),
    "10^12 rows": ({"rows": 10**12}, "number of rows"),
    "means far off": (
        {"theta": torch.tensor([[1, 1e6, 1]] + [[0.0, 0, 0]] * 4).double()},
        "means outside|far too large",
    ),
    "other classes": ({"classes": 7, "theta": torch.tensor([[1, 0, 1]] + [[0.0, 0, 0]] * 4).double()}, "7 classes"),
    "another shape": ({"theta": torch.zeros(2, 2).double()}, "shape|not an array"),
    "words": ({"rows": "many"}, "shape|number of rows"),
}


@dataclass(frozen=True, kw_only=True)
class FalseSummary(FedEP):
    """FedEP in which c1 lies."""

    lie: str = ""

    def summary(self, node: Node) -> Any:
        true = FedEP.summary(self, node)
        return true | FALSE_SUMMARIES[self.lie][0] if node.id == "c1" else true


@pytest.mark.parametrize("lie", FALSE_SUMMARIES)
@pytest.mark.parametrize("topology", ["star", "full"])
def test_a_false_summary_is_refused_and_the_run_continues(lie, topology):
    honest = method("fedep")
    clients = skewed(4)
    with federation(clients, topology=topology) as fed:
        result = federate(FalseSummary(task=honest.task, local=honest.local, lie=lie), fed, 2)
        actual = result.state if topology == "star" else fed.states["c0"]["~pool"]
        where = "server" if topology == "star" else "c0"
        assert set(fed.states[where]["alpha"]) == {"c0", "c2", "c3"}
    with federation({k: v for k, v in clients.items() if k != "c1"}, bench=None) as fed:
        assert near(actual, federate(honest, fed, 2).state)
    for record in result.rounds:
        told = [f.reason for f in record.failures if f.node == "c1"]
        told += [n.text for n in record.notes if "c1" in n.text]
        assert told
        assert any(word in text for text in told for word in FALSE_SUMMARIES[lie][1].split("|"))


def test_if_all_summaries_are_false_the_model_is_unchanged():
    @dataclass(frozen=True, kw_only=True)
    class AllLie(FedEP):
        def summary(self, node: Node) -> Any:
            return FedEP.summary(self, node) | {"rows": 10**12}

    honest = method("fedep")
    result = run(AllLie(task=honest.task, local=honest.local), federation())
    assert same(result.state, honest.task.init(0))
    assert len(result.rounds[-1].notes) == 4


def test_the_first_summary_counts():
    hub = Node("server", Data(*[Rows({}, torch.empty(0).long())] * 3))
    made = method("fedep")
    assert isinstance(made, FedEP)
    before = made.weigh(hub, {"a": E2[0], "b": E2[1]})
    assert made.weigh(hub, {"a": E2[0] | {"rows": 10**8}, "b": E2[1]}) == before
