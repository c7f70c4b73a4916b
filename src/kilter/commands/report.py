"""kilter report, dashboard and runs: look at runs and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilter.commands.experiment_options import Json, print_json, stdout, stops_with


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (report, dashboard, runs):
        app.command()(command)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, study folders, or folders that hold them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title. Default: the studies' names.", show_default=False)] = "",
) -> None:
    """Write one self-contained HTML page about runs and studies. It opens offline."""
    from kilter.report.html_report import write_report

    write_report(folders, out, title)
    stdout.print(f"Open {out} in a browser.", markup=False, soft_wrap=True)


def dashboard(
    folder: Annotated[Path, typer.Argument(help="A folder with runs and studies.")] = Path("."),
    listen: Annotated[str, typer.Option(help="HOST:PORT. Port 0 takes a free one.")] = "127.0.0.1:0",
) -> None:
    """Show all runs and studies of a folder live in a browser."""
    from kilter.report.dashboard import Dashboard, address_of

    server = Dashboard(folder, *address_of(listen))
    stdout.print(f"Open {server.address}", markup=False, soft_wrap=True)
    stdout.print("The address holds a secret token. Stop with Ctrl-C.")
    stdout.file.flush()
    with stops_with("The page shows nothing new from now on."), server:
        server.serve_forever()


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder with runs and studies.")] = Path("runs"),
    everything: Annotated[bool, typer.Option("--all", help="Also the runs of studies.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs and studies of a folder: state, progress, accuracy."""
    from dataclasses import asdict

    from kilter.report.run_list import RunList
    from kilter.report.run_table import run_table

    entries = RunList(folder).look()
    if not everything:
        studies = [f"{entry.folder}/" for entry in entries if entry.kind == "study"]
        entries = [entry for entry in entries if not entry.folder.startswith(tuple(studies))]
    if as_json:
        print_json([asdict(entry) for entry in entries])
    elif entries:
        stdout.print(run_table(entries))
    else:
        stdout.print(f"There are no runs in '{folder}'.", markup=False)
