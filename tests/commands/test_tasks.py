"""Every task with one command and no Python: what it reports, and that every method says what it can learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kilter.methods import methods
from kilter.tasks.kinds import KINDS

NATURAL = ["--partition", "natural", "--clients", "0", "--workers", "1"]


def patients(folder: Path, rows: int = 240) -> None:
    rng = np.random.default_rng(1)
    lines = ["client,bmi,sex,dose,time,event,age,flu,cold"]
    for k in range(rows):
        bmi, dose = rng.normal(25, 4), rng.normal(0, 1)
        time = rng.exponential(5 * np.exp(-dose))
        censor = rng.exponential(10)
        age = 50 + 8 * dose + 0.5 * (bmi - 25) + rng.normal(0, 2)
        lines.append(
            f"{'abc'[k % 3]},{bmi:.2f},{'mf'[k % 2]},{dose:.3f},{min(time, censor):.3f},{int(time <= censor)},"
            f"{age:.1f},{int(dose > 0)},{int(bmi > 26)}"
        )
    (folder / "patients.csv").write_text("\n".join(lines) + "\n")


def summary(folder: Path) -> dict:
    return json.loads((folder / "out/summary.json").read_text())


@pytest.mark.parametrize(
    ("options", "metric", "at_least"),
    [
        (["--task", "survival", "--label", "time", "--event", "event", "--drop", "age,flu,cold"], "c_index", 0.6),
        (
            ["--task=survival", "--loss=discrete-time:5", "--label=time", "--event=event", "--drop=age,flu,cold"],
            "c_index",
            0.6,
        ),
        (["--task", "regression", "--label", "age", "--drop", "time,event,flu,cold"], "r2", 0.5),
        (["--task", "multi-label", "--label", "flu,cold", "--drop", "time,event,age"], "auroc", 0.85),
        (["--label", "flu", "--drop", "time,event,age,cold", "--metrics", "brier"], "auroc", 0.9),
        (["--label", "flu", "--drop", "time,event,age,cold", "--loss", "class-weights"], "auprc", 0.9),
    ],
    ids=["cox", "discrete", "regression", "multi-label", "binary", "class-weights"],
)
def test_tables(kilter, tmp_path: Path, options: list[str], metric: str, at_least: float) -> None:
    patients(tmp_path)
    train = ["--model", "mlp:16", "--lr", "0.1", "--epochs", "3", "--rounds", "8"]
    code, shown, error = kilter("run", "--data", "patients.csv", *options, *NATURAL, *train, "--out", "out")
    assert code == 0, error
    result = summary(tmp_path)
    assert result["last"]["scores"]["metrics"][metric] > at_least
    main = result["chosen_by"]
    assert main in result["last"]["client"]
    assert main == "accuracy" or main in shown


def test_segmentation_of_generated_shapes(kilter, tmp_path: Path) -> None:
    train = ["--model", "unet:4:1", "--optimiser", "adam", "--lr", "0.02", "--batch", "8", "--rounds", "3"]
    code, _, error = kilter("run", "--data", "shapes", *NATURAL, *train, "--out", "out")
    assert code == 0, error
    assert summary(tmp_path)["chosen_by"] == "dice"
    assert summary(tmp_path)["last"]["scores"]["metrics"]["dice"] > 0.3


@pytest.mark.parametrize("model", ["transformer:16:1:2", "lstm:16"])
def test_text_classification(kilter, tmp_path: Path, model: str) -> None:
    rng = np.random.default_rng(0)
    words = {"good": ["fine", "great", "lovely"], "bad": ["awful", "poor", "sad"]}
    lines = ["client,review,label"]
    for k in range(150):
        label = ["good", "bad"][k % 2]
        text = [
            rng.choice(words[label]) if rng.random() < 0.5 else rng.choice(["the", "film", "was"]) for _ in range(8)
        ]
        lines.append(f"{'abc'[k % 3]},{' '.join(text)},{label}")
    (tmp_path / "reviews.csv").write_text("\n".join(lines) + "\n")
    train = ["--optimiser", "adam", "--lr", "0.02", "--epochs", "3", "--rounds", "2", "--model", model]
    options = ["--task", "text", "--text", "review", "--prepare", "sequence=12", *NATURAL, *train]
    code, _, error = kilter("run", "--data", "reviews.csv", *options, "--out", "out")
    assert code == 0, error
    assert summary(tmp_path)["global_accuracy"] > 0.9


def test_next_token_prediction(kilter, tmp_path: Path) -> None:
    lines = ["client,words"] + [f"{'ab'[k % 2]},{'one two three four ' * 3}" for k in range(40)]
    (tmp_path / "texts.csv").write_text("\n".join(lines) + "\n")
    train = ["--optimiser", "adamw", "--lr", "0.01", "--epochs", "5", "--rounds", "3"]
    train += ["--model", "causal-transformer:16:1:2", "--prepare", "sequence=12,width=64"]
    code, _, error = kilter(
        "run", "--data", "texts.csv", "--task", "next-token", "--text", "words", *NATURAL, *train, "--out", "out"
    )
    assert code == 0, error
    assert summary(tmp_path)["last"]["scores"]["metrics"]["perplexity"] < 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "slfed", "--data", "diabetes"], "slfed cannot learn the task regression, because peers"),
        (["--data", "digits", "--loss", "huber"], "loss of this task"),
        (["--data", "diabetes", "--task", "survival"], "The data is for the task regression"),
        (["--data", "digits", "--metrics", "dice"], "metric of the task"),
        (["--data", "shapes", "--model", "cnn"], "choose another model, such as --model unet"),
        (["--data", "digits", "--model", "unet"], "must return"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(kilter, options: list[str], says: str) -> None:
    code, _, error = kilter("run", *options, "--clients", "3", "--rounds", "1", "--workers", "1")
    assert code == 2
    assert says in error
    assert "Traceback" not in error


WORDS = ["--task", "text", "--text", "review"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (WORDS, "the table also has 'age'"),
        ([*WORDS, "--drop", "age", "--model", "mlp"], "cannot read the words of 'review' in order"),
        ([*WORDS, "--drop", "age", "--model", "lstm:8:20"], "knows 20 tokens"),
        ([*WORDS[2:], "--drop", "age", "--model", "lstm"], "use --task text"),
        (["--task", "text", "--drop", "review"], "no column has texts"),
        (["--data", "wine", "--model", "transformer"], "not whole numbers from 0"),
    ],
)
def test_a_network_for_words_in_order_gets_nothing_else(kilter, tmp_path: Path, options: list[str], says: str) -> None:
    lines = [f"{'ab'[k % 2]},{'good film' if k % 3 else 'bad book'},{k % 3 > 0},{20.5 + k % 7}" for k in range(80)]
    (tmp_path / "reviews.csv").write_text("client,review,label,age\n" + "\n".join(lines) + "\n")
    data = ["--partition", "iid", "--clients", "2"] if "--data" in options else ["--data", "reviews.csv"]
    code, _, error = kilter("run", *data, *options, "--rounds", "1", "--workers", "1")
    assert code == 2
    assert says in error
    assert "Traceback" not in error


def test_every_method_says_what_it_can_learn_and_why_not_the_rest() -> None:
    for name, kind in methods().items():
        assert kind.tasks <= set(KINDS), name
        assert bool(kind.tasks) == bool(kind.tasks_reason), name
