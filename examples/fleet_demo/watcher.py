"""Threads that ask every host what it has and serves, as `weightsync status` does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from weightsync_client import Client, ClientError, Retry, Timeouts

__all__ = ["AWAY", "Seen", "Watcher"]

_EVERY_S = 0.2
_ANSWER_S = 2.0
AWAY = "away"


class Named(Protocol):
    """A host."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def address(self) -> str:
        """Where its server listens."""


@dataclass(frozen=True)
class Seen:
    """What a host says of itself.

    Attributes:
        state: Of its engine, such as serving; away: nobody answers.
        live: The version that its ranks hold; 0: none.
        newest: The newest version that it has.
        decided: The version that its fleet has decided, as far as it has read; 0: none, or no
            member.
        members: How many members it sees in its fleet.
    """

    state: str = AWAY
    live: int = 0
    newest: int = 0
    decided: int = 0
    members: int = 0


class Watcher:
    """Asks each host five times a second, in a thread of its own, until the block ends.

    Args:
        hosts: Who is asked.
    """

    def __init__(self, hosts: Sequence[Named]) -> None:
        self._over = threading.Event()
        self._seen = {host.name: Seen() for host in hosts}
        self._threads = [
            threading.Thread(target=self._watch, args=(host,), name=host.name, daemon=True)
            for host in hosts
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * _ANSWER_S)

    @property
    def seen(self) -> dict[str, Seen]:
        """What each host has said last, by name."""
        return dict(self._seen)

    def _watch(self, host: Named) -> None:
        while not self._over.is_set():
            # A new channel after each failure: an old one waits longer and longer.
            timeouts = Timeouts(call_s=_ANSWER_S)
            with (
                contextlib.suppress(ClientError),
                Client(host.address, timeouts=timeouts, retry=Retry(attempts=1)) as client,
            ):
                while not self._over.is_set():
                    self._seen[host.name] = _ask(client)
                    self._over.wait(_EVERY_S)
            self._seen[host.name] = Seen()
            self._over.wait(_EVERY_S)


def _ask(client: Client) -> Seen:
    (model,) = client.status().models
    with contextlib.suppress(ClientError):
        fleet = client.fleet_status()
        return Seen(
            str(model.engine.state),
            model.live_version,
            model.newest_version,
            fleet.decided_version,
            len(fleet.members),
        )
    return Seen("no engine", newest=model.newest_version)
