"""Tables that could be read, but not as their owner means: refused in one sentence, or noted."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from kilter.data import TableOptions, load
from kilter.data.columns import as_days
from kilter.data.schema import Column, Schema
from kilter.errors import Mistake


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(cells: list[str], count: int = 40) -> str:
    return "a,b,label\n" + "".join(f"{cells[i % len(cells)]},{i},{i % 2}\n" for i in range(count))


NUMBERS = [str(i) for i in range(40)]
BAD = {
    "a typo in a small table": (rows([*NUMBERS[:39], "4O"]), r"holds '4O' in .*line 41, and most other"),
    "dates with slashes": (rows(["03/31/2024", "04/01/2024"]), r"holds '03/31/2024' in .*line 2, which is not a date"),
    "an impossible date": (rows(["28.02.2024", "31.02.2024"]), r"holds '31.02.2024' in .*line 3, which is not a date"),
    "numbers in place of names": ("1.5,2,0\n1,2,1\n", "only numbers in its first line"),
    "a long name": (f"{'a' * 201},label\n1,0\n2,1\n", "name is longer than 200 characters .* number 1"),
    "a long label": (f"a,label\n1,{'x' * 201}\n2,1\n", "holds a label that is longer than 200 characters"),
    "a label that moves the cursor": ("a,label\n1,\x1b[2J\n2,b\n", "holds a label .* not printable"),
    "only a header": ("a,label", "has 0 rows"),
    "the index of pandas": (",a,label\n0,1,0\n", "number 1: name it .pandas writes"),
    "UTF-16": ("a,label\n1,0\n2,1\n".encode("utf-16"), "line 1, is not UTF-8"),
    "Latin 1 from some row on": (
        ("a,label\n" + "é,0\n" * 1200).encode() + "é,1\n".encode("latin1"),
        "line 1202, is not",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_meant_is_refused_in_one_sentence(case, tmp_path):
    text, message = BAD[case]
    with pytest.raises(Mistake, match=message) as caught:
        load(write(tmp_path / "t.csv", text))
    assert "\n" not in str(caught.value)


def test_a_schema_may_declare_that_numbers_and_words_are_categories(tmp_path):
    path = write(tmp_path / "t.csv", rows([*NUMBERS[:39], "x"]))
    schema = Schema((Column("a", "category"), Column("b", "number")), "label", ("0", "1"))
    assert len(load(path, schema=schema).raw["a"].words) == 40
    assert load(write(tmp_path / "c.csv", rows(["1", "2", "3", "unknown"]))).schema.columns[0].kind == "category"


def test_dates_in_several_forms_are_the_same_days():
    forms = ["2024-03-05", "05.03.2024", "5.3.2024", "2024/3/5", "2024-3-5"]
    assert as_days(pa.chunked_array([[*forms, None]])).tolist()[:5] == [19787.0] * 5
    assert as_days(pa.chunked_array([["5.3.2024 12:00"]])).tolist() == [19787.5]
    assert as_days(pa.chunked_array([["2024-03-05T12:00:00Z"]])).tolist() == [19787.5]
    for impossible in ("31.02.2024", "2024-02-30", "1.13.2024", "1.2.3"):
        assert as_days(pa.chunked_array([["2024-01-01", impossible]])) is None


FOLDERS = {
    "words in one file": (
        {"a.csv": rows(["1", "2"]), "b.csv": rows(["u", "v"])},
        "'a' holds numbers in 'a.csv' and words in 'b.csv'",
    ),
    "labels as words in one file": (
        {"a.csv": rows(["1"]), "b.csv": rows(["1"]).replace(",0\n", ",no\n").replace(",1\n", ",yes\n")},
        "'label' holds numbers in 'a.csv' and words in 'b.csv'",
    ),
    "an empty file": ({"a.csv": rows(["1"]), "b.csv": "a,b,label\n"}, "b.csv' has no rows"),
    "a file that would not be read": ({"data.csv": rows(["1"]), "b.csv": rows(["1"])}, "'b.csv' would not be read"),
    "one more than train and test": (
        {"train.csv": rows(["1"]), "test.csv": rows(["1"]), "b.csv": rows(["1"])},
        "'b.csv' would not be read",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_contradict_themselves_are_refused(case, tmp_path):
    files, message = FOLDERS[case]
    for name, text in files.items():
        write(tmp_path / "d" / name, text)
    with pytest.raises(Mistake, match=message):
        load(tmp_path / "d")


def test_other_files_of_a_folder_are_named(tmp_path):
    for name in ("a.csv", "b.csv", "c.xlsx", "d/e.csv", ".hidden"):
        write(tmp_path / "d" / name, rows(["1"]))
    assert load(tmp_path / "d").notes[0].endswith("'c.xlsx', 'd/'.")


def test_test_rows_are_chosen_in_one_way(tmp_path):
    path, apart = write(tmp_path / "t.csv", rows(["1"])), write(tmp_path / "u.csv", rows(["1"]))
    with pytest.raises(Mistake, match="leave out --test-size"):
        load(path, table=TableOptions(test_file=str(apart), test_size=0.3))
    with pytest.raises(Mistake, match=r"empty.csv' has no rows"):
        load(path, table=TableOptions(test_file=str(write(tmp_path / "empty.csv", "a,b,label\n"))))


def test_names_that_differ_in_case_are_noted(tmp_path):
    text = "client,a,label\n" + "".join(f"{('A', 'a')[i // 2 % 2]},{i},{('ill', 'Ill')[i % 2]}\n" for i in range(40))
    assert load(write(tmp_path / "t.csv", text)).notes == (
        "The classes 'Ill', 'ill' differ only in upper and lower case: they count as different ones.",
        "The clients 'A', 'a' differ only in upper and lower case: they count as different ones.",
    )


def test_nested_columns_can_be_left_out_and_the_index_of_pandas_is_no_feature(tmp_path):
    columns = {"a": list(range(20)), "n": [{"k": 1}] * 20, "label": ["u", "v"] * 10, "__index_level_0__": ["x"] * 20}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(Mistake, match=r"column 'n', holds struct.*--drop n"):
        load(tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet", table=TableOptions(drop=("n",))).schema.names == ("a",)


def test_numbers_that_are_too_large_are_named(tmp_path):
    with pytest.raises(Mistake, match=r"holds 1e\+300, which is too large, in .*line 2"):
        load(write(tmp_path / "t.csv", rows(["1e300", "1"])))
    with pytest.raises(Mistake, match=r"holds a number beyond 1e\+38"):
        load(write(tmp_path / "u.csv", rows(["1e300", "1"])), table=TableOptions("a", task="regression"))
