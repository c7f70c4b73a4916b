"""The commands of a network: serve, join, peer, status. They import gRPC only when they run."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kilter.commands.experiment_options import Command, experiment_options, stops_with, typed_options
from kilter.commands.experiment_options import stdout as out
from kilter.commands.network_log import LogFile, LogJson, prepare
from kilter.commands.network_options import (
    Deadline,
    Device,
    GiveUp,
    Grace,
    Insecure,
    Largest,
    Linger,
    Metrics,
    MetricsTls,
    MetricsToken,
    PeerDeadline,
    PeerGrace,
    Policy,
    PublicRows,
    Quiet,
    RunFolder,
    StateDir,
    Tls,
)
from kilter.errors import Malformed, Mistake, unknown
from kilter.net import LARGEST
from kilter.options import TABLE_SETTINGS

if TYPE_CHECKING:
    from kilter.core import Rows
    from kilter.data import Preparation, Schema
    from kilter.experiment import Experiment
    from kilter.net.metrics import MetricsPort
    from kilter.net.peer_run import PeerRun
    from kilter.net.policy import SitePolicy
    from kilter.net.site import Site
    from kilter.net.tls import Identity

AGAIN = "Start it again with the same options to resume."


def serve(
    file: Annotated[Path, typer.Argument(help="An experiment file.")],
    listen: Annotated[str, typer.Option(help="Address and port.")] = "127.0.0.1:9443",
    tls_: Tls = None,
    sites: Annotated[
        str, typer.Option(help="Who may take part, by certificate name; default: the first sites to connect.")
    ] = "",
    quorum: Annotated[
        int,
        typer.Option(
            help="Fewest sites to begin and to go on with; default: all to begin, half to go on.",
            show_default=False,
            min=0,
        ),
    ] = 0,
    deadline: Deadline = 600.0,
    grace: Grace = 30.0,
    linger: Linger = 60.0,
    data: Annotated[
        str, typer.Option(help="The server's data (common test set, public rows); none: it has none.")
    ] = "",
    folder: RunFolder = "",
    largest: Largest = LARGEST,
    metrics: Metrics = "",
    metrics_tls: MetricsTls = None,
    metrics_token: MetricsToken = None,
    revoked: Annotated[
        Path | None, typer.Option(help="The authority's list of revoked certificates.", show_default=False)
    ] = None,
    dashboard: Annotated[
        str, typer.Option(help="HOST:PORT of a live page about this run and its sites.", show_default=False)
    ] = "",
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Show what the sites share about their tables, and do not train.")
    ] = False,
    insecure: Insecure = False,
    log_file: LogFile = None,
    log_json: LogJson = False,
    quiet: Quiet = False,
) -> None:
    """Lead a run with real sites. Start it again with the same options to resume."""
    from kilter.experiment import Experiment
    from kilter.net import tls
    from kilter.net.grpc_server import GrpcServer
    from kilter.net.revocation import revocation_list
    from kilter.net.server_run import ServerRun
    from kilter.report.dashboard import address_of
    from kilter.runtimes.interrupts import stoppable

    prepare(quiet, log_file, log_json)
    port = _metrics_port(metrics, metrics_tls, metrics_token)
    if dashboard:
        address_of(dashboard)
    identity = tls.identity(tls_, insecure, listen, role="server")
    run = ServerRun(Experiment.read(file), tls.words(sites), quorum, deadline, grace, data, folder, inspect, linger)
    server = GrpcServer(listen, identity, run.sites or None, largest, revocation_list(revoked, identity))
    me = identity.name if identity else "server"
    out.print(f"Listening on {listen.rpartition(':')[0]}:{server.port} as {me}; run folder {run.where}")
    with stops_with(AGAIN), stoppable():
        run.run(server, me, out, port, dashboard)


def _metrics_port(address: str, tls_: Path | None, token: Path | None) -> MetricsPort | None:
    """Where to serve metrics; None: nowhere."""
    from kilter.net.metrics import MetricsPort

    if not address:
        return None
    port = MetricsPort(address, tls_, token)
    port.check()
    return port


def site_policy(
    policy: Path | None, allow_methods: str, allow_steps: str, trust: list[str] | None, weights: str
) -> SitePolicy:
    """The policy file, narrowed by options of the command line."""
    from kilter.net.policy import SitePolicy, narrowed
    from kilter.net.tls import words

    read = replace(SitePolicy.read(policy), files=tuple(trust or ()), weights=weights)
    return narrowed(read, words(allow_methods), words(allow_steps))


def ask_at_terminal(lines: list[str]) -> bool:
    """Show the terms, and ask whether to approve them."""
    for line in lines:
        out.print(line, markup=False)
    return typer.confirm("Approve these terms?", default=False)


def join(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    data: Annotated[str, typer.Option(help="This site's data: a .csv, .parquet, .npz or folder.")],
    tls_: Tls = None,
    state_dir: StateDir = Path("kilter-state"),
    name: Annotated[str, typer.Option(help="My name (only with --insecure).", show_default=False)] = "",
    server_name: Annotated[str, typer.Option(help="The name in the server's certificate.")] = "server",
    policy: Policy = None,
    approve: Annotated[list[str] | None, typer.Option(help="A digest of terms to approve.")] = None,
    allow_methods: Annotated[str, typer.Option(help="Only these methods of the policy.")] = "",
    allow_steps: Annotated[str, typer.Option(help="Only these steps.")] = "",
    trust: Annotated[list[str] | None, typer.Option(help="A file of my own, file.py:Name, that may run.")] = None,
    weights: Annotated[str, typer.Option(help="This site's copy of the pre-trained weights.", show_default=False)] = "",
    public: PublicRows = "",
    give_up: GiveUp = 86400.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the terms and what would leave; send nothing.")
    ] = False,
    job: Annotated[int, typer.Option(help="At a hub: the run to take part in.", show_default=False, min=0)] = 0,
    approvals: Annotated[
        Path | None, typer.Option(help="Folder of the approvals; default: --state-dir.", show_default=False)
    ] = None,
    device: Device = "cpu",
    largest: Largest = LARGEST,
    insecure: Insecure = False,
    log_file: LogFile = None,
    log_json: LogJson = False,
    quiet: Quiet = False,
    **table: object,
) -> None:
    """Take part as a site: dial out to a server, train here, send what the steps return."""
    from kilter import data as kdata
    from kilter.experiment import Experiment
    from kilter.net import tls
    from kilter.net.ports import check_server_address
    from kilter.net.site import Site
    from kilter.runtimes.devices import parse

    prepare(quiet, log_file, log_json)
    identity = tls.identity(tls_, insecure, check_server_address(server))
    allowed = site_policy(policy, allow_methods, allow_steps, trust, weights)
    me, ask = _site_name(identity, name), ask_at_terminal if sys.stdin.isatty() else None
    reading, (where, *_) = Experiment.of(typed_options(table)), parse(device)
    options = reading.table_options()
    dataset = kdata.load(data, schema=_columns(reading.schema), table=options, prepare=False)
    site = Site(me, dataset, state_dir, allowed, data, identity, largest, ask, server_name, options, where, job=job)
    if approvals is not None:
        site.share_approvals(approvals)
    site.public = _public(public, dataset.classes)
    for digest in approve or ():
        site.approvals.add(digest, "--approve")
    _take_part(site, server, give_up, dry_run)


def _take_part(site: Site, server: str, give_up: float, dry_run: bool) -> None:
    """Rehearse, or stay with the server until the run is over."""
    from kilter.net.dry_run import rehearse
    from kilter.net.limits import limit_memory, limit_processes
    from kilter.net.site_client import attend
    from kilter.records.versions import versions
    from kilter.runtimes.interrupts import stoppable

    versions()  # asks git and uname once, before the limit
    limit_memory(site.policy.memory_mb)
    limit_processes(site.policy.processes)
    if dry_run:
        asyncio.run(rehearse(site, server, lambda line: out.print(line, markup=False, soft_wrap=True)))
        return
    with stops_with(AGAIN), stoppable(signal.SIGTERM):  # asyncio handles Ctrl-C itself
        asyncio.run(attend(site, server, give_up))


def _columns(path: str) -> Schema | None:
    """The columns that --schema names. How they are prepared, all sites of a run decide together."""
    from kilter.data.preparation import Preparation, read_schema

    schema = read_schema(path) if path else None
    return schema.schema if isinstance(schema, Preparation) else schema


def _site_name(identity: Identity | None, name: str) -> str:
    from kilter.net.fields import check_name

    if identity is None and not name:
        raise Mistake("Without a certificate a site must give its name: --name.")
    if identity is not None and name and name != identity.name:
        raise Mistake(f"This certificate's name is '{identity.name}', not '{name}'.")
    try:
        return check_name(identity.name if identity else name)
    except Malformed as e:
        raise Mistake(f"{e}.") from None


def peer(
    me: Annotated[str, typer.Option(help="My name in the list of peers, and in my certificate.")],
    peers: Annotated[Path, typer.Option(help="A TOML file: experiment = ..., and [peers] with NAME = HOST:PORT.")],
    data: Annotated[str, typer.Option(help="This site's data: a .csv, .parquet, .npz or folder.")],
    tls_: Tls = None,
    listen: Annotated[
        str, typer.Option(help="Where to listen; default: my line in the list.", show_default=False)
    ] = "",
    quorum: Annotated[
        int, typer.Option(help="Fewest peers to begin with; default: all.", show_default=False, min=0)
    ] = 0,
    deadline: PeerDeadline = 600.0,
    grace: PeerGrace = 30.0,
    folder: RunFolder = "",
    public: PublicRows = "",
    policy: Policy = None,
    device: Device = "cpu",
    largest: Largest = LARGEST,
    metrics: Metrics = "",
    metrics_tls: MetricsTls = None,
    metrics_token: MetricsToken = None,
    insecure: Insecure = False,
    log_file: LogFile = None,
    log_json: LogJson = False,
    quiet: Quiet = False,
    **table: object,
) -> None:
    """Take part as a peer, without a server: every site aggregates with its neighbours, or the sites aggregate in turn."""
    from kilter.data.preparation import read_schema
    from kilter.experiment import Experiment
    from kilter.net import tls
    from kilter.net.peer_run import PeerRun
    from kilter.runtimes.interrupts import stoppable

    prepare(quiet, log_file, log_json)
    port = _metrics_port(metrics, metrics_tls, metrics_token)
    experiment, addresses, classes, schema = _read_peers(peers, me)
    reading = Experiment.of({**asdict(experiment), **typed_options(table)})
    schema = read_schema(reading.schema) if reading.schema else schema
    listen = listen or addresses[me]
    identity = tls.identity(tls_, insecure, listen)
    if identity and identity.name != me:
        raise Mistake(f"--me is '{me}', and the certificate's name is '{identity.name}'.")
    allowed = site_policy(policy, "", "", None, experiment.weights)
    run = PeerRun(experiment, me, addresses, data, classes, folder, allowed, schema, reading.table_options())
    rows = _public(public, run.description.classes)
    if run.rotates:
        _take_turns(run, listen, identity, largest, rows, (quorum, deadline, grace), device, port)
        return
    with run.open(listen, identity, largest, rows, quorum, deadline, grace) as fed:
        host = listen.rpartition(":")[0]
        fed.set_device(device)
        out.print(f"Listening on {host}:{fed.transport.port} as {me}; run folder {run.where}")
        with stops_with(AGAIN), stoppable():
            run.run(fed, out, port)


def _take_turns(
    run: PeerRun,
    listen: str,
    identity: Identity | None,
    largest: int,
    public: Rows | None,
    waits: tuple[int, float, float],
    device: str,
    metrics: MetricsPort | None,
) -> None:
    """Take part where sites aggregate in turn."""
    from kilter.net.rotating_peer import RotatingPeer
    from kilter.net.turns import Waits
    from kilter.runtimes.devices import parse
    from kilter.runtimes.interrupts import stoppable

    peer = RotatingPeer(run, listen, identity, largest, public, Waits(*waits), parse(device)[0])
    out.print(f"Listening on {listen.rpartition(':')[0]}:{peer.links.port} as {run.me}; run folder {run.where}")
    with stoppable():
        peer.attend(out, metrics)


def _read_peers(
    path: Path, me: str
) -> tuple[Experiment, dict[str, str], list[str] | None, Schema | Preparation | None]:
    """The experiment, everyone's address, and the class names and the schema if the file names them."""
    from kilter.data.preparation import read_schema
    from kilter.experiment import Experiment
    from kilter.records.toml_file import read_toml

    listed = read_toml(path)
    addresses, classes = listed.get("peers"), listed.get("classes")
    if not isinstance(addresses, dict) or not all(isinstance(a, str) for a in addresses.values()):
        raise Mistake(f"'{path}' needs a table [peers] with a line NAME = \"HOST:PORT\" for each.")
    if me not in addresses:
        raise unknown("peer", me, addresses)
    experiment = Experiment.read(path.parent / str(listed.get("experiment", "experiment.toml")))
    if experiment.patience:
        raise Mistake("Peers cannot stop early together, as nobody sees everyone's score: set patience = 0.")
    schema = read_schema(path.parent / str(listed["schema"])) if "schema" in listed else None
    return experiment, addresses, classes if isinstance(classes, list) else None, schema


def _public(path: str, classes: tuple[str, ...]) -> Rows | None:
    """All training rows of a file: what an aggregator may hold."""
    from kilter import data as kdata
    from kilter.core import Rows

    if not path:
        return None
    dataset = kdata.load(path, classes=classes)
    return Rows({"x": dataset.x, "y": dataset.y}, dataset.train)


def status(
    server: Annotated[str, typer.Option(help="HOST:PORT of a server or peer.")],
    tls_: Tls = None,
    server_name: Annotated[str, typer.Option(help="The name in its certificate.")] = "server",
    insecure: Insecure = False,
) -> None:
    """Show a running server or peer: its round, who is connected, the last error, the traffic."""
    import grpc

    from kilter.net import tls
    from kilter.net.frames import OPTIONS
    from kilter.net.grpc_server import STATUS
    from kilter.net.ports import check_server_address

    me = tls.identity(tls_, insecure, check_server_address(server))
    options = [*OPTIONS, ("grpc.ssl_target_name_override", server_name)]
    channel = grpc.secure_channel(server, me.for_client(), options) if me else grpc.insecure_channel(server, OPTIONS)
    with channel:
        try:
            report = json.loads(channel.unary_unary(STATUS)(b"", timeout=10))
        except grpc.RpcError as e:
            raise Mistake(f"'{server}' does not answer: {(e.details() or e.code().name).splitlines()[0]}.") from None
    for key, value in report.items():
        out.print(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    from kilter.commands import certs, site

    certs.register(app)
    readers = [experiment_options(command, TABLE_SETTINGS) for command in (join, peer)]
    commands: list[Command] = [serve, *readers, status, site.approve, site.audit]
    for command in commands:
        app.command()(command)
