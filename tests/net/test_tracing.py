"""Traces: one for each round, with the spans of server and sites in one tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import AUTOMATIC, RUN, make_site, make_terms, order

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.net import tracing
from kilter.net.frames import Head
from kilter.net.messages import Goodbye, Order, Reply
from kilter.net.server import ServerRuntime
from kilter.net.site import Site
from kilter.net.terms import Terms
from kilter.net.transport import ConnectedSite, Transport

sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs kilter[tracing]")


class SameProcess(Transport):
    """Sites in this process: an order is carried out as it is sent."""

    def __init__(self, sites: dict[str, Site]) -> None:
        super().__init__()
        self.there = sites
        self.sites = {name: ConnectedSite(site.hello()) for name, site in sites.items()}

    def send(self, name: str, head: Head, body: bytes) -> None:
        if head["kind"] == "terms":
            self.there[name].agree(Terms.parse(head))
        if head["kind"] == "order":
            reply, answer = self.there[name].carry_out(Order.parse(head), body)
            assert self.on_message(name, reply.head(), answer) is None

    def drop(self, name: str, why: str) -> None:
        raise AssertionError(why)

    def close(self, goodbye: Goodbye | None = None) -> None:
        pass


@pytest.fixture
def spans() -> Iterator[Tree]:
    exporter = sdk.InMemorySpanExporter()
    tracing.configure(exporter)
    yield exporter
    tracing.configure()


def run_rounds(tmp_path: Path, rounds: int = 2) -> None:
    sites = {name: make_site(tmp_path, AUTOMATIC, name, rows=60) for name in ("a", "b")}
    terms = {name: make_terms(site) for name, site in sites.items()}
    transport = SameProcess(sites)
    fed = ServerRuntime(transport, ["a", "b"], run=RUN, seed=3, terms=lambda _, name: terms[name].head())
    method = sites["a"].method
    federate(method, fed, rounds)
    fed.traces.end()
    for site in sites.values():
        site.close()


def test_one_trace_for_each_round_across_sites(spans: Tree, tmp_path: Path) -> None:
    run_rounds(tmp_path)
    done = spans.get_finished_spans()
    rounds = {s.name: s for s in done if s.name.startswith("round ")}
    assert {"round 1", "round 2"} <= set(rounds)
    assert len({s.context.trace_id for s in rounds.values()}) == len(rounds)
    calls = {s.context.span_id: s for s in done if s.name.startswith("call ")}
    for call in calls.values():
        root = rounds[f"round {call.attributes['round']}"]
        assert (call.parent.span_id, call.context.trace_id) == (root.context.span_id, root.context.trace_id)
    at_sites = [s for s in done if " at " in s.name]
    trained = [s for s in at_sites if s.attributes["step"] == "train"]
    assert sorted((s.attributes["site"], s.attributes["round"]) for s in trained) == [
        ("a", 1),
        ("a", 2),
        ("b", 1),
        ("b", 2),
    ]
    for span in at_sites:
        call = calls[span.parent.span_id]
        assert call.context.trace_id == span.context.trace_id
        assert call.attributes["step"] == span.attributes["step"]
        assert call.start_time <= span.start_time <= span.end_time <= call.end_time
        assert set(span.attributes) == {"site", "step", "round"}  # no data


def test_without_a_collector_nothing_is_traced_and_nothing_travels(tmp_path: Path) -> None:
    tracing.configure()
    traces = tracing.RoundTraces(RUN)
    with traces.call(1, "train"), tracing.site_span("", "a", "train", 1):
        assert traces.parent == ""
    assert "trace" not in order("train").head()


def test_an_error_is_recorded_by_its_kind_only(spans: Tree) -> None:
    with pytest.raises(ValueError), tracing.site_span(f"00-{'1' * 32}-{'2' * 16}-01", "a", "train", 1):
        raise ValueError("patient 7")
    (span,) = spans.get_finished_spans()
    assert span.status.description == "ValueError"
    assert "patient" not in span.to_json()


@pytest.mark.parametrize("text", ["x", "00-1-2-01", f"00-{'1' * 32}-{'2' * 16}-01\n", f"00-{'G' * 32}-{'2' * 16}-01"])
def test_a_place_in_a_trace_that_is_none_is_dropped(text: str) -> None:
    assert tracing.checked_parent(text) == ""


def test_an_order_carries_its_place_in_the_trace() -> None:
    place = f"00-{'1' * 32}-{'2' * 16}-01"
    assert Order.parse(order("train", trace=place).head()).trace == place
    assert Order.parse({**order("train").head(), "trace": "nonsense"}).trace == ""


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setenv(tracing.VARIABLE, "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(Mistake, match=r"kilter\[tracing\]"):
        tracing.configure()


def test_replies_do_not_name_traces() -> None:
    assert not any("trace" in field for field in Reply.__dataclass_fields__)
