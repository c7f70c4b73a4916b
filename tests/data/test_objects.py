"""Data in memory: frames, arrays and torch data sets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from kilter.data import TableOptions, load
from kilter.errors import Mistake

COLUMNS = {
    "age": [float(i) for i in range(20)],
    "sex": ["fm"[i % 2] for i in range(20)],
    "outcome": [1 + i % 2 for i in range(20)],
}
OUTCOME = TableOptions(label="outcome")


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map-style data set of small pictures."""

    def __init__(self, count: int = 12, shape: tuple[int, ...] = (1, 4, 4)) -> None:
        self.count, self.shape = count, shape

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.full(self.shape, at / 10), at % 2


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_frames_are_read_like_files(library, tmp_path):
    frames = pytest.importorskip(library)
    make = frames.table if library == "pyarrow" else frames.DataFrame
    data = load(make(COLUMNS), table=OUTCOME)
    lines = [f"{age},{sex},{outcome}" for age, sex, outcome in zip(*COLUMNS.values(), strict=True)]
    (tmp_path / "t.csv").write_text("age,sex,outcome\n" + "\n".join(lines))
    assert torch.equal(data.x, load(tmp_path / "t.csv", table=OUTCOME).x)
    dropped = load(make(COLUMNS), table=TableOptions(label="outcome", drop=("sex",)))
    assert dropped.schema.names == ("age",)
    both = load({"north": make(COLUMNS), "south": make(COLUMNS)}, table=OUTCOME)
    assert both.group_names == ("north", "south")
    assert len(both.y) == 40


def test_arrays_and_pairs():
    x, y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2
    pair, named = load((x, y)), load({"x": torch.from_numpy(x), "y": y, "group": np.arange(10) // 5})
    assert torch.equal(pair.x, named.x)
    assert named.group_names == ("0", "1")
    assert load((x, y), classes=["no", "yes"]).classes == ("no", "yes")


def test_torch_data_sets_for_all_or_for_each_client():
    assert load(Pairs()).x.shape == (12, 1, 4, 4)
    assert load(Pairs(), client=lambda at: f"site {at % 3}").group_names == ("site 0", "site 1", "site 2")
    both = load({"a": Pairs(6), "b": Pairs(8)})
    assert both.group_names == ("a", "b")
    assert len(both.y) == 14


def test_a_series_in_npy_files_is_memory_mapped(tmp_path):
    x = np.random.default_rng(0).random((30, 16, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(30) % 3)
    np.save(tmp_path / "group.npy", np.array(["a", "b", "c"] * 10))
    data = load(tmp_path)
    assert data.x.shape == (30, 1, 16, 4)  # time and channels are rows and columns of a picture
    assert torch.equal(data.x[:, 0], torch.from_numpy(x))
    assert data.group_names == ("a", "b", "c")
    np.save(tmp_path / "y.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(Mistake, match=r"y.npy' cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "A int is not data"),
        ({}, "A dict is not data"),
        (Pairs(0), "empty"),
        ([(1, 2, 3)], "Item 0 .* not a pair"),
        ([(np.zeros(2), 0), (np.zeros(3), 1)], "different shapes"),
        ({"a": pa.table({**COLUMNS, "client": COLUMNS["sex"]})}, "a column 'client' of its own"),
        (
            {"a": pa.table({"u": [1], "outcome": [1]}), "b": pa.table({"u": [[1]], "outcome": [1]})},
            "do not fit together",
        ),
    ],
)
def test_other_objects_are_refused_in_one_sentence(data, message):
    with pytest.raises(Mistake, match=message) as caught:
        load(data, table=OUTCOME)
    assert "\n" not in str(caught.value)
