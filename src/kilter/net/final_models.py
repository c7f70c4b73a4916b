"""The final models of a finished run, for sites that were away when it ended.

The run folder keeps what they need: the last checkpoint, the best model and the model card. A site that connects within the time
hears the terms and receives its models, as the others did at the end of the run. `summary.json` lists who has received them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from rich.console import Console

from kilter.core import Method
from kilter.net.messages import Goodbye
from kilter.net.server import ServerRuntime
from kilter.net.transport import Transport
from kilter.records.model_info import CARD
from kilter.records.run_folder import Store, read_clients, read_summary

PAUSE = 0.2  # seconds between two looks at who is there


def hand_out_models(
    runtime: ServerRuntime, transport: Transport, method: Method, store: Store, seconds: float, out: Console
) -> None:
    """Wait this long for sites that lack the final models, and send them. Ctrl-C ends the wait."""
    missing = [name for name in runtime.ids if name not in read_summary(store.folder).received]
    if not missing or seconds <= 0:
        return
    out.print(
        f"{', '.join(missing)} did not receive the final models: waiting up to {seconds:g} s for them (Ctrl-C to stop).",
        markup=False,
        soft_wrap=True,
    )
    saved, card = store.load(), store.path(CARD)
    if saved is None:
        return
    runtime.bind(method)
    runtime.reopen(saved.at.round, saved.nodes)
    best, text = store.read_best(method.task.names), card.read_text() if card.exists() else ""

    def send(here: list[str]) -> None:
        received = runtime.distribute(method, saved.state, best, text, here)
        for failure in runtime.ledger.failures:
            transport.note(f"{failure.node} did not receive the final models: {failure.reason}")
        runtime.ledger.failures.clear()
        summary = read_summary(store.folder)
        store.finish(replace(summary, received=[*summary.received, *received]), read_clients(store.folder))

    try:
        dismiss(transport, missing, seconds, send)
    except KeyboardInterrupt:
        out.print("Stopped. Start the server again with the same options to send the models.")


def dismiss(
    transport: Transport, sites: Collection[str], seconds: float, first: Callable[[list[str]], None] | None = None
) -> None:
    """Tell sites that the run is finished, for so many seconds, or until all of these were told; call `first` before that.

    Other sites that are there are told at once.
    """
    waiting, until = set(sites), time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        with transport.changed:
            here = sorted(waiting & set(transport.sites))
            _say_goodbye(transport, set(transport.sites) - waiting)
            if not here:
                transport.changed.wait(PAUSE)
                continue
        if first is not None:
            first(here)
        with transport.changed:
            _say_goodbye(transport, here)
        waiting -= set(here)


def _say_goodbye(transport: Transport, names: Collection[str]) -> None:
    for name in names:
        if name in transport.sites:
            transport.send(name, Goodbye(True).head(), b"")
