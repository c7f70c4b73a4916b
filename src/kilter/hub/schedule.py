"""Which runs to start, to suspend and to give up: a function of the queue and of what the agents say, without side effects.

A run starts when enough of its sites are connected, agree, and have room for one more run. Older runs come first, but a run that
waits for its sites blocks nobody. A run that has lost its quorum for longer than the hub's patience is suspended: its process
stops, and the run resumes from its checkpoint when its sites are back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kilter.hub.job_queue import QueuedJob
from kilter.hub.messages import SiteReport

BLOCKED = ("pending", "refused", "failing")  # states in which a site does not take part in a run


@dataclass(frozen=True)
class AgentView:
    """A connected agent: how many runs it takes at once, and how each run is there."""

    parallel: int
    reports: Mapping[int, SiteReport] = field(default_factory=dict)

    def blocks(self, job: int) -> SiteReport | None:
        """Why this site does not take part in a run; None: it does, or would."""
        report = self.reports.get(job)
        return report if report is not None and report.state in BLOCKED else None


Action = Literal["start", "suspend", "fail", "wait", "queue"]  # wait: for sites; queue: for a free place


@dataclass(frozen=True)
class Decision:
    """What to do about one job; jobs without a decision stay as they are."""

    job: QueuedJob
    action: Action
    reason: str = ""


@dataclass
class Room:
    """Free places: of the hub, and of every agent."""

    hub: int
    agents: dict[str, int]

    def take(self, sites: Sequence[str]) -> None:
        self.hub -= 1
        for name in sites:
            self.agents[name] -= 1


def decide(
    jobs: Sequence[QueuedJob],
    running: Mapping[int, float],
    agents: Mapping[str, AgentView],
    parallel: int,
    patience: float,
) -> list[Decision]:
    """What to do now. `jobs` are active, oldest first; `running`: for how many seconds each running job has lacked its quorum."""
    decisions = []
    room = Room(parallel, {name: agent.parallel for name, agent in agents.items()})
    for job in jobs:
        if job.id in running and job.kind != "study":
            stop = _stop(job, agents, lost_long=running[job.id] >= patience)
            if stop is not None:
                decisions.append(stop)
            else:
                room.take(present(job, agents))
    for job in jobs:
        if job.id in running:
            continue
        if job.kind == "study":
            decisions.append(Decision(job, "start"))
            continue
        if refusal := hopeless(job, agents):
            decisions.append(Decision(job, "fail", refusal))
            continue
        free = [name for name in present(job, agents) if room.agents[name] > 0]
        if len(present(job, agents)) < job.need:
            decisions.append(Decision(job, "wait", lacking(job, agents)))
        elif room.hub <= 0 or len(free) < job.need:
            decisions.append(Decision(job, "queue"))
        else:
            room.take(free)
            decisions.append(Decision(job, "start"))
    return decisions


def present(job: QueuedJob, agents: Mapping[str, AgentView]) -> list[str]:
    """The sites of a run that are connected and take part."""
    return [name for name in job.sites if name in agents and agents[name].blocks(job.id) is None]


def lacking(job: QueuedJob, agents: Mapping[str, AgentView]) -> str:
    """Why a run has no quorum."""
    reasons = [f"{name}: {report.why}" for name in job.sites if (report := _blocked(job, name, agents)) and report.why]
    away = [name for name in job.sites if name not in agents]
    if away:
        reasons.append(f"not connected: {', '.join(away)}")
    return f"{len(present(job, agents))} of {job.need} sites; {'; '.join(reasons)}"[:400]


def hopeless(job: QueuedJob, agents: Mapping[str, AgentView]) -> str:
    """Why a run can never have its quorum: too many sites refuse. Empty if it can."""
    refusals = [r for name in job.sites if (r := _blocked(job, name, agents)) and r.state == "refused"]
    if len(job.sites) - len(refusals) >= job.need:
        return ""
    names = [name for name in job.sites if (r := _blocked(job, name, agents)) and r.state == "refused"]
    return f"{names[0]} does not take part: {refusals[0].why}"[:400]


def _blocked(job: QueuedJob, name: str, agents: Mapping[str, AgentView]) -> SiteReport | None:
    return agents[name].blocks(job.id) if name in agents else None


def _stop(job: QueuedJob, agents: Mapping[str, AgentView], lost_long: bool) -> Decision | None:
    """Whether to stop a running job: too many sites refuse, wait for an approval, or have been away for long."""
    if refusal := hopeless(job, agents):
        return Decision(job, "fail", refusal)
    possible = sum(_blocked(job, name, agents) is None for name in job.sites)
    if possible < job.need or (lost_long and len(present(job, agents)) < job.need):
        return Decision(job, "suspend", lacking(job, agents))
    return None


def assignments(jobs: Sequence[QueuedJob], running: Sequence[int], site: str) -> tuple[list[int], list[int]]:
    """The runs that a site should take part in now, and its runs that wait."""
    mine = [job.id for job in jobs if job.kind != "study" and site in job.sites]
    return [j for j in mine if j in running], [j for j in mine if j not in running]
