"""A stand-in for vLLM's OutputProcessor; the real one is in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["Llm", "Processor"]


class Processor:
    """Keeps a state for each request that has not finished, as vLLM's does."""

    def __init__(self, *, labels: bool) -> None:
        self.request_states: dict[str, Any] = {}
        self._labels = labels

    def add_request(self, request: Any, prompt: str | None = None) -> None:
        state = SimpleNamespace(tokens=0)
        if self._labels:
            state.weight_version_starts = []
        self.request_states[request.request_id] = state


class Llm:
    """An AsyncLLM that samples a token when a test says so.

    Args:
        labels: Whether it labels outputs, as 0.32 does and 0.26 does not.

    Attributes:
        label: Of the next token.
    """

    def __init__(self, *, labels: bool = True) -> None:
        self.label = "default"
        self.output_processor = Processor(labels=labels)
        if labels:
            self.update_weight_version = self._update_weight_version

    async def _update_weight_version(self, label: str) -> None:
        self.label = label

    def ask(self, name: str, *, pools: bool = False) -> None:
        """Begin a request."""
        request = SimpleNamespace(request_id=name, pooling_params=object() if pools else None)
        self.output_processor.add_request(request, None)

    def token(self, *names: str) -> None:
        """Sample a token for each request, labelled."""
        for name in names:
            state = self.output_processor.request_states[name]
            starts = getattr(state, "weight_version_starts", None)
            if starts is not None and (not starts or starts[-1][0] != self.label):
                starts.append((self.label, state.tokens))
            state.tokens += 1

    def end(self, *names: str) -> None:
        """Finish requests."""
        for name in names:
            del self.output_processor.request_states[name]
