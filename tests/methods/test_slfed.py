"""SLFed: known answers S1, S5, S8, the schemes' equality, and peers that vanish at every stage."""

import json

import pytest
import torch
from slfed_peers import PEERS, chosen, method, models, run

from kilter import Mistake, federate
from kilter.blocks.commitment import commitment
from kilter.blocks.secure_sum import SCHEMES, scratch
from kilter.core import Node
from kilter.methods.slfed import SLFed, cosine
from kilter.runtimes.simulation import Simulation
from kilter.train import SGD
from small import bench, skewed


def test_s1_similarity_is_symmetric():
    aa, ab = torch.tensor([151, 0, 356, 469, 24]), torch.tensor([200, 10, 300, 450, 40])
    ba, bb = torch.tensor([90, 310, 200, 150, 250]), torch.tensor([100, 400, 180, 120, 200])
    assert cosine(aa, ab) == pytest.approx(0.992408, abs=1e-6)
    assert cosine(ba, bb) == pytest.approx(0.976885, abs=1e-6)
    assert (cosine(aa, ab) + cosine(ba, bb)) / 2 == pytest.approx(0.984647, abs=1e-6)
    assert cosine(aa, ab) == cosine(ab, aa)


def test_all_schemes_give_the_same_models():
    by_share = {share: models(run(share=share)[1]) for share in SCHEMES}
    for share in ("once", "threshold", "scalar"):
        for i, w in by_share["ring"].items():
            assert all(
                torch.allclose(by_share[share][i][k], v, atol=1e-5) for k, v in w.items() if v.is_floating_point()
            ), share


def test_results_do_not_depend_on_workers_or_masks():
    first, again = models(run()[1]), models(run(workers=2)[1])
    alone = models(run(faults=lambda seed, round, node, step: "gone" if step == "choose" else None)[1])
    assert all(torch.equal(first[i][k], again[i][k]) for i in first for k in first[i])
    assert any(not torch.equal(first[i][k], alone[i][k]) for i in first for k in first[i])


@pytest.mark.parametrize("stage", ["paint", "train", "judge", "reveal", "opine", "choose", "split", "add_up", "adopt"])
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


def talk(told, peers=50, subset=2, rounds=8):
    """Only links, evidence and opinions, with similarities of 0.5: the round in which everyone has an opinion of everyone."""
    names = [f"c{k}" for k in range(peers)]
    m = method(told=told, subset=subset)
    nodes = {n: Node(n, None, peers=tuple(p for p in names if p != n)) for n in names}
    counts = torch.tensor([1, 1])
    for r in range(1, rounds + 1):
        posts = {}
        for n, node in nodes.items():
            node.round = r
            links = m.links(node)
            scratch(node).update(
                mine=counts,
                heard=dict.fromkeys(links, counts),
                yours=dict.fromkeys(links, counts),
                committed={b: commitment(counts, 0, b) for b in links},
            )
            posts[n] = m.opine(node, {b: {"counts": counts, "nonce": 0} for b in links})
        for n, node in nodes.items():
            m.choose(node, {b: post[n] for b, post in posts.items() if n in post})
        if all(len(node.state["known"]) == peers - 1 for node in nodes.values()):
            return r
    return None


def test_passing_on_all_opinions_reaches_everyone_in_four_rounds_and_direct_ones_in_seven():
    """METHODS.md 10.3, 50 peers, DS 2."""
    assert talk("all") == 4
    assert talk("direct") == 7


def opined(told):
    node = Node("A", None, round=1, step="opine", peers=("B", "C"))
    counts = torch.tensor([3, 4])
    scratch(node).update(
        mine=counts, heard={"B": counts}, yours={"B": counts}, committed={"B": commitment(counts, 7, "B")}
    )
    node.state |= {"known": {"C": (0.9, 0.0, 0.1)}, "evidence": {}}
    return method(told=told).opine(node, {"B": {"counts": counts, "nonce": 7}}), node


def test_only_direct_opinions_are_sent_unless_all_are_told():
    assert opined("direct")[0] == {"B": {}}
    assert opined("all")[0] == {"B": {"C": (0.9, 0.0, 0.1)}}


def test_a_fused_opinion_is_remembered_while_there_is_no_news():
    """u stays at .278; with memory="direct" it goes back to the .4 of the direct opinion alone."""
    for memory, expected in (("fused", 0.278), ("direct", 0.4)):
        node = Node("A", None, round=2, peers=("B", "C"))
        node.state |= {"evidence": {"B": (1.9, 1.1)}, "known": {"B": (0.522, 0.2, 0.278)}}
        assert chosen(node, {}, memory=memory)["B"][2] == pytest.approx(expected)


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


def test_pictures_are_sent_again_only_when_they_change(monkeypatch):
    def sent(album):
        letters = []

        class Spy(Simulation):
            def deliver(self, posts, name):
                if str(name) == "train":
                    letters.append([(a, b) for a, post in posts.items() for b, t in post.items() if "pictures" in t])
                return super().deliver(posts, name)

        with Spy(skewed(PEERS), bench=bench(), topology="full") as fed:
            federate(method(refresh=3, album=album), fed, 5)
            return letters, models(fed.states)

    (once, kept), (always, not_kept) = sent(25), sent(0)
    assert len(set(once[0] + once[1] + once[2])) == len(once[0] + once[1] + once[2])
    assert sum(map(len, once)) < sum(map(len, always))
    assert once[3] == always[3]  # everyone has painted again
    assert all(torch.equal(kept[i][k], not_kept[i][k]) for i in kept for k in kept[i])


def test_a_peer_that_lost_the_pictures_gets_them_again():
    m = method()
    data = skewed(PEERS)
    nodes = {i: Node(i, data[i], round=1, step="train", peers=tuple(p for p in data if p != i)) for i in data}
    a, b = nodes["c0"], next(nodes[p] for p in m.links(nodes["c0"]))
    for node in (a, b):
        node.state |= {"pictures": torch.zeros(60, 1, 8, 8, dtype=torch.uint8), "painted": 1, "sent": {}, "album": {}}
        node.state["w"] = m.task.init(0)
        scratch(node)["mine"] = m.counts(node, node.state["pictures"])
    letter = {"painted": 1, "commitment": ""}
    assert m.pictures_of(b, "c0", letter) is None  # it was told that b has them, and b has not
    a.state["sent"] = {b.id: True}
    scratch(a).update(yours={}, nonce=0)
    m.reveal(a, {})  # so b did not answer
    assert b.id not in a.state["sent"]


def test_a_cohort_is_refused_and_so_is_robust_aggregation():
    with pytest.raises(Mistake, match="cohort"):
        method(cohort=0.5)
    fed = Simulation(skewed(PEERS), topology="full")
    fed.robust = "median"
    with pytest.raises(Mistake, match="robust"):
        fed.bind(method())


@pytest.mark.parametrize(
    "bad",
    [{"refresh": 0}, {"trust": 2.0}, {"trust": 0.5}, {"prior": -1.0}, {"subset": -1}, {"pictures": 0}, {"fewest": 1}],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(Mistake, match=next(iter(bad))):
        method(**bad)


def test_links_of_many_peers_are_drawn_once_for_all():
    """Quadratic, not cubic: 400 peers took 18 s."""
    import time

    names, m = [f"c{k}" for k in range(400)], method()
    nodes = [Node(n, None, seed=1, round=1, peers=tuple(p for p in names if p != n)) for n in names]
    began = time.process_time()
    for node in nodes:
        m.links(node)
    assert time.process_time() - began < 3


def test_noise_in_place_of_the_gan_trains_no_gan():
    result, states = run(rounds=1, painter="noise")
    assert "paint" not in result.rounds[1].fit_seconds
    assert states["c0"]["pictures"].shape == (60, 1, 8, 8)
    assert states["c0"]["pictures"].dtype == torch.uint8
    assert not torch.equal(states["c0"]["pictures"], states["c1"]["pictures"])
