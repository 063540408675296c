"""Spans that vLLM makes of requests name the version that was live; other spans do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.extensions.request_spans import RequestSpans

if TYPE_CHECKING:
    from collections.abc import Mapping

_SETTINGS = EngineSettings("", "")


def _serve(live: LiveVersions, version: int) -> None:
    live.begin(version)
    live.confirm()


def test_a_request_names_what_was_live_when_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    live, provider, sent = LiveVersions(), TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(sent))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    RequestSpans().start(None, live, _SETTINGS)
    tracer = provider.get_tracer("vllm.llm_engine")

    def made(name: str) -> Mapping[str, Any]:
        tracer.start_span(name).end()
        return sent.get_finished_spans()[-1].attributes or {}

    assert "weightsync.version" not in made("llm_request"), "no version has a number yet"
    _serve(live, 7)
    assert made("llm_request")["weightsync.version"] == 7
    assert not made("other")
    _serve(live, 8)
    assert made("llm_request")["weightsync.version"] == 8


def test_nothing_is_done_where_vllm_traces_nothing() -> None:
    assert not hasattr(trace.get_tracer_provider(), "add_span_processor")
    RequestSpans().start(None, LiveVersions(), _SETTINGS)
