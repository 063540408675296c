"""Values of callers, checked before they become fields of a message, which tell little."""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Mapping

from weightsync.model.manifest import MAX_VERSION
from weightsync_client.errors import ClientError, invalid

# A year, in seconds: more is a mistake, or does not fit into a deadline.
_MOST_S = 366 * 86400


def _wrong(what: str, value: object, remedy: str) -> ClientError:
    return invalid(f"{what} is {reprlib.repr(value)}; use {remedy}")


def whole_number(what: str, value: object, least: int = 0) -> int:
    """Return a version, an epoch or a count, from `least` to 2^53-1, or raise InvalidError."""
    try:
        # Anything that counts as a whole number, such as NumPy's.
        number = operator.index(value)  # type: ignore[arg-type] # it raises TypeError
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, bool) or not least <= number <= MAX_VERSION:
        raise _wrong(what, value, f"a whole number from {least} to 2^53-1")
    return int(number)


def seconds(what: str, value: object) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    time = float(value) if number else -1.0  # type: ignore[arg-type] # as checked
    if not 0 <= time <= _MOST_S:
        raise _wrong(what, value, f"seconds, from 0 to {_MOST_S}")
    return time


def flag(what: str, value: object) -> bool:
    """Return a choice of yes or no; what only counts as true in Python is refused."""
    if not isinstance(value, bool):
        raise _wrong(what, value, "True or False")
    return value


def text(what: str, value: object) -> str:
    """Return a string that UTF-8 can hold, or raise InvalidError."""
    if not isinstance(value, str):
        raise _wrong(what, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(what, value, "Unicode text") from None
    return value


def metadata(value: object) -> dict[str, str]:
    """Return metadata of a version; numbers become text as `str` writes them."""
    if not isinstance(value, Mapping):
        raise _wrong("metadata", value, "a dict of strings")
    return {
        text("a key of metadata", key): _item(f"metadata[{key!r}]", item)
        for key, item in value.items()
    }


def _item(what: str, value: object) -> str:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number and not isinstance(value, str):
        raise _wrong(what, value, "a string or a number")
    return text(what, str(value))
