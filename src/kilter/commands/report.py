"""kilter report: a page about runs and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilter.commands.experiment_options import stdout


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(report)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, study folders, or folders that hold them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title. Default: the studies' names.", show_default=False)] = "",
) -> None:
    """Write one self-contained HTML page about runs and studies. It opens offline."""
    from kilter.report.html_report import write_report

    write_report(folders, out, title)
    stdout.print(f"Open {out} in a browser.", markup=False, soft_wrap=True)
