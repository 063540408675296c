"""Takes our fields out of a request's body, before vLLM reads it."""

from __future__ import annotations

import functools
import json
from typing import Any

from weightsync.vllm.extensions.answers.request_bounds import (
    EXACT,
    RequestBounds,
    may_have_fields,
    read_bounds,
    take_fields,
)

#: By which vLLM 0.33 and newer are asked for spans in a field of their own.
_OWN_SPANS = "return_weight_versions"
#: A larger body is passed on as it comes, for who sends it may have no key of vLLM's.
_MOST_MIB = 64
#: vLLM has no spans of these, and refuses who asks for them.
_BEAMS = "use_beam_search"


async def bounded_request(scope: Any, receive: Any) -> tuple[RequestBounds, Any, Any]:
    """Return what a request asks for, and its scope and `receive` as vLLM gets them.

    A body without a field of ours reaches vLLM byte for byte. ValueError: it asks for what cannot
    be, as one sentence says.
    """
    headers = scope["headers"]
    if not _has_json(headers):
        return read_bounds(headers, {}), scope, receive
    body, last = await _whole(receive)
    if last is not None and may_have_fields(body):
        raise ValueError(
            f"send the fields as headers, such as {EXACT}: this body is larger than {_MOST_MIB} MiB"
        )
    document = _document(body) if last is None and may_have_fields(body) else None
    fields = {} if document is None else take_fields(document)
    bounds = read_bounds(headers, fields)
    if bounds.spans and last is None and _tells_spans(scope):
        document = _document(body) if document is None else document
        if document is not None and not document.get(_BEAMS):
            fields[_OWN_SPANS] = [document.setdefault(_OWN_SPANS, True)]
    if fields:
        body = json.dumps(document).encode()
        headers = [pair for pair in headers if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        scope = {**scope, "headers": headers}
    return bounds, scope, _replayed(body, last, receive)


def _has_json(headers: Any) -> bool:
    kinds = [value for name, value in headers if name.lower() == b"content-type"]
    return any(b"json" in kind.lower() for kind in kinds)


async def _whole(receive: Any) -> tuple[bytes, Any]:
    """Return the body and None; or what came of it, and the message that shows that more comes.

    That is what is too much of it, or the client has left.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or size > _MOST_MIB << 20:
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts), None


def _replayed(body: bytes, last: Any, receive: Any) -> Any:
    first = {"type": "http.request", "body": body, "more_body": last is not None}
    waiting = [first] if last is None else [first, last]

    async def replay() -> Any:
        return waiting.pop(0) if waiting else await receive()

    return replay


def _document(body: bytes) -> dict[str, Any] | None:
    """Return a body's JSON object; None: it is none, and vLLM says so."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _tells_spans(scope: Any) -> bool:
    """Whether vLLM can be asked there for spans in a field of its own."""
    path = str(scope.get("path", "")).rstrip("/")
    return path.endswith("/completions") and _release_tells_spans()


@functools.cache
def _release_tells_spans() -> bool:
    try:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    except ImportError:
        return False
    return _OWN_SPANS in CompletionRequest.model_fields
