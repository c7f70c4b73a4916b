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

from kilter.engines.flower_transport import FlowerTransport, letter_in
from kilter.engines.settings import RunSettings, make_site
from kilter.engines.site_endpoint import answer_letter, refuse
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
    """Lead the run. Flower records it as finished when this returns, and as failed when it raises."""
    log_to_stderr()
    run = RunSettings.read(context.run_config).server_run()
    transport = FlowerTransport(grid, envelope, run.sites, run.deadline)
    run.run(transport, "server", Console(file=sys.stderr, highlight=False))


def visit(message: Message, context: Context) -> Message:
    """Answer one letter of the server, as the site that the node-config describes."""
    log_to_stderr()
    try:
        name = str(context.node_config.get("name", ""))
        if not name:
            raise Mistake("The node-config must give the site's name, as it is registered at the SuperLink.")
        site = make_site(context.node_config, name)
        letter = answer_letter(site, letter_in(message.content))
        site.close()  # before the answer goes out: the next message may come at once, to another process
    except Exception as e:
        letter = refuse("its settings do not work; see that site's log", e)
    return Message(enclosed(letter), reply_to=message)


def log_to_stderr() -> None:
    """Our log, next to Flower's."""
    logger = logging.getLogger("kilter.net")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.setLevel(logging.INFO)
        logger.propagate = False


server = ServerApp()
client = ClientApp()
server.main()(main)
client.query("kilter")(visit)
