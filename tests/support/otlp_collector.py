"""An OTLP collector in a process of its own: keeps the spans that it is sent, one JSON a line.

    python -m tests.support.otlp_collector FILE [PORT]

It serves the TraceService of OpenTelemetry's own protos over gRPC, prints the port that it listens
on, and writes each span with the attributes of who sent it.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.proto.common.v1.common_pb2 import KeyValue


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


class _Service(service_grpc.TraceServiceServicer):
    def __init__(self, file: Path) -> None:
        self._file = file

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        with self._file.open("a") as lines:
            for sender in request.resource_spans:
                resource = _values(sender.resource.attributes)
                for span in (span for scope in sender.scope_spans for span in scope.spans):
                    line = {
                        "resource": resource,
                        "trace_id": span.trace_id.hex(),
                        "span_id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "name": span.name,
                        "kind": span.kind,
                        "began_ns": span.start_time_unix_nano,
                        "ended_ns": span.end_time_unix_nano,
                        "attributes": _values(span.attributes),
                        "links": [link.trace_id.hex() for link in span.links],
                        "failed": span.status.code == span.status.STATUS_CODE_ERROR,
                        "message": span.status.message,
                    }
                    lines.write(json.dumps(line) + "\n")
        return service_pb.ExportTraceServiceResponse()


def main() -> None:
    file, port = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    file.touch()
    server = grpc.server(ThreadPoolExecutor(2))
    # The generated code has no types.
    add: Any = service_grpc.add_TraceServiceServicer_to_server
    add(_Service(file), server)
    sys.stdout.write(f"{server.add_insecure_port(f'127.0.0.1:{port}')}\n")
    sys.stdout.flush()
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
