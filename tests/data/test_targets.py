"""Targets that are not classes: read from tables and arrays, described in the schema, pooled over clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kilter.data import Schema, TableOptions, load, split
from kilter.data.targets import IGNORED, bins, next_tokens
from kilter.errors import Mistake


def write(folder: Path, text: str) -> Path:
    path = folder / "data.csv"
    path.write_text(text)
    return path


def table(folder: Path, rows: int = 40) -> Path:
    lines = ["client,age,time,event,flu,cold"]
    lines += [f"{'ab'[k % 2]},{20 + k},{k / 2},{k % 2},{int(k > 9)},{int(k % 3 == 0)}" for k in range(rows)]
    return write(folder, "\n".join(lines) + "\n")


def test_a_regression_has_numbers_and_pooled_moments(tmp_path: Path) -> None:
    data = load(table(tmp_path), table=TableOptions("age", task="regression"), prepare=False)
    assert data.y.dtype == torch.float32
    assert data.y[:3].tolist() == [20, 21, 22]
    assert data.task == "regression"
    assert "age" not in data.schema.names
    parts = split(data, "natural", 0, 0)
    rows = torch.cat([d.train.index for d in parts.clients.values()])
    pooled = data.y[rows].double()
    assert parts.dataset.target_moments == pytest.approx((float(pooled.mean()), float(pooled.std(correction=0))))


def test_partition_rules_follow_the_target(tmp_path: Path) -> None:
    data = load(table(tmp_path, 200), table=TableOptions("age", task="regression"))
    assert sorted(set(data.labels.tolist())) == list(range(10))
    skewed = split(data, "dirichlet:0.1", 4, 0)
    means = [float(d.train["y"].mean()) for d in skewed.clients.values()]
    assert max(means) - min(means) > 10


def test_survival_has_times_and_events(tmp_path: Path) -> None:
    data = load(table(tmp_path), table=TableOptions("time", task="survival", event="event"))
    assert data.y[:3].tolist() == [[0.0, 0.0], [0.5, 1.0], [1.0, 0.0]]
    assert [c.name for c in data.schema.targets] == ["time", "event"]
    assert {"time", "event"}.isdisjoint(data.schema.names)
    again = load(tmp_path / "data.csv", schema=data.preparation)  # the schema knows the columns
    assert torch.equal(again.y, data.y)
    assert torch.equal(again.x, data.x)


def test_several_labels(tmp_path: Path) -> None:
    data = load(table(tmp_path), table=TableOptions("flu,cold", task="multi-label"))
    assert data.classes == ("flu", "cold")
    assert data.y.shape == (40, 2)
    assert torch.equal(load(tmp_path / "data.csv", schema=data.schema).y, data.y)


def test_a_schema_with_targets_survives_its_file(tmp_path: Path) -> None:
    data = load(table(tmp_path), table=TableOptions("time", task="survival", event="event"))
    (tmp_path / "schema.toml").write_text(data.schema.text())
    assert Schema.read(tmp_path / "schema.toml") == data.schema
    assert type(data.preparation).parse(data.preparation.plain()) == data.preparation
    classes = load(table(tmp_path), table=TableOptions("flu"))
    assert "task" in data.schema.mismatch(classes.schema)
    assert "task" not in classes.schema.plain()


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("x,y\n1,a\n2,b\n3,a\n", TableOptions("y", task="regression"), "does not hold numbers"),
        ("x,y\n1,3\n2,\n3,4\n", TableOptions("y", task="regression"), "no number in"),
        ("x,y\n1,3\n2,4\n3,4\n", TableOptions("y", task="survival"), "--event"),
        ("x,y,e\n1,3,2\n2,4,1\n3,4,0\n", TableOptions("y", task="survival", event="e"), "only hold 0 and 1"),
        ("x,y,e\n1,-3,1\n2,4,1\n3,4,0\n", TableOptions("y", task="survival", event="e"), "negative time"),
        ("x,y\n1,3\n2,4\n3,4\n", TableOptions("z", task="regression"), "--label"),
        ("x,y\n1,3\n2,4\n3,4\n", TableOptions(task="next-token"), "--text"),
    ],
)
def test_bad_targets_are_refused_in_one_sentence(tmp_path: Path, text: str, options: TableOptions, says: str) -> None:
    with pytest.raises(Mistake, match=says):
        load(write(tmp_path, text), table=options)


def test_texts_as_tokens_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "label,words\n" + "".join(f"{'ab'[k % 2]},one two three one\n" for k in range(10)))
    data = load(path, table=TableOptions(text=("words",), task="text"))
    assert data.x.shape == (10, 64)
    first = data.x[0].long().tolist()
    assert first[0] == first[3] != first[1]
    assert min(first[:4]) > 0
    assert max(first) < 1024
    assert first[4:] == [0] * 60
    predicted = load(path, table=TableOptions(text=("words",), drop=("label",), task="next-token"))
    assert predicted.y[0, :4].tolist() == [*first[1:4], IGNORED]
    assert predicted.outputs == 1024


def test_arrays_of_every_task(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    np.savez(tmp_path / "n.npz", x=x, y=np.arange(20) / 2)
    numbers = load(tmp_path / "n.npz", table=TableOptions(task="regression"))
    mean, std = numbers.target_moments
    assert mean == pytest.approx(float(numbers.y[numbers.train].mean()))
    assert std > 0
    np.savez(tmp_path / "s.npz", x=x, y=np.stack([np.arange(20.0), np.arange(20) % 2], 1))
    assert load(tmp_path / "s.npz", table=TableOptions(task="survival")).y.shape == (20, 2)
    with pytest.raises(Mistake, match="shape"):
        load(tmp_path / "n.npz", table=TableOptions(task="survival"))


def test_shapes_have_masks_and_scanners() -> None:
    data = load("shapes")
    assert data.task == "segmentation"
    assert data.y.shape == (240, 32, 32)
    assert sorted(set(data.y.flatten().tolist())) == [0, 1, 2]
    assert len(split(data, "natural", 0, 0).clients) == 4
    assert torch.equal(load("shapes").x, data.x)


def test_bins_and_next_tokens() -> None:
    assert bins(np.zeros(5), 10).max() == 0
    assert next_tokens(np.array([[5, 6, 0]], dtype=np.float32)).tolist() == [[6, IGNORED, IGNORED]]
