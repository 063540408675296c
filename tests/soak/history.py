"""What was asked of the service and answered, and a small model of what must then be true.

An answer that came is a fact. Where none came, both outcomes are possible until the service tells.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["NO_ANSWER", "History"]

#: The outcome of a call of which nobody knows what it did.
NO_ANSWER = "no answer"


class History:
    """The record and the model. Every method may be called from any thread.

    Attributes:
        operations: Calls that were answered.
        violations: What must never be, one sentence each.
        lost: Versions whose commit was acknowledged and that are gone.
        committed: Content digest by version: acknowledged, or seen.
        perhaps: Digests that a version may have come to hold without an answer.
        live: Versions of which each may be live.
        epoch: The newest epoch that was told.
    """

    def __init__(self, path: Path) -> None:
        self.operations = 0
        self.violations: list[str] = []
        self.lost: set[int] = set()
        self.committed: dict[int, str] = {}
        self.perhaps: dict[int, set[str]] = {}
        self.live: set[int] = set()
        self.epoch = 0
        self._ever_live: set[int] = set()
        self._gone: set[int] = set()
        self._perhaps_gone: set[int] = set()
        self._limbo: dict[int, str] = {}
        self._highest = 1
        self._lock = threading.RLock()
        self._file = path.open("w", buffering=1)

    def record(self, operation: str, outcome: str, **facts: object) -> None:
        """Write a call and its answer down."""
        with self._lock:
            self.operations += outcome != NO_ANSWER
            line = {"t": round(time.monotonic(), 3), "op": operation, "outcome": outcome, **facts}
            self._file.write(json.dumps(line) + "\n")

    def note(self, **facts: object) -> None:
        """Write down what is no call, such as a fault."""
        with self._lock:
            self._file.write(json.dumps({"t": round(time.monotonic(), 3), **facts}) + "\n")

    def violate(self, text: str) -> None:
        """Remember that an invariant is broken."""
        with self._lock:
            self.violations.append(f"{text} (after {self.operations} operations)")
            self._file.write(json.dumps({"violation": text}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """End the record."""
        self._file.close()

    # What callers learn.

    def next_version(self) -> int:
        """Return a number that nobody has used."""
        with self._lock:
            self._highest += 1
            return self._highest

    def pushing(self, version: int, digest: str) -> None:
        """A push is about to be sent: from now on the version may exist."""
        with self._lock:
            self.perhaps.setdefault(version, set()).add(digest)

    def pushed(self, version: int, digest: str) -> None:
        """A commit was acknowledged."""
        with self._lock:
            before = self.committed.setdefault(version, digest)
            if before != digest:
                self.violate(f"version {version} changed from {before} to {digest}")
            if digest not in self.perhaps.pop(version, {digest}):
                self.violate(f"version {version} was committed as {digest}, which nobody pushed")

    def not_pushed(self, version: int, digest: str) -> None:
        """A push was refused for good."""
        with self._lock:
            self.perhaps.get(version, set()).discard(digest)

    def acquired(self, epoch: int) -> None:
        """An epoch was issued."""
        with self._lock:
            if epoch <= self.epoch:
                self.violate(f"epoch {epoch} was issued after {self.epoch}")
            self.epoch = epoch

    def switching(self, version: int) -> None:
        """An apply is about to be asked for. 0: some version that was live before."""
        with self._lock:
            self.live |= {version} if version else self._ever_live

    def switched(self, version: int) -> None:
        """A version is live, the answer says."""
        with self._lock:
            # One whose apply was never answered may have been live before, and is gone back to.
            self._ever_live |= self.live | {version}
            self.live = {version}

    def not_switched(self, before: Iterable[int]) -> None:
        """An apply was refused for good: what may be live is what might have been before."""
        with self._lock:
            self.live = set(before)

    def deleting(self, version: int) -> None:
        """A deletion is about to be asked for."""
        with self._lock:
            self._perhaps_gone.add(version)

    def deleted(self, version: int) -> None:
        """A deletion was acknowledged."""
        with self._lock:
            self._gone.add(version)
            self.committed.pop(version, None)

    def not_deleted(self, version: int) -> None:
        """A deletion was refused for good."""
        with self._lock:
            self._perhaps_gone.discard(version)

    # What the service tells when nobody asks anything else of it.

    def check_versions(
        self, told: Iterable[pb.VersionInfo], checkpoint: str, *, restarted: bool
    ) -> None:
        """Compare the whole list of versions with the model.

        Args:
            told: The list, told while no caller is at work.
            checkpoint: Content digest that may appear without a push: the engine's own.
            restarted: No call of before is still at work in the server: what was open is decided.
        """
        with self._lock:
            found = {v.version: v for v in told if v.durability == pb.DURABILITY_COMMITTED}
            for version, info in found.items():
                self._check_version(version, info.content_digest, checkpoint)
            for version in set(self.committed) - set(found):
                digest = self.committed.pop(version)
                # A deletion without an answer may be half done and undone by a restart.
                self._limbo[version] = digest
                if version not in self._perhaps_gone:
                    self.lost.add(version)
                    self.violate(f"version {version} was acknowledged and is gone")
            if restarted:
                self.perhaps.clear()
                self._perhaps_gone.clear()

    def _check_version(self, version: int, digest: str, checkpoint: str) -> None:
        if version in self._gone:
            self.violate(f"version {version} was deleted and is back")
        known = self.committed.get(version) or self._limbo.pop(version, None)
        if known is not None and known != digest:
            self.violate(f"version {version} changed from {known} to {digest}")
        if known is None and digest not in self.perhaps.get(version, {checkpoint}):
            self.violate(f"version {version} holds {digest}, which nobody pushed")
        self.committed[version] = digest
        self._highest = max(self._highest, version)

    def check_live(self, version: int, digest: str, *, restarted: bool) -> None:
        """Compare what the engine serves with the model."""
        with self._lock:
            if self.live and version not in self.live:
                self.violate(f"version {version} is live, only {sorted(self.live)} may be")
            if self.committed.get(version) != digest:
                self.violate(f"version {version} is live with {digest}")
            if restarted:
                self.live = {version}
            self._ever_live.add(version)

    def check_epoch(self, epoch: int) -> None:
        """Compare the newest epoch with what was issued."""
        with self._lock:
            if epoch < self.epoch:
                self.violate(f"epoch {self.epoch} was issued, the newest is {epoch}")
            self.epoch = epoch

    def snapshot(self) -> tuple[dict[int, str], set[int]]:
        """Return committed versions, and those that may be live."""
        with self._lock:
            return dict(self.committed), set(self.live)
