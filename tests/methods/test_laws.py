"""Laws and known answers of the methods (METHODS.md, sections 6 and 9): where each becomes another, what it conserves and reaches.

Where a law speaks of bits, clients are trained one by one (`stack=False`), so that nobody's rounding depends on company.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kilter.core import Data, Fit, Method, Node, Params, Replies, Rows
from kilter.federate import Result, federate
from kilter.params import average, mean, sub, weights
from kilter.runtimes.simulation import Simulation
from kilter.runtimes.step_runner import run_step
from kilter.seeds import derive
from kilter.tasks import Task
from kilter.train import SGD, batches
from small import (
    Vector,
    bench,
    constant,
    digits,
    federation,
    linear_task,
    method,
    mlp_task,
    near,
    normed_task,
    quadratic,
    quadratic_task,
    same,
    skewed,
)

FULL = SGD(lr=0.1, batch=0)  # one full-batch step a round


def run(name: str, clients: dict[str, Data], rounds: int = 1, task: Task | None = None, **settings: Any) -> Result:
    seed = settings.pop("seed", 0)
    with Simulation(clients, bench=settings.pop("bench", None), seed=seed, stack=False) as fed:
        return federate(method(name, task, **settings), fed, rounds)


def states(name: str, clients: dict[str, Data], rounds: int, task: Task | None = None, **settings: Any) -> Any:
    with Simulation(clients, stack=False, topology=settings.pop("topology", "star")) as fed:
        result = federate(method(name, task, **settings), fed, rounds)
        return result, {i: s for i, s in fed.states.items() if i in clients}


def together(clients: dict[str, Data]) -> Rows:
    return Rows(digits().tables, torch.cat([d.train.index for d in clients.values()]))


def at_node(
    run: Method, data: Data, message: Any, state: dict[str, Any] | None = None, **more: Any
) -> tuple[Any, Node]:
    """One node's train step by itself: its reply, and the node."""
    node = Node("a", data, state=state or {}, step="train", **more)
    (done,) = run_step(run.train, [node], [message])  # type: ignore[attr-defined]
    if done.error:
        raise done.error
    return done.reply, node


# FedAvg --------------------------------------------------------------------------------------------------------------


def test_fedavg_with_one_full_batch_is_a_centralised_gradient_step() -> None:
    clients = skewed()
    task = mlp_task()
    found = run("fedavg", clients, task=task, local=FULL).model
    rows = together(clients)
    net = task.load(task.init(0)).train()
    nn.functional.cross_entropy(net(rows["x"]), rows["y"]).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad
    assert found is not None
    assert near(found, dict(net.state_dict()))
    assert not near(found, task.init(0), 1e-4)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "scaffold", "pooled", "solo"])
def test_one_client_is_plain_sgd(name: str) -> None:
    """A hand-written loop with torch.optim over the same batches. SCAFFOLD: c = c_i, so no correction."""
    clients = {"only": skewed()["c3"]}
    task = mlp_task()
    plan = SGD(lr=0.1, batch=16, epochs=2)
    result, kept = states(name, clients, 3, task, local=plan)
    net = task.load(task.init(0)).train()
    rows = clients["only"].train
    who = "server" if name == "pooled" else "only"
    for round in (1, 2, 3):
        optim = torch.optim.SGD(net.parameters(), lr=0.1)
        fit = Fit(lambda *_: torch.zeros(()), {}, rows, plan, derive(0, round, who, "train", 1))
        for at in batches(fit):
            batch = rows.batch(at)
            optim.zero_grad()
            nn.functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
            optim.step()
    found = kept["only"]["w"] if name == "solo" else result.state[0] if name == "scaffold" else result.state
    if name == "scaffold":
        assert near(found, dict(net.state_dict()), 1e-5)
    else:
        assert same(found, dict(net.state_dict()))


def test_fedavg_weighs_by_rows_of_those_who_took_part() -> None:
    clients = {f"c{k}": constant([[g]] * n) for k, (g, n) in enumerate([(1.0, 1), (2.0, 3), (50.0, 4), (9.0, 2)])}
    sizes = {i: len(d.train) for i, d in clients.items()}
    gradient = {"c0": 1.0, "c1": 2.0, "c2": 50.0, "c3": 9.0}
    found = run("fedavg", clients, 3, linear_task([0.0]), local=SGD(lr=1.0, batch=0), cohort=0.5)
    w = 0.0
    for record in found.rounds[1:]:
        there = record["participants"]
        assert len(there) == 2
        w -= sum(gradient[i] * sizes[i] for i in there) / sum(sizes[i] for i in there)
    assert found.state["w"].item() == pytest.approx(w, rel=1e-5)


# FedProx -------------------------------------------------------------------------------------------------------------


def test_fedprox_known_answer() -> None:
    """w = (1, -1), w^t = (.5, .5), g = (.2, .4), eta .1, mu 1 -> (.93, -.89)."""
    task = linear_task([0.5, 0.5])
    prox = method("fedprox", task, mu=1.0, local=SGD(lr=0.1, batch=0))
    node = Node("a", constant([[0.2, 0.4]]))
    fit = node.fit(prox.loss, {"w": torch.tensor([1.0, -1.0])}, prox.local, ctx={"w": torch.tensor([0.5, 0.5])})  # type: ignore[attr-defined]
    (done,) = run_step(lambda *_: (yield fit), [node], [None])
    assert near(done.reply, {"w": torch.tensor([0.93, -0.89])})


def test_fedprox_over_two_local_steps_by_hand() -> None:
    # From 0: step one has no pull (-.2), step two is pulled back by mu (w - w^t) = -.2.
    found = run("fedprox", {"a": constant([[2.0]])}, task=linear_task([0.0]), mu=1.0, local=SGD(lr=0.1, epochs=2))
    assert found.state["w"].item() == pytest.approx(-0.2 - 0.1 * (2 - 0.2))


def test_fedprox_without_pull_is_fedavg_bit_for_bit() -> None:
    clients = skewed()
    for task in (mlp_task(), normed_task()):
        plain, prox = (run(n, clients, 3, task, **s) for n, s in (("fedavg", {}), ("fedprox", {"mu": 0.0})))
        assert same(plain.state, prox.state)
        assert [r["loss"] for r in plain.rounds] == [r["loss"] for r in prox.rounds]


def test_fedproxs_first_local_step_is_fedavgs() -> None:
    clients = skewed()
    plain, prox = run("fedavg", clients, local=FULL), run("fedprox", clients, local=FULL, mu=10.0)
    assert near(plain.state, prox.state)
    further = replace(FULL, epochs=5)
    assert not near(
        run("fedavg", clients, local=further).state, run("fedprox", clients, local=further, mu=1.0).state, 1e-4
    )


def test_a_stronger_pull_stays_nearer() -> None:
    clients = skewed()
    start = mlp_task().init(0)
    gone = [
        sum(
            float((v**2).sum())
            for v in sub(run("fedprox", clients, mu=mu, local=SGD(lr=0.05, batch=16)).state, start).values()
        )
        for mu in (0.0, 1.0, 10.0)
    ]
    assert gone[0] > gone[1] > gone[2]


def test_the_pull_does_not_touch_buffers() -> None:
    task = normed_task()
    w = task.init(0)
    far = {k: v + 1 for k, v in w.items() if v.is_floating_point()}
    prox = method("fedprox", task, mu=2.0)
    batch = digits().batch(torch.arange(20))
    torch.manual_seed(0)
    pulled = prox.loss(dict(w), batch, weights(far))  # type: ignore[attr-defined]
    torch.manual_seed(0)
    assert (pulled - task.loss(dict(w), batch)).item() == pytest.approx(task.size(), rel=1e-4)  # mu/2 sum 1^2


# SCAFFOLD ------------------------------------------------------------------------------------------------------------


def test_scaffold_known_answer() -> None:
    """x = (.5, .5), c = (.1, .1), c_i = (.3, -.1), eta .1, g = (.2, .4), (.1, .3)."""
    x, c = {"w": torch.tensor([0.5, 0.5])}, {"w": torch.tensor([0.1, 0.1])}
    scaffold = method("scaffold", linear_task([0.5, 0.5]), local=SGD(lr=0.1, batch=1))
    data = constant([[0.2, 0.4], [0.1, 0.3]])
    (y, dc), node = at_node(scaffold, data, (x, c), {"c": {"w": torch.tensor([0.3, -0.1])}}, round=1)
    assert near(y, {"w": torch.tensor([0.51, 0.39])})
    assert near(node.state["c"], {"w": torch.tensor([0.15, 0.35])})
    assert near(dc, {"w": torch.tensor([-0.15, 0.45])})
    hub = Node("server", data)
    moved, c_new = scaffold.combine(hub, (x, c), Replies({"a": (y, dc)}, of=3))  # type: ignore[attr-defined]
    assert near(moved, y)
    assert near(c_new, {"w": torch.tensor([0.1 - 0.05, 0.1 + 0.15])})


@pytest.mark.parametrize("topology", ["star", "rotating", "full"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffolds_c_is_the_mean_of_the_c_i(topology: str, momentum: float) -> None:
    plan = SGD(lr=0.05, batch=16, momentum=momentum, decay=0.9)
    result, kept = states("scaffold", skewed(), 3, local=plan, topology=topology)
    c = kept["c0"]["~pool"][1] if topology == "full" else result.state[1]
    assert near(c, mean(kept[i]["c"] for i in skewed()), 1e-5)
    assert max(float(v.abs().max()) for v in c.values()) > 1e-3


def test_scaffolds_c_stays_the_mean_over_all_under_partial_participation() -> None:
    clients = skewed(6)
    result, kept = states("scaffold", clients, 5, cohort=0.5)
    zero = {k: torch.zeros_like(v) for k, v in weights(mlp_task().init(0)).items()}
    assert near(result.state[1], mean(kept.get(i, {}).get("c", zero) for i in clients), 1e-5)


def test_scaffold_with_identical_clients_is_fedavg() -> None:
    """Full batches, so that all do the same."""
    one = skewed()["c3"]
    clients = {f"c{k}": one for k in range(3)}
    plan = SGD(lr=0.1, batch=0, epochs=3)
    assert near(run("scaffold", clients, 4, local=plan).state[0], run("fedavg", clients, 4, local=plan).state, 1e-5)


def test_scaffolds_first_round_is_the_plain_mean_of_local_training() -> None:
    clients = skewed()
    found = run("scaffold", clients).state[0]
    _, kept = states("solo", clients, 1)
    assert near(found, mean(s["w"] for s in kept.values()), 1e-5)
    assert not near(found, average((s["w"], len(clients[i].train)) for i, s in kept.items()), 1e-3)  # not by n_k


def test_scaffolds_server_rate() -> None:
    clients = {"a": constant([[1.0]]), "b": constant([[3.0]])}
    for rate, expected in [(1.0, -2.0), (0.5, -1.0), (0.0, 0.0)]:
        found = run("scaffold", clients, task=linear_task([0.0]), local=SGD(lr=1.0), server_lr=rate)
        assert found.state[0]["w"].item() == pytest.approx(expected)


def test_scaffold_corrects_no_buffers() -> None:
    result, kept = states("scaffold", skewed(), 2, normed_task())
    assert all(not k.startswith("~") for k in [*result.state[1], *kept["c0"]["c"]])
    assert any(k.startswith("~") for k in result.state[0])


def ten_quadratics() -> tuple[dict[str, Data], list[float]]:
    """Ten clients with curvatures and centres of their own, and where their mean loss is least."""
    rng = torch.Generator().manual_seed(3)
    a = 0.2 + 1.8 * torch.rand(10, 2, generator=rng)
    b = 4 * torch.randn(10, 2, generator=rng)
    best = (a * b).sum(0) / a.sum(0)
    return {f"q{k}": quadratic(a[k].tolist(), b[k].tolist()) for k in range(10)}, best.tolist()


@pytest.mark.parametrize(("cohort", "momentum", "rounds"), [(1.0, 0.0, 20), (1.0, 0.5, 20), (0.5, 0.0, 60)])
def test_scaffold_reaches_the_optimum_of_ten_quadratics_where_fedavg_does_not(
    cohort: float, momentum: float, rounds: int
) -> None:
    clients, best = ten_quadratics()
    plan = SGD(lr=0.2 * (1 - momentum), epochs=5, momentum=momentum)
    distance = {}
    for name in ("scaffold", "fedavg"):
        with Simulation(clients) as fed:
            state = federate(
                method(name, quadratic_task([0.0, 0.0]), local=plan, cohort=cohort), fed, rounds, evaluate_every=rounds
            ).state
        w = (state[0] if name == "scaffold" else state)["w"]
        distance[name] = float((w - torch.tensor(best)).norm())
    assert distance["scaffold"] < 1e-3
    assert distance["fedavg"] > 0.1


# FedBN ---------------------------------------------------------------------------------------------------------------


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


def test_fedbn_goes_by_module_type() -> None:
    clients = skewed()
    task = Task(Misnamed)
    result, kept = states("fedbn", clients, 2, task)
    assert set(result.state) == {"bn.weight", "bn.bias", "head.weight", "head.bias"}
    assert all(set(s["bn"]) == CALM for s in kept.values())
    assert len({s["bn"]["calm.weight"].sum().item() for s in kept.values()}) == len(clients)
    assert result.model is None


def test_fedbn_averages_the_rest_and_leaves_batchnorm_untouched() -> None:
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


def test_fedbn_known_answer() -> None:
    """conv (1, 3) with weights (.25, .75) -> 2.5."""
    fedbn = method("fedbn", normed_task())
    replies = Replies({"a": ({"conv": torch.tensor([1.0])}, 25), "b": ({"conv": torch.tensor([3.0])}, 75)}, of=2)
    assert fedbn.combine(Node("server", skewed()["c0"]), {}, replies)["conv"].item() == 2.5  # type: ignore[attr-defined]


def test_fedbn_of_a_net_without_batchnorm_is_fedavg_bit_for_bit() -> None:
    clients = skewed()
    plain, bn = run("fedavg", clients, 3, bench=bench()), run("fedbn", clients, 3, bench=bench())
    assert same(plain.state, bn.state)
    assert bn.model is not None
    assert same(bn.model, plain.model)
    assert bn.summary["client_accuracy"] == plain.summary["client_accuracy"]
    assert (bn.summary["bytes_up"], bn.summary["bytes_down"]) == (
        plain.summary["bytes_up"],
        plain.summary["bytes_down"],
    )


def test_a_node_is_judged_with_its_own_batchnorm_and_one_that_never_trained_with_the_first() -> None:
    clients = skewed()
    task = Task(Misnamed)
    with federation(clients, stack=False) as fed:
        fedbn = method("fedbn", task, cohort=0.5)
        result = federate(fedbn, fed, 1)
        for i, data in clients.items():
            whole = task.init(0) | result.state | fed.states.get(i, {}).get("bn", {})
            assert result.clients["last"]["clients"][i]["own_test"] == task.evaluate(whole, data.test)
        assert 0 < sum("bn" in s for s in fed.states.values()) < 4


# SOLO and pooled -----------------------------------------------------------------------------------------------------


def test_solo_does_not_depend_on_the_others_data() -> None:
    clients, others = skewed(seed=0), skewed(seed=9)
    _, one = states("solo", clients, 2, normed_task())
    _, two = states("solo", {"c0": clients["c0"]} | {i: others[i] for i in ("c1", "c2")}, 2, normed_task())
    _, three = states("solo", {"x": others["c1"], "c0": clients["c0"]}, 2, normed_task())
    assert same(one["c0"], two["c0"])
    assert same(one["c0"], three["c0"])
    assert not near(one["c1"]["w"], two["c1"]["w"], 1e-3)


def test_pooled_is_centralised_training_on_the_union() -> None:
    clients = skewed()
    task = mlp_task()
    plan = SGD(lr=0.1, batch=0, epochs=3)
    found = run("pooled", clients, 2, task, local=plan).model
    rows = together(clients)
    net = task.load(task.init(0)).train()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        optim.zero_grad()
        nn.functional.cross_entropy(net(rows["x"]), rows["y"]).backward()
        optim.step()
    assert found is not None
    assert same(found, dict(net.state_dict()))


def test_pooled_takes_every_row_of_every_client() -> None:
    with federation(skewed()) as fed:
        federate(method("pooled"), fed, 1)
        assert len(fed.states["server"]["rows"]["y"]) == sum(len(d.train) for d in fed.clients.values())


def test_pooled_is_a_better_upper_bound_than_alone() -> None:
    clients = skewed(rows=800)
    plan = SGD(lr=0.2, batch=16)
    best, alone = (run(n, clients, 8, local=plan, bench=bench()).summary["global_accuracy"] for n in ("pooled", "solo"))
    assert best > alone + 0.1


# Laws of every average -----------------------------------------------------------------------------------------------

AVERAGING = ["fedavg", "fedprox", "fedbn"]


def combine(name: str, replies: dict[str, tuple[Params, int]]) -> Params:
    run = method(name, mlp_task())
    return run.combine(Node("server", skewed()["c0"]), {}, Replies(replies, of=len(replies)))  # type: ignore[attr-defined]


def replies_of(*seeds: int) -> dict[str, tuple[Params, int]]:
    return {f"c{s}": (mlp_task().init(s), 10 + 7 * s) for s in seeds}


@pytest.mark.parametrize("name", AVERAGING)
def test_identical_models_come_back_bit_for_bit(name: str) -> None:
    one = mlp_task().init(1)
    assert same(combine(name, {f"c{k}": (one, 3 * k + 1) for k in range(7)}), one)


@pytest.mark.parametrize("name", AVERAGING)
@settings(max_examples=10)
@given(st.permutations(range(5)))
def test_the_order_of_clients_does_not_matter(name: str, order: list[int]) -> None:
    assert near(combine(name, replies_of(*range(5))), combine(name, replies_of(*order)), 1e-6)


@pytest.mark.parametrize("name", AVERAGING)
def test_an_average_lies_in_the_hull(name: str) -> None:
    replies = replies_of(*range(5))
    for k, v in combine(name, replies).items():
        stack = torch.stack([w[k] for w, _ in replies.values()])
        assert (v >= stack.min(0).values - 1e-7).all()
        assert (v <= stack.max(0).values + 1e-7).all()


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_client_in_two_equal_halves_counts_as_one(name: str) -> None:
    """One full-batch epoch; weighing by n_k makes halves and whole the same."""
    clients = skewed()
    d = clients["c3"]
    half = len(d.train) // 2
    index = d.train.index[: 2 * half]
    clients["c3"] = Data(Rows(digits().tables, index), d.valid, d.test)
    whole = run(name, clients, 2, local=FULL).state
    halves = {k: v for k, v in clients.items() if k != "c3"} | {
        f"half{k}": Data(Rows(digits().tables, part), d.valid, d.test) for k, part in enumerate(index.split(half))
    }
    assert near(whole, run(name, halves, 2, local=FULL).state, 1e-5)


def test_one_seed_one_result_and_another_seed_another() -> None:
    clients = skewed()
    a, b = run("fedavg", clients, 2, seed=4), run("fedavg", clients, 2, seed=4)
    assert same(a.state, b.state)
    timeless = {"seconds": 0, "fit_seconds": {}, "workers": {}}
    assert a.summary | timeless == b.summary | timeless
    assert not near(a.state, run("fedavg", clients, 2, seed=5).state, 1e-3)


def test_no_test_row_reaches_training() -> None:
    """Changing every test and validation label, and the common test set, changes nothing that is trained."""
    clients = skewed()
    used = torch.zeros(len(digits()), dtype=torch.bool)
    used[together(clients).index] = True
    tables = digits().tables
    wrong = dict(tables) | {"y": torch.where(used, tables["y"], (tables["y"] + 1) % 10)}
    fooled = {i: Data(*(Rows(wrong, r.index) for r in (d.train, d.valid, d.test))) for i, d in clients.items()}
    for name in ("fedavg", "scaffold", "fedbn"):
        assert same(run(name, clients, 2, bench=bench()).state, run(name, fooled, 2, bench=bench()).state)


def test_learning_happens() -> None:
    found = run("fedavg", skewed(rows=800), 10, local=SGD(lr=0.2, batch=16), bench=bench())
    losses = [r["loss"] for r in found.rounds[1:]]
    assert losses[-1] < losses[0] / 2
    assert found.summary["global_accuracy"] > 0.75
    assert all(a != b for a, b in pairwise(losses))


def test_a_bare_vector_is_a_network_too() -> None:
    assert Task(Vector([1.0, 2.0])).size() == 2
