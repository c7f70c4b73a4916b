"""Data sets of the Hugging Face library: saved folders are read without it; the hub gives a clear sentence when it is away."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest

from kilter.data import TableOptions, load
from kilter.errors import Mistake

NAMES = ["well", "ill"]
SICK = TableOptions(label="sick", client="site", drop=("id",))


def rows(count: int) -> pa.Table:
    columns = {
        "id": [str(i) for i in range(count)],
        "age": list(range(count)),
        "site": ["ab"[i % 2] for i in range(count)],
    }
    return pa.table({**columns, "sick": [i % 2 for i in range(count)]})


def save(folder: Path, count: int) -> None:
    """As `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    table = rows(count)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text(
        json.dumps({"features": {"sick": {"names": NAMES, "_type": "ClassLabel"}}})
    )


def test_a_saved_data_set_with_one_split(tmp_path):
    save(tmp_path / "d", 40)
    data = load(tmp_path / "d", table=SICK)
    assert data.classes == ("ill", "well")
    assert data.group_names == ("a", "b")
    assert data.schema.names == ("age",)
    assert len(data.test) == 8


def test_a_saved_data_set_with_train_and_test(tmp_path):
    for name, count in (("train", 40), ("test", 12)):
        save(tmp_path / "d" / name, count)
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    data = load(tmp_path / "d", table=SICK)
    assert (len(data.train), len(data.test)) == (40, 12)
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["other"]}))
    with pytest.raises(Mistake, match="no 'train'"):
        load(tmp_path / "d", table=SICK)


def test_a_damaged_folder_is_refused(tmp_path):
    save(tmp_path / "d", 9)
    (tmp_path / "d" / "data-00000-of-00001.arrow").write_bytes(b"x")
    with pytest.raises(Mistake, match="cannot be read as a saved data set"):
        load(tmp_path / "d")


def test_the_hub_by_name(monkeypatch):
    class Part:
        features: dict[str, object] = {"sick": SimpleNamespace(names=NAMES)}  # noqa: RUF012
        data = SimpleNamespace(table=rows(30))

    library = ModuleType("datasets")
    library.load_dataset = lambda name: {"train": Part()} if name == "org/there" else 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert load("hf:org/there", table=SICK).group_names == ("a", "b")
    with pytest.raises(Mistake, match=r"cannot be fetched from the Hugging Face hub .*go online"):
        load("hf:org/away")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Mistake, match="needs the library datasets"):
        load("hf:org/there")
