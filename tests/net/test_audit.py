"""The audit log notices every change but one at its end, and says in plain words what has left."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kilter.errors import Mistake
from kilter.net.audit import AuditLog, export, summarise, verify


@pytest.fixture
def log(tmp_path: Path) -> Path:
    made = AuditLog(tmp_path)
    made.record("hello", b"hello", kinds="data description", to="server")
    for round in range(1, 6):
        made.record("reply", b"x" * round, run="ab" * 16, round=round, step="train", kinds="model", to="server")
    made.close()
    return made.path


def test_a_genuine_log_verifies_and_is_continued_after_a_restart(log: Path) -> None:
    assert [e.number for e in verify(log)] == [1, 2, 3, 4, 5, 6]
    again = AuditLog(log.parent)
    again.record("reply", b"y", to="server")
    again.close()
    assert [e.number for e in verify(log)] == [1, 2, 3, 4, 5, 6, 7]
    assert log.stat().st_mode & 0o077 == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_removed_or_inserted_line_is_noticed(log: Path, data: st.DataObject) -> None:
    good = log.read_text()
    lines = good.splitlines()
    at = data.draw(st.integers(0, len(lines) - 2))
    match data.draw(st.sampled_from(["change", "remove", "swap", "repeat", "number"])):
        case "change":
            entry = json.loads(lines[at])
            key = data.draw(st.sampled_from(["bytes", "round", "digest", "to", "approval", "kinds", "time"]))
            entry[key] = entry[key] + 1 if isinstance(entry[key], int) else entry[key] + "0"
            lines[at] = json.dumps(entry)
        case "remove":
            del lines[at]
        case "swap":
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
        case "repeat":
            lines.insert(at, lines[at])
        case _:
            lines[at] = "3"
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(Mistake, match=r"Line \d+ of"):
        list(verify(log))
    with pytest.raises(Mistake, match=r"Line \d+ of"):
        AuditLog(log.parent)
    log.write_text(good)


def test_half_a_line_after_a_crash_is_removed(log: Path) -> None:
    with open(log, "a") as f:
        f.write('{"number": 7, "time')
    made = AuditLog(log.parent)
    made.record("reply", b"z", to="server")
    made.close()
    assert [e.number for e in verify(log)] == [1, 2, 3, 4, 5, 6, 7]


def test_two_processes_cannot_write_to_one_log(log: Path) -> None:
    first = AuditLog(log.parent)
    with pytest.raises(Mistake, match="Another process"):
        AuditLog(log.parent)
    first.close()


def test_the_summary_and_the_export_say_what_has_left(log: Path, tmp_path: Path) -> None:
    text = "\n".join(summarise(log))
    assert "6 entries, all genuine" in text
    assert "run abababab: 5 x reply to server: model, 15 bytes" in text
    assert list(verify(log))[-1].hash in text
    assert export(log, tmp_path / "audit.csv") == 6
    with open(tmp_path / "audit.csv") as f:
        rows = list(csv.DictReader(f))
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
