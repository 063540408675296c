"""Which versions made an answer of vLLM, token by token where it was asked to tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync_client.errors import ClientError, invalid

__all__ = ["Spans", "TokenSpans", "VersionSpan", "versions_of"]

_VERSIONS, _SPANS, _OWN = "weightsync_version", "weightsync_spans", "weight_versions"
_SPAN = re.compile(r"(\d+):(\d+)-(\d+)")
_EVENT = re.compile(r"^data: ?(\{.*\})[ \t\r]*$", re.MULTILINE)
_NO_TOKENS = "-"


@dataclass(frozen=True)
class VersionSpan:
    """Tokens that one version made: from `start` up to, and without, `end`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class TokenSpans:
    """One sequence of an answer.

    Attributes:
        spans: In order, without gaps.
        keys: Versions whose keys and values tokens of a later version may have used. Logprobs of
            such tokens are those of neither version: take them from the answer. None: vLLM's own
            field names the spans alone.
    """

    spans: tuple[VersionSpan, ...]
    keys: tuple[int, ...] | None = ()

    def per_token(self) -> list[int]:
        """Return the version of each token."""
        return [span.version for span in self.spans for _ in range(span.start, span.end)]


@dataclass(frozen=True)
class Spans:
    """The versions that made an answer.

    Attributes:
        versions: Each one once, in order.
        sequences: One for each choice, in order; empty: the request did not ask for them with
            `x-weightsync-spans: 1`, or vLLM does not know, as for embeddings and beams.
    """

    versions: tuple[int, ...]
    sequences: tuple[TokenSpans, ...] = ()

    @property
    def oldest(self) -> int:
        """The oldest version that made a part of the answer: lag is counted from it."""
        return min(self.versions)

    @property
    def newest(self) -> int:
        """The newest one."""
        return max(self.versions)

    @property
    def pure(self) -> bool:
        """Whether one version is known to have made all of it, with keys of its own alone."""
        own = all(sequence.keys == () for sequence in self.sequences)
        return own and bool(self.sequences) and len(self.versions) == 1

    def per_token(self, choice: int = 0) -> list[int]:
        """Return the version of each token of a choice.

        Raises:
            InvalidError: The answer does not tell, or has no such choice.
        """
        if not self.sequences:
            raise invalid(
                "send x-weightsync-spans: 1 with the request: this answer does not name the "
                "version of each token"
            )
        if not 0 <= choice < len(self.sequences):
            raise invalid(f"choice is {choice}; this answer has {len(self.sequences)}, from 0")
        return self.sequences[choice].per_token()


def versions_of(response: Any) -> Spans:
    """Return the versions that made an answer of a vLLM with weightsync's plugin.

    Args:
        response: A response of httpx, requests or aiohttp, or a raw response of OpenAI's client;
            its headers alone; of a stream the last event with JSON: its text, what it parses to, or
            the last chunk of OpenAI's client; the text of a whole stream; or vLLM's RequestOutput.

    Raises:
        InvalidError: It names no version, or what is there is not to be understood.
    """
    facts = _Facts()
    for mapping in _mappings(response):
        facts.take(mapping)
    sequences = facts.sequences
    versions = facts.versions or _in_order(sequences)
    if not versions:
        raise invalid(
            "give an answer of a vLLM with weightsync's plugin: this one names no version, as "
            "where WEIGHTSYNC_ANSWER_VERSIONS is 0, or weights without a number made a part of it"
        )
    return Spans(versions, sequences)


class _Facts:
    def __init__(self) -> None:
        self.versions: tuple[int, ...] = ()
        self.sequences: tuple[TokenSpans, ...] = ()

    def take(self, mapping: Mapping[str, Any]) -> None:
        named = {_name(key): value for key, value in mapping.items()}
        if str(named.get("content_type", "")).startswith("text/event-stream"):
            raise invalid(
                "give the last event of the stream: its head names the version of the first token "
                "alone"
            )
        if _VERSIONS in named:
            self.versions = _numbers(str(named[_VERSIONS]))
        if _SPANS in named:
            self.sequences = tuple(map(_sequence, str(named[_SPANS]).split()))
        elif not self.sequences:
            self.sequences = _own(named.get("choices") or named.get("outputs") or ())


def _mappings(response: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all that names versions: headers, JSON, or attributes."""
    if isinstance(response, Mapping):
        yield response
    elif isinstance(response, bytes | bytearray):
        yield from _mappings(bytes(response).decode(errors="replace"))
    elif isinstance(response, str):
        yield from _last_json(response)
    elif hasattr(response, "headers"):
        yield response.headers
    elif hasattr(response, "model_dump"):
        yield response.model_dump()
    elif hasattr(response, "outputs"):
        yield {"outputs": response.outputs}
    else:
        raise invalid(
            f"give a response, not {type(response).__name__}; see the help of versions_of"
        )


def _last_json(text: str) -> Iterator[Mapping[str, Any]]:
    events = _EVENT.findall(text)
    try:
        found = json.loads(events[-1] if events else text)
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise invalid(f"give the JSON of an answer or a stream's last event, not {text[:100]!r}")
    yield found


def _name(key: Any) -> str:
    return str(key).lower().replace("-", "_").removeprefix("x_")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise _unclear(text)
    return tuple(map(int, parts))


def _sequence(text: str) -> TokenSpans:
    if text == _NO_TOKENS:
        return TokenSpans(())
    spans_text, _, more = text.partition(";")
    spans: list[VersionSpan] = []
    for part in spans_text.split(","):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise _unclear(text)
        spans.append(VersionSpan(*map(int, match.groups())))
    # What a later release adds is passed over.
    keys = [part.removeprefix("keys=") for part in more.split(";") if part.startswith("keys=")]
    return TokenSpans(tuple(spans), _numbers(keys[0]) if keys else ())


def _own(choices: Sequence[Any]) -> tuple[TokenSpans, ...]:
    """Return what vLLM itself tells of each choice; empty if it does not, or not in numbers."""
    found = []
    for choice in choices:
        spans = _get(choice, _OWN)
        if spans is None or not all(str(_get(span, "version")).isdigit() for span in spans):
            return ()
        parts = [(_get(span, "version"), _get(span, "start"), _get(span, "end")) for span in spans]
        found.append(TokenSpans(tuple(VersionSpan(*map(int, part)) for part in parts), None))
    return tuple(found)


def _get(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def _in_order(sequences: Sequence[TokenSpans]) -> tuple[int, ...]:
    found = (span.version for sequence in sequences for span in sequence.spans)
    return tuple(dict.fromkeys(found))


def _unclear(text: str) -> ClientError:
    return invalid(f"install the release of weightsync that vLLM has: {text[:100]!r} is not clear")
