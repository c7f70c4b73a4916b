"""kilter inspect: look at data before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kilter.commands.experiment_options import assemble, experiment_options, stdout
from kilter.errors import Mistake
from kilter.options import TABLE_SETTINGS


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(experiment_options(inspect, TABLE_SETTINGS))


def inspect(
    data: Annotated[str, typer.Argument(help="A data set by name, or your own file or folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with figures.", show_default=False)] = None,
    schema_file: Annotated[
        Path | None,
        typer.Option(help="Also write the schema of a table, to edit and use with --schema.", show_default=False),
    ] = None,
    **options: Any,
) -> None:
    """Inspect data: columns, classes, clients, skew, duplicates, columns that give the label away, and warnings."""
    import json
    from dataclasses import replace

    from kilter.data import Preparation
    from kilter.data.inspection import inspect as look_at
    from kilter.data.preparation import fit_whole
    from kilter.records.run_folder import write
    from kilter.report.inspection import page, tables

    dataset = assemble(None, None, {**options, "data": data}).dataset()
    if dataset.raw is not None and dataset.schema is not None and not isinstance(dataset.preparation, Preparation):
        dataset = dataset.prepared(fit_whole(dataset.raw, dataset.schema, dataset.train.numpy()))
    elif dataset.schema is None and schema_file is not None:
        raise Mistake(f"'{data}' has no schema, because it is not a table: leave out --schema-file.")
    report = look_at(replace(dataset, name=data))
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2, allow_nan=False))
    else:
        for part in tables(report):
            stdout.print(part)
    if schema_file is not None and dataset.schema is not None:
        write(schema_file, dataset.schema.text())
    if html is not None:
        write(html, page(report))
        if not as_json:
            stdout.print(f"Page: {html}")
