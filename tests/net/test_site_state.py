"""What a site keeps: nothing is applied twice, a new session of the server rolls back, and altered or foreign files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kilter.errors import Mistake
from kilter.net.messages import Order, Reply, StateMark
from kilter.net.site_state import SiteState, StateDirectory
from kilter.records import wire
from kilter.runtimes.step_names import StepName

RUN = "ab" * 16
ONE, TWO, THREE, FOUR = ("11" * 8, "22" * 8, "33" * 8, "44" * 8)  # sessions of the server


class Site:
    """A site whose orders count up; it knows what a server would know about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: StateMark | None = None
        self.open()

    def open(self) -> None:
        self.directory = StateDirectory(self.folder)
        self.state = SiteState(self.directory, RUN)

    def close(self) -> None:
        self.state.close()
        self.directory.close()

    def order(
        self,
        round: int,
        seq: int,
        accepted: tuple[int, int] | None = None,
        session: str = ONE,
        since: int = 0,
        **more: Any,
    ) -> Order:
        given = {"accepted": accepted, "state": self.known, **more}
        return Order(RUN, session, since, round, seq, StepName("train"), **given)

    def do(self, order: Order) -> tuple[str, bytes]:
        """Carry out an order; its reply says how far the count is."""
        stored = self.state.begin(order)
        if stored is not None:
            return "stored", stored[1]
        state = {"count": self.state.state().get("count", 0) + 1}
        body = str(state["count"]).encode()
        reply = Reply("a", RUN, order.session, *order.place, order.step, self.state.mark)
        self.known = self.state.finish(order, state, reply, body).state
        return "done", body

    @property
    def count(self) -> int:
        return int(self.state.state().get("count", 0))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "state")


def test_the_same_order_again_gives_the_same_reply_and_is_not_applied_twice(site: Site) -> None:
    assert site.do(site.order(1, 1)) == ("done", b"1")
    assert site.do(site.order(1, 1)) == ("stored", b"1")
    site.close()
    site.open()  # after a crash
    assert site.do(site.order(1, 1)) == ("stored", b"1")
    assert site.do(site.order(1, 2, (1, 1))) == ("done", b"2")
    assert site.count == 2


def test_a_step_whose_reply_was_not_accepted_is_undone(site: Site) -> None:
    site.do(site.order(1, 1))
    first = site.known
    site.do(site.order(2, 1, (1, 1)))
    assert site.count == 2
    site.known = first
    site.state.begin(site.order(2, 2, (1, 1)))  # (2, 1) came too late
    assert site.count == 1
    site.close()
    site.open()  # it stays undone, though a later reply was accepted
    site.state.begin(site.order(3, 1, (2, 2)))
    assert site.count == 1


def test_a_new_session_of_the_server_takes_back_the_round_it_runs_again(site: Site) -> None:
    site.do(site.order(1, 1))
    end_of_round_1 = site.known
    site.do(site.order(2, 1, (1, 1)))
    site.do(site.order(2, 2, (2, 1)))
    assert site.count == 3
    site.known = end_of_round_1
    assert site.do(site.order(2, 1, (1, 1), TWO, 2)) == ("done", b"2")
    assert site.do(site.order(2, 2, (2, 1), TWO, 2)) == ("done", b"3")
    assert site.do(site.order(3, 1, (2, 2), THREE, 3)) == ("done", b"4")  # nothing to take back
    with pytest.raises(Mistake, match="went back to round 1"):
        site.state.begin(site.order(1, 1, None, FOUR, 1))


def test_an_order_out_of_turn_is_refused(site: Site) -> None:
    site.do(site.order(2, 2))
    for at in ((2, 1), (1, 9)):
        with pytest.raises(wire.Malformed, match="out of turn"):
            site.state.begin(site.order(*at))


def test_only_files_that_count_stay(site: Site) -> None:
    accepted = None
    for round in range(1, 8):
        site.do(site.order(round, 1, accepted))
        accepted = (round, 1)
    assert len(list(site.state.folder.iterdir())) <= 6  # state, before the step, before the round, reply, index, lock


def test_a_lost_state_directory_is_noticed(site: Site, tmp_path: Path) -> None:
    site.do(site.order(1, 1))
    other = Site(tmp_path / "new")
    other.known = site.known
    with pytest.raises(Mistake, match="does not fit the run"):
        other.state.begin(other.order(2, 1, (1, 1)))


def test_a_state_directory_restored_from_an_old_copy_is_noticed(site: Site) -> None:
    site.do(site.order(1, 1))
    old = {p.name: p.read_bytes() for p in site.state.folder.iterdir()}
    site.do(site.order(2, 1, (1, 1)))
    site.close()
    for path in site.state.folder.iterdir():
        path.unlink()
    for name, data in old.items():
        (site.state.folder / name).write_bytes(data)
    site.open()
    with pytest.raises(Mistake, match="does not fit the run"):
        site.state.begin(site.order(3, 1, (2, 1)))


def test_every_flipped_bit_in_state_reply_or_index_is_noticed(site: Site) -> None:
    site.do(site.order(1, 1))
    site.close()
    index = site.state.index
    assert index.state
    assert index.reply
    for name in (index.state.file, index.reply.file, "index.json"):
        path = site.state.folder / name
        good = path.read_bytes()
        for at in range(0, len(good), 7):
            path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            site.directory = StateDirectory(site.folder)
            with pytest.raises(Mistake, match="altered or damaged"):
                read_all(site)
            site.close()
        path.write_bytes(good)


def read_all(site: Site) -> None:
    site.state = SiteState(site.directory, RUN)
    site.state.begin(site.order(1, 1))
    site.state.state()


def test_files_are_private(site: Site) -> None:
    site.do(site.order(1, 1))
    assert site.folder.stat().st_mode & 0o077 == 0
    assert site.state.folder.stat().st_mode & 0o077 == 0


def test_strangers_and_a_second_process_are_refused(site: Site, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be one"):
        SiteState(site.directory, "../../etc")
    with pytest.raises(Mistake, match="Another process"):
        StateDirectory(site.folder)
    site.do(site.order(1, 1))
    site.close()
    (site.state.folder / "index.json").write_text(json.dumps({"index": "{}", "checksum": "0"}))
    site.directory = StateDirectory(site.folder)
    with pytest.raises(Mistake, match="altered or damaged"):
        SiteState(site.directory, RUN)


def test_a_sites_secret_is_drawn_once_and_readable_by_its_owner_only(tmp_path):
    from kilter.net.site_state import private_seed

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first = private_seed(tmp_path / "a")
    assert private_seed(tmp_path / "a") == first
    assert private_seed(tmp_path / "b") != first
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "a" / "secret").write_text("not a number")
    with pytest.raises(Mistake, match="damaged"):
        private_seed(tmp_path / "a")
