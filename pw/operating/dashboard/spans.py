"""Spans of runs for OpenTelemetry: one for each run that has ended, from the controller's events."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode

from pw.core.errors import Error

NS = 1_000_000_000


class Spans:
    """Makes a span of each run that has ended or failed (`Reader.runs`).

    Args:
        provider: makes tracers; by default one that sends to OTEL_EXPORTER_OTLP_ENDPOINT.

    Raises:
        Error: there is no provider, and the exporter is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = (provider or _exporting()).get_tracer("pw")

    def ended(self, client: int, event: dict[str, Any]) -> None:
        """Make the span of a run."""
        end_s = event["time_s"]
        span = self._tracer.start_span(
            event["program"] or "run",
            start_time=int((end_s - event["seconds"]) * NS),
            attributes={
                "pw.run": event["run"],
                "pw.attempt": event["attempt"],
                "pw.client": client,
                "pw.islands": event["islands"],
            },
            kind=trace.SpanKind.SERVER,
        )
        if event["what"] == "failed":
            span.set_status(Status(StatusCode.ERROR, event["error"]))
        span.end(int(end_s * NS))


def _exporting() -> TracerProvider:
    set_before = trace.get_tracer_provider()  # as `opentelemetry-instrument` does
    if isinstance(set_before, TracerProvider):
        return set_before
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise Error(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and its exporter is missing; run: pip install "
            "opentelemetry-exporter-otlp-proto-http"
        ) from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
