"""FedMD: the mean of logits, a digest that finds nothing to learn among equals, and who holds the public rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acting import hub, play

from kilter.core import Data, Node, Replies
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedmd import FedMD
from kilter.tasks import Task
from kilter.train import SGD
from small import federation, mlp_task, near, normed_task, public, same, skewed


def md(task: Task | None = None, **settings: Any) -> FedMD:
    return FedMD(task=task or normed_task(), local=SGD(lr=0.1, batch=16), **{"pretrain": 3, "align": 50} | settings)


def test_mean_logits_by_hand() -> None:
    replies = {"a": {"logits": torch.tensor([[1.0, 2, 0]])}, "b": {"logits": torch.tensor([[3.0, -2, 1]])}}
    state = md().combine(hub(7), {"has": []}, Replies(replies, 2))
    assert state["logits"].tolist() == [[2, 0, 0.5]]
    assert (state["round"], state["has"]) == (7, ["a", "b"])


@pytest.mark.parametrize("match", ["mae", "mse"])
def test_equal_logits_give_a_zero_gradient(match: str) -> None:
    run = md(mlp_task(), match=match)
    w, rows = run.task.init(0), public()
    with torch.no_grad():
        said = run.task.outputs(w, rows["x"])
    mean = run.combine(hub(), {"has": []}, Replies({i: {"logits": said} for i in "abc"}, 3))["logits"]
    leaves = {k: v.requires_grad_() for k, v in w.items()}
    loss = run.distance(leaves, {"x": rows["x"], "logits": mean}, None)
    assert loss.item() == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(loss, list(leaves.values())))


def test_distances() -> None:
    w, rows = mlp_task().init(0), public()
    with torch.no_grad():
        off = mlp_task().outputs(w, rows["x"]) + torch.tensor([1.0, -3.0] * 5)
        batch = {"x": rows["x"], "logits": off}
        assert md(mlp_task()).distance(w, batch, None).item() == pytest.approx(2, abs=1e-5)
        assert md(mlp_task(), match="mse").distance(w, batch, None).item() == pytest.approx(5, abs=1e-5)


def test_the_fits_of_a_node_in_order() -> None:
    """First the public rows, then its own; later: digest, then its own."""
    run, data = md(digest_batch=20), skewed()["c0"]
    node = Node("c0", data, round=0, public=public())
    reply, (first, second), (_, after) = play(run.train(node, {"logits": None, "round": 0}))
    assert (first.plan.epochs, len(first.rows)) == (3, len(public()))
    assert torch.equal(second.rows.index, data.train.index)
    assert same(node.state["w"], after)
    assert reply["logits"].shape == (50, 10)
    node.round = 1
    _, (digest, revisit), (told, _) = play(run.train(node, {"logits": reply["logits"], "round": 0}))
    assert (digest.plan.batch, digest.plan.epochs) == (20, 1)
    assert torch.equal(digest.rows["x"], run.chosen(node, 0)["x"])  # the rows those logits are of
    assert torch.equal(digest.rows["logits"], reply["logits"])
    assert same(revisit.params, told)


def test_all_nodes_choose_the_same_rows_and_new_ones_each_round() -> None:
    run = md()
    a, b = (run.chosen(Node(i, skewed()["c0"], public=public()), 3).index for i in "ab")
    other = run.chosen(Node("a", skewed()["c0"], public=public()), 4).index
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert len(a.unique()) == 50
    assert len(md(align=5000).chosen(Node("a", skewed()["c0"], public=public()), 1)) == len(public())


def test_digesting_makes_models_more_similar() -> None:
    """What two models say of public rows is nearer after each has digested the mean."""
    run = md(mlp_task(), match="mse", digest=20)
    rows, models = run.chosen(Node("a", skewed()["c0"], public=public()), 0), [run.task.init(s) for s in (1, 2)]

    def apart(pair: list[dict[str, torch.Tensor]]) -> float:
        return float((run.task.predict(pair[0], rows["x"]) - run.task.predict(pair[1], rows["x"])).square().mean())

    mean = sum(run.task.predict(w, rows["x"]) for w in models) / 2
    after = []
    for w in models:
        nothing = Data(rows.take(torch.arange(1)), rows, rows)
        node = Node("a", nothing, round=1, public=public(), state={"w": w})
        _, (_, _), (told, _) = play(run.train(node, {"logits": mean, "round": 0}))
        after.append(told)
    assert apart(after) < apart(models) / 4


def test_only_logits_leave_a_node() -> None:
    with federation() as fed:
        result = federate(md(), fed, 3)
    assert all(r.bytes_up == pytest.approx(4 * 50 * 10 * 4, rel=0.2) for r in result.rounds)
    assert result.model is None
    assert all(r.bytes_down < result.rounds[0].bytes_down for r in result.rounds[1:])  # the public rows: once


@pytest.mark.parametrize("topology", ["star", "rotating", "full"])
def test_results_do_not_depend_on_who_holds_the_public_rows(topology: str) -> None:
    with federation() as fed:
        star = federate(md(), fed, 2)
        expected = {i: fed.states[i]["w"] for i in fed.ids}
    with federation(topology=topology) as fed:
        other = federate(md(), fed, 2)
        assert all(near(fed.states[i]["w"], expected[i], 1e-6) for i in fed.ids)
        assert ("public" in fed.states["c1"]) == (topology == "star")
    assert star.summary.client_accuracy == other.summary.client_accuracy


def test_an_absent_node_catches_up() -> None:
    def away(seed: int, round: int, node: str, step: str) -> str | None:
        return "away" if node == "c1" and round == 0 else None

    with federation(faults=away) as fed:
        result = federate(md(), fed, 2)
        assert "w" in fed.states["c1"]
    assert result.rounds[0].participants == ["c0", "c2", "c3"]
    assert "c1" in result.rounds[1].participants


def test_it_needs_public_rows() -> None:
    with federation(public=None) as fed, pytest.raises(Mistake, match="public"):
        federate(md(), fed, 1)
