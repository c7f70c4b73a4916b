"""Versions: messages and files of the release before are understood, and a refusal says which side to update."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sites import RUN, SESSION, make_site

from kilter.errors import Malformed, Mistake
from kilter.net import messages, versions
from kilter.net.agreement import Agreement
from kilter.net.messages import Goodbye, Hello, Order, PeerAnswer, PeerHello, PeerLetter, Refusal, Reply
from kilter.net.results import StepResult
from kilter.net.site_state import SiteState, StateDirectory
from kilter.net.terms import Terms
from kilter.net.versions import PROTOCOLS, common_protocol, read_range, upgraded
from kilter.records import wire
from small import same

RECORDED = Path(__file__).parent / "recorded/protocol3"  # written by the code of protocol 3
KINDS: dict[str, Any] = {"hello": Hello, "terms": Terms, "order": Order, "reply": Reply, "refusal": Refusal}
KINDS |= {"goodbye": Goodbye, "letter": PeerLetter, "peer hello": PeerHello, "answer": PeerAnswer}
LINES = [json.loads(line) for line in (RECORDED / "messages.jsonl").read_text().splitlines()]
NEW = {"protocol", "protocols"}  # fields that protocol 4 added to messages


@pytest.mark.parametrize("line", LINES, ids=[f"{k}-{line['kind']}" for k, line in enumerate(LINES)])
def test_recorded_messages_of_protocol_3_are_understood(line: dict[str, Any]) -> None:
    message = KINDS[line["kind"]].parse(line["head"])
    written = {k: v for k, v in message.head().items() if k not in NEW}
    assert written == {k: v for k, v in line["head"].items() if k not in NEW}
    if line["digest_of_terms"]:
        assert message.digest == line["digest_of_terms"]  # an approval given under the old release still holds


def test_recorded_bodies_of_protocol_3_are_understood() -> None:
    order, reply = (next(line for line in LINES if line["kind"] == kind) for kind in ("order", "reply"))
    tree = wire.decode(base64.b64decode(order["body"]))
    assert same(wire.decode(wire.encode(tree)), tree)
    result = StepResult.parse(wire.decode(base64.b64decode(reply["body"])), ("a", "b", "c"))
    assert result.fits


def test_a_release_before_ranges_understands_our_hello(tmp_path: Path) -> None:
    """It looks at `protocol` alone, and ignores what it does not know."""
    site = make_site(tmp_path, rows=40)
    head = site.hello().head()
    old = next(line["head"] for line in LINES if line["kind"] == "hello")
    assert head["protocol"] == old["protocol"] == 3
    assert set(old) <= set(head)
    site.close()


def test_the_newest_common_protocol_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PROTOCOLS", (3, 5))
    assert [common_protocol(theirs) for theirs in ((3, 3), (1, 4), (4, 9))] == [3, 4, 5]
    with pytest.raises(Malformed, match="update kilter at the site"):
        common_protocol((1, 2))
    with pytest.raises(Malformed, match="update kilter at the server"):
        common_protocol((6, 8))
    with pytest.raises(Malformed, match="update kilter at the other peer"):
        common_protocol((6, 8), "peer")


def test_a_hello_of_protocol_3_is_answered_in_protocol_3() -> None:
    old = next(line["head"] for line in LINES if line["kind"] == "hello")
    assert Hello.parse(old).protocol == 3
    assert Hello.parse({**old, "protocols": [3, 99]}).protocol == PROTOCOLS[1]
    for impossible in ([99, 120], [1, 2]):
        with pytest.raises(Malformed, match="update kilter at the"):
            Hello.parse({**old, "protocols": impossible})


@pytest.mark.parametrize("head", [{}, {"protocol": "3"}, {"protocol": True}, {"protocols": [1, "x"], "protocol": 3}])
def test_a_hello_without_protocols_is_refused(head: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        read_range(head)


def test_terms_in_a_protocol_that_a_site_does_not_speak_are_refused() -> None:
    terms = next(line["head"] for line in LINES if line["kind"] == "terms")
    assert Terms.parse(terms).protocol == 3
    with pytest.raises(Malformed, match="update kilter at the site"):
        Terms.parse({**terms, "protocol": 99})


def test_a_peer_of_another_protocol_is_refused() -> None:
    head = PeerHello(RUN, "a", "b", 1).head()
    assert PeerHello.parse(head) == PeerHello(RUN, "a", "b", 1)
    with pytest.raises(Malformed, match="update kilter at the other peer"):
        PeerHello.parse({**head, "protocols": [99, 99]})


# Files ----------------------------------------------------------------------------------------------------------------


def test_the_state_of_a_site_goes_on_under_this_release(tmp_path: Path) -> None:
    """The site was stopped under the old release after its reply; the server asks again, and the stored reply is sent."""
    shutil.copytree(RECORDED / "state", tmp_path / "state")
    directory = StateDirectory(tmp_path / "state")
    state = SiteState(directory, RUN)
    line = next(line for line in LINES if line["kind"] == "order")
    recorded = next(line for line in LINES if line["kind"] == "reply")
    stored = state.begin(Order.parse(line["head"]))
    assert stored is not None
    assert stored[0] == Reply.parse(recorded["head"])
    assert stored[1] == base64.b64decode(recorded["body"])
    following = Order.parse({**line["head"], "round": 2, "accepted": [1, 1], "state": stored[0].state.plain()})
    assert state.begin(following) is None
    state.finish(following, state.state(), Reply("a", RUN, SESSION, 2, 1, following.step, state.mark), b"x")
    index = json.loads(json.loads((tmp_path / "state" / RUN / "index.json").read_text())["index"])
    assert index["version"] == 2
    state.close()
    directory.close()


def test_the_agreement_of_a_run_is_read_and_written_with_a_version() -> None:
    agreed = Agreement.read(RECORDED / "run.json")
    assert (agreed.run, agreed.sites) == (RUN, ["a", "b", "c"])
    assert json.loads(agreed.text())["version"] == 2


@pytest.mark.parametrize("what", ["run.json", "index.json"])
def test_files_of_a_newer_release_are_refused(tmp_path: Path, what: str) -> None:
    if what == "run.json":
        (tmp_path / what).write_text(json.dumps({"version": 99}))
        with pytest.raises(Mistake, match="newer release of kilter"):
            Agreement.read(tmp_path / what)
        return
    shutil.copytree(RECORDED / "state", tmp_path / "state")
    path = tmp_path / "state" / RUN / "index.json"
    plain = json.loads(json.loads(path.read_text())["index"]) | {"version": 99}
    text = json.dumps(plain)
    path.write_text(json.dumps({"checksum": wire_checksum(text), "index": text}))
    directory = StateDirectory(tmp_path / "state")
    with pytest.raises(Mistake, match="newer release of kilter"):
        SiteState(directory, RUN)
    directory.close()


def wire_checksum(text: str) -> str:
    from kilter.records.checksums import checksum

    return checksum(text.encode())


def test_every_version_in_between_takes_its_step() -> None:
    steps = {1: lambda t: {**t, "b": 1}, 2: lambda t: {**t, "c": t["b"]}}
    assert upgraded({"a": 0}, 3, steps, "x") == {"a": 0, "b": 1, "c": 1, "version": 3}
    assert upgraded({"b": 7, "version": 2}, 3, steps, "x") == {"b": 7, "c": 7, "version": 3}
    with pytest.raises(Mistake, match="not a number"):
        upgraded({"version": "two"}, 3, steps, "x")


def test_every_kind_of_message_is_recorded() -> None:
    assert {line["kind"] for line in LINES} == set(KINDS)
    assert messages.PROTOCOLS is PROTOCOLS
