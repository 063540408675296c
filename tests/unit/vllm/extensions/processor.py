"""A stand-in for vLLM's OutputProcessor; the real one is in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Llm", "Processor"]


class Processor:
    """Keeps a state for each request that has not finished, as vLLM's does."""

    def __init__(self, *, labels: bool) -> None:
        self.request_states: dict[str, Any] = {}
        self._labels = labels

    def add_request(
        self, request: Any, prompt: str | None, parent_req: Any = None, request_index: int = 0
    ) -> None:
        state = SimpleNamespace(tokens=0)
        state.detokenizer = SimpleNamespace(num_output_tokens=lambda: state.tokens)
        if self._labels:
            state.weight_version_starts = []
        self.request_states[request.request_id] = state


class Llm:
    """An AsyncLLM that samples a token when a test says so.

    Args:
        labels: Whether it labels outputs, as 0.32 does and 0.26 does not.

    Attributes:
        label: Of the next token.
        salts: The `cache_salt` of each request, as it goes to the engine core.
        aborted: What was ended: by AsyncLLM, and then by the engine core.
        on_abort: Called then, as vLLM queues the last output of what it ends.
    """

    def __init__(self, *, labels: bool = True) -> None:
        self.label = "default"
        self.output_processor = Processor(labels=labels)
        self.salts: dict[str, str | None] = {}
        self.aborted: tuple[list[str], list[str]] = ([], [])
        self.on_abort: Callable[[], None] = lambda: None
        self.engine_core = SimpleNamespace(abort_requests_async=self._abort_requests)
        if labels:
            self.update_weight_version = self._update_weight_version

    async def _update_weight_version(self, label: str) -> None:
        self.label = label

    async def _abort_requests(self, request_ids: list[str]) -> None:
        self.aborted[1].extend(request_ids)

    async def abort(self, request_ids: list[str], internal: bool = False) -> None:
        """End requests by the ids that they, or their parents, have inside."""
        assert internal
        self.aborted[0].extend(request_ids)
        for name in list(self.output_processor.request_states):
            if name in request_ids or name.partition("_")[2] in request_ids:
                self.end(name)
        self.on_abort()

    def ask(
        self,
        name: str,
        *,
        pools: bool = False,
        of: str = "",
        index: int = 0,
        external: str = "",
        salt: str | None = None,
    ) -> None:
        """Begin a request; `of` names that of which it is one of several sequences."""
        request = SimpleNamespace(
            request_id=name,
            external_req_id=external or None,
            cache_salt=salt,
            pooling_params=object() if pools else None,
        )
        parent = SimpleNamespace(request_id=of) if of else None
        self.output_processor.add_request(request, None, parent, index)
        self.salts[name] = request.cache_salt

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
