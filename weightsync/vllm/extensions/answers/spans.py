"""Which tokens each version made, and whose keys they used, as text for a header.

`41:0-142,42:142-300;keys=41` is one sequence: tokens 0 to 141 are of version 41, 142 to 299 of 42,
and some of these were computed with keys and values of version 41. Several sequences are in the
order of the answer's choices, with a space between them; one without tokens is `-`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightsync.vllm.bridge.live_versions import KeptKeys

if TYPE_CHECKING:
    from weightsync.vllm.bridge.live_versions import LiveInterval

#: A longer one is refused by proxies and clients.
MOST_BYTES = 7168
_NO_TOKENS = "-"


class Span(NamedTuple):
    """Tokens of one version: half open, counted from 0."""

    version: int
    start: int
    end: int


class SequenceSpans(NamedTuple):
    """The spans of one sequence, in order, and the other versions whose keys it used."""

    spans: tuple[Span, ...]
    keys: tuple[int, ...]

    def __str__(self) -> str:
        if not self.spans:
            return _NO_TOKENS
        text = ",".join(f"{span.version}:{span.start}-{span.end}" for span in self.spans)
        keys = ",".join(map(str, self.keys))
        return f"{text};keys={keys}" if keys else text


def sequence_spans(
    intervals: Sequence[LiveInterval], starts: Sequence[tuple[str, int]], count: int
) -> SequenceSpans | None:
    """Return the spans of a sequence of `count` tokens; None: a part is of no known version.

    Args:
        intervals: All that were live since the request came.
        starts: Each label with its first token, as vLLM tracks them.
        count: Of its tokens.
    """
    starts = [start for start in starts if start[1] < count]
    if not starts:
        return None if count else SequenceSpans((), ())
    times = _times(intervals, [label for label, _ in starts])
    if not times:
        return None
    ends = [start for _, start in starts[1:]] + [count]
    found: list[Span] = []
    for (_, start), end, during in zip(starts, ends, times, strict=True):
        version = intervals[during[0]].version
        if not version:
            return None
        if found and found[-1].version == version:
            start = found.pop().start  # noqa: PLW2901 - it is one span with the one before
        found.append(Span(version, start, end))
    used = {at for during in times for at in during}
    return SequenceSpans(tuple(found), tuple(_other_keys(intervals, used)))


def _times(intervals: Sequence[LiveInterval], labels: Sequence[str]) -> list[list[int]]:
    """Return for each label the intervals in which its tokens may be; empty if there are none.

    A label may come again, after a rollback.
    """
    first, at = [], 0
    for label in labels:
        while at < len(intervals) and intervals[at].label != label:
            at += 1
        if at == len(intervals):
            return []
        first.append(at)
    last, at = [], len(intervals) - 1
    for label in reversed(labels):
        while intervals[at].label != label:
            at -= 1
        last.append(at)
    return [
        [at for at in range(begin, end + 1) if intervals[at].label == label]
        for label, begin, end in zip(labels, first, reversed(last), strict=True)
    ]


def _other_keys(intervals: Sequence[LiveInterval], used: set[int]) -> Iterator[int]:
    """Yield versions whose keys tokens of another version may have used, each once, in order."""
    known: dict[int, None] = {}
    others: dict[int, None] = {}
    for at, interval in enumerate(intervals):
        if at and interval.kept is KeptKeys.NONE:
            known.clear()
        known |= dict.fromkeys((*interval.older, interval.version))
        if at in used:
            others |= {version: None for version in known if version not in (0, interval.version)}
    yield from others


def spans_text(sequences: Sequence[SequenceSpans]) -> str:
    """Return what a header has; "" if it would be too long."""
    text = " ".join(map(str, sequences))
    return text if len(text) <= MOST_BYTES else ""
