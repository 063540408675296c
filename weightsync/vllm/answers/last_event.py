"""The last JSON of an event stream, to which something is added."""

from __future__ import annotations

import json
import re

__all__ = ["LastEvent"]

#: The data of an event where it is a JSON object; `[DONE]` is none.
_DATA = re.compile(rb"^data: ?\{", re.MULTILINE)
_OBJECT = re.compile(rb"(data: ?\{.*)\}([ \t]*(?:\r?\n|\Z))")


class LastEvent:
    """Keeps the last `data:` line with a JSON object, and what follows it, until more comes."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, body: bytes) -> bytes:
        """Take a piece of the stream; returns what may be sent before more is known."""
        body = self._kept + body
        starts = [match.start() for match in _DATA.finditer(body)]
        at = starts[-1] if starts else len(body)
        self._kept = body[at:]
        return body[:at]

    def release(self) -> bytes:
        """Return what is kept, and keep it no longer."""
        kept, self._kept = self._kept, b""
        return kept

    def extended(self, name: str, value: str) -> bytes:
        """Return what is kept, its JSON object with one member more."""
        member = f"{json.dumps(name)}:{json.dumps(value)}".encode()

        def add(match: re.Match[bytes]) -> bytes:
            comma = b"" if match[1].endswith(b"{") else b","
            return match[1] + comma + member + b"}" + match[2]

        return _OBJECT.sub(add, self.release(), count=1)
