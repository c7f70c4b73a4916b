"""Tables of users: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from kilter.data import Schema, TableOptions, load
from kilter.data.holdout import hold_out_share
from kilter.data.schema import Column, conflict, merge, with_series
from kilter.errors import Mistake


def table(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def rows(count: int = 20, separator: str = ",", point: str = ".") -> str:
    """A table with a number, a word, a date, gaps and the label 1 or 2."""
    lines = [separator.join(("age", "sex", "seen", "outcome"))]
    for i in range(count):
        age = "" if i == 3 else f"{40 + i / 2}".replace(".", point)
        lines.append(separator.join((age, "?" if i == 5 else "fm"[i % 2], f"2024-01-{1 + i:02}", str(1 + i % 2))))
    return "\n".join(lines) + "\n"


OUTCOME = TableOptions(label="outcome")


def test_words_gaps_dates_and_another_label(tmp_path):
    data = load(table(tmp_path / "p.csv", rows()), table=OUTCOME)
    assert data.classes == ("1", "2")
    assert [(c.name, c.kind) for c in data.schema.columns] == [("age", "number"), ("sex", "category"), ("seen", "date")]
    assert data.preparation.columns[1].values == ("f", "m")
    assert data.x.shape == (20, 1 + 3 + 1)
    assert data.x[3, 0] == 0  # a gap is the mean
    assert data.x[:6, 1:4].tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]
    numbers = data.x[data.train][:, [0, 4]]
    assert torch.allclose(numbers[:, 1].mean(), torch.tensor(0.0), atol=1e-6)
    assert torch.allclose(numbers[:, 1].std(correction=0), torch.tensor(1.0), atol=1e-5)


@pytest.mark.parametrize(
    ("separator", "point", "encoding"),
    [(";", ",", "utf-8"), ("\t", ".", "utf-8"), ("|", ",", "utf-8"), (",", ".", "utf-8-sig")],
)
def test_separators_decimal_commas_and_bom_change_nothing(tmp_path, separator, point, encoding):
    plain = load(table(tmp_path / "plain.csv", rows()), table=OUTCOME)
    other = load(table(tmp_path / "Köln é.csv", rows(separator=separator, point=point), encoding), table=OUTCOME)
    assert torch.equal(plain.x, other.x)
    assert plain.preparation == other.preparation


def test_parquet_is_read_like_csv(tmp_path):
    columns = {
        "age": [None if i == 3 else 40 + i / 2 for i in range(20)],
        "sex": [None if i == 5 else "fm"[i % 2] for i in range(20)],
        "seen": np.arange("2024-01-01", "2024-01-21", dtype="datetime64[D]"),
        "outcome": [1 + i % 2 for i in range(20)],
    }
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet")
    plain = load(table(tmp_path / "plain.csv", rows()), table=OUTCOME)
    other = load(tmp_path / "p.parquet", table=OUTCOME)
    assert torch.equal(plain.x, other.x)
    assert torch.equal(plain.y, other.y)


def test_one_file_per_client_is_matched_by_name(tmp_path):
    table(tmp_path / "h" / "a.csv", "age,bmi,label\n" + "".join(f"{i},{i * i},{i % 2}\n" for i in range(10)))
    table(tmp_path / "h" / "b.csv", "label;bmi;age\n" + "".join(f"{i % 2};{i * i};{i}\n" for i in range(10)))
    data = load(tmp_path / "h")
    assert data.group_names == ("a", "b")
    assert torch.equal(data.x[:10], data.x[10:])
    assert data.client_source == "files"
    table(tmp_path / "h" / "c.csv", "age,label\n1,0\n2,1\n")
    with pytest.raises(Mistake, match=r"c.csv' has no column 'bmi', unlike 'a.csv'"):
        load(tmp_path / "h")
    dropped = load(tmp_path / "h", table=TableOptions(drop=("bmi",)))
    assert dropped.x.shape == (22, 1)


def test_test_file_test_size_and_client(tmp_path):
    path = table(tmp_path / "p.csv", rows())
    apart = table(tmp_path / "q.csv", rows(4))
    data = load(path, table=TableOptions(label="outcome", test_file=str(apart)))
    assert (len(data.train), len(data.test)) == (20, 4)
    assert torch.equal(data.x[:4], data.x[20:])
    data = load(path, table=TableOptions(label="outcome", test_size=0.4))
    assert (len(data.train), len(data.test)) == (12, 8)
    bad = TableOptions(label="outcome", client="sex")
    with pytest.raises(Mistake, match=r"Column 'sex' has no client in '.*p.csv', line 7"):
        load(path, table=bad)


def test_test_rows_do_not_change_the_preparation(tmp_path):
    path = table(tmp_path / "p.csv", rows())
    first = load(path, table=TableOptions(label="outcome", test_file=str(table(tmp_path / "q.csv", rows(4)))))
    second = load(path, table=TableOptions(label="outcome", test_file=str(table(tmp_path / "r.csv", rows(19)))))
    assert first.preparation == second.preparation


MANY = "a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(150))
BAD = {
    "no label": ("a,b\n1,2", {}, r"no column 'label' or 'y' \(it has 'a', 'b'\)"),
    "wrong label": ("a,b\n1,2", {"label": "bb"}, "did you mean 'b'"),
    "two labels": ("a,y,label\n1,2,3", {}, "both 'label' and 'y'"),
    "two clients": ("a,y,client,group\n1,2,3,4", {}, "both 'client' and 'group'"),
    "empty": ("", {}, "is empty: its first line must name the columns"),
    "no rows": ("a,y\n", {}, "has 0 rows"),
    "no features": ("y\n1\n2\n", {}, "0 feature columns"),
    "too few cells": ("a,y\n1,0\n\n1\n", {}, "line 4, has 1 cells"),
    "too many cells": ("a,y\n1,0\n1,2,3\n", {}, "line 3, has 3 cells"),
    "word among numbers": (MANY.replace("\n77,", "\nx7,"), {}, "holds 'x7' in .*line 79, and most other"),
    "free text": ("a,y\n" + "".join(f"w{i},{i % 2}\n" for i in range(150)), {}, "150 different words"),
    "infinite": ("a,y\n1,0\ninf,1\n", {}, "infinite number in .*line 3"),
    "double": ("a,a,y\n1,2,0", {}, "two columns of the same name, 'a'"),
    "unnamed": ("a,,y\n1,2,0", {}, "column without a name, number 2"),
    "fraction": ("a,y\n1,0.5\n2,1", {}, "not whole numbers, such as '0.5'"),
    "many labels": ("a,y\n" + "".join(f"1,{i}\n" for i in range(150)), {}, "150 different labels"),
    "empty label": ("a,y\n1,0\n2,\n3,1\n", {}, "no label in .*line 3"),
    "NaN label": ("a,y\n1,0\n2,nan\n3,1\n", {}, "no label in .*line 3"),
    "empty client": ("a,y,client\n1,0,u\n2,1,\n", {}, "no client in .*line 3"),
    "one row": ("a,y\n1,0\n", {}, "at least two"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_are_refused_in_one_sentence(case, tmp_path):
    text, options, message = BAD[case]
    with pytest.raises(Mistake, match=message) as caught:
        load(table(tmp_path / "t.csv", text), table=TableOptions(**options))
    assert "\n" not in str(caught.value)


def test_a_test_class_that_nobody_trains_on_is_refused(tmp_path):
    path = table(tmp_path / "p.csv", "a,y\n1,0\n2,1\n")
    apart = table(tmp_path / "q.csv", "a,y\n1,2\n")
    with pytest.raises(Mistake, match="the class '2', which no training row has"):
        load(path, table=TableOptions(test_file=str(apart)))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(Mistake, match="cannot be read as a Parquet file"):
        load(tmp_path / "t.parquet")


# ---- schemas ----


def test_a_schema_survives_its_file(tmp_path):
    schema = load(table(tmp_path / "p.csv", rows()), table=OUTCOME).schema
    (tmp_path / "schema.toml").write_text(schema.text())
    assert Schema.read(tmp_path / "schema.toml") == schema


def test_a_reordered_table_gives_the_same_rows_under_a_schema(tmp_path):
    data = load(table(tmp_path / "p.csv", rows()), table=OUTCOME)
    lines = [line.split(",") for line in rows().splitlines()]
    turned = table(tmp_path / "q.csv", "\n".join(",".join(line[::-1]) for line in lines))
    assert torch.equal(load(turned, schema=data.schema).x, data.x)
    assert torch.equal(load(turned, schema=data.preparation).x, data.x)


MISMATCHES = {
    "missing": ("age,label\n1,a\n2,b\n", "column 'sex' is missing"),
    "extra": ("age,sex,foo,label\n1,f,1,a\n2,m,2,b\n", "column 'foo' is not expected"),
    "retyped": ("age,sex,label\n1,0,a\n2,1,b\n", "column 'sex' holds numbers instead of words"),
    "class": ("age,sex,label\n1,f,a\n2,m,c\n", "label 'c' is not among the classes 'a', 'b'"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_does_not_fit_a_schema_is_named(case, tmp_path):
    schema = Schema((Column("age", "number"), Column("sex", "category")), "label", ("a", "b"))
    text, message = MISMATCHES[case]
    with pytest.raises(Mistake, match=message):
        load(table(tmp_path / "t.csv", text), schema=schema)


@pytest.mark.parametrize(
    "text",
    [
        "x = [",
        "target = 1",
        'target = "y"\nclasses = ["a"]',
        'target = "y"\nclasses = ["a"]\n[[columns]]\nname = "b"\nkind = "blob"',
        'target = "y"\nclasses = ["a"]\n[[columns]]\nname = "y"\nkind = "number"',
        'target = "y"\nclasses = ["a"]\n[[columns]]\nname = "b"\nkind = "number"\nclip = nan',
    ],
)
def test_bad_schema_files(text, tmp_path):
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(Mistake, match="is not a schema"):
        Schema.read(tmp_path / "schema.toml")


def test_a_column_that_is_empty_at_one_site_fits_any_kind():
    empty, words = Column("c", "empty"), Column("c", "category")
    merged = merge([Schema((empty,), "y", ("10",)), Schema((words,), "y", ("9",))])
    assert merged == Schema((words,), "y", ("9", "10"))


def test_columns_are_prepared_as_any_site_says_unless_two_contradict_each_other():
    def schema(*settings):
        return Schema((Column("a", "number"), Column("b", "number", **dict(settings))), "y", ("0",))

    merged = merge([schema(), schema(("clip", 0.1)), schema(("fill", "median"))])
    assert merged.columns[1] == Column("b", "number", fill="median", clip=0.1)
    assert conflict(schema(), schema(("clip", 0.1))) == ""
    with pytest.raises(Mistake, match=r"column 'b' has clip 0.2 instead of 0.1 \(--prepare\)"):
        merge([schema(("clip", 0.1)), schema(("clip", 0.2))])


def test_time_series_of_one_site_are_those_of_all():
    columns = tuple(Column(name, "number") for name in ("hr_2", "age", "hr_1", "bp_1", "bp_2"))
    plain = Schema(columns, "y", ("0",))
    beats = with_series(plain, ["hr_*"])
    assert merge([plain, beats]) == merge([beats, plain]) == beats
    with pytest.raises(Mistake, match="the time series are in other columns"):
        merge([beats, with_series(plain, ["bp_*"])])
    assert [c.name for c in with_series(beats, ["bp_*"]).columns if c.series] == ["bp_1", "bp_2"]


def test_prepare_cannot_contradict_a_schema(tmp_path):
    path = table(tmp_path / "t.csv", "a,b,label\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(40)))
    schema = load(path, table=TableOptions(prepare="clip=0.1")).schema
    assert load(path, schema=schema).schema == load(path, schema=schema, table=TableOptions(prepare="clip=0.1")).schema
    with pytest.raises(Mistake, match=r"column 'a' has clip=0\.1 there, and --prepare wants 0\.2"):
        load(path, schema=schema, table=TableOptions(prepare="clip=0.2"))
    with pytest.raises(Mistake, match="column 'a' has series=none there, and --series wants a"):
        load(path, schema=schema, table=TableOptions(series=("a", "b")))


def test_files_with_different_types_of_one_column_are_joined(tmp_path):
    table(tmp_path / "h" / "a.csv", "a,b,c,label\n" + "".join(f"{i},,2024-01-0{i},{i % 2}\n" for i in range(1, 8)))
    table(tmp_path / "h" / "b.csv", "a,b,c,label\n" + "".join(f"{i}.5,{i},0{i}.01.2024,{i % 2}\n" for i in range(1, 8)))
    data = load(tmp_path / "h")
    assert [c.kind for c in data.schema.columns] == ["number", "number", "date"]
    assert data.raw["c"].cells[:7].tolist() == data.raw["c"].cells[7:].tolist()


def test_line_breaks_inside_of_quotes(tmp_path):
    text = "note,a,label\n" + "".join(f'"x\ny{i % 3}",{i},{i % 2}\n' for i in range(40))
    data = load(table(tmp_path / "t.csv", text))
    assert len(data.y) == 40
    with pytest.raises(Mistake, match="line 84, has 2 cells"):
        load(table(tmp_path / "t.csv", text + "\n\n1,2\n"))


@given(st.integers(4, 200), st.floats(0.2, 0.8))
def test_law_a_test_share_is_kept(count, share):
    train, test = hold_out_share(np.arange(count) % 2, None, share)
    assert len(test) == pytest.approx(share * count, abs=1)
    assert sorted([*train, *test]) == list(range(count))
