"""The client: asks vLLM's OpenAI API for one completion after the other and watches its clock."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

__all__ = ["Generator", "complete", "stream_completion"]

_TIMEOUT_S = 30.0
_MAX_TOKENS = 72
_UNFINISHED = " \N{HORIZONTAL ELLIPSIS}"


def stream_completion(
    port: int, prompt: str, *, model: str = "demo", max_tokens: int = _MAX_TOKENS
) -> Iterator[str]:
    """Yield the pieces of a greedy completion as they arrive over HTTP.

    Raises:
        OSError, http.client.HTTPException: vLLM is away.
        RuntimeError: vLLM answered with an error.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            msg = f"vLLM answered {answer.status}: {answer.read(500).decode(errors='replace')}"
            raise RuntimeError(msg)
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(event["error"])
                yield event["choices"][0]["text"]
    finally:
        connection.close()


def complete(port: int, prompt: str) -> str:
    """Return a whole greedy completion."""
    return "".join(stream_completion(port, prompt))


class Generator:
    """A thread that generates without end, and what it saw.

    Attributes:
        text: The newest whole completion since `begin`; until there is one, what came so far.
        tokens: Pieces received so far.
        error: Why it stopped; None: it runs.
    """

    def __init__(self, port: int, prompt: str) -> None:
        self._port = port
        self._prompt = prompt
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._longest = 0.0
        self._last = 0.0
        self._begun = 0
        self._whole = threading.Event()
        self.text = ""
        self.tokens = 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_TIMEOUT_S)

    def begin(self) -> None:
        """Forget gaps and text so far; the gap that runs now counts from here."""
        with self._lock:
            self._longest, self._last = 0.0, time.monotonic()
            self._begun += 1
            self._whole.clear()

    def longest_gap(self) -> float:
        """Return the longest time without a token since `begin`, the present gap included.

        The client asks without a break, so time between two requests counts as well.
        """
        with self._lock:
            return max(self._longest, time.monotonic() - self._last)

    def wait_whole(self, seconds: float) -> None:
        """Return when a completion that was asked for after `begin` is whole, or time is over."""
        self._whole.wait(seconds)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._generate()
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            self.error = error

    def _generate(self) -> None:
        text, begun = "", self._begun
        for piece in stream_completion(self._port, self._prompt):
            if self._stop.is_set():
                return
            text += piece
            now = time.monotonic()
            with self._lock:
                self.tokens += 1
                self._longest = max(self._longest, now - self._last)
                self._last = now
                if not self._whole.is_set():
                    self.text = text + _UNFINISHED
        with self._lock:
            if begun == self._begun:
                self.text = text
                self._whole.set()
