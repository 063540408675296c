"""Which versions an engine serves, one after the other, and how vLLM labels their outputs."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: The label of outputs in a vLLM that nobody has given one yet.
_FIRST_LABEL = "default"
#: How many versions whose keys may be found are named beside the oldest one: the last of them.
_MOST_OLDER = 15


class KeptKeys(enum.Enum):
    """Who may find keys and values of the version before, once another one is served."""

    NONE = enum.auto()
    """Nobody: they were thrown away, or are computed again."""
    IN_FLIGHT = enum.auto()
    """Requests that computed them themselves."""
    ALL = enum.auto()
    """New requests with the same prefix as well."""


@dataclass(slots=True, eq=False)
class LiveInterval:
    """The time during which one version, 0 if it is not known, is served under one label.

    `labelled` says whether all its outputs carry the label, and no later ones do. If it began
    `between_steps`, one step may carry the label of the wrong side. The ranks may yet refuse a
    `pending` one. `kept` tells who uses keys of the interval before, and `older` names the versions
    whose keys a new request may find. `following` is None while it lasts.
    """

    label: str
    version: int
    labelled: bool
    between_steps: bool = False
    pending: bool = False
    kept: KeptKeys = KeptKeys.NONE
    older: tuple[int, ...] = ()
    following: LiveInterval | None = None

    def walk(self) -> Iterator[LiveInterval]:
        interval: LiveInterval | None = self
        while interval is not None:
            yield interval
            interval = interval.following


class LiveVersions:
    """Begins an interval before vLLM is asked to serve it, so that none is missing.

    Intervals that no request refers to are freed. `labelled` says whether this vLLM labels outputs.
    `version` is the number of what is served for certain, 0 if none is known: a newer one counts
    when vLLM has done what it was asked for, an older one before.

    Attributes:
        newest: The newest committed version that the server knows of; 0: there is none; None: no
            server has told.
        watchers: Called when another version is served than before, or may be, and decided.
    """

    def __init__(self, *, labelled: bool = True) -> None:
        self.current = LiveInterval(_FIRST_LABEL, 0, labelled)
        self.version = 0
        self.newest: int | None = None
        self.watchers: set[Callable[[], None]] = set()
        self._labelled = labelled
        self._attempt: LiveInterval | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def undecided(self) -> bool:
        """Whether the ranks may yet refuse what was begun."""
        return self._attempt is not None

    def begin(self, version: int, kept: KeptKeys = KeptKeys.NONE) -> None:
        """Begin to serve a version, to be confirmed; 0: none is known, and vLLM's label stays."""
        label = str(version) if version else self.current.label
        if (label, version) != (self.current.label, self.current.version):
            self._append(label, version, kept)
        self.version = min(self.version, version)
        self._notify()

    def confirm(self) -> None:
        """Note that vLLM serves what was begun last."""
        self.version = self.current.version

    def attempt(self, version: int, kept: KeptKeys = KeptKeys.ALL) -> None:
        """Begin to serve a version that the ranks may refuse, between two steps, until `settle`."""
        self._settled.clear()
        self._append(str(version), version, kept)
        self.version = min(self.version, version)
        self.current.between_steps = self.current.pending = True
        self._attempt = self.current

    def settle(self, version: int) -> None:
        """End an attempt, if any: `version` was served since it began; 0 if it is not known."""
        if self._attempt is not None:
            for interval in self._attempt.walk():
                interval.version, interval.pending = version, False
            self.version, self._attempt = version, None
            self._settled.set()
            self._notify()

    def relabel(self, label: str) -> None:
        """Note that outputs get another label from here on, whoever asked for it."""
        if label != self.current.label:
            self._append(label, self.current.version, KeptKeys.ALL)

    def unlabelled(self) -> None:
        self.current.labelled = False

    async def settled(self) -> None:
        await self._settled.wait()

    def _append(self, label: str, version: int, kept: KeptKeys) -> None:
        before = self.current
        older = _findable(before, version) if kept is KeptKeys.ALL else ()
        following = LiveInterval(label, version, self._labelled, kept=kept, older=older)
        before.following = self.current = following

    def _notify(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()


def _findable(before: LiveInterval, version: int) -> tuple[int, ...]:
    """Return the versions other than `version` whose keys are there after an interval."""
    found = dict.fromkeys((*before.older, before.version))
    numbers = [number for number in found if number not in (0, version)]
    return (*numbers[:1], *numbers[1:][-_MOST_OLDER:])
