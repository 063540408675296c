"""The controller: applies, rolls back, deletes, pins, pulls and verifies."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

from tests.soak.callers import FIRST, MODEL, TIMEOUT_S, Caller, pull
from tests.soak.contents import digest_of
from tests.soak.history import NO_ANSWER
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Controller"]

#: Versions that are never deleted: the newest, to which applies go.
_YOUNG = 6


class Controller(Caller):
    """Each act is one call of an operator, or what it may do wrong.

    Attributes:
        compared: Versions that were read back and compared byte by byte.
        flipped: Contents of which a bit was flipped in shared memory.
        proved: Times that every rank proved what it holds.
        switches: Applies and rollbacks between two steps that went well.
    """

    acts: ClassVar[Mapping[str, int]] = {
        "apply": 30, "switch": 15, "rollback": 12, "delete": 18, "pin": 8, "compare": 12,
        "verify": 5, "incomplete": 2, "clash": 2, "crawl": 2,
    }  # fmt: skip
    compared = proved = switches = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flipped: set[int] = set()
        #: Whether a version is pinned, as acknowledged; None: nobody knows.
        self._pins: dict[int, bool | None] = {}
        #: How applies and rollbacks pause.
        self._mode: pb.PauseMode.ValueType = pb.PAUSE_MODE_UNSPECIFIED

    def switch(self) -> None:
        """Make a version live between two steps; where none is above, go back so."""
        self._mode = pb.PAUSE_MODE_BETWEEN_STEPS
        try:
            self.apply()
        finally:
            self._mode = pb.PAUSE_MODE_UNSPECIFIED

    def apply(self) -> None:
        """Make a version live, sometimes twice with one key; where none is above, go back."""
        committed, before = self.history.snapshot()
        above = sorted(version for version in committed if version > max(before, default=0))
        if not above:
            self.rollback()
            return
        self.apply_version(self.rng.choice(above[-3:]), 1 + (self.rng.random() < 0.2))

    def apply_version(self, version: int, times: int = 1) -> str:
        """Make a version live, with one key each time; return how the last call ended."""
        request, outcome = self._request(version), ""
        for _ in range(times):
            _, before = self.history.snapshot()
            self.history.switching(version)
            answer, outcome = self.call(
                "apply",
                lambda: self.stub.ApplyVersion(request, timeout=TIMEOUT_S),
                version=version,
            )
            self._switched("apply", answer, outcome, before)
        return outcome

    def rollback(self) -> None:
        """Go back, sometimes twice with one key: one version at most."""
        key = f"r{self.rng.randrange(1 << 30)}"
        pause = pb.PauseOptions(mode=self._mode)
        request = pb.RollbackRequest(model=MODEL, reason="soak", idempotency_key=key, pause=pause)
        starts, seen = self.site.starts, set()
        for _ in range(1 + (self.rng.random() < 0.3)):
            _, before = self.history.snapshot()
            self.history.switching(0)
            answer, outcome = self.call(
                "rollback", lambda: self.stub.Rollback(request, timeout=TIMEOUT_S)
            )
            self._switched("rollback", answer, outcome, before)
            if answer is not None:
                seen.add(answer.report.version)
        if len(seen) > 1 and starts == self.site.starts:
            self.history.violate(f"one rollback went to versions {sorted(seen)}")

    def clash(self) -> None:
        """Apply and roll back at once: one after the other, and one of both is what is live."""
        committed, before = self.history.snapshot()
        above = [version for version in committed if version > max(before, default=0)]
        request = self._request(max(above, default=max(committed, default=FIRST)))
        self.history.switching(request.version)
        self.history.switching(0)
        may = {request.version} | self.history.snapshot()[1]
        back = pb.RollbackRequest(model=MODEL, reason="soak")
        calls = [
            lambda: self.stub.ApplyVersion(request, timeout=TIMEOUT_S),
            lambda: self.stub.Rollback(back, timeout=TIMEOUT_S),
        ]
        outcomes: list[str] = []
        threads = [
            threading.Thread(target=lambda c=call: outcomes.append(self.call("clash", c)[1]))
            for call in calls
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status, _ = self.call(
            "status", lambda: self.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
        )
        live = status.models[0].live_version if status is not None else 0
        if live and live not in may:
            self.history.violate(f"an apply and a rollback made version {live} live, of {may}")
        self.done["clash"] += "ok" in outcomes

    def incomplete(self) -> None:
        """Apply a version of which nothing has come: refused, and the push goes on."""
        version = self.history.next_version()
        begin = pb.BeginPushRequest(model=MODEL, version=version, shard_count=1)
        begun, _ = self.call("begin", lambda: self.stub.BeginPush(begin, timeout=5))
        if begun is None:
            return
        request = self._request(version)
        answer, outcome = self.call(
            "apply", lambda: self.stub.ApplyVersion(request, timeout=TIMEOUT_S)
        )
        if answer is not None:
            self.history.violate(f"version {version} was applied before anything of it came")
        self.done["incomplete"] += outcome == Reason.PUSH_INCOMPLETE
        drop = pb.AbortPushRequest(push_id=begun.push_id)
        self.call("abort", lambda: self.stub.AbortPush(drop, timeout=TIMEOUT_S))

    def delete(self) -> None:
        """Delete one of the older versions."""
        committed, live = self.history.snapshot()
        old = sorted(set(committed) - live)[1:-_YOUNG]
        if old:
            self.delete_version(self.rng.choice(old), force=self.rng.random() < 0.5)

    def delete_version(self, version: int, *, force: bool) -> None:
        """Delete a version; by force also the one that a rollback would go back to."""
        request = pb.DeleteVersionRequest(model=MODEL, version=version, force=force)
        self.history.deleting(version)
        answer, outcome = self.call(
            "delete", lambda: self.stub.DeleteVersion(request, timeout=TIMEOUT_S), version=version
        )
        if answer is not None:
            self.history.deleted(version)
        elif outcome in (Reason.VERSION_IN_USE, Reason.ENGINE_AWAY):
            self.history.not_deleted(version)

    def pin(self) -> None:
        """Pin a version, then mostly let it go."""
        committed, _ = self.history.snapshot()
        if committed:
            version = self.rng.choice(list(committed))
            self._pin(version, pinned=True)
            # Of three slots two pinned ones would leave none for what comes.
            others = any(on is not False for v, on in self._pins.items() if v != version)
            if self.rng.random() < 0.8 or others:
                self._pin(version, pinned=False)

    def check_pins(self, told: Iterable[pb.VersionInfo]) -> None:
        """Compare what is pinned with what was acknowledged, then let all go: pins hold slots."""
        for info in told:
            known = self._pins.get(info.version, False)
            if known is not None and known != info.pinned:
                self.history.violate(f"version {info.version} has pinned={info.pinned}")
            if info.pinned:
                self._pin(info.version, pinned=False)
            else:
                self._pins.pop(info.version, None)

    def compare(self) -> None:
        """Pull a version and compare every byte."""
        self._pull_any(0)

    def crawl(self) -> None:
        """Pull a version slowly; nobody waits for the reader."""
        self.done["crawl"] += self._pull_any(0.15) == "ok"

    def _pull_any(self, pause_s: float) -> str:
        committed, _ = self.history.snapshot()
        return self.pull(self.rng.choice(list(committed)), pause_s) if committed else ""

    def pull(self, version: int, pause_s: float = 0.0) -> str:
        """Pull one version and compare every byte; return how the call ended."""
        digest = self.history.snapshot()[0].get(version, "")
        shards, outcome = self.call(
            "pull", lambda: pull(self.stub, version, pause_s), version=version
        )
        number = self.contents.known.get(digest)
        if shards is None or number is None:
            return outcome
        found = [shards[index] for index in sorted(shards)]
        expected = [data for _, data in self.contents.shards(number)]
        # The engine's checkpoint may lie in other files than a push of the same content.
        same = found == expected or (version == FIRST and digest_of(found) == digest)
        self.compared += 1
        # The stream brings the digests, and clients compare them: a bit that a fault has flipped in
        # memory is told so.
        told = number in self.flipped and not _fits(found, digest)
        if not same and not told:
            self.history.violate(f"version {version} came back with other bytes")
        return outcome

    def verify(self) -> None:
        """Prove what the ranks hold."""
        request = pb.VerifyVersionRequest(model=MODEL)
        answer, _ = self.call("verify", lambda: self.stub.VerifyVersion(request, timeout=60))
        if answer is not None:
            self.proved += 1
            # A rank that could not compare says why, and proves nothing either way.
            if any(rank.error.startswith("differs") for rank in answer.ranks):
                self.history.violate(f"the ranks do not hold version {answer.version}")

    # Inside

    def _pin(self, version: int, *, pinned: bool) -> None:
        request = pb.PinVersionRequest(model=MODEL, version=version, pinned=pinned)
        before = self._pins.get(version, False)
        # From now on either may be, until it is told.
        self._pins[version] = None
        answer, outcome = self.call(
            "pin", lambda: self.stub.PinVersion(request, timeout=TIMEOUT_S), version=version
        )
        if answer is not None:
            self._pins[version] = pinned
        elif outcome != NO_ANSWER:
            self._pins[version] = before

    def _request(self, version: int) -> pb.ApplyVersionRequest:
        return pb.ApplyVersionRequest(
            model=MODEL,
            version=version,
            clear_rejected=True,
            idempotency_key=f"a{self.rng.randrange(1 << 30)}",
            pause=pb.PauseOptions(mode=self._mode),
        )

    def _switched(self, name: str, answer: Any, outcome: str, before: set[int]) -> None:
        if answer is None:
            # A fence leaves it to the ranks what is live in the end.
            if outcome not in (NO_ANSWER, Reason.ENGINE_FENCED):
                self.history.not_switched(before)
            return
        report = answer.report
        expected = self.history.snapshot()[0].get(report.version)
        digests = {rank.content_digest for rank in report.ranks}
        if digests != {expected}:
            self.history.violate(f"{name} of version {report.version} was answered with {digests}")
        self.history.switched(report.version)
        self.switches += report.pause.mode == pb.PAUSE_MODE_BETWEEN_STEPS

    def rest(self) -> None:
        """Leave some time to the others."""
        time.sleep(self.rng.uniform(0, 0.02))


def _fits(shards: list[bytes], digest: str) -> bool:
    try:
        return digest_of(shards) == digest
    except (ValueError, KeyError):
        # The bit lies in a header.
        return False
