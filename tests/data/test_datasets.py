"""Loading: the bundled sets, one's own files, every mistake in them, and the real files where they are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kilter.data import DATASETS, load, split
from kilter.data.array_checks import features
from kilter.data.datasets import SOURCES
from kilter.data.files import read_npz, write_npz
from kilter.data.holdout import hold_out
from kilter.errors import Mistake

REAL = pytest.mark.skipif(
    "KILTER_DATA" not in os.environ, reason="set KILTER_DATA to the folder of the real .npz files"
)


@pytest.fixture
def save(tmp_path):
    def save(name="own.npz", **arrays):
        np.savez(tmp_path / name, **arrays)
        return str(tmp_path / name)

    return save


def good(**changes):
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    return {"x": x, "y": np.arange(20) % 4} | changes


# ---- bundled ----


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("digits", (1797, 1, 8, 8), 10), ("wine", (178, 13), 3), ("breast-cancer", (569, 30), 2)],
)
def test_bundled(name, shape, classes):
    data = load(name)
    assert tuple(data.x.shape) == shape
    assert data.x.dtype == torch.float32
    assert len(data.classes) == classes
    assert sorted(torch.cat([data.train, data.test]).tolist()) == list(range(shape[0]))
    share = np.bincount(data.y[data.test]) / np.bincount(data.y)
    assert share == pytest.approx(np.full(classes, 0.2), abs=0.03)  # stratified
    assert torch.equal(load(name).test, data.test)
    if name == "digits":
        assert (data.x.min(), data.x.max()) == (0, 1)
    else:
        assert data.x[data.train].mean(0).abs().max() < 1e-5
        assert (data.x[data.train].std(0, correction=0) - 1).abs().max() < 1e-5


def test_every_name_is_described():
    assert set(DATASETS) == set(SOURCES)
    assert all(DATASETS.values())


def test_hold_out_is_even_over_groups_and_classes():
    y, groups = np.tile(np.arange(4), 100), np.repeat(np.arange(10), 40)
    train, test = hold_out(y, groups)
    assert np.bincount(groups[test]).tolist() == [8] * 10
    assert np.bincount(groups[test] * 4 + y[test]).tolist() == [2] * 40
    assert sorted([*train, *test]) == list(range(400))
    assert [len(part) for part in hold_out(np.array([0, 1]))] == [1, 1]


# ---- one's own files ----


def test_own_npz_whole_and_divided(save):
    data = load(save(**good()))
    assert (data.name, len(data.train), len(data.test), data.classes) == ("own", 16, 4, ("0", "1", "2", "3"))
    x, y = good()["x"], good()["y"]
    data = load(save(x_train=x, y_train=y, x_test=x[:3], y_test=y[:3], classes=np.array(list("abcd"))))
    assert data.train.tolist() == list(range(20))
    assert data.test.tolist() == [20, 21, 22]
    assert data.classes == ("a", "b", "c", "d")
    assert torch.equal(data.x[20:], data.x[:3])


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_class_numbers_follow_the_names_of_their_own_file(save, dtype):
    """A file of another site may name the classes in another order, or have some of them only."""
    y = np.arange(20) % 2
    own = save(**good(y=y.astype(dtype), classes=np.array(["well", "ill"])))
    data = load(own, classes=["ill", "unsure", "well"])
    assert data.classes == ("ill", "unsure", "well")
    assert data.y.tolist() == [2, 0] * 10
    assert load(own, classes=["well", "ill"]).y.tolist() == y.tolist()
    assert load(own, classes=["0", "1"]).y.tolist() == y.tolist()  # the list has no names
    with pytest.raises(Mistake, match="class 'well', which is not among ill, dead"):
        load(own, classes=["ill", "dead"])
    with pytest.raises(Mistake, match="label 3 is out of range"):
        load(save(**good(classes=np.array(["ill", "well"]))), classes=["well", "ill", "x", "y"])
    flags = np.stack([y, 1 - y], axis=1).astype(dtype)
    with pytest.raises(Mistake, match="classes a, b, not b, a"):
        load(save(**good(y=flags, classes=np.array(["a", "b"]))), classes=["b", "a"])


def test_own_groups_make_natural_clients(save):
    names = np.array(["north", "south"] * 10)
    data = load(save(**good(group=names)))
    assert data.group_names == ("north", "south")
    assert list(split(data, "natural", 0).clients) == ["north", "south"]
    data = load(save(**good(group=np.array([7, 3] * 10))))
    assert data.group_names == ("3", "7")
    assert data.groups[:2].tolist() == [1, 0]


def test_images_become_channels_first_floats():
    grey = np.zeros((5, 6, 7), dtype=np.uint8)
    grey[0, 0, 1] = 255
    x = features("t", grey)
    assert tuple(x.shape) == (5, 1, 6, 7)
    assert x[0, 0, 0, 1] == 1
    last = np.zeros((5, 6, 7, 3), dtype=np.uint8)
    last[0, 0, 1, 2] = 51
    assert features("t", last)[0, 2, 0, 1] == pytest.approx(0.2)
    assert tuple(features("t", np.zeros((5, 3, 6, 7), dtype=np.float32)).shape) == (5, 3, 6, 7)
    assert features("t", np.full((5, 2), 255, dtype=np.uint8)).max() == 255  # a table is used as given


def test_large_images_stay_bytes(monkeypatch):
    monkeypatch.setattr("kilter.data.array_checks.FLOATS", 4 * 5 * 42 - 1)
    assert features("t", np.zeros((5, 6, 7), dtype=np.uint8)).dtype == torch.uint8
    monkeypatch.setattr("kilter.data.array_checks.FLOATS", 4 * 5 * 42)
    assert features("t", np.zeros((5, 6, 7), dtype=np.uint8)).dtype == torch.float32


def test_colour_constants_are_of_training_rows(save):
    x = np.zeros((4, 2, 2, 3), dtype=np.uint8)
    x[1, :, :, 0] = 255
    test = np.full((2, 2, 2, 3), 200, dtype=np.uint8)
    data = load(save(x_train=x, y_train=np.arange(4), x_test=test, y_test=np.zeros(2, dtype=int)))
    assert data.mean == pytest.approx((0.25, 0, 0), abs=1e-6)
    assert data.std[0] == pytest.approx(np.sqrt(0.25 * 0.75), rel=1e-5)


def test_csv_and_folders(tmp_path):
    lines = ["age,group,label,bmi", *(f"{20 + i},{'ab'[i % 2]},{['sick', 'fit'][i % 2]},{i / 2}" for i in range(10))]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    data = load(str(tmp_path / "data.csv"))
    assert data.classes == ("fit", "sick")
    assert data.group_names == ("a", "b")
    assert data.schema.names == ("age", "bmi")
    age, bmi = data.preparation.columns
    assert (data.x[3] * torch.tensor([age.std, bmi.std]) + torch.tensor([age.mean, bmi.mean])).tolist() == [23, 1.5]
    assert data.y[:2].tolist() == [1, 0]
    assert torch.equal(load(tmp_path).x, data.x)
    agreed = load(tmp_path / "data.csv", classes=["sick", "unsure", "fit"])
    assert agreed.y[:2].tolist() == [0, 2]
    parts = tmp_path / "parts"
    parts.mkdir()
    np.savez(parts / "train.npz", **good())
    np.savez(parts / "test.npz", x=good()["x"][:2], y=good()["y"][:2])
    data = load(parts)
    assert (len(data.train), len(data.test)) == (20, 2)


# ---- mistakes in them ----

x, y = good()["x"], good()["y"]
BAD = {
    "nan": (good(x=np.where(x == 4, np.nan, x)), "NaN or infinite values in 1 of 20 rows, first in row 2"),
    "inf": (good(x=np.where(x == 4, np.inf, x)), "NaN or infinite"),
    "negative": (good(y=y - 1), "label -1 is negative"),
    "fraction": (good(y=y + 0.5), "not a whole number"),
    "nan label": (good(y=np.where(y == 1, np.nan, y)), "not a whole number"),
    "range": (good(classes=np.array(["a", "b"])), r"label 3 is out of range, there are 2 classes \(0..1\)"),
    "huge": (good(y=y * 10**9), "too large to be a class number"),
    "strange name": (
        good(y=np.array(["a", "b"] * 10), classes=np.array(["a"])),
        "label 'b' is not among the classes a",
    ),
    "length": (good(y=y[:-1]), r"'x' has 20 rows and 'y' has shape \(19,\)"),
    "two-dimensional": (good(y=y[:, None]), r"'y' has shape \(20, 1\)"),
    "group length": (good(group=y[:-1]), "'group' has shape"),
    "group type": (good(group=y + 0.5), "groups are of type float64"),
    "group range": (good(group=y, group_names=np.array(["n"])), r"outside 0..0"),
    "empty": (good(x=x[:0], y=y[:0]), "array 'x' is empty"),
    "missing": ({"x": x}, r"no array 'y' \(it has x\)"),
    "half": ({"x_train": x, "y_train": y, "x_test": x}, "no array 'y_test'"),
    "words": (good(x=np.full((20, 2), "w")), "x has type <U1"),
    "flat": (good(x=x[:, 0]), r"shape \(20,\)"),
    "other shape": ({"x_train": x, "y_train": y, "x_test": x[:, :1], "y_test": y}, "use the same features in both"),
    "other type": ({"x_train": x, "y_train": y, "x_test": x.astype(int), "y_test": y}, "use one type for both"),
    "one group": ({"x_train": x, "y_train": y, "x_test": x, "y_test": y, "group_train": y}, "only one of group_train"),
    "one row": (good(x=x[:1], y=y[:1]), "at least two"),
    "pickled": (good(x=np.array([{}] * 20, dtype=object)), "holds pickled objects"),
    "dates": (good(y=y.astype("datetime64[D]")), "labels are of type datetime64"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays(case, save):
    arrays, message = BAD[case]
    with pytest.raises(Mistake, match=message) as caught:
        load(save(**arrays))
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path, save):
    whole = Path(save(**good())).read_bytes()
    for name, content in {
        "cut.npz": whole[: len(whole) // 2],
        "text.npz": b"hello",
        "empty.npz": b"",
        "array.npz": b"\x93NUMPY",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Mistake, match=r"damaged or not a \.npz file"):
            load(str(tmp_path / name))
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    (tmp_path / "flip.npz").write_bytes(flipped)
    with pytest.raises(Mistake, match="damaged"):
        load(str(tmp_path / "flip.npz"))
    (tmp_path / "bytes.csv").write_bytes(b"a,y\n\xff\xfe,1")
    (tmp_path / "t.xls").write_text("")
    (tmp_path / "t.doc").write_text("")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "bytes.csv": "line 2, is not UTF-8 text",
        "t.xls": "save the sheet as a CSV file",
        "t.doc": "neither .npz nor .csv",
        "folder": "has no data.npz",
        "gone.npz": "There is no file",
    }.items():
        with pytest.raises(Mistake, match=message):
            load(str(tmp_path / name))
    with pytest.raises(Mistake, match="did you mean 'mnist'"):
        load("mnits")


def test_writing_is_whole_or_nothing(tmp_path):
    write_npz(tmp_path / "deep" / "a.npz", {"x": x})
    with pytest.raises(ValueError):
        write_npz(tmp_path / "deep" / "a.npz", {"x": np.array([{}], dtype=object)})
    assert np.array_equal(read_npz(tmp_path / "deep" / "a.npz")["x"], x)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["a.npz"]


# ---- the real files ----

FILES = {
    "mnist": ((1, 28, 28), 60000, 10000, 10, 0),
    "fashion-mnist": ((1, 28, 28), 60000, 10000, 10, 0),
    "femnist": ((1, 28, 28), 41065, 4680, 62, 287),
    "chest-xray": ((1, 64, 64), 2903, 733, 3, 8),
    "chest-xray-binary": ((1, 32, 32), 2903, 733, 2, 8),
    "heart-disease": ((13,), 607, 313, 2, 4),
    "cifar100": ((3, 32, 32), 600, 144, 100, 0),
    "tiny-imagenet": ((3, 32, 32), 8000, 2000, 40, 0),
}


@REAL
@pytest.mark.parametrize("name", FILES)
def test_real_files(name):
    shape, train, test, classes, groups = FILES[name]
    if not any((Path(os.environ["KILTER_DATA"]) / file).is_file() for file in SOURCES[name].files):
        pytest.skip(f"KILTER_DATA has no {SOURCES[name].files}")
    data = load(name)
    assert (tuple(data.x.shape[1:]), len(data.train), len(data.test)) == (shape, train, test)
    assert (len(data.classes), len(data.group_names)) == (classes, groups)
    assert data.x.isfinite().all()
    if len(shape) == 3:
        assert (data.x.min(), data.x.max()) == (0, 1)
    assert (data.mean is not None) == (shape[0] == 3)
    if groups:
        whole = split(data, "natural", 0)
        assert len(whole.clients) == groups
        assert sum(len(d.test) for d in whole.clients.values()) == test


@REAL
def test_heart_disease_is_imputed_and_standardised():
    data = load("heart-disease")
    raw = read_npz(Path(os.environ["KILTER_DATA"]) / "heart_disease.npz")
    chol = list(raw["features"]).index("chol")
    column, site = raw["x_train"][:, chol], raw["site_train"]
    known = column[(column > 0) & ~np.isnan(column)]
    filled = np.where((column > 0), column, np.median(known))
    expected = (filled - filled.mean()) / filled.std()
    assert data.x[: len(column), chol].numpy() == pytest.approx(expected, abs=1e-4)
    assert len(np.unique(data.x[: len(column), chol].numpy()[site == 2])) == 1  # Switzerland measured none
    assert data.group_names == ("cleveland", "hungarian", "switzerland", "va")
