"""FedEP: METHODS E1-E9, its laws, degenerate inputs, and nodes that lie about their labels."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.blocks.density import mixture
from kilter.core import Data, Node, Replies, Rows, step
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.methods.fedep import (
    FedEP,
    alphas,
    alphas_as_run,
    divergences,
    joint_as_run,
    masses,
    smoothed,
)
from kilter.runtimes.simulation import Simulation
from kilter.train import SGD
from small import federation, method, mlp_task, near

MODES = ("blend", "kl", "code", "code_exact")
MODELS = ("bin", "density", "hist")
E1 = np.array([[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.05, 0.05, 0.1, 0.8]])
E1_N = np.array([100.0, 100, 200])
E2 = [
    {"rows": n, "classes": 10, "theta": torch.tensor(theta, dtype=torch.float64)}
    for n, theta in (
        (100, [[0.2, 9, 0.1], [0.8, 1.18181818, 1.33]]),
        (200, [[0.3, 4, 0.1], [0.7, 5.118, 1.33]]),
    )
]
E2_N = np.array([100.0, 200])


def close(expected: Any) -> Any:
    return pytest.approx(np.array(expected), abs=1e-6)


# Known answers --------------------------------------------------------------------------------------------------------


def test_e1_pools_divergences_and_weights():
    assert close([0.2625, 0.1125, 0.1375, 0.4875]) == E1_N / 400 @ E1
    assert divergences(E1, E1_N) == close([0.166340, 0.571829, 0.328833])
    assert alphas(E1, E1_N, "kl", eps=0) == close([0.155894, 0.535922, 0.308184])
    assert alphas(E1, E1_N, "code", eps=0) == close([0.342538, 0.431996, 0.225466])
    assert alphas(E1, E1_N, "blend", eps=0) == close([0.216156, 0.291304, 0.492540])


def test_the_base_of_the_logarithm_does_not_matter():
    bits = divergences(E1, E1_N) / log(2)
    assert bits / bits.sum() == close([0.155894, 0.535922, 0.308184])
    run = bits + np.log2(400 / E1_N)
    assert run / run.sum() == close([0.342538, 0.431996, 0.225466])


@pytest.mark.parametrize(
    ("model", "eps", "kl", "mode", "expected"),
    [
        ("density", 1e-6, [2.696404, 1.306313], "kl", [0.673643, 0.326357]),
        ("density", 1e-2, [1.236277, 0.430222], "kl", [0.741841, 0.258159]),
        ("bin", 1e-2, [1.149879, 0.394502], "kl", [0.744557, 0.255443]),
        ("bin", 1e-2, [1.149879, 0.394502], "code", [0.737583, 0.262417]),
        ("bin", 1e-2, [1.149879, 0.394502], "blend", [0.435297, 0.564703]),
    ],
)
def test_e2_from_mixtures(model, eps, kl, mode, expected):
    f = np.stack([masses(s, model) for s in E2])
    assert divergences(smoothed(f, eps), E2_N) == close(kl)
    assert alphas(f, E2_N, mode, eps) == close(expected)


def test_e2b_densities_that_are_not_normalised():
    raw = np.stack([masses(s, "density") for s in E2])
    assert raw.sum(axis=1) == close([1.001238, 1.083538])
    kl = divergences(raw, E2_N)
    assert kl == close([3.041558, 1.266972])
    assert kl / kl.sum() == close([0.705939, 0.294061])


def test_e2c_as_the_thesis_ran_it():
    joint = np.stack([joint_as_run(s, s["rows"] / 300) for s in E2])
    assert joint.sum() == pytest.approx(0.982385, abs=1e-6)
    total = joint.sum(axis=0)
    bits = (total * np.log2((total + 0.01) / (joint.round(4) + 0.01))).sum(axis=1)
    assert bits == close([2.553616, 0.832150])
    assert alphas_as_run(joint) == close([0.754221, 0.245779])
    made = method("fedep", alpha_mode="code_exact")
    assert isinstance(made, FedEP)
    assert made.alphas(E2) == close([0.754221, 0.245779])


def test_e3_the_equation_as_printed_can_be_negative_and_ours_is_not():
    sharp, wide = (np.array([[0.5, 0, v], [0.5, 1, v]]) for v in (0.02, 0.5))
    raw = np.stack([mixture.density(theta, 2) for theta in (sharp, wide)])
    kl = divergences(raw, np.ones(2))
    assert kl == close([-0.810724, 1.517656])
    assert kl / kl.sum() == close([-1.146820, 2.146820])
    assert (divergences(smoothed(raw, 1e-2), np.ones(2)) >= 0).all()


def test_e5_weights_are_renormalised_over_those_who_replied():
    hub = Node("server", Data(*[Rows({}, torch.empty(0).long())] * 3))
    made = method("fedep")
    hub.state = {"known": dict.fromkeys("abc", E2[0]), "alpha": {"a": 0.5, "b": 0.3, "c": 0.2}}
    replies = Replies({k: ({"w": torch.tensor([x])}, E2[0]) for k, x in (("a", 1.0), ("c", 0.0))}, of=3)
    assert float(made.combine(hub, {"w": torch.zeros(1)}, replies)["w"]) == pytest.approx(0.714286, abs=1e-6)


def test_e6_nine_alike_and_one_with_three_classes():
    f = np.array([[0.1] * 10] * 9 + [[0.4, 0.3, 0.3] + [0] * 7])
    n = np.full(10, 10.0)
    for mode, expected in {
        "kl": [0.007881, 0.929072],
        "code": [0.095405, 0.141355],
        "blend": [0.090065, 0.189414],
    }.items():
        assert alphas(f, n, mode)[[0, 9]] == close(expected)
    assert alphas(f, n, "kl", eps=1e-6)[9] == pytest.approx(0.985069, abs=1e-6)
    assert alphas_as_run(f / 10)[[0, 9]] == close([0.099127, 0.107861])


def test_e7_sizes_of_100_and_900():
    f, n = np.full((2, 10), 0.1), np.array([100.0, 900])
    assert alphas(f, n, "code") == close([0.956245, 0.043755])  # reverses the amounts
    assert alphas_as_run(f * [[0.1], [0.9]]) == close([0.947052, 0.052948])
    assert alphas(f, n, "blend") == close([0.1, 0.9])
    assert alphas(f, n, "kl") == close([0.1, 0.9])  # all KL are 0: amounts decide


def test_e8_renaming_classes_changes_mixtures_but_not_histograms():
    def weights(names: list[int], model: str, eps: float) -> Any:
        held = ([0, 1], [8, 9], range(10))
        clients = [np.bincount([names[i] for i in ids], minlength=10) * 10 for ids in held]
        f = [c / c.sum() if model == "hist" else mixture.density(mixture.fit(c, 1), 10) for c in clients]
        return alphas(np.stack(f), np.ones(3), "kl", eps)

    before = list(range(10))
    after = [0, 9, 2, 3, 4, 5, 6, 7, 8, 1]
    assert weights(before, "density", 1e-6) == close([0.478310, 0.478310, 0.043380])
    assert weights(after, "density", 1e-6) == close([0.445889, 0.001009, 0.553102])
    # The printed answer for `hist` is that of eps = 1e-6 on counts of 100 rows, which is 1e-8 on frequencies.
    for names in (before, after):
        assert weights(names, "hist", 1e-8) == close([0.491217, 0.491217, 0.017567])


def test_e9_the_program_is_kl_plus_log_of_one_over_p_when_eps_vanishes():
    joint = E1 * (E1_N / 400)[:, None]  # of at most four digits, so that rounding does nothing
    assert alphas_as_run(joint, eps=1e-13) == close(alphas(E1, E1_N, "code", eps=0))


# Laws of the weights --------------------------------------------------------------------------------------------------


@st.composite
def summaries(draw: Any) -> list[np.ndarray]:
    """Label counts of some clients over one label set."""
    classes = draw(st.integers(1, 8))
    some = st.lists(st.integers(0, 200), min_size=classes, max_size=classes).filter(any)
    return [np.array(c) for c in draw(st.lists(some, min_size=1, max_size=6))]


def weights_of(clients: list[np.ndarray], mode: str, model: str) -> Any:
    made = FedEP(task=mlp_task(), local=SGD(), alpha_mode=mode, label_model=model)  # type: ignore[arg-type]
    told = {
        "hist": lambda c: {"counts": torch.tensor(c)},
        "bin": lambda c: {"theta": torch.tensor(mixture.fit(c, 1))},
        "density": lambda c: {"theta": torch.tensor(mixture.fit(c, 1))},
    }[model]
    known = [{"rows": int(c.sum()), "classes": len(c)} | told(c) for c in clients]
    return made.alphas(known)


@given(summaries(), st.sampled_from(MODES), st.sampled_from(MODELS))
def test_weights_are_non_negative_and_sum_to_one(clients, mode, model):
    alpha = weights_of(clients, mode, model)
    assert (alpha >= 0).all()
    assert alpha.sum() == pytest.approx(1, abs=1e-12)
    assert weights_of(clients[::-1], mode, model)[::-1] == pytest.approx(alpha, abs=1e-9)


@given(summaries(), st.sampled_from(MODES), st.sampled_from(MODELS), st.integers(2, 5))
def test_equal_clients_have_equal_weights(clients, mode, model, k):
    assert weights_of([clients[0]] * k, mode, model) == pytest.approx(np.full(k, 1 / k), abs=1e-6)


@given(summaries(), st.sampled_from(MODELS))
def test_blend_never_lets_a_small_client_dominate(clients, model):
    """alpha_k <= p_k (1 + g max KL), and no KL exceeds ln((1 + C eps) / eps)."""
    n = np.array([c.sum() for c in clients])
    most = 1 + log((1 + len(clients[0]) * 0.01) / 0.01)
    assert (weights_of(clients, "blend", model) <= n / n.sum() * most + 1e-9).all()


# The method -----------------------------------------------------------------------------------------------------------


def run(made: Any, fed: Simulation, rounds: int = 2) -> Any:
    with fed:
        return federate(made, fed, rounds)


@pytest.mark.parametrize("topology", ["star", "ring"])
def test_blend_without_g_is_fedavg(topology):
    a, b = (run(m, federation(topology=topology)) for m in (method("fedep", g=0.0), method("fedavg")))
    assert a.summary.global_accuracy == b.summary.global_accuracy
    if topology == "star":
        assert near(a.state, b.state)


@pytest.mark.parametrize(("mode", "model"), [*((m, "bin") for m in MODES), ("blend", "hist"), ("code", "density")])
def test_all_topologies_give_the_same_model(mode, model):
    """A server, a node in turn, and every node for itself over the full graph: the same model."""
    made = method("fedep", alpha_mode=mode, label_model=model)
    star, turn = (run(made, federation(topology=t)) for t in ("star", "rotating"))
    assert near(star.state, turn.state)
    with federation(topology="full") as fed:
        federate(made, fed, 2)
        assert all(near(star.state, fed.states[node]["~pool"]) for node in fed.ids)


def test_on_a_ring_every_node_weights_its_neighbourhood():
    with federation(6, topology="ring") as fed:
        federate(method("fedep", alpha_mode="kl"), fed, 1)
        for k, node in enumerate(fed.ids):
            alpha = fed.states[node]["alpha"]
            assert set(alpha) == {fed.ids[(k + d) % 6] for d in (-1, 0, 1)}
            assert sum(alpha.values()) == pytest.approx(1)


@pytest.mark.parametrize("mode", MODES)
def test_every_aggregate_lies_in_the_hull_of_the_models(mode):
    made = method("fedep", alpha_mode=mode)
    seen: list[Any] = []

    @dataclass(frozen=True, kw_only=True)
    class Watched(FedEP):
        @step
        def combine(self, hub: Node, w: Any, replies: Replies) -> Any:
            new = FedEP.combine(self, hub, w, replies)
            seen.append((new, [m for m, _ in replies.values()]))
            return new

    run(Watched(task=made.task, local=made.local, alpha_mode=mode), federation())  # type: ignore[arg-type]
    for new, models in seen:
        for name, value in new.items():
            stack = torch.stack([m[name] for m in models])
            assert bool((stack.min(0).values - 1e-6 <= value).all())
            assert bool((value <= stack.max(0).values + 1e-6).all())


def test_partial_participation_and_missing_replies():
    result = run(method("fedep", alpha_mode="kl", cohort=0.5), federation(6), rounds=3)
    assert [len(r.participants) for r in result.rounds] == [6, 3, 3, 3]


def test_a_missed_summary_arrives_with_the_model():
    def away(seed: int, round: int, node: str, step: str) -> str | None:
        return "it was away" if node == "c1" and step.endswith("summarise") else None

    with federation(faults=away) as fed:
        result = federate(method("fedep"), fed, 1)
        late = dict(fed.states["server"]["alpha"])
    assert "c1" not in result.rounds[0].participants
    with federation() as fed:
        assert near(result.state, federate(method("fedep"), fed, 1).state)
        assert fed.states["server"]["alpha"] == pytest.approx(late)


def test_if_only_nodes_with_weight_zero_reply_rows_decide():
    """As printed, a node that is like everyone weighs nothing."""
    hub = Node("server", Data(*[Rows({}, torch.empty(0).long())] * 3))
    made = method("fedep", alpha_mode="kl")
    hub.state = {"known": dict.fromkeys("abc", E2[0]), "alpha": {"a": 0.0, "b": 0.0, "c": 1.0}}
    replies = Replies({k: ({"w": torch.tensor([x])}, E2[0]) for k, x in (("a", 1.0), ("b", 0.0))}, of=3)
    assert float(made.combine(hub, {"w": torch.zeros(1)}, replies)["w"]) == 0.5


def test_only_models_and_small_summaries_are_sent():
    with federation() as fed:
        result = federate(method("fedep"), fed, 1)
    first, second = result.rounds[:2]
    assert first.bytes_up < 4 * 600
    assert first.bytes_down == 0
    with federation() as fed:
        plain = federate(method("fedavg"), fed, 1).rounds[1]
    assert second.bytes_down == plain.bytes_down
    assert second.bytes_up - plain.bytes_up < 4 * 600


def test_summaries_are_not_forwarded():
    with federation() as fed:
        result = federate(method("fedep"), fed, 1)
        assert set(result.state) == set(mlp_task().init(0))  # the state, which nodes are sent, is the model alone
        assert all(set(fed.states[node]) == {"summary"} for node in fed.ids)


@pytest.mark.parametrize("wrong", [{"g": -1.0}, {"eps": 0.0}, {"rho": 0.0}, {"v_floor": -1.0}, {"tolerance": 0.0}])
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(Mistake, match=next(iter(wrong))):
        method("fedep", **wrong)


# Other forms ----------------------------------------------------------------------------------------------------------


def test_jensen_shannon_by_hand():
    """P = (.5, .5) from (1, 0) and (0, 1): each is (3/4 ln 4/3 + 1/4 ln ... ) away, and equal nodes are at distance 0."""
    q = np.array([[1.0, 0.0], [0.0, 1.0]])
    middle = 0.5 * (0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)) + 0.5 * log(1 / 0.75)
    assert divergences(q, np.array([1.0, 1.0]), "js") == pytest.approx([middle, middle])
    assert divergences(np.full((2, 2), 0.5), np.array([1.0, 3.0]), "js") == pytest.approx([0.0, 0.0])


@given(summaries())
def test_jensen_shannon_is_at_most_ln_2(clients):
    q = smoothed(np.stack([c / c.sum() for c in clients]), 1e-9)
    js = divergences(q, np.array([float(c.sum()) for c in clients]), "js")
    assert ((js >= -1e-12) & (js <= log(2) + 1e-9)).all()


def test_the_listing_pools_over_the_classes_of_the_aggregator():
    """METHODS 10.7: an outlier that aggregates over its own three classes gives itself little, and much over all classes."""
    even, odd = np.full(10, 30), np.array([100, 100, 100, 0, 0, 0, 0, 0, 0, 0])
    known = [{"rows": 300, "classes": 10, "counts": torch.tensor(c)} for c in (even, even, odd)]
    made = FedEP(task=mlp_task(), local=SGD(), alpha_mode="listing", label_model="hist")
    everywhere, at_the_outlier = made.alphas(known), made.alphas(known, np.array([0, 1, 2]))
    assert everywhere[2] > 1 / 3 > at_the_outlier[2]
    assert everywhere == pytest.approx(FedEP(task=mlp_task(), local=SGD(), alpha_mode="code_exact").alphas(known))
    assert at_the_outlier.sum() == pytest.approx(1)


def test_the_listing_runs_between_peers_and_in_a_star():
    for topology in ("star", "full"):
        with federation(topology=topology) as fed:
            assert federate(method("fedep", alpha_mode="listing"), fed, 1).summary.failures == 0


def test_a_rotating_aggregators_memory_counts_as_traffic():
    with federation(topology="rotating") as fed:
        first = federate(method("fedep"), fed, 2).rounds
    with federation(topology="rotating") as fed:
        plain = federate(method("fedavg"), fed, 2).rounds
    summaries_ = sum(first[2].bytes_by_node[i][0] for i in first[2].bytes_by_node)
    assert summaries_ > sum(up for up, _ in plain[2].bytes_by_node.values()) + 1000


def test_without_any_aggregator_the_model_stays_as_it_was():
    def faults(seed, round, node, step):
        return "away" if round == 1 and step == "aggregate" else None

    with federation(topology="rotating", faults=faults) as fed:
        result = federate(method("fedavg"), fed, 1)
        first = fed.round and method("fedavg").setup(fed)
    assert near(result.model, first)
    assert [f.step for f in result.rounds[1].failures] == ["aggregate"] * 4 + ["combine"]
