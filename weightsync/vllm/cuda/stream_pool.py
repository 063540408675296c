"""Streams for what comes after the current one's work, beside what it is given next."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StreamPool"]

#: So that one long piece of work keeps none of the others waiting.
_STREAMS = 4


class StreamPool:
    """Gives streams out in turn.

    Args:
        device: Where they are; on a CPU all is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        count = _STREAMS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]  # torch annotates nothing there
        self._turns = itertools.cycle(self._streams)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Have the body queue work that begins when what was queued before it is done."""
        if not self._streams:
            yield
            return
        stream = next(self._turns)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def close(self) -> None:
        """Wait for all of them: what they use may be given back then."""
        for stream in self._streams:
            stream.synchronize()

    def settle(self) -> None:
        """Have the current stream wait for all of them."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
