"""A model after its run: best and last, predictions in words, exports that agree, a new site with and without fine-tuning."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import csv as arrow_csv
from safetensors.torch import save_file
from torch import Tensor

from kilter.data import TableOptions
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.inference.evaluate import evaluate_at_new_site, fine_tune, new_site_data
from kilter.inference.export import FORMATS, export, verify
from kilter.inference.model_folder import SavedModel, load_model
from kilter.inference.predict import predict, save
from kilter.inference.rows import read_new_rows, read_rows
from kilter.records.run_folder import Store, read_summary, write


def table(path: Path, rows: int = 200, seed: int = 0, header: str = "client,dose,sex,age,label") -> Path:
    rng = np.random.default_rng(seed)
    lines = [header]
    for k in range(rows):
        dose = rng.normal()
        cells = {"client": "abc"[k % 3], "dose": f"{dose:.3f}", "sex": "mf"[k % 2]}
        cells |= {"age": f"{50 + 10 * dose:.2f}", "label": "ill" if dose > 0 else "well"}
        lines.append(",".join(cells.get(name, "0") for name in header.split(",")))
    path.write_text("\n".join(lines) + "\n")
    return path


def run(folder: Path, data: Path | str, **fields: object) -> Path:
    settings = {"partition": "natural", "clients": 0, "model": "mlp:8", "rounds": 3, "local": {"lr": 0.3}, **fields}
    experiment = Experiment.of({"data": str(data), **settings})
    datasets: list = []
    method, fed = experiment.build(1, None, datasets.append)
    store = Store(folder)
    write(folder / "experiment.toml", experiment.write())
    if datasets[0].preparation is not None:
        write(folder / "preparation.toml", datasets[0].preparation.text())
    with fed:
        experiment.run(method, fed, store)
    store.close()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run on a table with two classes, and its data."""
    here = tmp_path_factory.mktemp("trained")
    data = table(here / "data.csv")
    return run(here / "run", data, drop="age", rounds=8, local={"lr": 0.5, "epochs": 2}), data


def test_predictions_have_class_names_and_probabilities(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = trained
    model = load_model(folder)
    assert model.which == "best"
    predictions = predict(model, read_rows(model, data))
    assert predictions.column_names == ["row", "prediction", "p(ill)", "p(well)"]
    truth = [line.rsplit(",", 1)[1] for line in data.read_text().splitlines()[1:]]
    assert np.mean(np.array(predictions["prediction"].to_pylist()) == truth) > 0.9
    assert np.allclose(predictions["p(ill)"].to_numpy() + predictions["p(well)"].to_numpy(), 1, atol=1e-6)
    save(predictions, tmp_path / "p.parquet")
    with pytest.raises(Mistake, match=r"\.csv or \.parquet"):
        save(predictions, tmp_path / "p.txt")


def test_columns_are_found_by_name_and_labels_are_not_needed(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = trained
    model = load_model(folder)
    reordered = table(tmp_path / "new.csv", header="sex,extra,dose")
    x = read_rows(model, reordered)
    assert torch.equal(x, read_rows(model, data))
    with pytest.raises(Mistake, match="no column 'sex'"):
        read_rows(model, table(tmp_path / "other.csv", header="dose,age"))
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 9), dtype=np.float32))
    with pytest.raises(Mistake, match="the model needs"):
        read_rows(model, tmp_path / "x.npz")


def test_best_is_the_model_of_the_best_round_and_last_of_the_last(tmp_path: Path) -> None:
    data = table(tmp_path / "data.csv")
    folder = run(tmp_path / "run", data, drop="age", rounds=4, local={"lr": 3.0, "momentum": 0.9})  # it overshoots
    summary = read_summary(folder)
    assert summary.best is not None
    short = run(tmp_path / "short", data, drop="age", rounds=summary.best.round, local={"lr": 3.0, "momentum": 0.9})
    best, same_round = load_model(folder, "best"), load_model(short, "last")
    assert all(torch.equal(best.params[k], same_round.params[k]) for k in best.params)
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: kilter")


def test_personal_models_have_plain_names(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", table(tmp_path / "data.csv"), drop="age", method="solo")
    model = load_model(folder, client="a")
    assert model.which == "a"
    other = load_model(folder, client="b")
    assert not torch.equal(model.params["head.weight"], other.params["head.weight"])
    with pytest.raises(Mistake, match="--client"):
        load_model(folder)
    with pytest.raises(Mistake, match="Unknown client"):
        load_model(folder, client="z")


def test_a_regression_predicts_in_the_units_of_the_target(tmp_path: Path) -> None:
    data = table(tmp_path / "data.csv")
    folder = run(tmp_path / "run", data, task="regression", label="age", drop="label", rounds=8)
    model = load_model(folder)
    ages = predict(model, read_rows(model, data))["age"].to_numpy()
    truth = np.array([float(line.split(",")[3]) for line in data.read_text().splitlines()[1:]])
    assert abs(ages - truth).mean() < 4
    assert torch.allclose(model.module()(torch.zeros(2, *model.shape)), model.outputs(torch.zeros(2, *model.shape)))


@pytest.mark.parametrize("to", FORMATS)
def test_exports_agree_on_every_row(trained: tuple[Path, Path], tmp_path: Path, to: str) -> None:
    if to == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    folder, data = trained
    model = load_model(folder)
    exported = export(model, to, tmp_path / to, read_rows(model, data))
    assert exported.difference <= 1e-5
    assert exported.rows == 200
    assert (tmp_path / to / "README.md").exists()
    assert (tmp_path / to / "preparation.toml").exists()
    if to == "huggingface":
        config = json.loads((tmp_path / to / "config.json").read_text())
        assert config["classes"] == ["ill", "well"]


def test_an_export_that_differs_is_refused(trained: tuple[Path, Path]) -> None:
    folder, data = trained
    model = load_model(folder)
    rows = read_rows(model, data)
    module = model.module()
    with pytest.raises(Mistake, match="another class"):
        verify(module, lambda x: -module(x), rows, "binary")
    with pytest.raises(Mistake, match="differs by"):
        verify(module, lambda x: module(x) * 1.001, rows, "binary")
    for kind in ("binary", "regression"):
        with pytest.raises(Mistake, match="not finite"):
            verify(module, lambda x: module(x) * float("nan"), rows, kind)


def test_a_hub_folder_is_read_again_to_check_it(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(tensors: dict[str, Tensor], *rest: Any, **more: Any) -> None:
        save_file({name: value + 1 for name, value in tensors.items()}, *rest, **more)

    folder, data = trained
    monkeypatch.setattr("kilter.inference.export.save_file", damaged)
    model = load_model(folder)
    with pytest.raises(Mistake, match="do not use it"):
        export(model, "huggingface", tmp_path / "hub", read_rows(model, data))


def test_a_new_site_with_images_as_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = (rng.random((120, 8, 8)) * 100 + 100 * y[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "new.npz", x=x[:40], y=y[:40])
    np.savez(tmp_path / "large.npz", x=np.zeros((40, 9, 9), np.uint8), y=y[:40])
    folder = run(tmp_path / "run", tmp_path / "train.npz", model="cnn:8", partition="iid", clients=2)
    model = load_model(folder)
    result = evaluate_at_new_site(model, new_site_data(model, tmp_path / "new.npz", TableOptions()), steps=0)
    assert result.received["accuracy"] > 0.9
    with pytest.raises(Mistake, match=r"shape \(1, 9, 9\), and the model needs \(1, 8, 8\)"):
        new_site_data(model, tmp_path / "large.npz", TableOptions())


def test_a_new_site_with_and_without_fine_tuning(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = trained
    model = load_model(folder)
    path = table(tmp_path / "new.csv", rows=120, seed=9)
    flipped = path.read_text().replace(",ill", ",x").replace(",well", ",ill").replace(",x", ",well")
    path.write_text(flipped)  # the opposite labels: only fine-tuning helps
    dataset = new_site_data(model, path, TableOptions(drop=("age",)))
    result = evaluate_at_new_site(model, dataset, steps=60)
    assert result.received["accuracy"] < 0.2
    assert result.tuned["accuracy"] > 0.8
    assert evaluate_at_new_site(model, dataset, steps=0).tuned is None
    before = model.params["head.weight"].clone()
    from kilter.core import Rows

    rows = Rows({"x": dataset.x, "y": dataset.y}, dataset.train)
    assert torch.equal(fine_tune(model, rows, 5)["head.weight"], fine_tune(model, rows, 5)["head.weight"])
    assert torch.equal(model.params["head.weight"], before)
    strange = table(tmp_path / "strange.csv")
    strange.write_text(strange.read_text().replace(",ill", ",dead"))
    with pytest.raises(Mistake, match="dead"):
        new_site_data(model, strange, TableOptions(drop=("age",)))


def test_images_of_any_size_are_named_and_unreadable_ones_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for folder, size in (("train", 12), ("new", 20)):
        for at in range(40):
            path = tmp_path / folder / ("dark", "light")[at % 2] / f"{at:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.normal((60, 180)[at % 2], 10, (size, size)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(path)
    (tmp_path / "new/dark/01b.png").write_bytes(b"damaged")
    settings = {"partition": "iid", "clients": 2, "rounds": 20, "local": {"lr": 0.3}}
    model = load_model(run(tmp_path / "run", tmp_path / "train", **settings))
    rows = read_new_rows(model, tmp_path / "new")
    assert rows.notes[-1].startswith("Skipped 1 of 41 images that cannot be read")
    predicted = predict(model, rows.x, rows.files).to_pydict()
    assert len(predicted["file"]) == 40
    assert [name.split("/")[0] for name in predicted["file"]] == predicted["prediction"]
    assert torch.allclose(model.outputs(rows.x), model.outputs(read_rows(model, tmp_path / "new")), atol=1e-6)
    result = evaluate_at_new_site(model, new_site_data(model, tmp_path / "new", TableOptions()), steps=0)
    assert (result.test_rows, result.received["accuracy"]) == (8, 1.0)


def test_a_schema_can_make_numbers_categories_and_the_model_reads_new_codes(tmp_path: Path) -> None:
    lines = [f"{'abc'[k % 3]},{k % 4},{'ill' if k % 4 in (0, 3) else 'well'}" for k in range(240)]
    (tmp_path / "t.csv").write_text("client,ward,label\n" + "\n".join(lines) + "\n")
    schema = Experiment.of({"data": str(tmp_path / "t.csv")}).dataset().schema
    (tmp_path / "s.toml").write_text(schema.text().replace('kind = "number"', 'kind = "category"'))
    model = load_model(run(tmp_path / "run", tmp_path / "t.csv", schema=str(tmp_path / "s.toml"), rounds=10))
    assert model.shape == (5,)  # wards 0 to 3, and other
    predicted = predict(model, read_rows(model, tmp_path / "t.csv")).to_pydict()["prediction"]
    assert predicted[:4] == ["ill", "well", "well", "ill"]
    assert (
        evaluate_at_new_site(model, new_site_data(model, tmp_path / "t.csv", TableOptions()), 0).received["accuracy"]
        == 1
    )


def test_damaged_and_missing_models_are_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="holds no model"):
        load_model(tmp_path)
    with pytest.raises(Mistake, match="Unknown model"):
        load_model(trained[0], "worst")
    (tmp_path / "model.toml").write_text("format = 1\n")
    with pytest.raises(Mistake, match="cannot be read"):
        load_model(tmp_path)


@pytest.mark.slow
def test_a_hundred_thousand_rows_take_less_than_three_seconds(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model: SavedModel = load_model(trained[0])
    rng = np.random.default_rng(0)
    rows = pa.table({"dose": rng.normal(size=100_000), "sex": rng.choice(["m", "f"], 100_000)})
    arrow_csv.write_csv(rows, tmp_path / "many.csv")
    began = time.perf_counter()
    save(predict(model, read_rows(model, tmp_path / "many.csv")), tmp_path / "out.csv")
    assert time.perf_counter() - began < 3
