"""Commands that list what there is: methods, datasets, models, partitions, topologies, schema, version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from kilter import __version__
from kilter.commands.experiment_options import Json, print_json, stdout


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (methods, datasets, models, partitions, topologies, schema, version):
        app.command()(command)


def methods(
    measure: Annotated[
        bool, typer.Option("--measure", help="Run two small rounds of each method and show what they sent.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the methods: their papers, what a client keeps, what leaves it, where they run, their settings."""
    from kilter.report.methods import descriptions, table

    if as_json:
        print_json({name: asdict(description) for name, description in descriptions().items()})
    elif measure:
        from kilter.methods import methods as classes
        from kilter.report.method_costs import costs

        stdout.print(table(descriptions(), costs(classes())))
    else:
        stdout.print(table(descriptions()))
        stdout.print("To measure what each method sends, relative to FedAvg: kilter methods --measure.")


def datasets(as_json: Json = False) -> None:
    """List the data sets that can be loaded by name."""
    from kilter.data import DATASETS

    _print_table("A name below, or your own .csv, .tsv, .parquet, .npz or folder.", DATASETS, as_json)


def models(as_json: Json = False) -> None:
    """List the networks and their options."""
    from kilter.models import MODELS

    _print_table("A name below, or my_model.py:Net.", MODELS, as_json)


def partitions(as_json: Json = False) -> None:
    """List the rules that divide data among clients, and their parameters."""
    from kilter.data import PARTITIONS

    _print_table("Parameters follow the name after colons: dirichlet:0.1.", PARTITIONS, as_json)


def topologies(as_json: Json = False) -> None:
    """List the topologies: who writes to whom, and who aggregates."""
    from kilter.topology import TOPOLOGIES

    _print_table("Parameters follow the name after colons: regular:4.", TOPOLOGIES, as_json)


def schema() -> None:
    """Print the JSON schema of the records in a run folder."""
    from kilter.records.codec import schema as record_schema

    print_json(record_schema())


def version() -> None:
    """Print the version."""
    stdout.print(__version__)


def _print_table(title: str, entries: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print_json(dict(entries))
        return
    table = Table(
        "name", "what it is", title=title, title_justify="left", box=None, header_style="bold", pad_edge=False
    )
    for name, text in entries.items():
        table.add_row(name, text)
    stdout.print(table)
