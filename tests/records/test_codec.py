"""Records as JSON: every record comes back, the schema is committed, older and newer formats are handled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.federate import federate
from kilter.records.codec import Unreadable, from_json, from_tree, read_report, schema, to_json, to_tree
from kilter.records.run_folder import Store, read_clients, read_rounds, read_summary
from kilter.records.types import FORMAT, Checkpoint, ClientReport, Failure, Point, Round, Spread
from kilter.report.result import result_table
from kilter.report.trust import read as read_trust
from small import federation, method

OLD = Path(__file__).with_name("format1")
finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=5)
spreads = st.builds(Spread, finite, finite, finite, finite, finite)
metrics = st.dictionaries(names, st.none() | finite, max_size=3)
rounds = st.builds(
    Round,
    round=st.integers(0, 10**6),
    seconds=finite,
    loss=st.none() | finite,
    participants=st.lists(names, max_size=3),
    failures=st.lists(
        st.builds(Failure, names, names, names, st.sampled_from(["absent", "error", "shape"])), max_size=2
    ),
    series=st.lists(st.builds(Point, names, names, st.integers(0, 100), finite), max_size=2),
    listens=st.dictionaries(names, st.dictionaries(names, finite, max_size=2), max_size=2),
    bytes_by_node=st.dictionaries(names, st.tuples(st.integers(0), st.integers(0)), max_size=2),
    global_metrics=st.none() | metrics,
    client=st.dictionaries(names, spreads, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(record=rounds)
def test_every_round_comes_back(record: Round) -> None:
    assert from_json(Round, to_json(record)) == record
    assert from_json(Round, to_json(record, indent=2)) == record
    assert from_tree(Round, to_tree(record)) == record


@pytest.mark.parametrize("name", ["fedavg", "solo", "scaffold"])
def test_the_records_of_a_run_come_back(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    result = federate(method(name), federation(), 2, store=store)
    saved = store.load()
    assert read_rounds(tmp_path) == result.rounds
    assert read_summary(tmp_path) == result.summary
    assert read_clients(tmp_path).last.clients == result.clients
    assert saved is not None
    assert from_tree(Checkpoint, to_tree(saved.at)) == saved.at


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 2}', '{"format": 2, "round": "one"}', '{"round": 1}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        from_json(Round, text)


def test_a_newer_format_is_refused_in_one_sentence(tmp_path: Path) -> None:
    shutil.copy(OLD / "finished" / "summary.json", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text()) | {"format": FORMAT + 1}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "rounds.jsonl").write_text(json.dumps({"format": FORMAT + 1}) + "\n")
    for read in (read_summary, read_rounds):
        with pytest.raises(
            Mistake, match=f"its format is {FORMAT + 1}, and this version of Kilter reads formats up to"
        ):
            read(tmp_path)


def test_the_committed_schema_is_the_one_of_the_types() -> None:
    path = Path(__file__).parents[2] / "docs" / "reference" / "schema.json"
    assert json.loads(path.read_text()) == schema(), "run: kilter schema > docs/reference/schema.json"


def test_a_clients_report_is_checked() -> None:
    report = read_report({"n_test": 3, "n_valid": 0, "test": {"accuracy": 0.5}, "valid": None})
    assert report == ClientReport(3, 0, test={"accuracy": 0.5})
    for bad in ({}, None, {"n_test": 3}, {"n_test": "three", "n_valid": 0}, {"n_test": 3, "n_valid": 0, "test": [1]}):
        with pytest.raises(Unreadable):
            read_report(bad)


# Runs of format 1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["finished", "personal", "feddisk", "slfed"])
def test_runs_of_format_1_can_still_be_read(name: str) -> None:
    old = json.loads((OLD / name / "summary.json").read_text())
    summary, rounds, clients = read_summary(OLD / name), read_rounds(OLD / name), read_clients(OLD / name)
    assert summary.global_accuracy == old["global_accuracy"] == summary.last.global_accuracy
    assert summary.client_accuracy is not None
    assert summary.client_accuracy.worst_decile == old["client_accuracy"]["worst_decile"]
    own = name in ("personal", "slfed")
    assert summary.global_model == ("mean of personal models" if own else "global")
    assert summary.client_model == ("personal" if own else "received")
    assert summary.best is not None
    assert summary.best.round == old["best"]["round"]
    assert [r.round for r in rounds] == [0, 1, 2]
    assert rounds[2].global_accuracy == old["global_accuracy"]
    assert len(clients.last.clients) == 3
    assert result_table(OLD / name).row_count >= 2


def test_tables_in_notes_of_format_1_become_series() -> None:
    points = read_rounds(OLD / "feddisk")[0].series
    assert [(p.series, p.at) for p in points] == [("nll", 0), ("nll", 1)]
    round = read_rounds(OLD / "slfed")[1]
    assert {p.series for p in round.series} == {"known", "uncertainty", "chosen"}
    assert all(isinstance(n.text, str) for n in round.notes)
    old = {"round": 1, "global": None, "client": None, "participants": ["a"], "bytes_up": 0, "bytes_down": 0}
    old |= {"notes": [{"node": "a", "step": "adopt", "note": {"listens": {"b": 0.5}}}]}
    assert from_tree(Round, old).listens == {"a": {"b": 0.5}}
    assert read_trust(OLD / "feddisk") is None


def test_a_stopped_run_of_format_1_can_be_resumed(tmp_path: Path) -> None:
    shutil.copytree(OLD / "stopped", tmp_path / "run")
    experiment = Experiment.read(tmp_path / "run" / "experiment.toml")
    method, fed = experiment.build()
    with fed:
        result = experiment.run(method, fed, Store(tmp_path / "run"))
    whole = read_rounds(OLD / "finished")
    for record, old in zip(result.rounds, whole, strict=True):
        assert record.bytes_by_node == old.bytes_by_node
        assert record.evaluation_bytes_up == old.evaluation_bytes_up
        assert record.participants == old.participants
        assert (record.loss or 0) == pytest.approx(old.loss or 0, rel=1e-4)
