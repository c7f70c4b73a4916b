"""The hub path with a small stand-in for the `datasets` library: nothing goes to the network."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kilter.data import load
from kilter.errors import Mistake


class Picture:
    """As much of a PIL image as is asked for."""

    def __init__(self, pixels):
        self.pixels = pixels

    def convert(self, mode):
        return self.pixels if mode == "L" else np.stack([self.pixels] * 3, axis=-1)


class Table:
    """As much of a datasets.Dataset as is asked for."""

    def __init__(self, columns, names):
        self.columns = columns
        self.features = {
            name: SimpleNamespace(names=names if name in ("label", "character") else None) for name in columns
        }

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return (
            self.columns[key] if isinstance(key, str) else {name: column[key] for name, column in self.columns.items()}
        )

    def __iter__(self):
        return (self[at] for at in range(len(self)))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A library whose load_dataset gives what a test puts into `tables`; no KILTER_DATA; an empty cache."""
    tables, asked = {}, []

    def load_dataset(repo, split):
        asked.append((repo, split))
        return tables[repo, split]

    library = ModuleType("datasets")
    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.delenv("KILTER_DATA", raising=False)
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))
    return SimpleNamespace(tables=tables, asked=asked, cache=tmp_path / "cache")


def pictures(n, seed=0):
    return [Picture(p) for p in np.random.default_rng(seed).integers(0, 256, (n, 4, 5), dtype=np.uint8)]


def test_fetched_once_then_from_the_cache(hub):
    train, test = pictures(6), pictures(3, 1)
    hub.tables["ylecun/mnist", "train"] = Table({"image": train, "label": [0, 1, 2, 0, 1, 2]}, ["0", "1", "2"])
    hub.tables["ylecun/mnist", "test"] = Table({"image": test, "label": [2, 1, 0]}, ["0", "1", "2"])
    data = load("mnist")
    assert tuple(data.x.shape) == (9, 1, 4, 5)
    assert np.array_equal((data.x[7, 0] * 255).round().numpy(), test[1].pixels)
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2, 2, 1, 0]
    assert [file.name for file in hub.cache.iterdir()] == ["mnist.npz"]
    asked = len(hub.asked)
    again = load("mnist")
    assert len(hub.asked) == asked
    assert torch.equal(again.x, data.x)


def test_colour(hub):
    for part, n in (("train", 4), ("valid", 2)):
        hub.tables["zh-plus/tiny-imagenet", part] = Table({"image": pictures(n), "label": [0] * n}, ["egg"])
    data = load("tiny-imagenet")
    assert tuple(data.x.shape) == (6, 3, 4, 5)
    assert len(data.mean) == 3
    assert data.classes == ("egg",)


def test_writers_are_kept_and_divided(hub):
    writers = [f"f{w}" for w in (7, 3) for _ in range(20)]
    table = Table({"image": pictures(40), "writer_id": writers, "character": [0, 1] * 20}, ["0", "1"])
    hub.tables["flwrlabs/femnist", "train"] = table
    data = load("femnist")
    assert data.group_names == ("f3", "f7")
    assert np.bincount(data.groups[data.test]).tolist() == [2, 2]
    again = load("femnist")  # from the cache
    assert again.group_names == data.group_names
    assert torch.equal(again.groups, data.groups)
    assert torch.equal(again.y, data.y)


def test_the_three_ways_are_named(hub, monkeypatch):
    with pytest.raises(Mistake) as offline:
        load("cifar10")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Mistake) as absent:
        load("cifar10")
    for caught in (offline, absent):
        text = str(caught.value)
        assert all(way in text for way in ("KILTER_DATA", str(hub.cache), "kilter[hub]", "cifar10.npz"))
        assert "\n" not in text
    with pytest.raises(Mistake, match="not on the Hugging Face hub"):
        load("heart-disease")
    assert not hub.cache.exists()


def test_folder_before_cache_before_hub(hub, monkeypatch, tmp_path):
    def save(folder, value):
        folder.mkdir(exist_ok=True)
        image = np.full((2, 4, 4), value, dtype=np.uint8)
        np.savez(folder / "mnist.npz", x_train=image, y_train=[0, 1], x_test=image, y_test=[0, 1])

    save(hub.cache, 51)
    assert load("mnist").x.max() == pytest.approx(0.2)
    save(tmp_path / "given", 255)
    assert load("mnist", tmp_path / "given").x.max() == 1  # the cache by argument
    monkeypatch.setenv("KILTER_DATA", str(tmp_path / "given"))
    assert load("mnist").x.max() == 1
    assert hub.asked == []
    monkeypatch.setenv("KILTER_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(Mistake, match=r"KILTER_DATA names .* not a folder"):
        load("mnist")


def test_a_full_cifar10_goes_before_the_sample(hub):
    hub.cache.mkdir()
    for file, n in (("cifar10_25k.npz", 2), ("cifar10.npz", 3)):
        image = np.zeros((n, 4, 4, 3), dtype=np.uint8)
        np.savez(hub.cache / file, x_train=image, y_train=[0] * n, x_test=image, y_test=[0] * n)
        assert len(load("cifar10").train) == n
