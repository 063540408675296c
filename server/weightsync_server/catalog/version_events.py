"""What happens to the versions of a model, for rooms above; `VersionTable.events` carries it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord


class VersionChanged(NamedTuple):
    """A version came, changed or was removed; then the table has it no more."""

    record: VersionRecord


class VersionCommitted(NamedTuple):
    record: VersionRecord


class VersionDamaged(NamedTuple):
    """Bytes of a committed version turned out to be wrong, in memory or in the store."""

    record: VersionRecord


class LiveReplaced(NamedTuple):
    """No engine serves this version any more."""

    record: VersionRecord


class SlotFreed(NamedTuple):
    """Something that a caller waits for may have come free."""


class SlotWanted(NamedTuple):
    """A caller waits for a slot, or was refused one."""


class LeaseEnded(NamedTuple):
    """One reader less relies on the bytes of a version."""

    record: VersionRecord


class ChainFolded(NamedTuple):
    """A version that was kept as a change is kept in full."""

    record: VersionRecord


_E = TypeVar("_E")


class EventBus:
    """Calls everyone who subscribed to a kind of event, in the order of subscription.

    Handlers run inside `publish`, on the event loop, and never await. What one raises reaches the
    publisher.
    """

    def __init__(self) -> None:
        self._handlers: defaultdict[type[Any], list[Callable[[Any], object]]] = defaultdict(list)

    def on(self, kind: type[_E], handler: Callable[[_E], object]) -> None:
        self._handlers[kind].append(handler)

    def off(self, kind: type[_E], handler: Callable[[_E], object]) -> None:
        """End one subscription of `handler` to this kind of event, if there is one."""
        with contextlib.suppress(ValueError):
            self._handlers[kind].remove(handler)

    def publish(self, event: object) -> None:
        """Call the handlers of this kind of event; one that leaves meanwhile is not called."""
        handlers = self._handlers[type(event)]
        for handler in tuple(handlers):
            if handler in handlers:
                handler(event)
