"""Which versions an engine serves, one after the other, and how vLLM labels their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

#: The label of outputs in a vLLM that nobody has given one yet.
_FIRST_LABEL = "default"


@dataclass(slots=True, eq=False)
class LiveInterval:
    """The time during which one version, 0 if it is not known, is served under one label.

    `labelled` says whether all its outputs carry the label, and no later ones do. If it began
    `between_steps`, one step may carry the label of the wrong side. The ranks may yet refuse a
    `pending` one. `following` is None while it lasts.
    """

    label: str
    version: int
    labelled: bool
    between_steps: bool = False
    pending: bool = False
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
    """

    def __init__(self, *, labelled: bool = True) -> None:
        self.current = LiveInterval(_FIRST_LABEL, 0, labelled)
        self.version = 0
        self._labelled = labelled
        self._attempt: LiveInterval | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    def begin(self, version: int) -> None:
        """Begin to serve a version, to be confirmed; 0: none is known, and vLLM's label stays."""
        label = str(version) if version else self.current.label
        if (label, version) != (self.current.label, self.current.version):
            self._append(label, version)
        self.version = min(self.version, version)

    def confirm(self) -> None:
        """Note that vLLM serves what was begun last."""
        self.version = self.current.version

    def attempt(self, version: int) -> None:
        """Begin to serve a version that the ranks may refuse, between two steps, until `settle`."""
        self._settled.clear()
        self._append(str(version), version)
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

    def relabel(self, label: str) -> None:
        """Note that outputs get another label from here on, whoever asked for it."""
        if label != self.current.label:
            self._append(label, self.current.version)

    def unlabelled(self) -> None:
        self.current.labelled = False

    async def settled(self) -> None:
        await self._settled.wait()

    def _append(self, label: str, version: int) -> None:
        following = LiveInterval(label, version, self._labelled)
        self.current.following = self.current = following
