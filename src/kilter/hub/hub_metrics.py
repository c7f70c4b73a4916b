"""The metrics of hubs and agents, and when they are ready."""

from __future__ import annotations

from typing import get_args

from kilter.hub.agent import Agent
from kilter.hub.hub import Hub
from kilter.hub.messages import SiteState, State
from kilter.net.metrics import MetricName, Values
from kilter.net.tls import Identity

JOBS = MetricName("kilter_hub_jobs", "Jobs by state.", label="state")
AGENT_UP = MetricName("kilter_hub_agent_up", "Whether the agent of a site is connected.", label="site")
JOB_ROUNDS = MetricName("kilter_hub_job_rounds", "Finished rounds of the runs that run now.", label="job")
RELAYED_IN = MetricName("kilter_hub_received_bytes", "Bytes passed on from sites to runs.", "counter")
RELAYED_OUT = MetricName("kilter_hub_sent_bytes", "Bytes passed on from runs to sites.", "counter")
CRASHES = MetricName("kilter_hub_crashes", "Crashes of processes of runs.", "counter")
HUB_CERTIFICATE = MetricName("kilter_hub_certificate_days", "Days until the hub's certificate expires.")
SITE_CERTIFICATE = MetricName(
    "kilter_hub_agent_certificate_days", "Days until the certificate of a connected agent expires.", label="site"
)
CONNECTED = MetricName("kilter_agent_connected", "Whether the agent is connected to its hub.")
RUNS = MetricName("kilter_agent_runs", "Runs at this site by state.", label="state")
AGENT_CERTIFICATE = MetricName("kilter_agent_certificate_days", "Days until the site's certificate expires.")


def hub_values(hub: Hub, identity: Identity) -> Values:
    counts = hub.queue.counts()
    running = {str(number): entry.job for number, entry in sorted(hub.running.items()) if entry.job.kind != "study"}
    return {
        JOBS: {state: counts.get(state, 0) for state in get_args(State)},
        AGENT_UP: {name: float(name in hub.agents) for name in hub.config.sites},
        JOB_ROUNDS: {number: hub.view(job).rounds for number, job in running.items()},
        RELAYED_IN: hub.traffic["in"],
        RELAYED_OUT: hub.traffic["out"],
        CRASHES: hub.crashes,
        SITE_CERTIFICATE: {n: days for n, a in hub.agents.items() if (days := a.days_left()) is not None},
        HUB_CERTIFICATE: identity.renewed().days_left(),
    }


def agent_values(agent: Agent) -> Values:
    states = [run.state for run in agent.runs.values()]
    return {
        CONNECTED: float(agent.connected),
        RUNS: {state: states.count(state) for state in get_args(SiteState)},
        AGENT_CERTIFICATE: agent.identity.days_left(),
    }


def agent_unready(agent: Agent) -> str:
    return "" if agent.connected else f"not connected to the hub {agent.config.hub}"
