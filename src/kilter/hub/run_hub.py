"""Hubs and agents from start to end: ports, queue and metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kilter.hub.agent import Agent
from kilter.hub.config import HubConfig, SiteConfig
from kilter.hub.hub import Hub
from kilter.hub.hub_metrics import agent_unready, agent_values, hub_values
from kilter.hub.service import HubService
from kilter.net.metrics import MetricsPort, Values, publish
from kilter.net.revocation import revocation_list
from kilter.net.tls import ExpiryWatch, Identity, check_role


async def _values(hub: Hub, identity: Identity) -> Values:
    return hub_values(hub, identity)


async def _watch_expiry(identity: Identity) -> None:
    """Warn once a day from 30 days before a certificate expires; a renewed one ends the warnings."""
    watch = ExpiryWatch()
    while True:
        await asyncio.sleep(3600)
        identity = identity.renewed()
        watch.look(identity.name, identity.days_left())


def _metrics_port(config: HubConfig | SiteConfig) -> MetricsPort | None:
    """Where to serve metrics, checked before anything starts; None: nowhere."""
    if not config.metrics:
        return None
    port = MetricsPort(config.metrics, config.metrics_tls, config.metrics_token)
    port.check()
    return port


async def run_agent(config: SiteConfig) -> None:
    """Until cancelled. Runs resume when it starts again."""
    os.umask(0o077)
    metrics = _metrics_port(config)
    agent = Agent(config)
    check_role(agent.identity, "site")
    if metrics:
        publish(metrics, lambda: agent_values(agent), lambda: agent_unready(agent))
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.look_after_runs())
        group.create_task(agent.stay_connected())
        group.create_task(_watch_expiry(agent.identity))


async def serve_hub(config: HubConfig, say: Callable[[str], None]) -> None:
    """Until cancelled. Sites and runs resume when it starts again."""
    os.umask(0o077)
    metrics = _metrics_port(config)
    identity = Identity.read(config.tls)
    check_role(identity, "server")
    service = HubService(Hub(config), identity, revocation_list(config.revoked, identity))
    server, port = await service.open(config.listen)
    say(f"Hub {identity.name} listens on {config.listen.rpartition(':')[0]}:{port}; state in {config.state}")
    loop = asyncio.get_running_loop()

    def values() -> Values:
        """Read in the loop's thread, which owns the queue."""
        return asyncio.run_coroutine_threadsafe(_values(service.hub, identity), loop).result(5.0)

    if metrics:
        publish(metrics, values, lambda: service.hub.problem)
    watching = asyncio.create_task(_watch_expiry(identity))
    try:
        await service.hub.run()
    finally:
        watching.cancel()
        await server.stop(0.5)
        await asyncio.sleep(0)
