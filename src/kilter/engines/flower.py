"""Kilter as a Flower app: `server` is its ServerApp, `client` its ClientApp (docs/engines.md has the commands).

A site's name is the one its key was registered under at the SuperLink (`flwr supernode register --name`), never what a message
says. A ClientApp lives for one message, so what a site keeps is on its own disk, where its node-config says.
"""

from __future__ import annotations

import logging
import sys

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from kilter.engines.flower_transport import GridDesk, opened
from kilter.engines.settings import lead_of, site_of
from kilter.engines.site_endpoint import answered, refusal
from kilter.errors import Mistake

log = logging.getLogger("kilter.net")

ASK = "query.kilter"  # Flower's type of all our messages


def enclosed(letter: bytes) -> RecordDict:
    """A letter as Flower carries it: an array of bytes, which it cuts into chunks."""
    return RecordDict({"letter": ArrayRecord({"bytes": Array("uint8", (len(letter),), "kilter", letter)})})


def envelope(letter: bytes, node: int, seconds: float) -> Message:
    """A letter to a node."""
    return Message(enclosed(letter), node, ASK, ttl=seconds)


# The two apps ---------------------------------------------------------------------------------------------------------


def main(grid: Grid, context: Context) -> None:
    """Lead the run; when this returns it is finished, and when it raises the run is on record as failed."""
    speak()
    lead = lead_of(context.run_config)
    desk = GridDesk(grid, envelope, lead.sites, lead.deadline)
    lead.run(desk, "server", Console(file=sys.stderr, highlight=False))


def visit(message: Message, context: Context) -> Message:
    """One letter of the server, answered by the site that the node-config describes."""
    speak()
    try:
        name = str(context.node_config.get("name", ""))
        if not name:
            raise Mistake("The node-config must say the site's name, as it is registered at the SuperLink.")
        site = site_of(context.node_config, name)
        letter = answered(site, opened(message.content))
        if site.keep is not None:
            site.keep.close()  # before the answer goes out: the next message may come at once, to another process
    except Exception as e:
        letter = refusal("its settings do not work; see that site's log", e)
    return Message(enclosed(letter), reply_to=message)


def speak() -> None:
    """Our log, beside Flower's."""
    logger = logging.getLogger("kilter.net")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.setLevel(logging.INFO)
        logger.propagate = False


server = ServerApp()
client = ClientApp()
server.main()(main)
client.query("kilter")(visit)
