"""Defaults that work: every method learns digits with no option but its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.data import load
from kilter.experiment import PUBLIC, Experiment
from kilter.methods import methods
from kilter.models import default_model
from kilter.records.run_folder import Store
from kilter.report.choices import choices

FAST = ("fedavg", "solo")  # the others are marked slow
EXPLAINED = {"server-only": "learns only as much as these rows show"}  # methods whose help says why they cannot


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in methods()]
)
def test_every_method_learns_digits_with_defaults(name: str, tmp_path: Path) -> None:
    if name in EXPLAINED:
        assert EXPLAINED[name] in " ".join((methods()[name].__doc__ or "").split())
        return
    experiment = Experiment.of({"method": name, "evaluate_every": 20})
    method, fed = experiment.build()
    with fed:
        summary = experiment.run(method, fed, Store(tmp_path / "run")).summary
    assert max(summary.global_accuracy or 0, summary.client_accuracy.mean or 0) > 0.85


def test_methods_get_what_they_need() -> None:
    assert Experiment.of({"method": "fedavg"}).topology == "star"
    assert Experiment.of({"method": "slfed"}).topology == "full"
    assert Experiment.of({"method": "fedpdc"}).public == PUBLIC
    assert (
        Experiment.of({"method": "fedpdc", "partition": "fedsbme:0.5"}).public == 0
    )  # the rule sets rows aside itself
    assert Experiment.of({"method": "fedavg"}).public == 0
    assert len(Experiment.of({"method": "fedavg"}).split().clients) == 10


def test_clients_that_the_data_names_are_the_default(tmp_path: Path) -> None:
    lines = [f"{i},{i % 2},{'abc'[i % 3]}" for i in range(90)]
    (tmp_path / "t.csv").write_text("x,label,client\n" + "\n".join(lines))
    experiment = Experiment.of({"data": str(tmp_path / "t.csv")})
    parts = experiment.split()
    assert set(parts.clients) == {"a", "b", "c"}
    lines = choices(experiment, parts.dataset)
    assert "Model: mlp, for tables. Change it with --model." in lines
    assert "Clients: the 3 that the data names. Change them with --partition and --clients." in lines
    assert len(Experiment.of({"data": str(tmp_path / "t.csv"), "partition": "iid", "clients": 4}).split().clients) == 4


def test_the_first_lines_say_what_was_chosen() -> None:
    experiment = Experiment.of({"method": "fedpdc"})
    text = "\n".join(choices(experiment, load("digits")))
    assert "Model: cnn, for images of 8x8 pixels" in text
    assert "Clients: 10, with labels divided by dirichlet:0.5" in text
    assert "learning rate 0.1" in text
    assert "Public rows: 5 of each class" in text
    assert "Topology: full" in "\n".join(choices(Experiment.of({"method": "slfed"}), load("digits")))
    assert default_model((3, 64, 64)) == "resnet18"


def test_the_default_model_fits_the_task(tmp_path: Path) -> None:
    lines = [f"{'good day' if i % 2 else 'bad night'},{i % 2},{'ab'[i % 3 > 0]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("note,label,client\n" + "\n".join(lines))
    table = {"data": str(tmp_path / "t.csv"), "text": "note"}
    counts = Experiment.of(table)
    assert choices(counts, counts.dataset())[0].startswith("Model: mlp, for tables")
    for settings in ({"task": "text"}, {"task": "text", "prepare": "sequence=8"}, {"prepare": "sequence=8"}):
        order = Experiment.of({**table, **settings})
        assert order.dataset().schema.columns[0].sequence  # type: ignore[union-attr]
        assert choices(order, order.dataset())[0].startswith("Model: transformer, for sequences of tokens")
    next_token = Experiment.of({**table, "task": "next-token", "drop": "label"})
    assert choices(next_token, next_token.dataset())[0].startswith("Model: causal-transformer, for sequences of tokens")
    shapes = Experiment.of({"data": "shapes"})
    assert choices(shapes, shapes.dataset())[0].startswith("Model: unet, for images of 32x32 pixels")
    assert len(shapes.split().clients) == 4
    assert Experiment.of({"data": "shapes", "model": "unet:4:1"}).model_of((1, 32, 32), "segmentation") == "unet:4:1"


def test_a_saved_model_names_the_network_that_was_chosen() -> None:
    method, fed = Experiment.of({"data": "shapes"}).build(workers=1)
    with fed:
        assert Experiment.of({"data": "shapes"}).model_info(method).experiment["model"] == "unet"
