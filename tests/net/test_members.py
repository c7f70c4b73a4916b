"""Members that lie to the server: each is recorded as that member's failure, and the others' results stand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from raw import hello_head
from test_enemies import NAMES, Camp

from kilter.core import Replies, Tree
from kilter.net import tls
from kilter.runtimes.step_names import EVALUATE, StepName
from small import method


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    tls.new(folder, ["server", *NAMES, "stranger"])
    return folder


@pytest.fixture
def camp(certs: Path) -> Iterator[Camp]:
    made = Camp(certs)
    made.runtime.bind(method("fedavg"))
    made.runtime.round = 1
    yield made
    made.end()


def call(camp: Camp, step: StepName, message: Tree, act: Callable[[], None], training: bool = True) -> Replies:
    thread = threading.Thread(target=act)
    thread.start()
    replies: Replies = camp.runtime.call(step, message, training=training)
    thread.join(30)
    return replies


def test_letters_where_none_belong_are_that_members_failure(camp: Camp) -> None:
    """Finding 4: `"post": true` in a reply header crashed the server."""
    camp.honest("a", "b")
    enemy = camp.enemy()
    camp.here("c")
    w = {"w": torch.zeros(3)}
    replies = call(camp, StepName("train"), w, lambda: enemy.reply(enemy.order()[0], {"a": 1}, letters=True))
    assert set(replies) == {"a", "b"}
    assert "letters" in camp.reasons()["c"]


@pytest.mark.parametrize("rows", [-(10**9), 10**15, 10**400, 101, -1])
def test_an_impossible_row_count_is_that_members_failure(camp: Camp, rows: int) -> None:
    """Finding 7: an impossible row count stopped or took over learning, and the record blamed the server."""
    camp.honest("a", "b")
    enemy = camp.enemy()
    camp.here("c")
    tree = {"w": torch.ones(3), "n": rows}
    replies = call(camp, StepName("train"), {"w": torch.zeros(3)}, lambda: enemy.reply(enemy.order()[0], tree))
    assert set(replies) == {"a", "b"}
    assert "counts" in camp.reasons()["c"]


GOOD = {"n_test": 5, "n_valid": 5, "test": {"loss": 0.5}, "valid": None}
REPORTS: dict[str, Any] = {
    "not a report": 3,
    "a list": [],
    "a text": "all is well",
    "unknown parts": {**GOOD, "extra": 1},
    "no counts": {"test": None},
    "a negative count": {**GOOD, "n_test": -1},
    "more rows than announced": {**GOOD, "n_test": 101},
    "a count that is a flag": {**GOOD, "n_test": True},
    "a metric that is text": {**GOOD, "test": {"loss": "low"}},
    "other metrics": {**GOOD, "test": {"joy": 1.0}},
    "metrics that are a list": {**GOOD, "test": [1.0]},
    "a huge number": {**GOOD, "valid": {"loss": 10**400}},
    "an accuracy of two": {**GOOD, "local": 2.0},
}


@pytest.mark.parametrize("what", REPORTS)
def test_a_malformed_evaluation_is_that_members_failure(camp: Camp, what: str) -> None:
    """Finding 4: malformed evaluation replies crashed the server."""
    enemy = camp.enemy()
    camp.honest("a")
    camp.here("c")
    camp.runtime.enough = 1
    replies = call(
        camp, EVALUATE, {"w": torch.zeros(3)}, lambda: enemy.reply(enemy.order()[0], REPORTS[what]), training=False
    )
    assert "c" not in replies
    assert "cannot be used" in camp.reasons()["c"]


NOTES: dict[str, Any] = {
    "listens to a text": {"listens": "x"},
    "listens to a stranger": {"listens": {"z": 1.0}},
    "listens to a word": {"listens": {"a": "much"}},
    "listens less than nothing": {"listens": {"a": -1.0}},
    "two lines": "one\ntwo",
    "a long line": "x" * 501,
    "deep": {"a": {"b": {"c": 1}}},
    "a tensor": {"a": torch.ones(3)},
    "an unsure text": {"uncertainty": "very"},
}


@pytest.mark.parametrize("what", NOTES)
def test_a_malformed_note_is_that_members_failure(camp: Camp, what: str) -> None:
    """Findings 4 and 13: a note crashed the server, and notes could fill its disk."""
    from raw import reply_head

    from kilter.records import wire

    camp.honest("a", "b")
    enemy = camp.enemy()
    camp.here("c")

    def act() -> None:
        head = reply_head("c", enemy.order()[0])
        result = {"reply": {"w": torch.ones(3)}, "fits": [], "seconds": 0.0, "notes": [NOTES[what]]}
        enemy.send(head, wire.encode(result))

    assert set(call(camp, StepName("train"), {"w": torch.zeros(3)}, act)) == {"a", "b"}
    assert "note" in camp.reasons()["c"]


def test_a_slow_member_does_not_stall_the_run_with_the_default_quorum(certs: Path) -> None:
    """Finding 8: with the default quorum, a slow site stalled the run."""
    camp = Camp(certs, deadline=1.0, quorum=None)
    try:
        camp.runtime.bind(method("fedavg"))
        camp.runtime.round = 1
        camp.honest("a", "b")
        camp.enemy()  # connected, and silent
        camp.here("c")
        assert set(camp.ask()) == {"a", "b"}
        assert "deadline" in camp.reasons()["c"]
    finally:
        camp.end()


def test_one_name_from_two_state_directories_is_refused(camp: Camp) -> None:
    """Finding 6: one name joined twice with different state directories."""
    camp.honest("a", "b")
    camp.enemy()
    camp.here("c")
    twin = camp.enemy(hello=b"")
    twin.send(hello_head("c", instance="cd" * 16))
    assert "another state directory" in twin.refused().details()
    assert "c" in camp.server.sites


def test_a_member_that_announces_another_row_count_is_disconnected(camp: Camp) -> None:
    first = camp.enemy()
    camp.here("c")
    first.close()
    changed = camp.enemy(hello=b"")
    changed.send(hello_head("c", rows=99_999))
    assert "announced 100 rows" in changed.refused().details()


@pytest.mark.parametrize("name", ["server", "~took", "a\nb", "", ".", "a b", "x" * 65, "é"])
def test_reserved_and_unprintable_names_are_refused(camp: Camp, name: str) -> None:
    """Finding 13: `--quorum` without `--sites` admitted a site called "server"; control characters forged log lines."""
    enemy = camp.enemy(hello=b"")
    enemy.send({**hello_head("c"), "name": name})
    details = enemy.refused().details()
    assert "name" in details
    assert details.isprintable()


@pytest.mark.parametrize("rows", [0, -1, 10**30, 1.5, "100", None, True])
def test_announced_rows_are_a_positive_whole_number(camp: Camp, rows: object) -> None:
    enemy = camp.enemy(hello=b"")
    enemy.send(hello_head("c", rows=rows))
    assert "rows" in enemy.refused().details()


def test_a_dry_run_counts_for_nothing(camp: Camp) -> None:
    """Finding 13: a dry run counted towards the quorum."""
    enemy = camp.enemy(hello=b"")
    enemy.send(hello_head("c", purpose="dry-run"))
    assert enemy.read()[0]["kind"] == "terms"
    assert "c" not in camp.server.sites
