"""SLFed: known answers S1, S5, S8, the schemes' equality, and peers that vanish at every stage."""

import json

import pytest
import torch

from kilter import Mistake, federate
from kilter.blocks.secure_sum import SCHEMES, scratch
from kilter.core import Node, Post
from kilter.methods.slfed import SLFed, cosine
from kilter.runtimes.simulation import Simulation
from kilter.train import SGD
from small import bench, mlp_task, skewed

PEERS = 6


def method(**fields):
    return SLFed(task=mlp_task(), local=SGD(lr=0.05, batch=16), pictures=60, gan_epochs=1, **fields)


def run(rounds=2, faults=None, workers=1, **fields):
    with Simulation(skewed(PEERS), bench=bench(), topology="full", faults=faults, workers=workers) as fed:
        result = federate(method(**fields), fed, rounds)
        return result, fed.states


def models(states):
    return {i: s["w"] for i, s in states.items() if "w" in s}


def test_s1_similarity_is_symmetric():
    aa, ab = torch.tensor([151, 0, 356, 469, 24]), torch.tensor([200, 10, 300, 450, 40])
    ba, bb = torch.tensor([90, 310, 200, 150, 250]), torch.tensor([100, 400, 180, 120, 200])
    assert cosine(aa, ab) == pytest.approx(0.992408, abs=1e-6)
    assert cosine(ba, bb) == pytest.approx(0.976885, abs=1e-6)
    assert (cosine(aa, ab) + cosine(ba, bb)) / 2 == pytest.approx(0.984647, abs=1e-6)
    assert cosine(aa, ab) == cosine(ab, aa)


def test_all_schemes_give_the_same_models():
    found = {share: models(run(share=share)[1]) for share in SCHEMES}
    for share in ("once", "threshold", "scalar"):
        for i, w in found["ring"].items():
            assert all(
                torch.allclose(found[share][i][k], v, atol=1e-5) for k, v in w.items() if v.is_floating_point()
            ), share


def test_results_do_not_depend_on_workers_or_masks():
    first, again = models(run()[1]), models(run(workers=2)[1])
    alone = models(run(faults=lambda seed, round, node, step: "gone" if step == "choose" else None)[1])
    assert all(torch.equal(first[i][k], again[i][k]) for i in first for k in first[i])
    assert any(not torch.equal(first[i][k], alone[i][k]) for i in first for k in first[i])


@pytest.mark.parametrize("stage", ["paint", "train", "judge", "opine", "choose", "split", "add_up", "adopt"])
def test_a_peer_lost_at_any_stage_does_not_corrupt_others(stage):
    """Everyone's model stays finite and in the hull of plausible values, and the record says what happened."""
    result, states = run(
        rounds=3, faults=lambda seed, round, node, step: "gone" if (node, step) == ("c1", stage) else None
    )
    lost = [f for r in result.rounds for f in r.failures]
    assert {f.step for f in lost} == {stage}
    whole, _ = run(rounds=3)
    for w in models(states).values():
        assert all(torch.isfinite(v).all() and v.abs().max() < 20 for v in w.values() if v.is_floating_point())
    assert abs(result.summary.client_accuracy.mean - whole.summary.client_accuracy.mean) < 0.3


def test_links_are_mutual_and_new_in_each_round():
    names = [f"c{k}" for k in range(8)]
    nodes = {
        r: [Node(n, None, seed=3, round=r, peers=tuple(m for m in names if m != n)) for n in names] for r in (1, 2)
    }
    linked = {r: {(n.id, b) for n in ns for b in method().links(n)} for r, ns in nodes.items()}
    for pairs in linked.values():
        assert pairs == {(b, a) for a, b in pairs}
        assert all(sum(a == n for a, _ in pairs) >= 2 for n in names)
    assert linked[1] != linked[2]


def test_uncertainty_depends_only_on_the_number_of_contacts():
    _, states = run(rounds=3, prior=1.0)
    for s in states.values():
        for alpha, beta in s["evidence"].values():
            contacts = alpha + beta - 2
            assert contacts == pytest.approx(round(contacts), abs=1e-6)
            assert contacts >= 1  # nobody is on the list without contact


def test_only_direct_opinions_are_sent():
    node = Node("A", None, round=1, step="opine", peers=("B", "C"))
    scratch(node).update(mine=torch.tensor([3, 4]), yours={"B": 1.0})
    node.state |= {"known": {"C": (0.9, 0.0, 0.1)}, "evidence": {}}
    told = method().opine(node, {"B": torch.tensor([3, 4])})
    assert set(told) == {"B"}
    assert "C" not in told["B"]


def test_the_gan_is_trained_on_schedule_and_its_pictures_are_bytes():
    result, states = run(rounds=6, refresh=2, frozen=4)
    painted = [r.round for r in result.rounds if "paint" in r.fit_seconds]
    assert painted == [1, 3]
    assert states["c0"]["pictures"].dtype == torch.uint8
    assert states["c0"]["pictures"].shape == (60, 1, 8, 8)


@pytest.mark.parametrize("topology", ["star", "rotating", "ring"])
def test_other_topologies_are_refused(topology):
    with pytest.raises(Mistake, match="topology full"):
        Simulation(skewed(PEERS), topology=topology).bind(method())


def test_the_record_has_weights_and_uncertainties():
    result, states = run(rounds=2)
    heard = result.rounds[-1].listens
    assert heard
    for i, sigma in heard.items():
        assert sigma == states[i]["desk"]["asked"]
    for point in result.rounds[-1].series:
        if point.series == "peers asked":
            assert point.value == len(heard.get(point.node, {})) or point.value < 2
        else:
            known = states[point.node]["known"]
            assert point.value == pytest.approx(sum(u for _, _, u in known.values()) / len(known))
    assert {point.series for point in result.rounds[-1].series} == {"mean uncertainty about known peers", "peers asked"}
    spent = result.summary.fit_seconds
    assert spent["paint"] == pytest.approx(sum(r.fit_seconds.get("paint", 0) for r in result.rounds))
    assert spent["train"] > 0


def test_the_ledger_counts_the_traffic_of_each_scheme(monkeypatch):
    """Printed: n^2 models a requester. Once: K (K - 1) shares and K - 1 sums a requester, below 2 K^2 for everybody."""
    from kilter.runtimes.ledger import Ledger

    def transfers(share):
        sizes, book = [], Ledger.letter

        def letter(ledger, sender, receiver, size, training=True):
            if training and sender != receiver:
                sizes.append(size)
            book(ledger, sender, receiver, size, training)

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "letter", letter)
            result, states = run(rounds=1, share=share)
        model = 8 * sum(v.numel() for v in states["c0"]["w"].values())  # ring and field elements have 64 bits
        listens = list(result.rounds[-1].listens.values())
        return sum(size // model for size in sizes), [len(sigma) for sigma in listens]

    for share in ("ring", "threshold", "scalar"):
        moved, lists = transfers(share)
        assert moved == sum(n * n for n in lists), share
    moved, lists = transfers("once")
    assert moved == PEERS * (PEERS - 1) + len(lists) * (PEERS - 1) <= 2 * PEERS**2


NONSENSE = {
    "train": {"pictures": torch.zeros(3, 1, 2, 2), "counts": torch.zeros(10, dtype=torch.int64)},
    "judge": torch.zeros(7, dtype=torch.int64),
    "opine": {"c2": (5.0, -4.5, 0.5), "c3": "trust me", "c4": None},
    "choose": "all of you",
    "split": {f"c{k}": {"layer": torch.zeros(2)} for k in range(PEERS)},
    "add_up": {"sum": {"layer": torch.zeros(2)}, "of": [1, 2]},
}


@pytest.mark.parametrize("share", SCHEMES)
def test_invalid_letters_are_ignored(share):
    """Whatever it writes, others go on without it, as if it were silent."""

    class Liars(Simulation):
        stage = ""

        def deliver(self, posts, name):
            if name == self.stage:
                posts = {**posts, "c1": Post(dict.fromkeys((i for i in self.ids if i != "c1"), NONSENSE[name]))}
            return super().deliver(posts, name)

    for stage in NONSENSE:
        with Liars(skewed(PEERS), bench=bench(), topology="full") as fed:
            fed.stage = stage
            federate(method(share=share), fed, 1)
            for w in models(fed.states).values():
                assert all(torch.isfinite(v).all() and v.abs().max() < 20 for v in w.values())


@pytest.mark.slow
def test_on_28x28_the_gan_costs_less_than_the_classifier():
    from kilter.core import Data, Rows
    from kilter.models import build
    from kilter.tasks import Task

    rows = Rows.of(x=torch.rand(300, 1, 28, 28), y=torch.arange(300) % 10)
    with Simulation({f"c{k}": Data(rows, rows, rows) for k in range(4)}, topology="full") as fed:
        plan = SGD(lr=0.01, batch=32)  # one epoch
        slfed = SLFed(task=Task(lambda: build("cnn:8", (1, 28, 28), 10)), local=plan)
        spent = federate(slfed, fed, 4, evaluate_every=4).summary.fit_seconds  # one painting in four rounds
    assert spent["paint"] < spent["train"]


def test_the_state_can_be_checkpointed(tmp_path):
    from kilter import Store

    with Simulation(skewed(PEERS), bench=bench(), topology="full") as fed:
        federate(method(), fed, 2, store=Store(tmp_path / "run"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["global_model"] == "mean of personal models"
