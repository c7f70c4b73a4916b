"""What every runtime owes: chance by purpose, replies checked, letters counted, states kept, and no difference by workers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from talk import Talk, talking

from kilter.core import SERVER, Data, Each, Fit, Mail, Node, Params, Replies, Rows
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.records import wire
from kilter.records.types import NodeNote
from kilter.runtimes.simulation import Simulation, fingerprint
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import StepFailed, resolve, run_step
from kilter.train import SGD, Adam
from small import bench, constant, federation, linear_task, method, near, same, skewed

# map -----------------------------------------------------------------------------------------------------------------


def test_map_answers_in_the_order_of_the_ids_whatever_was_asked(workers: int) -> None:
    with talking(federation(workers=workers)) as fed:
        actual = fed.map(Talk().answer, "hi", to=["c3", "c0"])
        assert isinstance(actual, Replies)
        assert list(actual.items()) == [("c0", ("c0", "hi")), ("c3", ("c3", "hi"))]
        assert actual.of == 4
        assert list(fed.map(Talk().answer)) == ["c0", "c1", "c2", "c3"]
        assert fed.map(Talk().answer, to=[]) == {}


def test_each_gets_its_own(workers: int) -> None:
    with talking(federation(workers=workers)) as fed:
        actual = fed.map(Talk().answer, Each(c1=1, c2=torch.ones(2)))
        assert same(dict(actual), {"c1": ("c1", 1), "c2": ("c2", torch.ones(2))})


def test_only_steps_can_be_called(workers: int) -> None:
    with talking(federation(workers=workers)) as fed:
        for name in ("hidden", "setup", "__class__", "spread:hidden", "gather:hidden", "nothing"):
            with pytest.raises(Mistake, match=f"has no step '{name}'"):
                fed.call(StepName.parse(name))
    with pytest.raises(Mistake):
        resolve(Talk(), StepName("predict"))


def test_a_mistake_stays_a_mistake_and_a_bug_a_bug(workers: int) -> None:
    with talking(federation(workers=workers)) as fed:
        with pytest.raises(Mistake, match=r"^no such luck$"):
            fed.map(Talk().fail, to=["c1"])
        with pytest.raises(StepFailed, match=r"failed at every client: ValueError: a bug of ours .talk\.py, line"):
            fed.map(Talk().fail, to=["c2"])
        assert fed.map(Talk().answer, 1, to=["c2"]) == {"c2": ("c2", 1)}  # and the worker lives on


# Chance --------------------------------------------------------------------------------------------------------------


def draws(**options: Any) -> dict[str, list[float]]:
    clients = skewed()
    order = options.pop("order", list(clients))
    with talking(federation({i: clients[i] for i in order}, **options)) as fed:
        fed.round = options.get("round", 3)
        return {i: t.tolist() for i, t in fed.map(Talk().draw).items()}


def test_chance_is_by_seed_round_node_and_step_and_nothing_else() -> None:
    base = draws()
    assert len({tuple(v) for v in base.values()}) == 4
    for other in ({"workers": 2}, {"workers": 3}, {"order": ["c2", "c0", "c3", "c1"]}, {"topology": "ring"}):
        assert draws(**other) == base
    assert all(draws(seed=1)[i] != base[i] for i in base)
    with talking(federation()) as fed:
        fed.round = 4
        assert all(t.tolist() != base[i] for i, t in fed.map(Talk().draw).items())
        fed.round = 3
        fed.map(Talk().draw, to=["c1"])  # a call more or less changes nothing
        assert {i: t.tolist() for i, t in fed.map(Talk().draw).items()} == base


def test_cohorts() -> None:
    with talking(federation(skewed(10), seed=5)) as fed:
        seen: set[str] = set()
        rounds = []
        for fed.round in range(1, 30):
            chosen = fed.sample(0.3)
            assert len(chosen) == 3
            assert list(chosen) == sorted(chosen)
            assert chosen == fed.sample(0.3)
            seen |= set(chosen)
            rounds.append(chosen)
        assert seen == set(fed.ids)
        assert len(set(rounds)) > 10
        assert fed.sample(1.0) == fed.ids
        assert len(fed.sample(0.001)) == 1
        for bad in (0, -0.5, 1.5, float("nan")):
            with pytest.raises(Mistake, match="cohort"):
                fed.sample(bad)


def test_every_node_is_as_likely_in_a_cohort() -> None:
    with talking(federation(skewed(10))) as fed:
        counts = dict.fromkeys(fed.ids, 0)
        for fed.round in range(1000):
            for i in fed.sample(0.3):
                counts[i] += 1
        assert all(240 < n < 360 for n in counts.values())  # 300 +- 4 sigma


def test_a_cohort_does_not_depend_on_the_order_of_clients() -> None:
    clients = skewed(10)
    a = talking(federation(clients))
    b = talking(federation(dict(reversed(clients.items()))))
    for a.round in range(10):
        b.round = a.round
        assert set(a.sample(0.4)) == set(b.sample(0.4))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "solo"])
def test_clients_in_another_order_give_the_same_up_to_the_order_of_sums(name: str) -> None:
    clients = skewed()
    run = method(name, cohort=0.5)
    straight, mixed = federation(clients), federation({i: clients[i] for i in ["c2", "c0", "c3", "c1"]})
    one, two = federate(run, straight, 3), federate(run, mixed, 3)
    assert [sorted(r.participants) for r in one.rounds] == [sorted(r.participants) for r in two.rounds]
    if name == "solo":  # nothing is summed
        assert same(straight.states, {i: mixed.states[i] for i in straight.states})
    else:
        assert one.model is not None
        assert two.model is not None
        assert near(one.model, two.model, 1e-5)


# Mail ----------------------------------------------------------------------------------------------------------------


def test_letters_reach_whom_they_are_for(workers: int) -> None:
    with talking(federation(topology="ring", workers=workers)) as fed:
        mail = fed.map(Talk().write)
        assert isinstance(mail, Mail)
        actual = fed.map(Talk().read, mail)
        assert actual == {
            "c0": {"c1": "c1 to c0", "c3": "c3 to c0"},
            "c1": {"c0": "c0 to c1", "c2": "c2 to c1"},
            "c2": {"c1": "c1 to c2", "c3": "c3 to c2"},
            "c3": {"c0": "c0 to c3", "c2": "c2 to c3"},
        }
        record = fed.ledger.close()
        cost = 2 * wire.size("c0 to c1")
        assert record.bytes_by_node == dict.fromkeys(fed.ids, (cost, cost))
        assert record.bytes_up == record.bytes_down == 4 * cost


def test_whoever_wrote_nothing_is_not_heard_and_whoever_got_nothing_has_an_empty_box() -> None:
    with talking(federation(topology="ring")) as fed:
        actual = fed.map(Talk().read, fed.map(Talk().write, to=["c0"]))
        assert actual == {"c0": {}, "c1": {"c0": "c0 to c1"}, "c2": {}, "c3": {"c0": "c0 to c3"}}


def test_writing_to_a_stranger_is_a_bug() -> None:
    with talking(federation(topology="ring")) as fed:
        with pytest.raises(ValueError, match="c0 wrote to c2, who is not its neighbour"):
            fed.map(Talk().shout, to=["c0"])
        assert isinstance(fed.map(Talk().shout, to=["c1"]), Mail)


def test_letters_to_oneself_cost_nothing() -> None:
    with talking(federation(topology="ring")) as fed:
        assert fed.map(Talk().read, fed.map(Talk().shout, to=["c2"]), to=["c2"]) == {"c2": {"c2": "hello"}}
        assert fed.ledger.close().bytes_up == 0


# Notes --------------------------------------------------------------------------------------------------------------


def test_notes_are_on_record(workers: int) -> None:
    with talking(federation(workers=workers)) as fed:
        fed.map(Talk().note, to=["c1"])
        assert fed.ledger.close().notes == [NodeNote("c1", "note", "I am c1")]
        assert fed.ledger.close().notes == []


# What a node keeps ---------------------------------------------------------------------------------------------------


def test_state_stays_with_its_node_and_never_leaves(workers: int) -> None:
    with talking(federation(workers=workers)) as fed:
        assert fed.map(Talk().remember) == dict.fromkeys(fed.ids, 1)
        assert fed.map(Talk().remember, to=["c1"]) == {"c1": 2}
        assert fed.map(Talk().remember) == {"c0": 2, "c1": 3, "c2": 2, "c3": 2}
        record = fed.ledger.close()
        assert record.bytes_up < 1500  # nine letters with a number: the secret is 4000 bytes
        assert {i: s["seen"] for i, s in fed.states.items()} == {"c0": 2, "c1": 3, "c2": 2, "c3": 2}
        assert fed.changed == set(fed.ids)


@pytest.mark.parametrize(
    "how",
    [
        "s['new'] = 1",
        "s['n'] = 2",
        "s['w'] = s['w'].clone()",
        "s['w'] += 1",
        "s['deep']['w'][0].mul_(2)",
        "del s['w']",
        "s['new'] = {}",
        "s['deep']['list'] = []",
        "s['w'], s['v'] = s['v'], s['w']",
        "s['n'] = None",
        "v = s.pop('w'); shape = v.shape; del v; s['w'] = torch.zeros(shape)",  # may be given the old one's id
    ],
)
def test_every_change_of_state_is_noticed(workers: int, how: str) -> None:
    with talking(federation(workers=workers)) as fed:
        fed.map(Talk().mutate, "s.update(w=torch.ones(3), v=torch.zeros(3), n=1, deep={'w': [torch.ones(1)]})")
        fed.changed.clear()
        fed.map(Talk().mutate, "s['w'] + s['v']")
        assert fed.changed == set()
        fed.map(Talk().mutate, how, to=["c2"])
        assert fed.changed == {"c2"}
        expected: dict[str, Any] = {"w": torch.ones(3), "v": torch.zeros(3), "n": 1, "deep": {"w": [torch.ones(1)]}}
        assert same(fed.states["c1"], expected)
        exec(how, {"torch": torch, "s": expected})
        assert same(fed.states["c2"], expected)


def test_an_id_used_again_does_not_hide_a_change() -> None:
    state = {"w": torch.ones(3)}
    before = fingerprint(state)
    for _ in range(100):
        del state["w"]
        state["w"] = torch.zeros(3)
        assert fingerprint(state) != before
    assert fingerprint(state) == fingerprint(state)


def test_a_second_run_begins_on_a_clean_page() -> None:
    fed = federation(topology="rotating")
    first = federate(method("scaffold"), fed, 2)
    second = federate(method("scaffold"), fed, 2)
    assert same(first.state, second.state)
    assert first.summary.bytes_up == second.summary.bytes_up


# Fits ----------------------------------------------------------------------------------------------------------------


def test_a_step_may_ask_for_several_fits_and_gets_each_ones_own() -> None:
    task = linear_task([0.0])

    def two(node: Node, n: int) -> Generator[Fit, Params, list[float]]:
        actual = []
        for k in range(n):
            w = yield node.fit(lambda p, b, c: task.loss(p, b) * c, task.init(0), SGD(lr=1.0), ctx=float(k + 1))
            actual.append(w["w"].item())
        return actual

    nodes = [Node(f"n{g}", constant([[float(g)]])) for g in (1, 10)]
    done = run_step(two, nodes, [1, 3])
    assert [d.reply for d in done] == [[-1], [-10, -20, -30]]
    assert [len(d.fits) for d in done] == [1, 3]


# Bad federations -----------------------------------------------------------------------------------------------------


def test_federations_that_cannot_be() -> None:
    nothing = Rows({"x": torch.ones(3)}, torch.empty(0, dtype=torch.int64))
    some = Rows.of(x=torch.ones(3))
    with pytest.raises(Mistake, match="at least one client"):
        Simulation({})
    with pytest.raises(Mistake, match="'b' has no training rows"):
        Simulation({"a": Data(some, some, some), "b": Data(nothing, some, some)})
    with pytest.raises(Mistake, match="at least one worker"):
        Simulation({"a": Data(some, some, some)}, workers=0)


def test_adam_and_scaffold_do_not_go_together() -> None:
    with pytest.raises(Mistake, match="use SGD"):
        federate(method("scaffold", local=Adam()), federation(), 1)


def test_a_node_sees_its_own_data_peers_and_the_common_sets() -> None:
    fed = federation(topology="ring")
    node = fed.node("c1", StepName.spread("train"), 2, {})
    assert node.data is fed.clients["c1"]
    assert (node.peers, node.step, node.round) == (("c0", "c2"), "train", 2)
    hub = federation().node(SERVER, StepName("combine"), 1, {})
    assert len(hub.data.train) == 0
    assert hub.public is not None
    assert hub.bench is not None
    assert len(hub.bench) == len(bench())


def test_plans_are_frozen() -> None:
    with pytest.raises(AttributeError):
        method("fedavg").cohort = 0.5  # type: ignore[misc]
    assert replace(method("fedavg"), cohort=0.5).cohort == 0.5
