"""The schedule: within all limits, oldest first, and nobody waits for a run that cannot start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.hub.job_queue import QueuedJob, RunOptions
from kilter.hub.messages import SiteReport
from kilter.hub.schedule import AgentView, assignments, decide, present

SITES = ("a", "b", "c")


def job(number: int, sites: tuple[str, ...] = SITES, quorum: int = 0, **changes: Any) -> QueuedJob:
    values: dict[str, Any] = {"kind": "experiment", "parent": 0, "key": "", "name": "x", "owner": "alice", "spec": ""}
    values |= {"options": RunOptions(), "rounds": 1, "state": "queued", "reason": "", "attempts": 0}
    values |= {"submitted": "", "started": "", "ended": "", **changes}
    return QueuedJob(id=number, sites=sites, quorum=quorum, **values)


def agents(*names: str, parallel: int = 1, **reports: SiteReport) -> dict[str, AgentView]:
    return {name: AgentView(parallel, {r.job: r for r in [reports[name]]} if name in reports else {}) for name in names}


def actions(*args: Any, parallel: int = 5, patience: float = 60.0) -> dict[int, str]:
    jobs, running, connected = args
    return {d.job.id: d.action for d in decide(jobs, running, connected, parallel, patience)}


def test_a_run_starts_when_its_sites_are_there() -> None:
    assert actions([job(1)], {}, agents("a", "b")) == {1: "wait"}
    assert actions([job(1)], {}, agents("a", "b", "c")) == {1: "start"}
    assert actions([job(1, quorum=2)], {}, agents("a", "b")) == {1: "start"}


def test_a_run_that_waits_blocks_nobody() -> None:
    assert actions([job(1), job(2, ("a", "b"))], {}, agents("a", "b")) == {1: "wait", 2: "start"}


def test_runs_take_turns_at_a_site_that_has_room_for_one() -> None:
    assert actions([job(1), job(2)], {}, agents(*SITES)) == {1: "start", 2: "queue"}
    assert actions([job(1), job(2)], {}, agents(*SITES, parallel=2)) == {1: "start", 2: "start"}
    assert actions([job(1), job(2)], {}, agents(*SITES, parallel=2), parallel=1) == {1: "start", 2: "queue"}


def test_a_run_that_lost_its_quorum_makes_room_after_a_while() -> None:
    waiting = [job(1), job(2, ("a",))]
    assert actions(waiting, {1: 59.0}, agents("a")) == {2: "queue"}
    assert actions(waiting, {1: 61.0}, agents("a")) == {1: "suspend", 2: "start"}


def test_a_site_that_waits_for_an_approval_suspends_the_run_at_once() -> None:
    pending = SiteReport(1, "pending", "its terms wait for an approval")
    (decision,) = decide([job(1)], {1: 0.0}, agents(*SITES, b=pending), 5, 60.0)
    assert (decision.action, "b: its terms wait" in decision.reason) == ("suspend", True)
    assert actions([job(1)], {}, agents(*SITES, b=pending)) == {1: "wait"}


def test_a_refusal_fails_the_run_unless_a_quorum_is_left() -> None:
    refused = SiteReport(1, "refused", "only allows fedavg")
    for running in ({}, {1: 0.0}):
        (decision,) = decide([job(1)], running, agents(*SITES, b=refused), 5, 60.0)
        assert (decision.action, decision.reason) == ("fail", "b does not take part: only allows fedavg")
    assert actions([job(1, quorum=2)], {}, agents(*SITES, b=refused)) == {1: "start"}


def test_studies_need_no_room() -> None:
    assert actions([job(1, kind="study"), job(2)], {}, agents(*SITES), parallel=1) == {1: "start", 2: "start"}


def test_a_site_is_assigned_its_running_jobs_and_knows_the_others() -> None:
    jobs = [job(1), job(2), job(3, ("b",)), job(4, kind="study")]
    assert assignments(jobs, [1, 3], "a") == ([1], [2])


names = st.sampled_from(SITES)
some_sites = st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)
reports = st.dictionaries(st.integers(1, 8), st.sampled_from(["running", "pending", "refused", "failing"]), max_size=4)
connected = st.dictionaries(names, st.tuples(st.integers(1, 3), reports), max_size=3)


@given(
    sites=st.lists(st.tuples(some_sites, st.integers(0, 3)), max_size=8),
    there=connected,
    parallel=st.integers(1, 4),
    started=st.sets(st.integers(1, 8)),
)
def test_no_limit_is_ever_exceeded(
    sites: list[tuple[tuple[str, ...], int]],
    there: dict[str, tuple[int, dict[int, Any]]],
    parallel: int,
    started: set[int],
) -> None:
    jobs = [job(k, s, min(q, len(s))) for k, (s, q) in enumerate(sites, start=1)]
    views = {n: AgentView(p, {j: SiteReport(j, s) for j, s in r.items()}) for n, (p, r) in there.items()}
    running = {j.id: 0.0 for j in jobs if j.id in started and len(present(j, views)) >= j.need}
    decisions = {d.job.id: d.action for d in decide(jobs, running, views, parallel, 60.0)}
    now = [j for j in jobs if decisions.get(j.id) == "start"]
    stopped = [j for j in jobs if decisions.get(j.id) in ("suspend", "fail") and j.id in running]
    assert len(now) <= max(0, parallel - len(running) + len(stopped))
    for one in now:
        assert len(present(one, views)) >= one.need
        free = [
            n
            for n in present(one, views)
            if sum(n in present(j, views) for j in jobs if j.id in running and j not in stopped) < views[n].parallel
        ]
        assert len(free) >= one.need
    for one in jobs:  # oldest first: a younger run with the same wishes never overtakes
        for other in now:
            if one.id < other.id and (one.sites, one.quorum) == (other.sites, other.quorum) and one not in now:
                assert one.id in running or decisions[one.id] in ("fail", "wait")


@pytest.mark.parametrize("state", ["starting", "running", "finished"])
def test_other_states_of_a_site_do_not_block(state: Any) -> None:
    assert present(job(1), agents(*SITES, a=SiteReport(1, state))) == list(SITES)
