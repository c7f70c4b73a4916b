"""The commands of a network: certs, serve, join, peer, status. `kilter.cli` only puts them on its list."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kilter.errors import Mistake
from kilter.net import LARGEST

Tls = Annotated[Path | None, typer.Option("--tls", help="folder with key.pem, cert.pem, ca.pem", show_default=False)]
Insecure = Annotated[bool, typer.Option("--insecure", help="no TLS: anyone may say any name; loopback only")]
Largest = Annotated[int, typer.Option(help="most bytes in a letter")]
Quiet = Annotated[bool, typer.Option("--quiet", help="log only what goes wrong")]


def certs_new(
    out_: Annotated[Path, typer.Option("--out", help="folder for the authority and one folder a name")],
    names: Annotated[str, typer.Option(help="who gets a key and a certificate: server,hospital-a,...")],
    days: Annotated[int, typer.Option(help="how long they are valid")] = 365,
) -> None:
    """An authority, keys and certificates for trying out."""
    tls = _part("tls")
    for folder in tls.new(out_, tls.words(names), days):
        typer.echo(f"{folder}: key.pem, cert.pem, ca.pem")
    typer.echo(f"{out_ / 'ca.key.pem'} makes more of them: keep it away from every site.")


def serve(
    file: Annotated[Path, typer.Argument(help="an experiment file")],
    listen: Annotated[str, typer.Option(help="address and port")] = "127.0.0.1:9443",
    tls_: Tls = None,
    sites: Annotated[
        str, typer.Option(help="who may take part, by certificate name; default: who makes the quorum")
    ] = "",
    quorum: Annotated[
        int, typer.Option(help="fewest sites to begin and go on with; default: all", show_default=False)
    ] = 0,
    deadline: Annotated[float, typer.Option(help="seconds a site has for a step")] = 600.0,
    grace: Annotated[float, typer.Option(help="seconds to wait for a site whose stream is lost")] = 30.0,
    data: Annotated[str, typer.Option(help="the server's data (common test set, public rows); none: it has none")] = "",
    folder: Annotated[
        str, typer.Option("--out", help="the run folder; the same again goes on with it", show_default=False)
    ] = "",
    largest: Largest = LARGEST,
    metrics: Annotated[str, typer.Option(help="address and port for Prometheus", show_default=False)] = "",
    insecure: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with real sites: wait for a quorum, then round after round. Started again, it goes on."""
    _part("entry").serve(**locals())


def join(
    server: Annotated[str, typer.Option(help="host:port of the server")],
    data: Annotated[str, typer.Option(help="this site's data: a .npz, .csv or folder")],
    tls_: Tls = None,
    state_dir: Annotated[Path, typer.Option(help="where this site keeps its state between steps")] = Path(
        "kilter-state"
    ),
    name: Annotated[str, typer.Option(help="my name (only with --insecure)", show_default=False)] = "",
    server_name: Annotated[str, typer.Option(help="the name in the server's certificate")] = "server",
    allow_methods: Annotated[str, typer.Option(help="methods this site runs; default: all that are installed")] = "",
    allow_steps: Annotated[str, typer.Option(help="steps this site runs; default: all of the method's")] = "",
    trust: Annotated[list[str] | None, typer.Option(help="a file of my own, file.py:Name, that may be run")] = None,
    weights: Annotated[str, typer.Option(help="this site's copy of the pre-trained weights", show_default=False)] = "",
    give_up: Annotated[float, typer.Option(help="seconds after which a server that is away is given up")] = 86400.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what each step would send, and send nothing")
    ] = False,
    largest: Largest = LARGEST,
    insecure: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """This site: dial out to a server, train here, send what the steps return."""
    _part("entry").join(**locals())


def peer(
    me: Annotated[str, typer.Option(help="my name in the list of peers, and in my certificate")],
    peers: Annotated[Path, typer.Option(help="a TOML file: experiment = ..., and [peers] with NAME = HOST:PORT")],
    data: Annotated[str, typer.Option(help="this site's data: a .npz, .csv or folder")],
    tls_: Tls = None,
    listen: Annotated[str, typer.Option(help="where to listen; default: my line in the list", show_default=False)] = "",
    quorum: Annotated[int, typer.Option(help="fewest peers to begin with; default: all", show_default=False)] = 0,
    deadline: Annotated[float, typer.Option(help="seconds to wait for a neighbour's letter")] = 600.0,
    grace: Annotated[float, typer.Option(help="seconds to wait for a neighbour that cannot be reached")] = 30.0,
    folder: Annotated[
        str, typer.Option("--out", help="the run folder; the same again goes on with it", show_default=False)
    ] = "",
    public: Annotated[str, typer.Option(help="a file of rows that whoever aggregates may hold")] = "",
    largest: Largest = LARGEST,
    metrics: Annotated[str, typer.Option(help="address and port for Prometheus", show_default=False)] = "",
    insecure: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """This site as a peer: no server at all, everyone trains and aggregates with its neighbours."""
    _part("entry").peer(**locals())


def status(
    server: Annotated[str, typer.Option(help="host:port of a server or peer")],
    tls_: Tls = None,
    server_name: Annotated[str, typer.Option(help="the name in its certificate")] = "server",
    insecure: Insecure = False,
) -> None:
    """A running server or peer: its round, who is here, the last error, the traffic."""
    _part("entry").status(**locals())


def _part(name: str) -> Any:
    """A part of the network; it needs libraries that not everyone has, and the other commands do not wait for them."""
    try:
        return importlib.import_module(f"kilter.net.{name}")
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] not in ("grpc", "cryptography"):
            raise
        raise Mistake(f"The network needs the library {e.name}: `pip install 'kilter[net]'`.") from None


def register(app: typer.Typer) -> None:
    """Put the commands on the command line's list."""
    certs = typer.Typer(help="Keys and certificates.", no_args_is_help=True)
    certs.command("new")(certs_new)
    app.add_typer(certs, name="certs")
    commands: list[Callable[..., None]] = [serve, join, peer, status]
    for command in commands:
        app.command()(command)
