"""FedBN: BatchNorm layers stay at the node, whatever they are called."""

from __future__ import annotations

import torch
from acting import run, states
from torch import Tensor, nn

from kilter.core import Node, Replies
from kilter.federate import federate
from kilter.params import average
from kilter.runtimes.step_runner import run_step
from kilter.tasks import Task
from small import (
    bench,
    federation,
    method,
    normed_task,
    same,
    skewed,
)


class Misnamed(nn.Module):
    """BatchNorm that is not called so, and a layer called bn that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.Linear(64, 8)
        self.calm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.calm(self.bn(x.flatten(1))).relu())


CALM = {"calm.weight", "calm.bias", "~calm.running_mean", "~calm.running_var", "~calm.num_batches_tracked"}


def test_layers_are_selected_by_type_not_by_name() -> None:
    clients = skewed()
    task = Task(Misnamed)
    result, kept = states("fedbn", clients, 2, task)
    assert set(result.state) == {"bn.weight", "bn.bias", "head.weight", "head.bias"}
    assert all(set(s["bn"]) == CALM for s in kept.values())
    assert len({s["bn"]["calm.weight"].sum().item() for s in kept.values()}) == len(clients)
    assert result.model is None


def test_other_layers_are_averaged_and_batchnorm_is_not() -> None:
    clients = skewed()
    task = Task(Misnamed)
    fedbn = method("fedbn", task)
    start = fedbn.setup(federation(clients))
    replies, own = {}, {}
    for i, data in clients.items():
        node = Node(i, data, round=1, step="train")
        (done,) = run_step(fedbn.train, [node], [start])  # type: ignore[attr-defined]
        replies[i], own[i] = done.reply, node.state["bn"]
    result, kept = states("fedbn", clients, 1, task)
    assert same(result.state, average(replies.values()))
    assert same({i: s["bn"] for i, s in kept.items()}, own)


def test_known_answer() -> None:
    """conv (1, 3) with weights (.25, .75) -> 2.5."""
    fedbn = method("fedbn", normed_task())
    replies = Replies({"a": ({"conv": torch.tensor([1.0])}, 25), "b": ({"conv": torch.tensor([3.0])}, 75)}, of=2)
    assert fedbn.combine(Node("server", skewed()["c0"]), {}, replies)["conv"].item() == 2.5  # type: ignore[attr-defined]


def test_a_network_without_batchnorm_gives_fedavg_bit_for_bit() -> None:
    clients = skewed()
    plain, bn = run("fedavg", clients, 3, bench=bench()), run("fedbn", clients, 3, bench=bench())
    assert same(plain.state, bn.state)
    assert bn.model is not None
    assert same(bn.model, plain.model)
    assert bn.summary.client_accuracy == plain.summary.client_accuracy
    assert (bn.summary.bytes_up, bn.summary.bytes_down) == (
        plain.summary.bytes_up,
        plain.summary.bytes_down,
    )


def test_a_node_is_evaluated_with_its_own_batchnorm_or_with_the_initial_one() -> None:
    clients = skewed()
    task = Task(Misnamed)
    with federation(clients, stack=False) as fed:
        fedbn = method("fedbn", task, cohort=0.5)
        result = federate(fedbn, fed, 1)
        for i, data in clients.items():
            whole = task.init(0) | result.state | fed.states.get(i, {}).get("bn", {})
            assert result.clients[i].own_test == task.evaluate(whole, data.test)
        assert 0 < sum("bn" in s for s in fed.states.values()) < 4
