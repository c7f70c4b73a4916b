"""FedPCL: prototypes by hand, classes that are missing here or everywhere, and what leaves a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from acting import hub, play
from safetensors.torch import save_file
from torch import Tensor

from kilter.core import Node
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedpcl import FedPCL
from kilter.models import build, load_weights
from kilter.tasks import Task
from kilter.train import SGD
from small import SHAPE, federation, mlp_task, normed_task, public, same, skewed


def pcl(task: Task | None = None, **settings: Any) -> FedPCL:
    return FedPCL(task=task or normed_task(), local=SGD(lr=0.1, batch=16), **{"width": 8, "pretrain": 5} | settings)


def known(prototypes: Tensor, sets: Tensor) -> dict[str, Tensor]:
    return {"centre": prototypes, "known": torch.ones(len(prototypes), dtype=torch.bool), "sets": sets}


def test_loss_by_hand() -> None:
    """f = (.6, .8), prototypes e1 and e2, the second class, tau .07: .055844, from the global set and again from a client's."""
    run, batch = pcl(), {"r": torch.tensor([[3.0, 4.0]]), "y": torch.tensor([1])}
    eye = torch.eye(2)
    actual = run.loss({"P": eye}, batch, known(eye, eye[None]))
    assert actual.item() == pytest.approx(2 * 0.055844, abs=2e-6)


def test_sets_are_averaged_over_clients() -> None:
    run, batch = pcl(tau=1.0), {"r": torch.randn(5, 3), "y": torch.tensor([0, 1, 1, 0, 1])}
    p, centre, sets = {"P": torch.randn(4, 3)}, torch.randn(2, 4), torch.randn(3, 2, 4)
    apart = [run.loss(p, batch, known(centre, s[None])) for s in sets]
    assert run.loss(p, batch, known(centre, sets)).item() == pytest.approx(float(sum(apart) / 3), abs=1e-6)


def test_a_node_knows_its_own_classes_if_letters_are_lost() -> None:
    """Its prototype was lost on the way: the loss of its rows must not be that of an impossible class."""
    run, node = pcl(pretrain=0), Node("c0", skewed()["c0"], round=1)
    nothing = {"centre": torch.zeros(10, 8), "known": torch.zeros(10, dtype=torch.bool), "sets": torch.zeros(2, 10, 8)}
    (classes, means), (fit,), _ = play(run.train(node, (nothing, {})))
    assert fit.ctx["known"].nonzero().flatten().tolist() == classes.tolist() == node.data.train["y"].unique().tolist()
    assert run.loss(fit.params, fit.rows.batch(), fit.ctx) < 20
    assert (means.norm(dim=1) <= 1 + 1e-6).all()
    nothing["sets"] = nothing["sets"][:0]  # nor did anybody else's come
    _, (fit,), (after,) = play(run.train(node, (nothing, {})))
    assert after["P"].isfinite().all()


def test_only_prototypes_leave_a_node() -> None:
    run = pcl()
    with federation() as fed:
        result = federate(run, fed, 3)
        spent = [r.bytes_up for r in result.rounds]
        for i in fed.ids:
            classes, means = result.state["sets"][i]
            assert means.shape == (len(fed.clients[i].train["y"].unique()), 8)
            assert classes.tolist() == fed.clients[i].train["y"].unique().tolist()
            assert same(fed.states[i]["encoder"], result.state["encoder"])  # frozen, the same for all
        projections = [fed.states[i]["P"]["P"] for i in fed.ids]
    assert max(spent) < sum(4 * 8 * 10 + 8 * 10 + 600 for _ in fed.ids)
    assert not any(torch.equal(a, b) for k, a in enumerate(projections) for b in projections[:k])
    assert result.model is None


def test_the_encoder_is_sent_once() -> None:
    with federation() as fed:
        down = [r.bytes_down for r in federate(pcl(mlp_task(64)), fed, 3).rounds]
    assert down[0] > 4 * 4 * 64 * 64  # in the set-up, with the first question for prototypes
    assert max(down[1:]) < down[0] / 2


def test_the_encoder_is_trained_on_public_rows_only() -> None:
    run = pcl()
    encoder, (fit,), _ = play(run.teach(hub(0, public(), "teach")))
    assert fit.plan.epochs == 5
    assert torch.equal(fit.rows["x"], public()["x"])
    assert not any(k.startswith("head") for k in encoder)
    with federation() as fed:
        assert same(federate(run, fed, 1).state["encoder"], encoder)


def test_without_public_rows_it_is_refused() -> None:
    with federation(public=None) as fed, pytest.raises(Mistake, match="public"):
        federate(pcl(), fed, 1)
    with federation(public=None) as fed:
        assert federate(pcl(pretrain=0), fed, 1).summary.failures == 0


def test_weights_from_a_file(tmp_path: Path) -> None:
    net = build("mlp:16", SHAPE, 10)
    save_file(net.state_dict(), tmp_path / "encoder.safetensors")
    task = Task(lambda: load_weights(build("mlp:16", SHAPE, 10), tmp_path / "encoder.safetensors"))
    run, x = pcl(task, pretrain=0), public()["x"]
    actual = run.encode(Node("c0", skewed()["c0"]), {}, x)
    with torch.no_grad():
        assert torch.allclose(actual, net.body(x))  # type: ignore[operator]
    with federation(topology="full", public=None) as fed:  # and so needs no aggregator
        result = federate(run, fed, 2)
    assert result.summary.client_accuracy.mean > 0.3


def test_prototypes_of_absent_clients_are_kept() -> None:
    with federation() as fed:
        state = federate(pcl(cohort=0.5), fed, 2).state
    assert list(state["sets"]) == list(fed.ids)
    assert state["known"]["sets"].shape[0] == len(fed.ids)


def test_the_projection_starts_as_an_isometry() -> None:
    run = pcl(width=20)
    p = run.projection(Node("a", skewed()["c0"], seed=3))["P"]
    assert torch.allclose(p.T @ p, torch.eye(16), atol=1e-5)
    assert torch.equal(p, run.projection(Node("b", skewed()["c1"], seed=3))["P"])


def test_evaluation_changes_nothing() -> None:
    run = pcl()
    with federation() as fed:
        state = federate(run, fed, 1).state
    node = Node("new", skewed()["c0"])
    assert run.personal(node, state, public()["x"]).shape == (len(public()), 10)
    assert node.state == {}
