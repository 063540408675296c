"""Which versions an engine serves, one after the other, and how vLLM labels their outputs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LiveInterval", "LiveVersions"]

#: The label of outputs in a vLLM that nobody has given one yet.
_FIRST_LABEL = "default"


@dataclass(slots=True, eq=False)
class LiveInterval:
    """The time during which one version is served under one label.

    Attributes:
        label: What vLLM labels its outputs with.
        version: Its number; 0: none is known.
        labelled: Whether all its outputs carry the label, and no later ones do.
        between_steps: Whether it began between two steps, without a pause: then one step may carry
            the label of the wrong side.
        pending: Whether the ranks may yet refuse it.
        following: The next one; None: it lasts.
    """

    label: str
    version: int
    labelled: bool
    between_steps: bool = False
    pending: bool = False
    following: LiveInterval | None = None

    def walk(self) -> Iterator[LiveInterval]:
        """Yield it and all that followed."""
        interval: LiveInterval | None = self
        while interval is not None:
            yield interval
            interval = interval.following


class LiveVersions:
    """Begins an interval before vLLM is asked to serve it, so that none is missing.

    Intervals that no request refers to are freed.

    Args:
        labelled: Whether this vLLM labels outputs at all.

    Attributes:
        current: The last interval.
        version: Number of what is served for certain: a newer one counts when vLLM has done what it
            was asked for, an older one before. 0: no number is known.
    """

    def __init__(self, *, labelled: bool = True) -> None:
        self.current = LiveInterval(_FIRST_LABEL, 0, labelled)
        self.version = 0
        self._labelled = labelled
        self._attempt: LiveInterval | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    def begin(self, version: int) -> None:
        """Begin to serve a version, to be confirmed; without effect when it is the present one.

        Args:
            version: Its number; 0: none is known, and vLLM keeps the label that it has.
        """
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
        """End an attempt, if there is one.

        Args:
            version: What was served since it began; 0: nobody knows.
        """
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
        """Note that vLLM did not take the label of what is served."""
        self.current.labelled = False

    async def settled(self) -> None:
        """Return when no attempt is under way."""
        await self._settled.wait()

    def _append(self, label: str, version: int) -> None:
        following = LiveInterval(label, version, self._labelled)
        self.current.following = self.current = following
