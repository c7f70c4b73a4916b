"""The metrics of hubs and agents, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hub_place import enrol

from kilter.hub import hub_metrics
from kilter.hub.agent import Agent, SiteRun
from kilter.hub.config import HubConfig, SiteConfig
from kilter.hub.hub import ConnectedAgent, Hub
from kilter.net import status
from kilter.net.metrics import MetricName, exposition
from kilter.net.tls import Identity

DASHBOARD = Path(__file__).parents[2] / "packaging/grafana/kilter.json"
METRICS = {m.sample for module in (hub_metrics, status) for m in vars(module).values() if isinstance(m, MetricName)}


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.read(enrol(tmp_path, "server", "server"))


def test_the_metrics_of_a_hub(tmp_path: Path, identity: Identity) -> None:
    hub = Hub(HubConfig(tmp_path / "server", ("a", "b"), state=tmp_path / "state"))
    hub.queue.add("experiment", "x", "alice", "", ["a"])
    hub.arrived(ConnectedAgent("a", 1, lambda assignment: None))
    hub.traffic["in"] += 7
    text = exposition(lambda: hub_metrics.hub_values(hub, identity)).decode()
    assert 'kilter_hub_jobs{state="queued"} 1.0' in text
    assert 'kilter_hub_jobs{state="failed"} 0.0' in text
    assert 'kilter_hub_agent_up{site="a"} 1.0' in text
    assert 'kilter_hub_agent_up{site="b"} 0.0' in text
    assert "kilter_hub_received_bytes_total 7.0" in text
    assert re.search(r"kilter_hub_certificate_days (89|90)\.", text)


def test_the_metrics_of_an_agent(tmp_path: Path, identity: Identity) -> None:
    agent = Agent(SiteConfig("hub:1", tmp_path / "server", "x.npz", state=tmp_path / "state"))
    agent.runs[3] = SiteRun(3, "pending")
    text = exposition(lambda: hub_metrics.agent_values(agent)).decode()
    assert 'kilter_agent_runs{state="pending"} 1.0' in text
    assert "kilter_agent_connected 0.0" in text
    assert hub_metrics.agent_unready(agent) == "not connected to the hub hub:1"
    agent.connected = True
    assert hub_metrics.agent_unready(agent) == ""


def test_every_metric_that_the_dashboard_queries_exists_and_every_metric_is_drawn() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queried = {name for query in queries for name in re.findall(r"kilter_[a-z_]+", query)}
    assert queried <= METRICS
    assert METRICS - queried == {"kilter_round"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
