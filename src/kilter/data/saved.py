"""Data sets of the Hugging Face library `datasets`: a folder written by `save_to_disk`, or hf:NAME from the hub.

A saved folder holds Arrow files, which pyarrow reads without that library. Columns hold numbers, words, dates or texts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from kilter.data.tables import Table
from kilter.errors import Mistake

PREFIX = "hf:"


def is_saved(path: Path) -> bool:
    """Whether this is a folder written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def read_saved(path: Path) -> tuple[Table, Table]:
    """The training rows, and the same followed by the test rows, if there are some."""
    try:
        if (path / "state.json").is_file():
            parts = [_read_part(path)]
        else:
            splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
            if "train" not in splits:
                raise Mistake(f"'{path}' has the splits {', '.join(splits)}, and no 'train': save one under that name.")
            parts = [_read_part(path / name) for name in ("train", "test") if name in splits]
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Mistake(
            f"'{path}' cannot be read as a saved data set ({reason}): save it again with save_to_disk."
        ) from None
    return _tables(str(path), parts)


def _read_part(folder: Path) -> pa.Table:
    """The rows of one split, with names in place of class numbers."""
    files = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
    tables = []
    for name in files:
        with pa.memory_map(str(folder / name)) as source, pa.ipc.open_stream(source) as stream:
            tables.append(stream.read_all())
    info = folder / "dataset_info.json"
    features = json.loads(info.read_text()).get("features") or {} if info.is_file() else {}
    return _with_names(
        pa.concat_tables(tables), {key: f.get("names") for key, f in features.items() if isinstance(f, dict)}
    )


def _with_names(table: pa.Table, names: dict[str, list[str] | None]) -> pa.Table:
    for column, classes in names.items():
        if classes and column in table.column_names:
            texts = [None if c is None or c < 0 else classes[c] for c in table.column(column).to_pylist()]
            table = table.set_column(table.column_names.index(column), column, pa.array(texts, pa.string()))
    return table


def fetch_rows(name: str) -> tuple[Table, Table]:
    """A data set from the hub, by name: its splits train and test."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise Mistake(
            f"'{PREFIX}{name}' is on the Hugging Face hub, which needs the library datasets: `pip install 'kilter[hub]'`."
        ) from None
    try:
        splits = load_dataset(name)
        parts = []
        for split in ("train", "test"):
            if split in splits:
                names = {key: getattr(f, "names", None) for key, f in splits[split].features.items()}
                parts.append(_with_names(pa.table(splits[split].data.table), names))
    except Exception as error:  # the library raises many kinds, also if there is no network
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Mistake(
            f"The data set '{name}' cannot be fetched from the Hugging Face hub ({reason}): go online, or give the path of "
            "a folder written by save_to_disk."
        ) from None
    if not parts:
        raise Mistake(
            f"The data set '{name}' on the hub has no split 'train': save one with save_to_disk and give its path."
        )
    return _tables(name, parts)


def _tables(name: str, parts: list[pa.Table]) -> tuple[Table, Table]:
    tables = [
        Table.of(name, dict(zip(p.column_names, p.columns, strict=True))) for p in (parts[0], pa.concat_tables(parts))
    ]
    return tables[0], tables[1]
