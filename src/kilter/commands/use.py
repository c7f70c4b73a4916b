"""kilter predict, kilter evaluate and kilter export: what to do with the model of a run or of a site."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kilter.commands.experiment_options import Command, experiment_options, stdout, typed_options
from kilter.errors import Mistake, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from kilter.inference.model_folder import SavedModel

Folder = Annotated[Path, typer.Argument(help="A run folder, or the folder of a site's models.")]
Which = Annotated[str, typer.Option(help="best (on validation) or last; default: best.", show_default=False)]
Client = Annotated[str, typer.Option(help="Use the own model of this client.", show_default=False)]
Weights = Annotated[str, typer.Option(help="My copy of the pre-trained weights of the run.", show_default=False)]
# How to read the data of a new site. Everything else about them is the model's.
NEW_SITE = ("label", "event", "drop", "test_file", "test_size", "tokenizer")
Tokenizer = Annotated[str, typer.Option(help="The tokenizer file of the run.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    commands: list[Command] = [predict, experiment_options(evaluate, NEW_SITE), export]
    for command in commands:
        app.command()(command)


def predict(
    folder: Folder,
    data: Annotated[Path, typer.Argument(help="New rows: a .csv, .tsv, .parquet or .npz file, or a folder.")],
    out: Annotated[Path, typer.Option(help="Where to write the predictions.")] = Path("predictions.csv"),
    which: Which = "",
    client: Client = "",
    weights: Weights = "",
    tokenizer: Tokenizer = "",
) -> None:
    """Predict new rows with a saved model. They are prepared as in training; no labels are needed."""
    from kilter.inference.model_folder import load_model
    from kilter.inference.predict import predict as predictions
    from kilter.inference.predict import save
    from kilter.inference.rows import read_new_rows
    from kilter.records.display import counted

    model = load_model(folder, which, client, weights)
    began = time.perf_counter()
    rows = read_new_rows(model, data, tokenizer)
    save(predictions(model, rows.x, rows.files), out)
    for note in rows.notes:
        stdout.print(note, markup=False, soft_wrap=True)
    stdout.print(
        f"{counted(len(rows.x), 'row')} with the {_called(model)} in {time.perf_counter() - began:.1f} s: {out}",
        markup=False,
    )


def _called(model: SavedModel) -> str:
    return f"{model.which} model" if model.which in ("best", "last") else f"model of {model.which}"


def evaluate(
    folder: Folder,
    data: Annotated[str, typer.Option(help="Labelled rows of a site that did not take part.")],
    steps: Annotated[int, typer.Option(help="Also evaluate after this many steps of training there.", min=0)] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate of these steps; 0: that of the run.", min=0, max=1e9)] = 0.0,
    which: Which = "",
    client: Client = "",
    weights: Weights = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **reading: object,
) -> None:
    """Evaluate a saved model on a new site's data, as it is and after a few steps of fine-tuning."""
    from kilter.experiment import Experiment
    from kilter.inference.evaluate import evaluate_at_new_site, new_site_data
    from kilter.inference.model_folder import load_model
    from kilter.records.display import metric

    model = load_model(folder, which, client, weights)
    dataset = new_site_data(model, data, Experiment.of(typed_options(reading)).table_options())
    result = evaluate_at_new_site(model, dataset, steps, lr)
    if as_json:
        typer.echo(json.dumps({**vars(result), "model": model.which, "steps": steps}, indent=2))
        return
    table = Table(box=None, header_style="bold")
    for heading in ("", "as it is", *([f"after {steps} steps"] if result.tuned else [])):
        table.add_column(heading, justify="right" if heading else "left")
    for name, value in result.received.items():
        table.add_row(name, metric(name, value), *([metric(name, result.tuned[name])] if result.tuned else []))
    stdout.print(table)
    stdout.print(
        f"The {_called(model)} on {result.test_rows} test rows of '{data}'; {result.train_rows} rows for fine-tuning.",
        markup=False,
    )


def export(
    folder: Folder,
    to: Annotated[str, typer.Option(help="onnx, torchscript, exported-program or huggingface.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write; default: RUN/export.")] = None,
    which: Which = "",
    client: Client = "",
    data: Annotated[str, typer.Option(help="Rows to check the export with; default: the run's data.")] = "",
    weights: Weights = "",
) -> None:
    """Export a saved model with a model card, and check its outputs on real rows."""
    from kilter.inference.export import FORMATS
    from kilter.inference.export import export as write
    from kilter.inference.model_folder import load_model

    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    model = load_model(folder, which, client, weights)
    rows, where = _rows_to_check(model, data)
    exported = write(model, to, out or folder / "export", rows)
    stdout.print(
        f"{exported.path}: the {_called(model)}; its outputs on {exported.rows} rows {where} differ by at most "
        f"{exported.difference:.1e} from ours.",
        markup=False,
        soft_wrap=True,
    )


def _rows_to_check(model: SavedModel, data: str) -> tuple[Tensor, str]:
    """Real rows where there are some; random rows for a model folder without data."""
    import torch

    from kilter.core import as_float
    from kilter.experiment import Experiment
    from kilter.inference.rows import read_rows

    if data:
        return read_rows(model, Path(data))[:2000], f"of '{data}'"
    file = model.folder / "experiment.toml"
    if file.exists():
        try:
            dataset = Experiment.read(file).split().dataset
            return as_float(dataset.x[dataset.test[:2000]]), "of the run's test data"
        except Mistake as e:
            stdout.print(f"The run's data is not here ({e}), so random rows are used.", markup=False)
    noise = torch.randn(200, *model.shape, generator=torch.Generator().manual_seed(0))
    return (noise.abs() if model.task.kind in ("text", "next-token") else noise), "of random numbers"
