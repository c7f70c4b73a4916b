"""FedPDC: known answers P1-P5 of METHODS 3.4, and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilter import SGD, Node, Replies, Rows, Simulation, Task, federate
from kilter.core import SERVER, Data, Method
from kilter.methods.fedavg import FedAvg
from kilter.methods.fedpdc import FedPDC, shares
from kilter.params import buffers, mean
from kilter.records import wire
from kilter.runtimes.step_names import StepName
from kilter.study.statistics import curve, rounds_to_target
from small import bench, federation, near, normed_task, public, same
from small import mlp_task as small_task

NONE = Rows({}, torch.empty(0, dtype=torch.int64))
PLAN = SGD(lr=0.1, batch=16)


def fedpdc(task: Task | None = None, **settings: Any) -> FedPDC:
    return FedPDC(task=task or small_task(), local=settings.pop("local", PLAN), **settings)


def hub(rows: Rows) -> Node:
    return Node(SERVER, Data(NONE, NONE, NONE), public=rows)


class Scorer(nn.Module):
    """Right on the share f(w) of the rows x = .005, .015, ...: f is .62, .48, .55, .10 at the models of P1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.w
        f = 0.62 * a + 0.48 * b + 0.0225 * a * b - 0.2175 * a * a * b
        return torch.cat([x, f.expand_as(x)], 1)


MODELS = [[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [-1.0, 3.0]]
SIZES = [1000, 4000, 3000, 2000]


def scored(label: int = 1, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    rows = Rows.of(x=(torch.arange(100) + 0.5)[:, None] / 100, y=torch.full((100,), label))
    replies = {f"c{i}": ({"w": torch.tensor(w)}, n) for i, (w, n) in enumerate(zip(MODELS, SIZES, strict=True))}
    task = Task(Scorer())
    return fedpdc(task, **settings).combine(hub(rows), (task.init(0), {}), Replies(replies, 4))


def test_p1_weights_are_accuracies() -> None:
    assert shares([0.62, 0.48, 0.55, 0.10], SIZES) == pytest.approx([0.354286, 0.274286, 0.314286, 0.057143], abs=1e-6)
    w, p = scored()
    assert list(p.values()) == pytest.approx([0.62, 0.48, 0.55, 0.10])
    assert w["w"].tolist() == pytest.approx([0.925714, 1.074286], abs=1e-6)


def test_p1_all_accuracies_zero_is_fedavg() -> None:
    assert shares([0, 0, 0, 0], SIZES) == pytest.approx([0.1, 0.4, 0.3, 0.2])
    assert shares([0, 0, 0, 0], SIZES, size_aware=True) == pytest.approx([0.1, 0.4, 0.3, 0.2])
    w, p = scored(label=2)  # a class the network does not have
    assert set(p.values()) == {0}
    assert w["w"].tolist() == pytest.approx([0.5, 1.6], abs=1e-6)


def test_size_aware_weights() -> None:
    assert shares([0.5, 0.25], [1, 2], size_aware=True) == [0.5, 0.5]
    assert scored(size_aware=True)[0]["w"].tolist() != scored()[0]["w"].tolist()


class Logistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        z = (x @ self.w)[:, None]
        return torch.cat([torch.zeros_like(z), z], 1)


@pytest.mark.parametrize(
    ("correction", "loss", "step"),
    [
        ("constant", 7.854355, (0.105744, -0.188511)),
        ("prox", 0.854355 + 7 / 2 * 0.05, (0.098744, -0.174511)),
        ("scale", 8 * 0.854355, (0.145955, -0.108089)),
        ("public", 0.854355 + 10 * (1 - 0.537407), (0.118213, -0.200887)),
    ],
)
def test_p2_one_step_of_each_correction(correction: Any, loss: float, step: tuple[float, float]) -> None:
    task = Task(Logistic())
    method = fedpdc(task, correction=correction, lam=10.0)
    node = Node("c0", Data(NONE, NONE, NONE), round=1)
    node.state["public"] = {"x": torch.eye(2), "y": torch.tensor([1, 0])}
    constants = method.constants(node, {"w": torch.zeros(2)}, 0.3)
    w = {"w": torch.tensor([0.1, -0.2], requires_grad=True)}
    actual = method.loss(w, {"x": torch.tensor([[1.0, 2.0]]), "y": torch.tensor([1])}, constants)
    (gradient,) = torch.autograd.grad(actual, [w["w"]])
    assert float(actual.detach()) == pytest.approx(loss, abs=1e-5)
    assert (w["w"] - 0.01 * gradient).tolist() == pytest.approx(step, abs=1e-6)
    if correction == "constant":
        assert gradient.tolist() == pytest.approx([-0.574443, -1.148885], abs=1e-6)
    if correction == "public":
        own = torch.tensor([-0.574443, -1.148885])
        assert ((gradient - own) / 10).tolist() == pytest.approx([-0.124688, 0.123758], abs=1e-6)


def test_scale_is_capped() -> None:
    method = fedpdc(correction="scale", lam_schedule="linear", most=4)
    strength, _ = method.constants(Node("c0", Data(NONE, NONE, NONE), round=100), {}, 0.6)
    assert float(strength) == 4


def test_p3_lambda_by_round() -> None:
    method = fedpdc(lam_schedule="linear")
    assert [method.strength(t) for t in (1, 10, 50, 100)] == [0.5, 5, 25, 50]
    assert fedpdc(lam=3).strength(50) == 3


def test_p4_a_node_that_did_not_take_part_has_score_one() -> None:
    fed = federation(6)
    method = fedpdc(cohort=0.5)
    fed.bind(method)
    state = method.setup(fed)
    for t in (1, 2, 3):
        fed.round = t
        state = method.round(fed, state)
        took = fed.sample(0.5)
        assert tuple(state[1]) == took
        for i in fed.ids:
            w, p = method.view(state, i)
            strength, _ = method.constants(fed.node(i, StepName("train"), t + 1, {}), w, p)
            assert (float(strength) == 0) == (i not in took or p == 1)
            assert w is state[0]


@pytest.mark.parametrize(
    ("fedavg", "ours", "speedup"),
    [(100, (56, 37, 25), (1.79, 2.70, 4.0)), (100, (95, 78, 56), (1.05, 1.28, 1.79)), (20, (19, 10), (1.05, 2.0))],
)
def test_p5_speed_up_is_rounds_to_fedavgs_score(fedavg: int, ours: tuple[int, ...], speedup: tuple[float, ...]) -> None:
    for reached, times in zip(ours, speedup, strict=True):
        actual = rounds_to_target(curve([0.5 if t < reached else 0.6 for t in range(1, fedavg + 1)]), 0.6)
        assert actual is not None
        assert round(fedavg / actual, 2) == times


def outcome(method: Method, rounds: int = 3, **options: Any) -> dict[str, Tensor]:
    with federation(**options) as fed:
        actual = federate(method, fed, rounds, evaluate_every=rounds)
    assert actual.model is not None
    return actual.model


def test_as_printed_lambda_has_no_effect() -> None:
    weak, strong = (outcome(fedpdc(correction="constant", lam=lam)) for lam in (0.0, 10.0))
    assert same(weak, strong)


def test_with_lambda_zero_all_corrections_agree() -> None:
    plain = outcome(fedpdc(correction="constant"))
    for correction in ("prox", "public", "scale"):
        assert near(outcome(fedpdc(correction=correction, lam=0.0)), plain, 1e-5)


def test_equal_scores_are_the_plain_mean() -> None:
    with federation() as fed:
        method = fedpdc(lam=0.0)
        fed.public = Rows.of(x=public()["x"], y=torch.full((len(public()),), 99))
        fed.bind(method)
        fed.round = 1
        w, p = method.setup(fed)
        replies = fed.map(method.train, (w, 1.0))
        actual, _ = method.combine(hub(fed.public), (w, p), replies)
        same_sizes = Replies({i: (w, 1) for i, (w, _) in replies.items()}, 4)
        alike, _ = method.combine(hub(fed.public), (w, p), same_sizes)
    assert near(alike, mean(w for w, _ in replies.values()))
    assert near(actual, outcome(FedAvg(task=small_task(), local=PLAN), 1), 1e-5)


def test_corrections_change_the_model() -> None:
    plain = outcome(fedpdc(correction="constant"))
    for correction in ("prox", "public", "scale"):
        assert not near(outcome(fedpdc(correction=correction, lam=2.0)), plain, 1e-3)


@pytest.mark.parametrize("correction", ["prox", "public", "scale", "constant"])
def test_stacked_and_one_by_one_agree(correction: Any) -> None:
    both = [outcome(fedpdc(correction=correction, lam=1.0), 2, stack=stack) for stack in (True, False)]
    assert near(*both, 1e-4)


@pytest.mark.parametrize("topology", ["star", "rotating", "full", "ring"])
@pytest.mark.parametrize("correction", ["prox", "public"])
def test_every_topology(topology: str, correction: Any) -> None:
    method = fedpdc(correction=correction, lam=1.0, local=SGD(lr=0.4, batch=16))
    with federation(topology=topology) as fed:
        actual = federate(method, fed, 5, evaluate_every=5)
    assert actual.summary.global_accuracy > 0.25
    if topology == "full":
        with federation() as fed:
            star = federate(method, fed, 5, evaluate_every=5)
        assert actual.summary.global_accuracy == pytest.approx(star.summary.global_accuracy, abs=0.01)


def books(correction: Any, topology: str = "star") -> list[dict[str, Any]]:
    with federation(topology=topology) as fed:
        return federate(fedpdc(correction=correction), fed, 2, evaluate_every=2).rounds


def test_the_ledger_counts_the_public_rows_once() -> None:
    plain, sent = books("prox"), books("public")
    asked = 4 * wire.size(True)
    assert plain[0].bytes_down == plain[0].bytes_up == 0
    assert sent[0].bytes_down == 4 * wire.size(public().batch())
    assert sent[0].bytes_up == asked
    for one, other in zip(plain[1:], sent[1:], strict=True):
        assert one.bytes_down == pytest.approx(other.bytes_down, abs=4 * 16)  # digits of a score
    # in its turn every node aggregates, so every node holds them
    assert books("public", "rotating")[0].bytes_down < asked


def test_traffic_is_fedavgs_and_one_number() -> None:
    with federation() as fed:
        fedavg = federate(FedAvg(task=small_task(), local=PLAN), fed, 2, evaluate_every=2).rounds
    extra = books("prox")[2].bytes_down - fedavg[2].bytes_down
    assert 0 < extra < 4 * 600  # a number, and how the letter nests


def test_nodes_do_not_see_the_scores_of_others() -> None:
    method = fedpdc()
    w = method.task.init(0)
    assert method.shared((w, {"c0": 0.5})) == (w, {})


def test_only_aggregators_hold_public_rows() -> None:
    with federation() as star, federation(topology="ring") as ring, federation(topology="rotating") as rotating:
        assert star.node("c0", StepName("train"), 1, {}).public is None
        assert star.node(SERVER, StepName("combine"), 1, {}).public is not None
        assert ring.node("c0", StepName("train"), 1, {}).public is not None
        assert rotating.node("c0", StepName("train"), 1, {}).public is not None


def test_a_node_without_public_rows_trains_without_correction() -> None:
    def absent(seed: int, round: int, node: str, step: str) -> str | None:
        return "away" if (node, step) == ("c1", "keep") else None

    with federation(faults=absent) as fed:
        actual = federate(fedpdc(correction="public"), fed, 1)
    notes = [n.node for n in actual.rounds[1].notices if "missed" in n.what]
    assert notes == ["c1"]


def test_batch_norm_does_not_learn_from_the_public_rows() -> None:
    """Statistics after training are those of training on one's own rows alone, at a learning rate of almost nothing."""
    plan = SGD(lr=1e-12, batch=16)
    both = [outcome(fedpdc(normed_task(), correction=c, local=plan), 1) for c in ("constant", "public")]
    assert near(*(buffers(w) for w in both), 1e-5)


def test_the_record_says_on_how_many_rows_models_were_scored() -> None:
    with federation() as fed:
        actual = federate(fedpdc(), fed, 1)
    assert any("90 public rows" in n.text for n in actual.rounds[1].notes)


def test_it_needs_public_rows() -> None:
    from kilter import Mistake

    with pytest.raises(Mistake, match="--public-file"):
        Simulation(federation().clients, bench=bench()).bind(fedpdc())


def test_without_public_rows_it_averages_by_rows_and_says_so() -> None:
    """Known answer of FedAvg (P1): (.5, 1.6). The round is not lost."""
    node = hub(Rows.of(x=torch.zeros(0, 1), y=torch.zeros(0, dtype=torch.int64)))
    replies = {f"c{i}": ({"w": torch.tensor(w)}, n) for i, (w, n) in enumerate(zip(MODELS, SIZES, strict=True))}
    task = Task(Scorer())
    w, p = fedpdc(task).combine(node, (task.init(0), {}), Replies(replies, 4))
    assert w["w"].tolist() == pytest.approx([0.5, 1.6], abs=1e-6)
    assert p == {}
    assert any("no public rows" in str(note) for note in node.notes)


def test_the_ratio_of_the_proof_is_the_averages_accuracy_over_ones_own() -> None:
    """f(.925714, 1.074286) is above 1/2; B_i = P / p_i, at most `most`."""
    w, p = scored(penalty="ratio", most=4.0)
    whole = float(Task(Scorer()).predict(w, (torch.arange(100) + 0.5)[:, None] / 100).argmax(1).double().mean())
    expected = [min(whole / own, 4.0) for own in (0.62, 0.48, 0.55, 0.10)]
    assert [1 - v for v in p.values()] == pytest.approx(expected)
    assert expected[-1] == 4.0
