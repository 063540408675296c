"""The versions that made the answer to one HTTP request, read off vLLM's own bookkeeping."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightsync.vllm.answers.live_versions import LiveInterval, LiveVersions

__all__ = ["RequestVersions", "watch"]

#: The HTTP request that the running task answers.
_answering: ContextVar[RequestVersions | None] = ContextVar("weightsync_answering", default=None)


class RequestVersions:
    """Knows, for an HTTP request, the versions that have sampled tokens for it.

    It is exact where vLLM labels the outputs of a request with the version they come from. Where it
    does not, which is so in 0.26 and for embeddings, scores and the like, it is all versions that
    were live since vLLM got the request.

    Args:
        live: What the engine serves.
    """

    def __init__(self, live: LiveVersions) -> None:
        self._live = live
        self._since: LiveInterval | None = None
        #: For each of vLLM's requests: the labels of its outputs, each with its first token.
        self._labels: list[Sequence[tuple[str, int]] | None] = []
        self._unfinished: list[str] = []
        self._requests: Mapping[str, Any] = {}

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Have what vLLM is asked in the body count as asked for this request."""
        token = _answering.set(self)
        try:
            yield
        finally:
            _answering.reset(token)

    def add(self, request: Any, requests: Mapping[str, Any]) -> None:
        """Add one of the engine's requests.

        Args:
            request: vLLM's EngineCoreRequest.
            requests: vLLM's state of each request that has not finished, by id.
        """
        if self._since is None:
            self._since = self._live.current
        self._requests = requests
        self._unfinished.append(request.request_id)
        pools = getattr(request, "pooling_params", None) is not None
        state = requests.get(request.request_id)
        # The list itself grows while vLLM generates; it outlives the state.
        self._labels.append(None if pools else getattr(state, "weight_version_starts", None))

    def finished(self) -> bool:
        """Whether the engine was asked for something and has done all of it."""
        while self._unfinished and self._unfinished[-1] not in self._requests:
            self._unfinished.pop()
        return self._since is not None and not self._unfinished

    async def so_far(self) -> tuple[int, ...]:
        """Return the numbers of all versions that have contributed, each once, in order.

        Empty: none has, or the number of one is not known.
        """
        return await self._named({label for starts in self._labels for label, _ in starts or ()})

    async def first(self) -> tuple[int, ...]:
        """Return the version of the first token, as `so_far` does.

        Of several sequences, the first token of each.
        """
        return await self._named({starts[0][0] for starts in self._labels if starts})

    async def _named(self, labels: set[str]) -> tuple[int, ...]:
        if self._since is None:
            return ()
        if self._live.current.label in labels:
            # Its tokens come behind the answers of the ranks, so that these are here as well.
            await self._live.settled()
        intervals = tuple(self._since.walk())
        if None in self._labels or not _tell_apart(intervals):
            return _numbers(interval.version for interval in intervals)
        if not labels <= {interval.label for interval in intervals}:
            return ()
        return _numbers(_contributed(intervals, labels))


def watch(llm: Any, live: LiveVersions) -> None:
    """Have every request of an AsyncLLM be known to the HTTP request that it is made for.

    Costs a call for each request, and none for tokens.

    Args:
        llm: vLLM's AsyncLLM.
        live: Learns of labels, whoever sets them.
    """
    processor = llm.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        if (answer := _answering.get()) is not None:
            answer.add(request, processor.request_states)

    processor.add_request = add_request
    if (update := getattr(llm, "update_weight_version", None)) is None:
        return

    async def update_weight_version(new_version: str) -> None:
        live.relabel(new_version)
        await update(new_version)

    llm.update_weight_version = update_weight_version


def _tell_apart(intervals: Sequence[LiveInterval]) -> bool:
    """Whether each label is of one version: a trainer's own may be anything."""
    versions: dict[str, int] = {}
    return all(
        interval.labelled
        and versions.setdefault(interval.label, interval.version) == interval.version
        for interval in intervals
    )


def _contributed(intervals: Sequence[LiveInterval], labels: set[str]) -> Iterator[int]:
    """Yield versions with those labels; on both sides of a switch that came between two steps."""
    sampled = [interval.label in labels for interval in intervals]
    for at, interval in enumerate(intervals):
        before = at > 0 and _blurred(interval) and sampled[at - 1]
        after = at + 1 < len(intervals) and _blurred(intervals[at + 1]) and sampled[at + 1]
        if sampled[at] or before or after:
            yield interval.version


def _blurred(interval: LiveInterval) -> bool:
    # One that is not settled has no tokens yet: they come behind the answers of the ranks.
    return interval.between_steps and not interval.pending


def _numbers(versions: Iterator[int]) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(versions))
    return () if 0 in found else found
