"""The version on vLLM's own spans of requests, where it traces them (`--otlp-traces-endpoint`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.vllm.bridge.extension_points import AsgiApp
    from weightsync.vllm.bridge.live_versions import LiveVersions
    from weightsync.vllm.env import EngineSettings

#: vLLM's name of such a span.
_REQUEST = "llm_request"
#: As the spans of weightsync-server name a version.
_ATTRIBUTE = "weightsync.version"


class RequestSpans:
    """Has each span that vLLM makes of a request name the version that was live when it ended.

    It is added to OpenTelemetry's tracer provider as any processor of spans; where vLLM traces
    nothing, nothing is done.
    """

    def wrap(self, app: AsgiApp) -> AsgiApp:
        return app

    def start(self, llm: Any, live: LiveVersions, settings: EngineSettings) -> None:
        del llm, settings
        # Imported by vLLM, if it is there.
        trace = sys.modules.get("opentelemetry.trace")
        provider = trace.get_tracer_provider() if trace is not None else None
        add = getattr(provider, "add_span_processor", None)
        if add is not None:
            add(_processor(live))


def _processor(live: LiveVersions) -> Any:
    from opentelemetry.sdk.trace import SpanProcessor

    class VersionProcessor(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            del parent_context
            # vLLM makes the span when the request has ended.
            if span.name == _REQUEST and live.version:
                span.set_attribute(_ATTRIBUTE, live.version)

    return VersionProcessor()
