"""Lying peers against an honest one: strange heads and bodies, in bounded memory, while a third one is heard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import grpc
import pytest
from mutate import mutate_bytes, mutate_head
from place import free_ports
from test_peer_transport import until, write

from kilter.net.frames import OPTIONS, to_frames
from kilter.net.messages import PeerHello, PeerLetter
from kilter.net.peer_transport import AHEAD, HELLO, PUT, PeerTransport
from kilter.runtimes.step_names import StepName


@pytest.fixture
def peers() -> Iterator[dict[str, PeerTransport]]:
    ports = dict(zip("abc", free_ports(3), strict=True))
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    made = {name: PeerTransport(name, addresses, addresses[name], "run", None, largest=2**20) for name in "bc"}
    for peer in made.values():
        peer.enter(1)
    yield made
    for peer in made.values():
        peer.close()


@pytest.mark.parametrize("seed", range(3))
def test_strange_letters_change_nothing_for_others(peers: dict[str, PeerTransport], seed: int) -> None:
    rng = Random(seed)
    b, c = peers["b"], peers["c"]
    with grpc.insecure_channel(f"127.0.0.1:{b.port}", OPTIONS) as channel:
        put, hello = channel.stream_unary(PUT), channel.unary_unary(HELLO)
        for _ in range(700):
            letter = PeerLetter("run", "a", "b", rng.randrange(4), rng.randrange(500), StepName("train"), False, ("c",))
            head = letter.head() if rng.random() < 0.4 else mutate_head(rng, letter.head())
            try:
                frames = list(to_frames(head, rng.randbytes(rng.randrange(3000))))
            except (TypeError, ValueError):
                continue
            frames = frames if rng.random() < 0.8 else [mutate_bytes(rng, f) for f in frames]
            greeting = json.dumps(mutate_head(rng, PeerHello("run", "a", "b", 1).head())).encode()
            for call, data in ((put, iter(frames)), (hello, greeting)):
                try:
                    call(data, timeout=20)
                except grpc.RpcError as e:
                    assert e.code() in (  # noqa: PT017 - which refusal it is does not matter
                        grpc.StatusCode.INVALID_ARGUMENT,
                        grpc.StatusCode.PERMISSION_DENIED,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                    )
    assert b.gone == {}
    assert sum(who == "a" for _, who in b.inbox) <= AHEAD + 1
    assert {who for _, who in b.inbox} <= {"a"}
    write(c, "b", b"honest")
    until(lambda: ((1, 1), "c") in b.inbox)
    assert b.inbox[(1, 1), "c"][1] == b"honest"
