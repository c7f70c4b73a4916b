"""Options that the commands of a network and of a hub share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST_SECONDS = 1e9  # 31 years; an infinite time could not be written into a message


def seconds(help: str) -> object:
    """An option that is a time in seconds."""
    return typer.Option(help=help, min=0, max=MOST_SECONDS)


Tls = Annotated[Path | None, typer.Option("--tls", help="Folder with key.pem, cert.pem, ca.pem.", show_default=False)]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: names are not verified. Loopback only.")]
Largest = Annotated[int, typer.Option(help="Most bytes in a letter.", min=1)]
Device = Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda, cuda:1, mps or xpu.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log only problems.")]
Metrics = Annotated[str, typer.Option(help="HOST:PORT of metrics (Prometheus) and health checks.", show_default=False)]
MetricsTls = Annotated[Path | None, typer.Option(help="Folder with key.pem and cert.pem: metrics over HTTPS.")]
MetricsToken = Annotated[Path | None, typer.Option(help="File with the token that readers of metrics must send.")]
RunFolder = Annotated[str, typer.Option("--out", help="Run folder; reuse the folder to resume.", show_default=False)]
StateDir = Annotated[Path, typer.Option(help="Where this site keeps its state, approvals and audit log.")]
PublicRows = Annotated[str, typer.Option(help="A file of rows that every site may use when it aggregates.")]
Policy = Annotated[Path | None, typer.Option(help="This site's policy (site.toml).", show_default=False)]
Deadline = Annotated[float, seconds("Seconds a site has for a step.")]
Grace = Annotated[float, seconds("Seconds to wait for a site that lost its connection.")]
Linger = Annotated[float, seconds("Seconds after the end for sites that lack the final models.")]
GiveUp = Annotated[float, seconds("Stop retrying after this many seconds without the server.")]
PeerDeadline = Annotated[float, seconds("Seconds to wait for a neighbour's letter.")]
PeerGrace = Annotated[float, seconds("Seconds to wait for a neighbour that cannot be reached.")]
