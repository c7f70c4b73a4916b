"""kilter show and kilter trust: pictures of a partition and of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kilter.commands.experiment_options import assemble, experiment_options, stdout
from kilter.errors import Mistake


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(experiment_options(show))
    app.command()(trust)


def show(
    picture: Annotated[Path, typer.Option(help="Where to write the picture (.png or .svg).")] = Path("skew.png"),
    federated: Annotated[
        bool, typer.Option("--federated", help="Use only the label counts that each client sends.")
    ] = False,
    epsilon: Annotated[
        float, typer.Option(help="With --federated: epsilon of Laplace noise on the counts.", min=0, max=1e9)
    ] = 0.0,
    **options: Any,
) -> None:
    """Show how a partition skews the data: in the terminal and as a picture."""
    from kilter.report.federated_skew import census
    from kilter.report.skew_picture import draw, table

    if epsilon and not federated:
        raise Mistake("--epsilon adds noise to the counts that clients send: add --federated.")
    split = assemble(None, None, options).split()
    skew, cells, spent = census(split, epsilon) if federated else (None, None, 0)
    stdout.print(table(split, skew, cells))
    if federated:
        stdout.print(
            f"Measured from the label counts that clients sent, {spent:,} bytes in all; no label left a client."
        )
    if epsilon:
        stdout.print(
            f"Every count has Laplace noise of scale {1 / epsilon:g}: epsilon = {epsilon:g} for one row more or less. "
            "Asking again spends the same amount again."
        )
    draw(split, picture, cells)
    stdout.print(f"Picture: {picture}")


def trust(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Draw who listens to whom in a run: a graph, a matrix by round, uncertainty and list size by round."""
    from kilter.report.trust import draw_or_refuse

    for path in draw_or_refuse(folder):
        stdout.print(f"{path}", soft_wrap=True)
