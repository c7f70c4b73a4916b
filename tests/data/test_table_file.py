"""Large CSV files are read block by block. The result is that of reading the file as a whole."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.data import load, table_file
from kilter.data.columns import parse_column
from kilter.data.growing_column import GrowingColumn
from kilter.data.table_file import read_file
from kilter.data.tables import read_table
from kilter.errors import Mistake

CELLS = {
    "whole": st.integers(-(2**40), 2**40).map(str),
    "decimal": st.decimals(-1000, 1000, places=3).map(str),
    "word": st.sampled_from(["a", "Köln", "two words", " spaced "]),
    "date": st.dates().map(str),
    "gap": st.sampled_from(["", "NA", "?"]),
    "quoted": st.sampled_from(['"a,b"', '"say ""no"""']),
}
columns = st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=3).flatmap(
    lambda kinds: st.lists(st.one_of(*(CELLS[kind] for kind in kinds)), min_size=12, max_size=12)
)


def parsed(path: Path) -> list[tuple[str, str, list[object]]]:
    table = read_table([path])
    result = []
    for name in list(table.columns):
        column = parse_column(table, name)
        values = [column.words[c] if c >= 0 else None for c in column.cells] if column.words else column.cells.tolist()
        result.append((name, column.kind, [None if value != value else value for value in values]))
    return result


@settings(max_examples=40, deadline=None)
@given(st.lists(columns, min_size=1, max_size=4), st.booleans())
def test_reading_in_blocks_gives_the_same_cells_as_reading_the_whole_file(cells, bom):
    lines = [",".join(["id", *(f"c{k}" for k in range(len(cells)))])]
    lines += [",".join([str(row), *(column[row] for column in cells)]) for row in range(12)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig" if bom else "utf-8")
        whole = parsed(path)
        for block in (70, 200):
            with mock.patch.object(table_file, "BLOCK", block):
                assert parsed(path) == whole


def write(path: Path, rows: int = 200) -> Path:
    lines = [f"{k / 7:.3f},{'fm'[k % 2]},{k % 3}" for k in range(rows)]
    path.write_text("dose,sex,label\n" + "\n".join(lines) + "\n")
    return path


def test_blocks_are_really_used_and_numbers_are_not_copied(tmp_path, monkeypatch):
    path = write(tmp_path / "t.csv")
    monkeypatch.setattr(table_file, "BLOCK", 500)
    cells, separator = read_file(path)
    assert separator == ","
    assert cells["dose"].num_chunks == 1
    assert cells["label"].type == pa.int64()
    first = np.asarray(cells["dose"].chunk(0).to_numpy())
    table = read_table([path])
    assert np.shares_memory(parse_column(table, "dose").cells, table.columns["dose"].chunk(0).to_numpy())
    assert first.tolist() == pytest.approx([k / 7 for k in range(200)], abs=5e-4)


def test_a_large_table_is_loaded_like_a_small_one(tmp_path, monkeypatch):
    path = write(tmp_path / "t.csv")
    whole = load(path)
    monkeypatch.setattr(table_file, "BLOCK", 500)
    blocks = load(path)
    assert whole.x.equal(blocks.x)
    assert whole.preparation == blocks.preparation


@pytest.mark.parametrize("bad", ["1,f\n", "1,f,0,9\n", '"a\nb",f,0\n'])
def test_errors_in_a_late_block_name_the_line(tmp_path, monkeypatch, bad):
    path = write(tmp_path / "t.csv")
    path.write_text(path.read_text() + bad)
    monkeypatch.setattr(table_file, "BLOCK", 500)
    if '"' in bad:  # a line break in a cell is no error
        assert len(read_table([path])) == 201
    else:
        with pytest.raises(Mistake, match="line 202, has"):
            read_table([path])


def test_whole_numbers_become_decimals_with_the_first_decimal_or_gap():
    whole, column = GrowingColumn(2), GrowingColumn(2)  # too few: they grow
    for each in (whole, column):
        assert each.add(pa.int64(), pa.chunked_array([[1, 2], [2**53 + 1]]))
    assert whole.finish().to_pylist() == [1, 2, 2**53 + 1]
    assert column.add(pa.float64(), pa.chunked_array([[0.5, None]]))
    assert column.add(pa.null(), pa.chunked_array([pa.nulls(1)]))
    assert not column.add(pa.string(), pa.chunked_array([["word"]]))
    assert str(column.finish().to_pylist()) == "[1.0, 2.0, 9007199254740992.0, 0.5, nan, nan]"


def test_a_test_file_is_read_once_and_its_rows_come_last(tmp_path, monkeypatch):
    from kilter.data import TableOptions, tables

    read: list[Path] = []
    monkeypatch.setattr(tables, "read_file", lambda path: (read.append(path), read_file(path))[1])
    train, test = write(tmp_path / "t.csv", 50), write(tmp_path / "test.csv", 10)
    data = load(train, table=TableOptions(test_file=str(test)))
    assert read == [train, test]
    assert data.test.tolist() == list(range(50, 60))
