"""Enemies, really tried: each is refused in one line, the server stays up, and the result is that of the honest ones."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from raw import Honest, Raw, channel, letter, reply_head

from kilter.core import SERVER, Replies
from kilter.errors import Mistake
from kilter.net import grpc_server, tls
from kilter.net.grpc_server import STATUS, GrpcServer
from kilter.net.server import ServerRuntime
from kilter.records import wire
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import Done

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    tls.new(folder, ["server", *NAMES, "stranger"])
    return folder


class Camp:
    """A server, honest sites where wanted, and a place for an enemy called c."""

    def __init__(self, certs: Path, deadline: float = 60.0, quorum: int | None = 2) -> None:
        self.certs = certs
        self.server = GrpcServer("127.0.0.1:0", self.me("server"), NAMES, largest=2**24)
        self.runtime = ServerRuntime(self.server, NAMES, run="0" * 32, quorum=quorum, deadline=deadline, grace=0.0)
        self.runtime.round = 1
        self.raws: list[Raw] = []

    def me(self, name: str) -> tls.Identity:
        return tls.Identity.read(self.certs / name)

    def enemy(self, name: str = "c", claims: str = "", **given: Any) -> Raw:
        self.raws.append(Raw(self.server.port, self.me(name), claims or name, **given))
        return self.raws[-1]

    def honest(self, *names: str) -> None:
        for name in names:
            self.raws.append(Honest(self.server.port, self.me(name), name, lambda w: {"w": w["w"] + 1}))
        self.here(*names)

    def here(self, *names: str) -> None:
        end = time.monotonic() + 30
        while not set(names) <= set(self.server.sites):
            assert time.monotonic() < end
            time.sleep(0.01)

    def ask(self) -> Replies:
        actual: Replies = self.runtime.call(StepName("train"), {"w": torch.zeros(3)})
        return actual

    def reasons(self) -> dict[str, str]:
        return {f.node: f.reason for f in self.runtime.ledger.close().failures}

    def end(self) -> None:
        for raw in self.raws:
            raw.close()
        self.server.close()


@pytest.fixture
def camp(certs: Path) -> Iterator[Callable[..., Camp]]:
    made: list[Camp] = []

    def make(**options: Any) -> Camp:
        made.append(Camp(certs, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def refused_at_the_door(port: int, identity: tls.Identity, **given: Any) -> str:
    raw = Raw(port, identity, identity.name, **given)
    actual = raw.refused()
    raw.close()
    return str(actual.code().name)


def test_no_certificate_a_foreign_one_and_an_expired_one_do_not_come_in(
    camp: Callable[..., Camp], tmp_path: Path
) -> None:
    here = camp()
    me = here.me("a")
    assert refused_at_the_door(here.server.port, me, key=None, cert=None) == "UNAVAILABLE"
    tls.new(tmp_path / "foreign", ["a"])
    foreign = tls.Identity.read(tmp_path / "foreign/a")
    assert refused_at_the_door(here.server.port, me, key=foreign.key, cert=foreign.cert) == "UNAVAILABLE"
    (tmp_path / "old").mkdir()
    for name in ("ca.pem", "ca.key.pem"):
        (tmp_path / "old" / name).write_bytes((here.certs / name).read_bytes())
    tls.new(tmp_path / "old", ["a"], days=-1)
    key, cert = ((tmp_path / "old/a" / f"{part}.pem").read_bytes() for part in ("key", "cert"))
    assert refused_at_the_door(here.server.port, me, key=key, cert=cert) == "UNAVAILABLE"
    with pytest.raises(Mistake, match="expired"):
        tls.Identity.read(tmp_path / "old/a")
    here.honest("a", "b")
    assert set(here.ask()) == {"a", "b"}


def test_a_site_does_not_talk_to_a_server_of_another_name(camp: Callable[..., Camp]) -> None:
    """A site with a good certificate cannot play the server."""
    here = camp()
    false = GrpcServer("127.0.0.1:0", here.me("b"), None)
    assert refused_at_the_door(false.port, here.me("a")) == "UNAVAILABLE"
    false.close()


def test_nobody_speaks_in_anothers_name(camp: Callable[..., Camp], caplog: pytest.LogCaptureFixture) -> None:
    here = camp()
    assert here.enemy("c", claims="a").refused().code() is grpc.StatusCode.PERMISSION_DENIED
    stranger = here.enemy("stranger").refused()
    assert stranger.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "not on the list" in stranger.details()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")
    with caplog.at_level(logging.WARNING, logger="kilter.net"):
        answered = _together(here, lambda: enemy.reply(enemy.order()[0], {"w": torch.full((3,), 9.0)}, **{"from": "a"}))
    assert set(answered) == {"a", "b"}
    assert all(torch.equal(r["w"], torch.ones(3)) for r in answered.values())
    assert len([r for r in caplog.records if "another's name" in r.getMessage()]) == 1


def _together(here: Camp, act: Callable[[], None]) -> Replies:
    import threading

    thread = threading.Thread(target=act)
    thread.start()
    actual = here.ask()
    thread.join(30)
    return actual


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seq": 7}, "no open order"),
        ({"round": 0}, "no open order"),
        ({"session": "0" * 8}, "no open order"),
        ({"run": "1" * 32}, "no open order"),
        ({"step": "evaluate"}, "no open order"),
        ({"seq": -1}, "not a whole number"),
        ({"seq": True}, "not a whole number"),
        ({"kind": "order"}, "another kind"),
    ],
)
def test_a_reply_counts_only_for_the_open_order(camp: Callable[..., Camp], changed: dict[str, Any], says: str) -> None:
    here = camp()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")
    actual = _together(here, lambda: enemy.reply(enemy.order()[0], {"w": torch.full((3,), 9.0)}, **changed))
    assert set(actual) == {"a", "b"}
    assert says in enemy.refused().details()


def test_a_replayed_and_a_reordered_reply_are_discarded(camp: Callable[..., Camp]) -> None:
    here = camp()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")
    orders: list[dict[str, Any]] = []

    def answer() -> None:
        orders.append(enemy.order()[0])
        enemy.reply(orders[-1], {"w": torch.ones(3)})

    assert set(_together(here, answer)) == {"a", "b", "c"}
    here.runtime.ledger.close()

    def replay() -> None:
        enemy.order()
        enemy.reply(orders[0], {"w": torch.full((3,), 9.0)})  # the first order's reply, again

    assert set(_together(here, replay)) == {"a", "b"}
    assert "no open order" in enemy.refused().details()
    assert here.ask()
    assert "c" in here.reasons()


BAD: dict[str, Any] = {
    "another shape": {"w": torch.ones(4)},
    "another dtype": {"w": torch.ones(3, dtype=torch.float64)},
    "another name": {"v": torch.ones(3)},
    "another nesting": ({"w": torch.ones(3)},),
    "NaN": {"w": torch.tensor([1.0, float("nan"), 1.0])},
    "infinite": {"w": torch.tensor([1.0, float("inf"), 1.0])},
    "nothing": None,
    "of norm 1e9": {"w": torch.tensor([0.0, 1e9, 0.0])},
}


@pytest.mark.parametrize("what", BAD)
def test_a_reply_of_another_kind_than_the_others_is_left_out(camp: Callable[..., Camp], what: str) -> None:
    here = camp()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")
    assert set(_together(here, lambda: enemy.reply(enemy.order()[0], BAD[what]))) == {"a", "b"}
    assert "reply" in here.reasons()["c"]


def nested(depth: int) -> bytes:
    """A letter whose tree nests this deep."""
    good = wire.encode([[]])
    length = int.from_bytes(good[:8], "little")
    head = good[8 : 8 + length].rstrip().replace(b"[[]]", b"[" * depth + b"]" * depth)
    return len(head).to_bytes(8, "little") + head + good[8 + length :]


BODIES: dict[str, bytes] = {
    "empty": b"",
    "noise": bytes(range(256)) * 10,
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "deep": nested(100_000),
    "half": letter({"w": torch.ones(3)})[:-5],
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "not a reply": wire.encode({"w": torch.ones(3)}),
    "fits that are words": wire.encode({"reply": 1, "fits": ["ab"], "seconds": 0.0, "notes": []}),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_malformed_reply_is_left_out(camp: Callable[..., Camp], what: str) -> None:
    here = camp()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")

    def act() -> None:
        order = enemy.order()[0]
        enemy.send(reply_head("c", order), BODIES[what])

    assert set(_together(here, act)) == {"a", "b"}
    assert "cannot be used" in here.reasons()["c"]


FRAMES: dict[str, bytes] = {
    "ten gigabytes announced": b'H{"kind":"reply","size":10000000000}',
    "a negative size": b'H{"kind":"reply","size":-1}',
    "a size that is a word": b'H{"kind":"reply","size":"9"}',
    "no head": b"Babc",
    "nothing": b"",
    "not JSON": b"H{",
    "deep JSON": b"H" + b"[" * 100_000,
    "no kind": b'H{"size":0}',
    "a list": b"H[1,2]",
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_malformed_frame_ends_only_its_own_stream(camp: Callable[..., Camp], what: str) -> None:
    here = camp()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")
    enemy.frame(FRAMES[what])
    assert enemy.refused().code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(here.ask()) == {"a", "b"}


def test_a_frame_larger_than_a_frame_is_not_taken(camp: Callable[..., Camp]) -> None:
    here = camp()
    here.honest("a", "b")
    enemy = here.enemy()
    here.here("c")
    enemy.frame(b"H" + b" " * 2**22)
    assert enemy.refused().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert set(here.ask()) == {"a", "b"}


def test_slow_ones_hold_up_nobody_beyond_the_deadline(
    camp: Callable[..., Camp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "HELLO_SECONDS", 0.5)
    here = camp(deadline=3.0)
    mute = [socket.create_connection(("127.0.0.1", here.server.port)) for _ in range(20)]  # not even a handshake
    silent = here.enemy("stranger", hello=b"")
    here.honest("a", "b")
    loris = here.enemy()
    here.here("c")

    def drip() -> None:
        order = loris.order()[0]
        loris.frame(b"H" + json.dumps({**reply_head("c", order), "size": 10_000}).encode())
        for _ in range(20):
            loris.frame(b"B.")

    began = time.monotonic()
    assert set(_together(here, drip)) == {"a", "b"}
    assert time.monotonic() - began < 30
    assert "deadline" in here.reasons()["c"]
    assert "no hello" in silent.refused().details()
    for one in mute:
        one.close()


def test_status_is_for_members(camp: Callable[..., Camp]) -> None:
    here = camp()
    here.server.status = lambda: {"me": "server", "round": 1}
    with channel(here.server.port, here.me("a")) as line:
        assert b'"round": 1' in line.unary_unary(STATUS)(b"", timeout=20)
    with channel(here.server.port, here.me("stranger")) as line, pytest.raises(grpc.RpcError, match="list of sites"):
        line.unary_unary(STATUS)(b"", timeout=20)


def test_what_a_step_fails_with_stays_at_the_site() -> None:
    from kilter.net.site import make_reply

    letters, error, body = make_reply(Done(error=ValueError("patient 17 has no label")))
    assert (letters, body) == (False, b"")
    assert "17" not in error
    assert "ValueError" in error


def test_insecure_is_for_loopback_only() -> None:
    assert tls.identity(None, True, "127.0.0.1:1") is None
    with pytest.raises(Mistake, match="one machine"):
        tls.identity(None, True, "0.0.0.0:1")
    with pytest.raises(Mistake, match="always on"):
        tls.identity(None, False, "127.0.0.1:1")


def test_no_file_of_ours_knows_pickle() -> None:
    import kilter

    for path in Path(kilter.__file__).parent.rglob("*.py"):
        bad = re.findall(
            r"import (?:c?pickle|dill|shelve|marshal)\b|torch\.load\((?!.*weights_only=True)", path.read_text()
        )
        assert not bad, f"{path}: {bad}"


def test_the_servers_own_name_is_nobodys() -> None:
    assert SERVER not in NAMES
