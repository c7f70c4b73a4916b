"""FedRep: what is frozen stays frozen, and heads never leave."""

from __future__ import annotations

import pytest
import torch
from acting import play

from kilter.core import Node
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedrep import FedRep
from kilter.models import build
from kilter.params import buffers, drop, pick
from kilter.tasks import Task
from kilter.train import SGD
from small import SHAPE, federation, method, near, normed_task, same, skewed


def rep(**settings: object) -> FedRep:
    return FedRep(task=normed_task(), local=SGD(lr=0.1, batch=16), **settings)  # type: ignore[arg-type]


def test_head_and_body_are_trained_in_turn() -> None:
    run, node = rep(head_epochs=2), Node("c0", skewed()["c0"], round=1)
    head, start = run.task.part("head"), run.task.init(0)
    phi = drop(start, head)
    (sent, n), (first, second), (_, after) = play(run.train(node, phi))
    assert first.train == head
    assert (first.plan.epochs, second.plan.epochs) == (2, 1)
    # The body after the head's phase is bit for bit what came, BatchNorm's statistics too.
    assert same(drop(second.params, head), phi)
    assert not same(pick(second.params, head), pick(start, head))
    # The head after the body's phase is what it was.
    assert same(pick(after, head), node.state["head"])
    assert same(sent, drop(after, head))
    assert not same(buffers(sent), buffers(phi))
    assert n == len(node.data.train)


def test_heads_are_never_uploaded_and_differ() -> None:
    run = rep(finish=False)
    with federation() as fed:
        result = federate(run, fed, 2)
        assert not run.task.part("head") & set(result.state)
        heads = [fed.states[i]["head"]["head.weight"] for i in fed.ids]
    assert result.model is None
    assert result.summary.global_model == "mean of personal models"
    assert all(not torch.equal(a, b) for k, a in enumerate(heads) for b in heads[:k])


def test_the_last_round_tunes_every_head_and_sends_nothing() -> None:
    with federation() as fed:
        short = federate(rep(finish=False, cohort=0.5), fed, 2)
        before = {i: dict(s) for i, s in fed.states.items() if s}
    with federation() as fed:
        long = federate(rep(cohort=0.5), fed, 3)
        heads = {i: s["head"] for i, s in fed.states.items() if s}
    assert same(short.state, long.state)
    assert set(heads) == set(fed.ids)
    assert all(not same(heads[i], s["head"]) for i, s in before.items())
    assert long.rounds[3].bytes_up == 0
    assert long.rounds[3].participants == list(fed.ids)


def test_traffic_is_that_of_the_body() -> None:
    up = []
    for name in ("fedavg", "fedrep"):
        with federation() as fed:
            run = method(name)
            up.append(federate(run, fed, 2).rounds[1].bytes_up)
    head = 4 * sum(v.numel() for v in pick(run.task.init(0), run.task.part("head")).values())
    assert 4 * head < up[0] - up[1] < 4 * (head + 300)  # and its place in the header


def test_a_single_node_learns() -> None:
    data = {"a": skewed()["c0"]}
    with federation(data) as fed:
        result = federate(rep(head_epochs=5), fed, 4)
    assert result.summary.client_accuracy.mean > 0.5


def test_a_network_without_a_body_is_refused() -> None:
    run = FedRep(task=Task(lambda: build("linear", SHAPE, 10)), local=SGD())
    with federation() as fed, pytest.raises(Mistake, match="has only a head"):
        federate(run, fed, 1)


def test_a_new_node_has_the_initial_head() -> None:
    run = rep()
    node = Node("new", skewed()["c1"], seed=0)
    assert near(run.whole(node, drop(run.task.init(0), run.task.part("head"))), run.task.init(0), 0)
