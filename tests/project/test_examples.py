"""The examples: exported raw data goes to a table of six methods with one command."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from kilter import cli
from kilter.core import Data, Rows
from kilter.experiment import Experiment
from kilter.federate import federate
from kilter.records.run_folder import read_summary
from kilter.runtimes.simulation import Simulation

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("heart-disease", "chest-xray", "femnist", "breast-cancer", "wine", "notes")
SMALL = {"notes": 90, "femnist": 400, "wine": 0, "breast-cancer": 0}  # rows of each client; 0: all
NEEDS = {"heart-disease": "heart_disease.npz", "chest-xray": "chest_xray.npz", "femnist": "femnist.npz"}


def export() -> ModuleType:
    spec = importlib.util.spec_from_file_location("export", EXAMPLES / "export.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_raw(name: str, most: int) -> None:
    """The raw form of a data set in the folder raw/NAME."""
    if name in NEEDS and not (Path(os.environ.get("KILTER_DATA", "")) / NEEDS[name]).is_file():
        pytest.skip(f"KILTER_DATA has no {NEEDS[name]}")
    folder = Path("raw") / name
    folder.mkdir(parents=True)
    export().EXPORTS[name](folder, most)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_every_example_reads_its_raw_data(name: str) -> None:
    write_raw(name, most=SMALL.get(name, 30))
    experiment = Experiment.of({**settings(name), "method": "fedavg"})
    parts = experiment.split()
    assert len(parts.clients) >= 3
    assert parts.public is not None


def settings(name: str) -> dict[str, object]:
    """The experiment part of an example's study."""
    values = dict(tomllib.loads((EXAMPLES / f"{name}.toml").read_text())["experiment"])
    local = {key: values.pop(key) for key in ("lr", "epochs")}
    return {**values, "local": local}


@pytest.mark.docs
@pytest.mark.parametrize("name", NAMES)
def test_every_example_compares_six_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_raw(name, most=SMALL.get(name, 60))
    words = [
        "compare",
        str(EXAMPLES / f"{name}.toml"),
        "--seeds",
        "1",
        "--rounds",
        "2",
        "--out",
        "study",
        "--jobs",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["kilter", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert len(list(Path("study").rglob("summary.json"))) == 6


def test_federated_preparation_trains_the_same_weights_as_preparing_the_pooled_table() -> None:
    """Heart disease: four hospitals with gaps, words and other separators, against scikit-learn on all training rows at once."""
    write_raw("heart-disease", most=0)
    values = {**settings("heart-disease"), "method": "fedavg", "rounds": 3, "prepare": "least=1", "public": 0}
    experiment = Experiment.of(values)
    federated = experiment.split()
    whole = experiment.dataset()
    trained = np.sort(np.concatenate([data.train.index.numpy() for data in federated.clients.values()]))
    x = []
    for column in whole.schema.columns:
        parsed = whole.raw[column.name]
        if column.kind == "number":
            scaler = StandardScaler().fit(parsed.cells[trained, None])  # leaves gaps out
            x.append(np.nan_to_num(scaler.transform(parsed.cells[:, None])))
            continue
        words = np.array([*parsed.words, ""])[parsed.cells][:, None]
        values = sorted(set(words[trained, 0]) - {""})
        coder = OneHotEncoder(categories=[values], handle_unknown="ignore", sparse_output=False).fit(words[trained])
        x += [coder.transform(words), (~np.isin(words, [*values, ""])).astype(float)]
    tables = {"x": torch.from_numpy(np.concatenate(x, axis=1).astype(np.float32)), "y": whole.y}

    def pooled(rows: Rows) -> Rows:
        return Rows(tables, rows.index)

    clients = {
        name: Data(pooled(data.train), pooled(data.valid), pooled(data.test))
        for name, data in federated.clients.items()
    }
    assert np.allclose(federated.dataset.x.numpy(), tables["x"].numpy(), atol=1e-5)
    method = experiment.make(shape=tuple(tables["x"].shape[1:]), classes=2)
    weights = []
    for parts in (federated.clients, clients):
        with Simulation(parts, seed=0) as fed:
            weights.append(federate(method, fed, 3).model)
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-6), name


def accuracies(script: str, folder: Path) -> list[float]:
    """Run an example; the first column of numbers in the table that it prints."""
    words = [sys.executable, str(EXAMPLES / script), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ") and "%" in line]
    return [float(line.split("|")[2].strip(" %")) for line in lines]


@pytest.mark.docs
def test_pre_training_helps_clinics_with_few_images(tmp_path: Path) -> None:
    scratch, tuned, personal = accuracies("fine_tune_images.py", tmp_path / "images")
    assert scratch < 70 < min(tuned, personal)


@pytest.mark.docs
def test_each_data_set_in_a_sequence_makes_the_model_forget_the_last_one(tmp_path: Path) -> None:
    if not (Path(os.environ.get("KILTER_DATA", "")) / "chest_xray.npz").is_file():
        pytest.skip("KILTER_DATA has no chest_xray.npz")
    on_the_first = accuracies("data_sets_in_sequence.py", tmp_path / "sequence")
    assert len(on_the_first) == 4
    assert on_the_first[0] > 80
    assert max(on_the_first[1:]) < 80


@pytest.mark.docs
def test_pre_training_and_adapters_help_clinics_with_few_texts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    untrained, adapters, all_weights = accuracies("fine_tune_text.py", tmp_path / "texts")
    assert untrained < 70 < min(adapters, all_weights)
    sent = [read_summary(tmp_path / f"texts/runs/{k}").bytes_up for k in (1, 2)]
    assert sent[0] < 0.05 * sent[1]  # only adapters and the head travel
