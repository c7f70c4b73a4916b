"""A hub from start to end: its port, its queue and its metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kilter.hub.config import HubConfig
from kilter.hub.hub import Hub
from kilter.hub.service import HubService
from kilter.net.revocation import revocation_list
from kilter.net.tls import Identity


async def serve_hub(config: HubConfig, say: Callable[[str], None]) -> None:
    """Until cancelled. Sites and runs resume when it starts again."""
    os.umask(0o077)
    identity = Identity.read(config.tls)
    service = HubService(Hub(config), identity, revocation_list(config.revoked, identity))
    server, port = await service.open(config.listen)
    say(f"Hub {identity.name} listens on {config.listen.rpartition(':')[0]}:{port}; state in {config.state}")
    try:
        await service.hub.run()
    finally:
        await server.stop(0.5)
        await asyncio.sleep(0)
