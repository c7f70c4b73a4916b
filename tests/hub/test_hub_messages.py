"""Messages of hubs: what does not fit is refused, and versions are negotiated."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.errors import Malformed
from kilter.hub import messages
from kilter.hub.messages import (
    AgentHello,
    AgentReport,
    Assignment,
    ListRequest,
    SiteReport,
    SubmitRequest,
    common_protocol,
    decode,
    decode_from_agent,
    decode_request,
    encode,
)


def test_messages_survive_the_wire() -> None:
    report = AgentReport([SiteReport(3, "refused", "why")])
    assert decode_from_agent(encode(report)) == report
    assert decode_request(encode(SubmitRequest("x", "n", ["a"], 2))) == SubmitRequest("x", "n", ["a"], 2)
    assert decode(encode(Assignment([1], [2])), Assignment) == Assignment([1], [2])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        None,
        b"[]",
        b'{"type":"hello","name":"../x","parallel":1}',
        b'{"type":"hello","name":"a","parallel":0}',
        b'{"type":"report","runs":[{"job":0,"state":"running"}]}',
        b'{"type":"report","runs":[{"job":1,"state":"dancing"}]}',
        b'{"type":"order"}',
        b"\xff\xfe",
    ],
)
def test_what_does_not_fit_is_refused(data: object) -> None:
    with pytest.raises(Malformed):
        decode_from_agent(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for read in (decode_from_agent, decode_request):
        try:
            read(data)
        except Malformed:
            continue


def test_fields_of_a_newer_release_are_ignored() -> None:
    assert decode_request(b'{"type":"list","most":5,"colour":"blue"}') == ListRequest(5)
    assert decode_from_agent(b'{"type":"hello","name":"a","parallel":1,"gpu":true}') == AgentHello("a", 1)


def test_the_newest_common_version_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOLS", (2, 4))
    assert [common_protocol(theirs) for theirs in ((1, 2), (2, 3), (3, 9), (4, 4))] == [2, 3, 4, 4]
    with pytest.raises(Malformed, match="update kilter at the site"):
        common_protocol((1, 1))
    with pytest.raises(Malformed, match="update kilter at the hub"):
        common_protocol((5, 6))


def test_a_hub_and_an_agent_import_no_torch() -> None:
    code = "import sys, kilter.hub.run_hub, kilter.hub.agent, kilter.hub.client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
