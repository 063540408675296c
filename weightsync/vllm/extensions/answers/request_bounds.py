"""What an HTTP request asks of the versions that answer it, in its headers and in its body."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weightsync.vllm.bridge.live_versions import LiveVersions

MINIMUM = "x-weightsync-min-version"
EXACT = "x-weightsync-exact-version"
LAG = "x-weightsync-max-lag"
SPAN = "x-weightsync-max-span"
GROUP = "x-weightsync-group"
SPANS = "x-weightsync-spans"
#: What each is called here, and the smallest number that it takes; None: it is no number.
_NAMES: dict[str, tuple[str, int | None]] = {
    MINIMUM: ("minimum", 0),
    EXACT: ("exact", 1),
    LAG: ("max_lag", 0),
    SPAN: ("max_span", 1),
    GROUP: ("group", None),
    SPANS: ("spans", 0),
}
#: All fields of a body begin so, and none of vLLM's does.
_FIELD = "weightsync_"
#: In which frameworks pass on what vLLM's own fields do not have.
_EXTRA = "vllm_xargs"
#: More digits than any version has.
_MOST_DIGITS = 20
_GROUP_ID = re.compile(r"[A-Za-z0-9._:@+=-]{1,128}")


class Refusal(NamedTuple):
    """Why a request is not answered: which bound, in a word, and one sentence.

    `again` says whether the same request may be answered later.
    """

    why: str
    message: str
    again: bool = True


@dataclass(frozen=True)
class RequestBounds:
    """Which versions may answer a request, and what its answer tells of them.

    Attributes:
        minimum: The oldest version that may be live when the request comes.
        exact: The one version that may contribute; None: any.
        max_lag: How far the live version may be behind the newest committed one when the request
            comes; None: any distance.
        max_span: How many versions may contribute; None: any number.
        group: Requests with the same name share keys over versions; "": none.
        spans: Whether the answer names the tokens of each version.
    """

    minimum: int = 0
    exact: int | None = None
    max_lag: int | None = None
    max_span: int | None = None
    group: str = ""
    spans: bool = False

    @property
    def lasting(self) -> bool:
        """Whether they hold until the answer has been made."""
        return self.exact is not None or self.max_span is not None

    def refusal(self, live: LiveVersions) -> Refusal | None:
        """Return why a request is not answered now; None: it is."""
        version = live.version
        what = f"version {version} is live" if version else "the live weights have no number yet"
        if version < self.minimum:
            return Refusal(
                "min_version",
                f"{what}, and {MINIMUM} asks for {self.minimum} or a newer one; try again when "
                "that has been applied",
            )
        if self.exact is not None and version != self.exact:
            return Refusal(
                "exact_version",
                f"{what}, and {EXACT} asks for {self.exact}; leave it out, or try again when "
                f"{self.exact} is live",
            )
        return self._lags(live, what) if self.max_lag is not None else None

    def _lags(self, live: LiveVersions, what: str) -> Refusal | None:
        lag = self.max_lag or 0
        if live.newest is None:
            message = (
                "no weightsync-server has reported which version is the newest, from which "
                f"{LAG}: {lag} is counted; try again, and if this lasts install the release of "
                "this plugin for the server too"
            )
        elif live.version and live.version >= live.newest - lag:
            return None
        else:
            message = (
                f"the newest version is {live.newest} and {what.removeprefix('version ')}, more "
                f"than {LAG}: {lag} allows; try again when a newer one has been applied"
            )
        return Refusal("max_lag", message)

    def broken(self, made: Collection[int], new: int) -> Refusal | None:
        """Return why an answer must end, which `made` have contributed to, and `new` would.

        0 stands for weights without a number; None: it may go on.
        """
        if self.exact is not None and {*made, new} != {self.exact}:
            other = next(version for version in (new, *made) if version != self.exact)
            return Refusal(
                "exact_version",
                f"{_became(other)} while this answer was made for {self.exact} alone; ask again",
            )
        count = len({*made, new})
        if self.max_span is not None and count > self.max_span:
            return Refusal(
                "max_span",
                f"{_became(new)} while this answer was made, which would be of {count} versions, "
                f"more than {SPAN}: {self.max_span} allows; ask again",
            )
        return None


def _became(version: int) -> str:
    return f"version {version} became live" if version else "weights without a number became live"


def read_bounds(
    headers: Iterable[tuple[bytes, bytes]], fields: Mapping[str, list[Any]]
) -> RequestBounds:
    """Return what headers and body ask for; ValueError, in one sentence, if that cannot be.

    `fields` are those of the body that `take_fields` has taken out.
    """
    given: dict[str, list[tuple[str, str]]] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name in _NAMES:
            given.setdefault(name, []).append((name, value.decode("latin-1").strip()))
    for name, values in given.items():
        if len(values) > 1:
            raise _wrong(name, name, ", ".join(text for _, text in values))
    for field, values in fields.items():
        name = f"x-{field.replace('_', '-')}"
        if name not in _NAMES:
            known = ", ".join(each[2:].replace("-", "_") for each in _NAMES)
            msg = f"leave out {field[:100]!r}, which is not known here; the fields are {known}"
            raise ValueError(msg)
        given.setdefault(name, []).extend((field, _text(value)) for value in values)
    return RequestBounds(**{_NAMES[name][0]: _one(name, pairs) for name, pairs in given.items()})


def take_fields(body: dict[str, Any]) -> dict[str, list[Any]]:
    """Take our fields out of a request's JSON, also where frameworks put them beside vLLM's."""
    found: dict[str, list[Any]] = {}
    extra = body.get(_EXTRA)
    for place in (body, extra if isinstance(extra, dict) else {}):
        for name in [name for name in place if name.startswith(_FIELD)]:
            found.setdefault(name, []).append(place.pop(name))
    return found


def may_have_fields(body: bytes) -> bool:
    return _FIELD.encode() in body


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    # True is 1, as a header has it.
    return str(int(value)) if isinstance(value, bool) else json.dumps(value)


def _one(name: str, given: list[tuple[str, str]]) -> Any:
    """Return what a header and its field agree on."""
    values = [_value(name, sender, text) for sender, text in given]
    for value, (sender, text) in zip(values, given, strict=True):
        if value != values[0]:
            first, other = given[0]
            msg = f"send one of {first}, which is {other!r}, and {sender}, which is {text!r}"
            raise ValueError(msg)
    return values[0]


def _value(name: str, sender: str, text: str) -> Any:
    smallest = _NAMES[name][1]
    if smallest is None:
        if _GROUP_ID.fullmatch(text):
            return text
    elif text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS:
        if name != SPANS and int(text) >= smallest:
            return int(text)
        if name == SPANS and text in ("0", "1"):
            return text == "1"
    raise _wrong(name, sender, text)


def _wrong(name: str, sender: str, found: str) -> ValueError:
    smallest = _NAMES[name][1]
    if name == SPANS:
        wanted = "1 or 0"
    elif smallest is None:
        wanted = "1 to 128 letters, digits and . _ : @ + = -"
    else:
        wanted = f"one whole number {'from 1 ' if smallest else ''}such as 41"
    return ValueError(f"{sender} is {found[:100]!r}; send it once, as {wanted}")
