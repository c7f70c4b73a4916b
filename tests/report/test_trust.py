"""Who listens to whom: read from a run's record, drawn, and asked for where there is nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kilter import Mistake
from kilter.records.codec import to_json
from kilter.records.types import Point, Round
from kilter.report.trust import draw, draw_or_refuse, read

IDS = ["a", "b", "c"]


def record(t: int, listens: dict[str, dict[str, float]]) -> Round:
    series = [Point("peers asked", i, t, k) for k, i in enumerate(IDS)]
    series += [Point("uncertainty", i, t, 1 / (t + k)) for k, i in enumerate(IDS)]
    return Round(round=t, participants=IDS, listens=listens, series=series)


def written(folder: Path, *records: Round) -> Path:
    (folder / "rounds.jsonl").write_text("".join(to_json(r) + "\n" for r in (Round(round=0), *records)))
    return folder


def test_shares_of_the_new_model(tmp_path: Path) -> None:
    actual = read(written(tmp_path, record(1, {"a": {"b": 0.5, "c": 0.5}}), record(2, {"b": {"a": 1.0}})))
    assert actual is not None
    assert actual.ids == IDS
    assert np.allclose(actual.shares[1], [[0, 0.25, 0.25], [0, 0, 0], [0, 0, 0]])
    assert np.allclose(actual.shares[2], [[0, 0, 0], [0.5, 0, 0], [0, 0, 0]])
    assert actual.series["peers asked"] == {1: [0, 1, 2], 2: [0, 1, 2]}


def test_the_pictures_name_everyone_and_are_the_same_again(tmp_path: Path) -> None:
    folder = written(tmp_path, *(record(t, {"a": {"b": 0.5, "c": 0.1}, "c": {"a": 0.3}}) for t in range(1, 4)))
    made = draw(folder)
    assert [p.name for p in made] == ["trust-graph.png", "trust-matrix.png", "trust-rounds.png"]
    before = [p.with_suffix(".svg").read_bytes() for p in made]
    assert all(f">{i}<".encode() in text for text in before[:2] for i in IDS)
    assert b"round 3" in before[1]
    draw(folder)
    assert before == [p.with_suffix(".svg").read_bytes() for p in made]


def test_where_nobody_chooses_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="not a run folder"):
        draw_or_refuse(tmp_path)
    assert draw(written(tmp_path, record(1, {}))) == []
    with pytest.raises(Mistake, match="does not record who listens"):
        draw_or_refuse(tmp_path)
