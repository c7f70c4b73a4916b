"""Preparation: federated statistics equal pooled ones, and each kind of column becomes the numbers that it should."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from kilter.data import Column, Preparation, Schema, TableOptions, load, split
from kilter.data.channel_moments import moments
from kilter.data.columns import Parsed
from kilter.data.explain import explain
from kilter.data.preparation import (
    ImagePreparation,
    check_statistics,
    fit,
    fit_channels,
    fit_whole,
    parse_preparation,
    read_schema,
)
from kilter.data.prepare_settings import parse_prepare
from kilter.data.schema import with_series
from kilter.data.statistics import ACCURACY, ColumnStatistics, pool, quantile, sketch_of, summarise, words_of
from kilter.errors import Mistake

CLASSES = ("0", "1")
numbers = st.floats(-1e6, 1e6, width=32) | st.just(float("nan"))
parts_of_numbers = st.lists(st.lists(numbers, min_size=1, max_size=20), min_size=1, max_size=5)


def one(column: Column) -> Schema:
    return Schema((column,), "y", CLASSES)


def federated(parsed: Parsed, sizes: list[int], column: Column) -> Preparation:
    """Fitted on statistics of clients that hold this many rows each."""
    ends = np.cumsum(sizes)
    rows = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    statistics = [summarise({column.name: parsed}, one(column), part) for part in rows]
    plain = [{"columns": {name: c.plain() for name, c in part.items()}} for part in statistics]
    return fit(one(column), [check_statistics(part, one(column)) for part in plain])


# Laws -----------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(parts_of_numbers)
def test_law_federated_moments_are_pooled_moments(parts):
    column = Column("a", "number", least=1)
    whole = Parsed("number", np.concatenate([np.array(part) for part in parts]))
    fitted = federated(whole, [len(part) for part in parts], column).columns[0]
    known = whole.cells[np.isfinite(whole.cells)]
    mean, std = (known.mean(), known.std()) if len(known) else (0.0, 0.0)
    scale = max(1.0, abs(mean), std)
    assert fitted.count == len(known)
    assert fitted.mean == pytest.approx(mean, abs=1e-9 * scale)
    assert fitted.std == pytest.approx(std, abs=1e-6 * scale)


@settings(deadline=None, max_examples=50)
@given(parts_of_numbers, st.sampled_from([0.01, 0.25, 0.5, 0.9]))
def test_law_federated_quantiles_are_within_the_stated_bound(parts, share):
    arrays = [np.array(part) for part in parts]
    arrays = [a[np.isfinite(a)] for a in arrays]
    whole = np.concatenate(arrays)
    if len(whole) == 0:
        return
    pooled = pool([{"a": ColumnStatistics(len(a), sketch=sketch_of(a))} for a in arrays])["a"]
    assert pooled.sketch == sketch_of(whole)
    exact = np.quantile(whole, share, method="lower")
    assert quantile(pooled.sketch, share) == pytest.approx(exact, rel=ACCURACY * 1.001, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=12), min_size=1, max_size=4))
def test_law_federated_categories_are_pooled_categories(parts):
    column = Column("a", "category", least=1, fill="most-frequent")
    texts = [word for part in parts for word in part]
    parsed = Parsed.of_words(texts)
    preparation = federated(parsed, [len(part) for part in parts], column)
    assert preparation == fit_whole({"a": parsed}, one(column), np.arange(len(texts)))
    known = sorted({word for word in texts if word})
    assert preparation.columns[0].values == tuple(known)
    if known:
        filled = SimpleImputer(missing_values="", strategy="most_frequent").fit_transform(
            np.array(texts, object)[:, None]
        )
        expected = OneHotEncoder(categories=[known], sparse_output=False).fit_transform(filled)
        assert preparation.apply({"a": parsed})[:, :-1].tolist() == expected.tolist()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 99))
def test_law_channel_moments_are_pooled_moments(sizes, seed):
    images = torch.from_numpy(np.random.default_rng(seed).random((sum(sizes), 3, 2, 2), dtype=np.float32))
    ends = np.cumsum(sizes)
    parts = [moments(images, np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    plain = [{"count": n, "mean": list(mean), "std": list(std)} for n, (mean, std) in zip(sizes, parts, strict=True)]
    fitted, (mean, std) = fit_channels(plain), moments(images, np.arange(ends[-1]))
    assert fitted.mean == pytest.approx(mean, abs=1e-6)
    assert fitted.std == pytest.approx(std, abs=1e-6)


# Known answers --------------------------------------------------------------------------------------------------------


def test_numbers_are_filled_clipped_and_scaled():
    cells = np.array([1.0, 2, 3, 4, 1000, np.nan] * 5)
    raw = {"a": Parsed("number", cells)}
    plain = fit_whole(raw, one(Column("a", "number")), np.arange(30)).apply(raw)[:, 0]
    pooled = StandardScaler().fit(cells[:5].repeat(5)[:, None])
    assert plain[:5] == pytest.approx(pooled.transform(cells[:5, None])[:, 0], rel=1e-6)
    assert plain[5] == 0
    median = fit_whole(raw, one(Column("a", "number", fill="median", clip=0.25, scale=False)), np.arange(30)).apply(raw)
    assert median[:6, 0] == pytest.approx([2, 2, 3, 4, 4, 3], rel=ACCURACY)
    frequent = fit_whole(raw, one(Column("a", "number", fill="most-frequent", scale=False)), np.arange(30)).apply(raw)
    assert frequent[5, 0] == 1
    zero = fit_whole(raw, one(Column("a", "number", fill="none", scale=False)), np.arange(30)).apply(raw)
    assert zero[5, 0] == 0


def test_dates_have_parts():
    days = np.array([np.datetime64(d).astype("datetime64[D]").astype(float) for d in ("2024-01-01", "2024-07-01")] * 5)
    raw = {"d": Parsed("date", days)}
    x = fit_whole(raw, one(Column("d", "date", parts=True)), np.arange(10)).apply(raw)
    assert x.shape == (10, 5)
    assert x[0] == pytest.approx([-1, 0, 1, 0, 1], abs=1e-6)  # January, and a Monday
    assert x[1] == pytest.approx([1, 0, -1, 0, 1], abs=1e-6)


def test_texts_are_counts_of_words():
    parsed = Parsed.of_words(["Fever and cough", "cough cough", ""] * 6, "text")
    raw = {"t": parsed}
    hashed = fit_whole(raw, one(Column("t", "text", width=64)), np.arange(18)).apply(raw)
    assert hashed.shape == (18, 64)
    assert np.linalg.norm(hashed[:3], axis=1) == pytest.approx([1, 1, 0])
    known = fit_whole(raw, one(Column("t", "text", vocabulary=2)), np.arange(18))
    assert known.columns[0].values == ("and", "cough")  # the most frequent, then the first by name
    assert known.apply(raw)[:3].tolist() == [pytest.approx([0.5**0.5, 0.5**0.5]), [0, 1], [0, 0]]
    assert words_of("a\x1f##b\x1f") == ["a", "##b"]


def test_rare_values_and_means_of_few_rows_stay_at_home():
    raw = {
        "c": Parsed.of_words(["a"] * 5 + ["b"] * 4 + [""]),
        "n": Parsed("number", np.array([7.0] * 3 + [np.nan] * 7)),
    }
    schema = Schema((Column("c", "category", least=1), Column("n", "number", least=1)), "y", CLASSES)
    statistics = summarise(raw, schema, np.arange(10), minimum=5)  # the site's own minimum wins
    assert statistics["c"].values == {"a": 5}
    assert statistics["n"] == ColumnStatistics()
    x = fit_whole(raw, one(Column("c", "category")), np.arange(10)).apply(raw)
    assert x[[0, 5, 9]].tolist() == [[1, 0], [0, 1], [0, 0]]


# Files and messages ---------------------------------------------------------------------------------------------------


def test_a_preparation_survives_its_file(tmp_path):
    raw = {"c": Parsed.of_words(["a", "b"] * 6), "n": Parsed("number", np.arange(12.0))}
    columns = (Column("c", "category", fill="most-frequent"), Column("n", "number", fill="median", clip=0.1))
    preparation = fit_whole(raw, Schema(columns, "y", CLASSES), np.arange(12))
    (tmp_path / "preparation.toml").write_text(preparation.text())
    assert Preparation.load(tmp_path) == preparation
    assert read_schema(tmp_path / "preparation.toml") == preparation
    (tmp_path / "schema.toml").write_text(preparation.schema.text())
    assert read_schema(tmp_path / "schema.toml") == preparation.schema
    with pytest.raises(Mistake, match="not a fitted preparation"):
        Preparation.read(tmp_path / "schema.toml")
    assert any("fill=median" in line for line in explain(preparation, ""))


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"columns": {}},
        {"columns": {"a": {"count": -1}}},
        {"columns": {"a": {"count": 1, "mean": float("nan")}}},
        {"columns": {"a": {"count": 1, "values": {"x": 0.5}}}},
        {"columns": {"a": {"count": 1, "values": {"x" * 300: 1}}}},
        {"columns": {"a": {"count": 1, "sketch": {"x": 1}}}},
        {"columns": {"a": {"count": 1, "rows": [1]}}},
    ],
)
def test_impossible_statistics_are_refused(value):
    with pytest.raises(ValueError):
        check_statistics(value, one(Column("a", "number")))


@pytest.mark.parametrize(
    "value", [None, {}, {"mean": [0.5], "std": [0.0]}, {"mean": ["x"], "std": [1.0]}, {"mean": [1.0]}]
)
def test_impossible_channel_moments_are_refused(value):
    with pytest.raises(ValueError):
        parse_preparation(value)
    with pytest.raises(ValueError):
        check_statistics(value, None)
    good = {"mean": [0.5], "std": [1.0]}
    assert parse_preparation(good) == ImagePreparation((0.5,), (1.0,))
    with pytest.raises(ValueError, match="no count"):
        check_statistics(good, None)


@pytest.mark.parametrize("text", ["fill", "fill=max", "clip=0.7", "clip=x", "scale=maybe", "least=0", "colour=red"])
def test_bad_settings_are_refused_in_one_sentence(text):
    with pytest.raises(Mistake, match="--prepare"):
        parse_prepare(text)


def test_every_client_contributes_to_the_preparation_of_a_split(tmp_path):
    lines = [f"{i},{'uv'[i % 2]},{i % 2},{'AB'[i > 40]}" for i in range(100)]
    (tmp_path / "t.csv").write_text("a,b,label,client\n" + "\n".join(lines))
    whole = load(tmp_path / "t.csv", prepare=False)
    assert whole.preparation is None
    parts = split(whole, "natural", 0)
    assert set(parts.statistics) == {"A", "B"}
    trained = torch.cat([data.train.index for data in parts.clients.values()]).numpy()
    fitted = parts.dataset.preparation
    assert fitted.columns[0].count == len(trained)
    assert fitted.columns[0].mean == pytest.approx(trained.mean())
    x = next(iter(parts.clients.values())).train["x"]
    assert x[:, 0].min() < -1
    same = load(tmp_path / "t.csv", table=TableOptions(prepare="scale=no"))
    assert same.x[:, 0].tolist() == list(range(100))


def test_a_preparation_names_what_is_missing():
    raw = {"a": Parsed("number", np.arange(9.0))}
    preparation = fit_whole(raw, one(Column("a", "number")), np.arange(9))
    with pytest.raises(Mistake, match="no column 'a'"):
        preparation.apply({"b": raw["a"]})
    with pytest.raises(Mistake, match="holds a category, and the model needs a number"):
        preparation.apply({"a": Parsed.of_words(["x"] * 9)})


def test_texts_can_be_divided_by_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "fever": 1, "cough": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [f"{('fever now', 'cough then')[i % 2]},{i % 2}" for i in range(20)]
    (tmp_path / "t.csv").write_text("note,label\n" + "\n".join(lines))
    options = TableOptions(text=("note",), tokenizer=str(tmp_path / "tokenizer.json"), prepare="vocabulary=3,least=1")
    data = load(tmp_path / "t.csv", table=options)
    assert data.preparation.columns[0].values == ("[UNK]", "cough", "fever")
    plain = load(tmp_path / "t.csv", table=TableOptions(text=("note",)))
    assert plain.x.shape == (20, 1024)
    assert "another file" in plain.schema.mismatch(data.schema)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(Mistake, match="not a tokenizer file"):
        load(tmp_path / "t.csv", table=TableOptions(text=("note",), tokenizer=str(tmp_path / "bad.json")))
    with pytest.raises(Mistake, match="column for --text"):
        load(tmp_path / "t.csv", table=TableOptions(text=("notes",)))


def series(rows: int = 30) -> tuple[dict[str, Parsed], Schema]:
    rng = np.random.default_rng(1)
    names = [f"{name}_{k}" for k in (10, 9, 8) for name in ("hr", "bp")] + ["age"]
    raw = {name: Parsed("number", rng.normal(50, 10, rows)) for name in names}
    raw["bp_9"].cells[3] = np.nan
    columns = tuple(Column(name, "number") for name in names)
    return raw, with_series(Schema(columns, "y", ("a", "b")), ["hr_*", "bp_*"])


def test_columns_of_a_series_are_in_the_order_of_time_and_share_one_scale():
    raw, schema = series()
    parts = [summarise(raw, schema, rows) for rows in np.array_split(np.arange(30), 3)]
    plain = [{"columns": {name: column.plain() for name, column in part.items()}} for part in parts]
    preparation = fit(schema, plain)
    assert preparation.shape == (3, 3, 1)
    assert preparation.inputs == ()
    x = preparation.apply(raw)[..., 0]
    hr = np.stack([raw[f"hr_{k}"].cells for k in (8, 9, 10)], axis=1)
    assert np.allclose(x[:, 0], (hr - hr.mean()) / hr.std(), atol=1e-6)  # as of all values pooled
    bp = np.stack([raw[f"bp_{k}"].cells for k in (8, 9, 10)], axis=1)
    assert np.allclose(x[0, 1], ((bp - np.nanmean(bp)) / np.nanstd(bp))[0], atol=1e-6)
    assert x[3, 1, 1] == 0  # the gap is the mean of the series
    age = raw["age"].cells
    assert np.allclose(x[:, 2], ((age - age.mean()) / age.std())[:, None], atol=1e-6)  # the same at every time
    assert Preparation.parse(tomllib.loads(preparation.text())) == preparation


def test_series_of_different_lengths_or_without_numbers_are_refused():
    _, schema = series()
    shorter = [c.plain() for c in schema.columns if c.name != "bp_9"]
    with pytest.raises(ValueError, match="the series 'bp' has 2 columns and 'hr' has 3"):
        Schema.parse({**schema.plain(), "columns": shorter})
    with pytest.raises(Mistake, match="No column matches --series 'pulse_\\*'"):
        with_series(schema, ["pulse_*"])
    words = Schema((Column("hr_1", "category"),), "y", ("a",))
    with pytest.raises(Mistake, match="column 'hr_1' of the series 'hr' holds words, not numbers"):
        with_series(words, ["hr_*"])


def test_embedded_categories_are_places_with_a_gap_and_other():
    raw = {"c": Parsed.of_words(["b", "a", "", "b", "a", "rare"] + ["a", "b"] * 5)}
    preparation = fit_whole(raw, one(Column("c", "category", embed=4, least=2)), np.arange(16))
    assert preparation.shape == (1,)
    assert preparation.inputs == (("c", (1,), 4, 4),)  # gap, a, b, other
    assert preparation.apply(raw)[:6, 0].tolist() == [2, 1, 0, 2, 1, 3]
    filled = fit_whole(raw, one(Column("c", "category", embed=4, fill="most-frequent")), np.arange(16))
    assert filled.apply(raw)[2, 0] == 1
