"""Inspection: what is measured has known answers, and what may harm training is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from kilter.data import TableOptions, load
from kilter.data.columns import Parsed
from kilter.data.datasets import assemble
from kilter.data.inspection import column_auroc, find_duplicates, inspect, perceptual_hashes, two_sample_test
from kilter.report.inspection import column_rows, page, tables


def hospital_table(path, rows: int = 120):
    """Two sites; `code` gives the label away, `same` is constant, `rare` is mostly empty."""
    rng = np.random.default_rng(0)
    lines = ["age,code,same,rare,label,client"]
    for i in range(rows):
        ill = i % 2
        rare = "1" if i % 10 == 0 else ""
        lines.append(f"{rng.normal():.4f},{'EF'[ill]}{i % 3},7,{rare},{ill},{'north' if i < 80 else 'south'}")
    path.write_text("\n".join(lines))
    return path


def test_a_table_is_described_and_its_traps_are_named(tmp_path):
    report = inspect(load(hospital_table(tmp_path / "t.csv")))
    by_name = {column.name: column for column in report.columns}
    assert by_name["code"].auroc == 1
    assert by_name["age"].auroc < 0.7
    assert (by_name["same"].distinct, by_name["same"].low) == (1, 7)
    assert by_name["rare"].gaps == pytest.approx(0.9)
    assert [client.name for client in report.clients] == ["north", "south"]
    assert sum(client.train + client.test for client in report.clients) == 120
    text = "\n".join(report.warnings)
    assert "`code` alone predicts the label (AUROC 1.00)" in text
    assert "`same` has the same value in every row" in text
    assert "`rare` is empty in 90% of the rows" in text


def test_a_column_alone_has_the_auroc_of_scikit_learn():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 300)
    cells = rng.normal(size=300) - y
    area = roc_auc_score(y, -cells)
    assert column_auroc(Parsed("number", cells), y, np.arange(300)) == pytest.approx(area)
    gaps = np.where(y == 1, np.nan, 1.0)
    assert column_auroc(Parsed("number", gaps), y, np.arange(300)) == 1  # that it is empty says everything
    noise = Parsed.of_words([f"w{k}" for k in rng.integers(0, 50, 300)])
    assert column_auroc(noise, y, np.arange(300)) < 0.65
    unique = Parsed.of_words([f"w{k}" for k in range(300)])
    assert column_auroc(unique, y, np.arange(300)) in (None, pytest.approx(0.5, abs=0.06))


def arrays(x: np.ndarray, groups: np.ndarray | None = None):
    y = np.arange(len(x)) % 2
    return assemble("a", {"x": x, "y": y, **({} if groups is None else {"group": groups})})


def test_the_two_sample_test_recognises_clients_with_features_of_their_own():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    x[200:] += 3
    parts = [np.arange(0, 100), np.arange(100, 200), np.arange(200, 300)]
    first, second, other = two_sample_test(arrays(x), parts)
    assert other > 0.99
    same = two_sample_test(arrays(x), parts[:2])
    assert same == pytest.approx([0.5, 0.5], abs=0.12)
    assert max(first, second) < other
    assert two_sample_test(arrays(x), parts[:1]) == [None]


def test_repeated_rows_are_counted_where_they_matter():
    x = np.arange(60, dtype=np.float32).reshape(30, 2)
    data = arrays(x, np.repeat(["a", "b", "c"], 10))
    test, train = int(data.test[0]), int(data.train[0])
    data.x[test] = data.x[train]
    elsewhere = int(data.train[data.groups[data.train] == 2][0])
    data.x[elsewhere] = data.x[train]
    copies = find_duplicates(data)
    assert (copies.within, copies.train_test, copies.clients, copies.similar) == (2, 1, 3, None)
    assert any("also training rows" in text for text in inspect(data).warnings)


def test_a_perceptual_hash_survives_brightness_and_size():
    rng = np.random.default_rng(3)
    picture = torch.from_numpy(rng.random((1, 1, 8, 9)).astype(np.float32))
    large = torch.nn.functional.interpolate(picture, (64, 72), mode="nearest")
    other = torch.from_numpy(rng.random((1, 1, 64, 72)).astype(np.float32))
    images = torch.cat([large, large * 0.8, other])
    data = replace(arrays(np.zeros((3, 1), np.float32)), x=images)
    first, lighter, different = perceptual_hashes(data).tolist()
    assert first == lighter
    assert first != different


def test_warnings_about_clients_and_classes(tmp_path):
    lines = ["a,label,client"]
    lines += [f"{i},{i % 2},big" for i in range(200)] + [f"{i},0,one" for i in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    text = "\n".join(inspect(load(tmp_path / "t.csv")).warnings)
    assert "one has one class." in text
    assert "one has only" in text
    assert "big holds 9" in text
    (tmp_path / "u.csv").write_text("a,label,client\n1,0,x\n2,1,x\n3,0,y\n")
    options = TableOptions(test_file=str(tmp_path / "u.csv"), client="client")
    assert inspect(load(tmp_path / "t.csv", table=replace(options, test_file=""))).clients
    unseen = load(tmp_path / "t.csv", table=options)
    assert any("Clients without training rows: x, y" in text for text in inspect(unseen).warnings)


TABLES = {
    "regression": ("a,t\n" + "".join(f"{i % 7},{i * 1.5}\n" for i in range(60)), TableOptions("t", task="regression")),
    "survival": (
        "a,t,e\n" + "".join(f"{i % 7},{i * 1.5},{i % 2}\n" for i in range(60)),
        TableOptions("t", task="survival", event="e"),
    ),
    "multi-label": (
        "a,u,v\n" + "".join(f"{i % 7},{i % 3 // 2},{i % 2}\n" for i in range(60)),
        TableOptions("u,v", task="multi-label"),
    ),
    "next-token": ("t\n" + "hello world\nthis is it\n" * 30, TableOptions(task="next-token", text=("t",))),
}


@pytest.mark.parametrize("task", TABLES)
def test_data_of_every_task_can_be_inspected(task, tmp_path):
    text, options = TABLES[task]
    (tmp_path / "t.csv").write_text(text)
    report = inspect(load(tmp_path / "t.csv", table=options))
    assert report.task == task
    assert report.classes == ({"u": 20, "v": 30} if task == "multi-label" else {})
    assert all(column.auroc is None for column in report.columns)
    assert task in page(report)
    assert len(tables(report)) > 2


def test_pictures_with_masks_and_built_in_numbers_can_be_inspected():
    assert inspect(load("shapes")).classes == {"ground": 0, "circle": 61, "square": 179}
    assert inspect(load("diabetes")).classes == {}


def test_columns_that_are_no_measurements_are_named(tmp_path):
    lines = [f"{9000 + i},202403{1 + i % 30:02},2024-03-{1 + i % 30:02},{i}%,{i % 5},{i % 2}" for i in range(60)]
    (tmp_path / "t.csv").write_text("id,admitted,day,share,ward,label\n" + "\n".join(lines))
    report = inspect(load(tmp_path / "t.csv"))
    text = "\n".join(report.warnings)
    assert "`id` has another whole number in every row" in text
    assert "`admitted` holds numbers like 20240301" in text
    assert "No value of `share` occurs in enough training rows" in text
    assert "ward" not in text
    assert [row[4] for row in column_rows(report)][2] == "2024-03-01"
