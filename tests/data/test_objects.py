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
            "'b', column 'u', holds list",
        ),
    ],
)
def test_other_objects_are_refused_in_one_sentence(data, message):
    with pytest.raises(Mistake, match=message) as caught:
        load(data, table=OUTCOME)
    assert "\n" not in str(caught.value)


class Items(Pairs):
    """A data set of any items."""

    def __init__(self, item: object, count: int = 12) -> None:
        super().__init__(count)
        self.item = item

    def __getitem__(self, at: int) -> object:
        return self.item(at) if callable(self.item) else self.item


FRAME = pa.table({"a": list(range(8)), "label": [0, 1] * 4})
WRONG = {
    "another column at one client": ({"n": FRAME, "s": FRAME.rename_columns(["b", "label"])}, "'s' has no column 'a'"),
    "one more column": ({"n": FRAME, "s": FRAME.append_column("z", [[1] * 8])}, "another column, 'z'"),
    "words at one client": (
        {"n": FRAME, "s": FRAME.set_column(0, "a", [["w"] * 8])},
        "'a' holds numbers in 'n' and words in 's'",
    ),
    "a client without rows": ({"n": FRAME, "s": FRAME[:0]}, "'s' has no rows"),
    "a frame and an array": ({"n": FRAME, "s": np.zeros((4, 2))}, "data frame of 's' is a ndarray"),
    "a dict as an item": (Items({"x": 1, "y": 2}), "not a pair .* but a dict"),
    "a fraction as a label": (Items(lambda at: (torch.zeros(2), at / 10)), "not a whole number"),
    "no label": (Items((torch.zeros(2), None)), "has the label None"),
    "several labels": (Items((torch.zeros(2), torch.tensor([0, 1]))), "has the label array"),
    "names and numbers": (Items(lambda at: (torch.zeros(2), [0, "a"][at % 2])), "names and numbers"),
    "other shapes at one client": ({"a": Pairs(), "b": Pairs(shape=(3,))}, "client 'a' .* shape .* 'b'"),
    "nothing at one client": ({"a": Pairs(), "b": Pairs(0)}, "client 'b' is empty"),
    "rows of different lengths": ({"x": [[1, 2], [3]], "y": [0, 1]}, "'x' has rows of different lengths"),
    "fewer labels": ((np.zeros((4, 2)), [0, 1, 0]), "4 and 3 rows"),
    "only features": (np.zeros((4, 2)), "A ndarray is not data"),
}


@pytest.mark.parametrize("case", WRONG)
def test_data_in_memory_that_cannot_be_meant_is_refused(case):
    data, message = WRONG[case]
    with pytest.raises(Mistake, match=message) as caught:
        load(data)
    assert "\n" not in str(caught.value)


def test_frames_that_pyarrow_cannot_read_are_refused_in_one_sentence():
    pandas = pytest.importorskip("pandas")
    for frame in (
        pandas.DataFrame({"a": [1, "x"], "label": [0, 1]}),
        pandas.Series([1.0]),
        pandas.DataFrame([[1, 2]], None, ["a", "a"]),
    ):
        with pytest.raises(Mistake, match=r"The data frame cannot be read \("):
            load(frame)


def test_categoricals_and_clients_with_frames_of_two_libraries():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    north = polars.DataFrame({"a": polars.Series(["u", "v"] * 8, dtype=polars.Categorical), "label": [0, 1] * 8})
    south = pandas.DataFrame({"label": [0, 1] * 8, "a": pandas.Categorical(["v", "u"] * 8)})
    data = load({"north": north, "south": south})
    assert data.raw["a"].words == ("u", "v")
    assert data.group_names == ("north", "south")


def test_pairs_and_arrays_by_name_for_each_client():
    x, y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2
    data = load({"a": (x, y), "b": {"x": x, "y": y}})
    assert data.group_names == ("a", "b")
    assert torch.equal(data.x[:10], data.x[10:])


def test_tensors_keep_their_channels_and_labels_may_be_names():
    data = load(Items(lambda at: (torch.arange(2 * 4 * 5.0).reshape(2, 4, 5) + at, ["no", "yes"][at % 2])))
    assert torch.equal(data.x[1], torch.arange(2 * 4 * 5.0).reshape(2, 4, 5) + 1)
    assert data.classes == ("no", "yes")
    colour = torch.rand(6, 3, 4, 5, requires_grad=True)
    assert torch.equal(load((colour, [0, 1] * 3)).x, colour.detach())


def test_options_without_effect_are_refused():
    x, y = np.zeros((10, 3)), np.arange(10) % 2
    for data, options in (
        ((x, y), OUTCOME),
        (FRAME, TableOptions(test_file="t.csv")),
        (FRAME, TableOptions(image_size="8")),
    ):
        with pytest.raises(Mistake, match="leave out"):
            load(data, table=options)
    for data in ((x, y), FRAME):
        with pytest.raises(Mistake, match="`client`"):
            load(data, client=lambda at: at)
    with pytest.raises(Mistake, match="names no client for item 0"):
        load(Pairs(), client=lambda at: None)
    for classes in ("01", [], ["0", "0"]):
        with pytest.raises(Mistake, match="each once"):
            load((x, y), classes=classes)


def test_arrays_say_what_nothing_prepares():
    x, y = np.full((10, 3), 5e4), 1 + np.arange(10) % 2
    assert [note.split(":")[0] for note in load((x, y)).notes] == [
        "No row has class 0",
        "x has values up to 5e+04. Arrays are not standardised",
    ]
    assert load((x / 1e5, y - 1)).notes == ()
    assert load((x / 1e5, y / 3), table=TableOptions(task="regression")).task == "regression"
