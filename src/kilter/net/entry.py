"""What the commands of a network do."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path

import grpc
from rich.console import Console

from kilter import data as kdata
from kilter.core import Rows
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment, read_toml
from kilter.net import terms, tls
from kilter.net.frames import OPTIONS
from kilter.net.grpc_server import STATUS, Door
from kilter.net.peer import Peer
from kilter.net.peer_transport import Office
from kilter.net.server_run import Lead, rounds
from kilter.net.site import Site, attend
from kilter.net.status import Board
from kilter.net.terms import Facts, Willing
from kilter.net.tls import words
from kilter.records.run_folder import Store, write
from kilter.report.result import show_result
from kilter.runtimes.interrupts import stoppable

out = Console(highlight=False)


def serve(
    file: Path,
    listen: str,
    tls_: Path | None,
    sites: str,
    quorum: int,
    deadline: float,
    grace: float,
    data: str,
    folder: str,
    largest: int,
    metrics: str,
    insecure: bool,
    quiet: bool,
) -> None:
    """`kilter serve`"""
    _logging(quiet)
    experiment, me = Experiment.read(file), tls.identity(tls_, insecure, listen)
    lead = Lead(experiment, words(sites), quorum, deadline, grace, data, folder)
    door = Door(listen, me, lead.sites or None, largest)
    out.print(
        f"Listening on {listen.rpartition(':')[0]}:{door.port} as {me.name if me else 'anyone'}; run folder {lead.where}"
    )
    with stoppable():
        lead.run(door, me.name if me else "server", out, metrics)


def join(
    server: str,
    data: str,
    tls_: Path | None,
    state_dir: Path,
    name: str,
    server_name: str,
    allow_methods: str,
    allow_steps: str,
    trust: list[str] | None,
    weights: str,
    give_up: float,
    dry_run: bool,
    largest: int,
    insecure: bool,
    quiet: bool,
) -> None:
    """`kilter join`"""
    _logging(quiet)
    me = tls.identity(tls_, insecure, server)
    if me is None and not name:
        raise Mistake("Without a certificate a site must say its name: --name.")
    if me is not None and name and name != me.name:
        raise Mistake(f"This certificate's name is '{me.name}', not '{name}'.")
    willing = Willing(words(allow_methods), words(allow_steps), tuple(trust or ()), weights)
    site = Site(me.name if me else name, kdata.load(data), state_dir, willing, data, me, largest)
    if dry_run:
        from kilter.net.dry_run import rehearse

        asyncio.run(rehearse(site, server, server_name, out.print))
        return
    with stoppable(signal.SIGTERM):  # asyncio has its own way with Ctrl-C
        asyncio.run(attend(site, server, server_name, give_up))


def peer(
    me: str,
    peers: Path,
    data: str,
    tls_: Path | None,
    listen: str,
    quorum: int,
    deadline: float,
    grace: float,
    folder: str,
    public: str,
    largest: int,
    metrics: str,
    insecure: bool,
    quiet: bool,
) -> None:
    """`kilter peer`"""
    _logging(quiet)
    listed = read_toml(peers)
    addresses, classes = listed.get("peers"), listed.get("classes")
    if not isinstance(addresses, dict) or not all(isinstance(a, str) for a in addresses.values()):
        raise Mistake(f"'{peers}' needs a table [peers] with a line NAME = \"HOST:PORT\" for each.")
    if me not in addresses:
        raise unknown("peer", me, addresses)
    experiment = Experiment.read(peers.parent / str(listed.get("experiment", "experiment.toml")))
    if experiment.patience:
        raise Mistake("Peers cannot stop early together, as nobody sees everyone's score: set patience = 0.")
    listen = listen or addresses[me]
    identity = tls.identity(tls_, insecure, listen)
    if identity and identity.name != me:
        raise Mistake(f"--me is '{me}', and the certificate's name is '{identity.name}'.")
    dataset = kdata.load(data, classes=classes)
    facts = Facts.of(dataset)
    if facts.mean is not None:
        facts = replace(facts, mean=None, std=None)  # nobody knows everyone's
    where = Path(folder or f"runs/{Path(experiment.method.split(':')[0]).stem}-{me}-{experiment.seed}")
    if (where / "summary.json").exists():
        raise Mistake(f"'{where}' already holds a finished run: choose another --out.")
    store = Store(where)
    if not (where / "experiment.toml").exists():
        write(where / "experiment.toml", experiment.write())
    office = Office(me, addresses, listen, terms.agreement(experiment, facts, addresses), identity, largest)
    out.print(f"Listening on {listen.rpartition(':')[0]}:{office.port} as {me}; run folder {where}")
    fed = Peer(
        office,
        list(addresses),
        terms.own_data(dataset, me, experiment.seed, experiment.valid),
        topology=experiment.topology,
        seed=experiment.seed,
        public=_public(public, facts.classes) if public else None,
        deadline=deadline,
        grace=grace,
        quorum=quorum or None,
    )
    with fed:
        board = Board(me, fed, experiment.rounds, lambda: (fed.here(), dict(office.traffic), office.last_error))
        office.status = board.read
        if metrics:
            board.publish(metrics)
        with stoppable():
            rounds(experiment, facts, fed, store, board, out)
    show_result(where, out)


def _public(path: str, classes: tuple[str, ...]) -> Rows:
    """All training rows of a file: what whoever aggregates may hold."""
    found = kdata.load(path, classes=classes)
    return Rows({"x": found.x, "y": found.y}, found.train)


def status(server: str, tls_: Path | None, server_name: str, insecure: bool) -> None:
    """`kilter status`"""
    me = tls.identity(tls_, insecure, server)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", server_name)]
    channel = grpc.secure_channel(server, me.for_client(), options) if me else grpc.insecure_channel(server, OPTIONS)
    with channel:
        try:
            found = json.loads(channel.unary_unary(STATUS)(b"", timeout=10))
        except grpc.RpcError as e:
            raise Mistake(f"'{server}' does not answer: {(e.details() or e.code().name).splitlines()[0]}.") from None
    for key, value in found.items():
        out.print(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}", markup=False)


def _logging(quiet: bool) -> None:
    logger = logging.getLogger("kilter.net")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
