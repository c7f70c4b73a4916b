"""What a site keeps: nothing is applied twice, nothing that was not taken stays, and a new life of the server rolls back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kilter.errors import Mistake
from kilter.net.site_state import Keep
from kilter.records import wire

RUN = "ab" * 16


def order(round: int, seq: int, took: list[int] | None = None, life: str = "one", since: int = 0) -> dict[str, Any]:
    return {"round": round, "seq": seq, "took": took, "life": life, "since": since}


def do(keep: Keep, what: dict[str, Any]) -> Any:
    """Carry out an order that counts; its reply says how far the count is."""
    found = keep.begin(what)
    if found is not None:
        return "kept", found[1]
    state = {"count": keep.state().get("count", 0) + 1}
    keep.finish(what, state, {"kind": "reply"}, str(state["count"]).encode())
    return "done", str(state["count"]).encode()


def count(keep: Keep) -> int:
    return int(keep.state().get("count", 0))


def test_the_same_order_again_gives_the_same_reply_and_is_not_applied_twice(tmp_path: Path) -> None:
    keep = Keep(tmp_path, RUN)
    assert do(keep, order(1, 1)) == ("done", b"1")
    assert do(keep, order(1, 1)) == ("kept", b"1")
    keep.close()
    keep = Keep(tmp_path, RUN)  # after a crash
    assert do(keep, order(1, 1)) == ("kept", b"1")
    assert do(keep, order(1, 2, took=[1, 1])) == ("done", b"2")
    assert count(keep) == 2


def test_a_step_whose_reply_was_not_taken_is_undone(tmp_path: Path) -> None:
    keep = Keep(tmp_path, RUN)
    do(keep, order(1, 1))
    do(keep, order(2, 1, took=[1, 1]))
    assert count(keep) == 2
    keep.begin(order(2, 2, took=[1, 1]))  # (2, 1) came too late
    assert count(keep) == 1
    keep.close()
    keep = Keep(tmp_path, RUN)  # it stays undone, though a later reply was taken
    keep.begin(order(3, 1, took=[2, 2]))
    assert count(keep) == 1


def test_a_servers_new_life_takes_back_the_round_it_runs_again(tmp_path: Path) -> None:
    keep = Keep(tmp_path, RUN)
    do(keep, order(1, 1))
    do(keep, order(2, 1, took=[1, 1]))
    do(keep, order(2, 2, took=[2, 1]))
    assert count(keep) == 3
    assert do(keep, order(2, 1, took=[1, 1], life="two", since=2)) == ("done", b"2")
    assert do(keep, order(2, 2, took=[2, 1], life="two", since=2)) == ("done", b"3")
    assert do(keep, order(3, 1, took=[2, 2], life="three", since=3)) == ("done", b"4")  # nothing to take back
    with pytest.raises(Mistake, match="went back to round 1"):
        keep.begin(order(1, 1, life="four", since=1))


def test_an_order_out_of_turn_is_refused(tmp_path: Path) -> None:
    keep = Keep(tmp_path, RUN)
    do(keep, order(2, 2))
    for at in ((2, 1), (1, 9)):
        with pytest.raises(wire.Malformed, match="out of turn"):
            keep.begin(order(*at))


def test_only_files_that_count_stay(tmp_path: Path) -> None:
    keep = Keep(tmp_path, RUN)
    took = None
    for round in range(1, 8):
        do(keep, order(round, 1, took))
        took = [round, 1]
    assert len(list(keep.folder.iterdir())) <= 6  # state, before the step, before the round, reply, index, lock


def test_damage_and_strangers_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="not one of ours"):
        Keep(tmp_path, "../../etc")
    keep = Keep(tmp_path, RUN)
    with pytest.raises(Mistake, match="Another process"):
        Keep(tmp_path, RUN)
    do(keep, order(1, 1))
    (keep.folder / keep.index["state"]).write_bytes(b"x")
    with pytest.raises(Mistake, match="damaged"):
        keep.state()
    keep.close()
    (keep.folder / "index.json").write_text("{")
    with pytest.raises(Mistake, match="damaged"):
        Keep(tmp_path, RUN)
