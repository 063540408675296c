"""Which versions made the answer to an HTTP request, and the end of one that may have no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync.vllm.extensions.answers.request_bounds import Refusal, RequestBounds
from weightsync.vllm.extensions.answers.spans import SequenceSpans, sequence_spans
from weightsync.vllm.lineage.cache_key import GROUP_PREFIX

if TYPE_CHECKING:
    from weightsync.vllm.bridge.live_versions import LiveInterval, LiveVersions

logger = logging.getLogger(__name__)

#: The HTTP request that the running task answers.
_answering: ContextVar[RequestVersions | None] = ContextVar("weightsync_answering", default=None)
#: How vLLM ends the name of a request: the prompt's place, then what makes it unique.
_PROMPT = re.compile(r"-(\d+)$")
#: A step of a beam search, of which no token is one of the answer for certain.
_BEAM = re.compile(r"-beam-\d+$")


@dataclass(slots=True)
class EngineRequest:
    """One of the engine's requests.

    Attributes:
        name: As vLLM's client knows it, for one of several sequences that of all of them.
        index: Of the sequence among those.
        root: By which vLLM ends it, with all of its sequences.
        starts: The labels of its outputs, each with its first token. The list itself grows while
            vLLM generates; it outlives vLLM's state. None: vLLM labels none.
        counter: Knows how many tokens it has; None: it makes none.
    """

    name: str
    index: int
    root: str
    starts: Sequence[tuple[str, int]] | None
    counter: Any


class RequestVersions:
    """Knows, for an HTTP request, the versions that have sampled tokens for it.

    Where vLLM does not label outputs, which is so in 0.26 and for embeddings, scores and the like,
    it is all versions that were live since vLLM got the request. When another version is served
    than `bounds` allow for what is not finished, the AsyncLLM `llm` ends it.

    Attributes:
        refusal: Why it was ended; None: it was not.
    """

    def __init__(
        self, live: LiveVersions, bounds: RequestBounds | None = None, llm: Any = None
    ) -> None:
        self.bounds = bounds or RequestBounds()
        self.refusal: Refusal | None = None
        self._live = live
        self._llm = llm
        self._since: LiveInterval | None = None
        self._asked: dict[str, EngineRequest] = {}
        self._unfinished: list[str] = []
        self._requests: Mapping[str, Any] = {}
        self._ending: set[asyncio.Future[Any]] = set()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Have what the engine is asked for in the block, and in its tasks, belong to this."""
        token = _answering.set(self)
        if self.bounds.lasting:
            self._live.watchers.add(self._check)
        try:
            yield
        finally:
            self._live.watchers.discard(self._check)
            _answering.reset(token)

    def add(
        self, request: Any, requests: Mapping[str, Any], parent: Any = None, index: int = 0
    ) -> None:
        """Add one of the engine's requests; `requests` is vLLM's state of open ones, by id."""
        if self._since is None:
            self._since = self._live.current
        self._requests = requests
        self._unfinished.append(request.request_id)
        pools = getattr(request, "pooling_params", None) is not None
        state = requests.get(request.request_id)
        self._asked[request.request_id] = EngineRequest(
            str(getattr(request, "external_req_id", None) or request.request_id),
            index,
            request.request_id if parent is None else parent.request_id,
            None if pools else getattr(state, "weight_version_starts", None),
            None if pools else getattr(state, "detokenizer", None),
        )
        if self.refusal is not None:
            self._stop()
        elif self.bounds.lasting:
            # What was live when its HTTP request came may be so no more.
            self._check()

    def finished(self) -> bool:
        """Whether the engine was asked for something and has done all of it."""
        while self._unfinished and self._unfinished[-1] not in self._requests:
            self._unfinished.pop()
        return self._since is not None and not self._unfinished

    async def so_far(self) -> tuple[int, ...]:
        """Return the numbers of all versions that have contributed, each once, in order.

        Empty if none has, or one has no known number.
        """
        return _known(await self._named(self._labels()))

    async def first(self) -> tuple[int, ...]:
        """Return the version of each sequence's first token, as `so_far` does."""
        firsts = {starts[0][0] for starts in self._starts() if starts}
        return _known(await self._named(firsts))

    async def spans(self) -> tuple[SequenceSpans, ...]:
        """Return the spans of each sequence, in the order of the answer's choices.

        Empty where nobody knows them: no tokens were asked for, beams were searched for, vLLM does
        not label tokens and several versions were live, or one has no known number.
        """
        await self._live.settled()
        intervals = tuple(self._since.walk()) if self._since is not None else ()
        found: list[SequenceSpans] = []
        for asked in sorted(self._asked.values(), key=_place):
            starts = asked.starts if _tell_apart(intervals) else None
            if asked.starts is None and len({interval.version for interval in intervals}) == 1:
                starts = [(intervals[0].label, 0)]
            if starts is None or asked.counter is None or _BEAM.search(asked.name):
                return ()
            one = sequence_spans(intervals, starts, asked.counter.num_output_tokens())
            if one is None:
                return ()
            found.append(one)
        return tuple(found)

    async def broken(self) -> Refusal | None:
        """Return why nothing more of the answer may be sent; None: its bounds hold so far."""
        await self._live.settled()
        if self.refusal is None and (made := self._made()):
            self.refusal = self.bounds.broken(made, made[-1])
            if self.refusal is not None:
                self._stop()
        return self.refusal

    async def end(self) -> None:
        """End the engine's requests if the answer was refused, at the latest now."""
        if self.refusal is None or self._llm is None:
            return
        await asyncio.gather(*self._ending, return_exceptions=True)
        # Those that vLLM had not sent to the engine core when they were ended.
        with contextlib.suppress(Exception):
            await self._llm.engine_core.abort_requests_async(list(self._asked))

    def _check(self) -> None:
        """End the answer if what is served now may not contribute to it."""
        if self.refusal is not None or self._live.undecided:
            return
        if self._since is None or self.finished():
            return
        self.refusal = self.bounds.broken(self._made(), self._live.current.version)
        if self.refusal is not None:
            self._stop()

    def _stop(self) -> None:
        if self._llm is not None:
            self._ending.add(asyncio.ensure_future(self._abort()))

    async def _abort(self) -> None:
        # All of it is in vLLM's state by now, also where several sequences were just added.
        roots = list(dict.fromkeys(asked.root for asked in self._asked.values()))
        try:
            await self._llm.abort(roots, internal=True)
        except Exception:
            logger.exception("weightsync: vLLM did not end a request")

    def _made(self) -> tuple[int, ...]:
        """Return who has contributed, as of what is known without waiting; 0: without a number."""
        labels = self._labels()
        if not labels and None not in self._starts():
            return ()
        return self._of_labels(labels)

    def _labels(self) -> set[str]:
        return {label for starts in self._starts() for label, _ in starts or ()}

    def _starts(self) -> list[Sequence[tuple[str, int]] | None]:
        return [asked.starts for asked in self._asked.values()]

    async def _named(self, labels: set[str]) -> tuple[int, ...]:
        if self._live.current.label in labels:
            # Its tokens come behind the answers of the ranks, so that these are here as well.
            await self._live.settled()
        return self._of_labels(labels)

    def _of_labels(self, labels: set[str]) -> tuple[int, ...]:
        if self._since is None:
            return ()
        intervals = tuple(self._since.walk())
        if None in self._starts() or not _tell_apart(intervals):
            return _each(interval.version for interval in intervals)
        if not labels <= {interval.label for interval in intervals}:
            return (0,)
        return _each(_contributed(intervals, labels))


def watch(llm: Any, live: LiveVersions) -> None:
    """Have every request of an AsyncLLM be known to the HTTP request that it is made for.

    Costs a call for each request, and none for tokens. `live` is told of every new label.
    """
    processor = llm.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        answer = _answering.get()
        if answer is not None and answer.bounds.group:
            # vLLM sends the request to the engine core after this.
            request.cache_salt = group_salt(answer.bounds.group, request.cache_salt)
        add(request, *args, **kwargs)
        if answer is not None:
            # Of vLLM's arguments: the prompt, whose sequence it is, and which.
            parent = args[1] if len(args) > 1 else kwargs.get("parent_req")
            index = args[2] if len(args) > 2 else kwargs.get("request_index", 0)
            answer.add(request, processor.request_states, parent, index)

    processor.add_request = add_request
    if (update := getattr(llm, "update_weight_version", None)) is None:
        return

    async def update_weight_version(new_version: str) -> None:
        live.relabel(new_version)
        await update(new_version)

    llm.update_weight_version = update_weight_version


def group_salt(group: str, salt: str | None) -> str:
    """Return the salt of a group's requests; one of their own keeps them apart as before."""
    # No name of a group has a slash.
    return f"{GROUP_PREFIX}{group}/{salt}" if salt else GROUP_PREFIX + group


def _place(asked: EngineRequest) -> tuple[int, int]:
    """Return where a sequence is among the choices: by prompt, then in its own order."""
    prompt = _PROMPT.search(asked.name)
    return (int(prompt[1]) if prompt else 0, asked.index)


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


def _each(versions: Iterator[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(versions))


def _known(versions: tuple[int, ...]) -> tuple[int, ...]:
    return () if 0 in versions else versions
