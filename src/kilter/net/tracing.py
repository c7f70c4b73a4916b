"""OpenTelemetry traces (`pip install 'kilter[tracing]'`): one trace for each round, across the server and its sites.

Traces are on if the environment variable OTEL_EXPORTER_OTLP_ENDPOINT names a collector, as for any program that uses
OpenTelemetry. The server's span of a round has a child for each call, and an order carries the call's place in the trace as a
typed field, so a site's span of the step hangs below it. Spans hold names, numbers and durations, never data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kilter.errors import Mistake

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
PARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C traceparent

_provider: TracerProvider | None = None


def configure(exporter: SpanExporter | None = None) -> None:
    """Send spans to the collector that the environment names, or to this exporter. Without either, nothing is traced."""
    global _provider
    if exporter is None and not os.environ.get(VARIABLE):
        _provider = None
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ModuleNotFoundError:
        raise Mistake(f"{VARIABLE} is set, and traces need a library: `pip install 'kilter[tracing]'`.") from None
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "kilter")})
    _provider = TracerProvider(resource=resource)
    if exporter is not None:
        _provider.add_span_processor(SimpleSpanProcessor(exporter))
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def _start(name: str, parent: str, attributes: dict[str, str | int]) -> Span:
    """A span below another one, which may be elsewhere; without a parent it begins a trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    assert _provider is not None
    context = TraceContextTextMapPropagator().extract({"traceparent": parent}, Context()) if parent else Context()
    return _provider.get_tracer("kilter").start_span(name, context, attributes=attributes)  # type: ignore[return-value]


def _mark(span: Span) -> str:
    """A span's place in its trace, as it travels."""
    at = span.get_span_context()
    return f"00-{at.trace_id:032x}-{at.span_id:016x}-{int(at.trace_flags):02x}"


class RoundTraces:
    """The server's spans: one for the round that runs, and one for each call in it."""

    def __init__(self, run: str) -> None:
        self.run, self.parent = run, ""  # the open call's place in the trace; empty: nothing is traced
        self._round: Span | None = None
        self._number = -1

    @contextmanager
    def call(self, round_number: int, step: str) -> Iterator[None]:
        """Trace a call; orders that are written meanwhile carry `parent`."""
        if _provider is None:
            yield
            return
        if self._round is None or self._number != round_number:
            self.end()
            self._round, self._number = (
                _start(f"round {round_number}", "", {"run": self.run, "round": round_number}),
                round_number,
            )
        span = _start(f"call {step}", _mark(self._round), {"step": step, "round": round_number})
        self.parent = _mark(span)
        try:
            yield
        finally:
            self.parent = ""
            span.end()

    def end(self) -> None:
        """The round is over."""
        if self._round is not None:
            self._round.end()
            self._round = None


@contextmanager
def site_span(parent: str, site: str, step: str, round_number: int) -> Iterator[None]:
    """Trace a step at a site, below the server's call. An error is recorded by its kind only."""
    if _provider is None or not parent:
        yield
        return
    from opentelemetry.trace import Status, StatusCode

    span = _start(f"{step} at {site}", parent, {"site": site, "step": step, "round": round_number})
    try:
        yield
    except BaseException as e:
        span.set_status(Status(StatusCode.ERROR, type(e).__name__))
        raise
    finally:
        span.end()


def checked_parent(text: str) -> str:
    """A place in a trace as it arrived; what is not one is dropped, as a trace decides nothing."""
    return text if PARENT.fullmatch(text) else ""
