"""What a member knows after a crash: whether its host may serve, and how far its fleet had come."""

from __future__ import annotations

import asyncio
from pathlib import Path

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_history import History, Seen
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.store_records import read_document, write_document


class MemberJournal:
    """One small file, replaced whole, in a folder that exists.

    `fleet` is the name of the one that it is of; that of another one is refused. `stopped_in` is
    the number of the apply for which the host was stopped; 0: it may serve. `seen` is the newest
    apply that was read. `followed` is the number of the last apply of which the host was made to
    accept what that accepts again. `refusal` is why the register is not followed, or empty.
    """

    def __init__(self, path: Path, fleet: str = "") -> None:
        self._path, self._fleet = path, fleet
        self.stopped_in, self.seen, self.refusal = 0, Seen(), ""
        self.followed = 0
        self._turn = asyncio.Lock()
        #: The verdict, or what was followed, is not written yet.
        self._pending = False
        try:
            found = read_document(path)
            # Of an earlier release the number is all.
            nonce, verdict = str(found.get("nonce", "")), str(found.get("verdict", ""))
            self.stopped_in, self.seen = (
                int(found["stopped_in"]),
                Seen(int(found["seen"]), nonce, verdict),
            )
            # Of an earlier release all is followed again.
            self.followed = int(found.get("followed", 0))
            other = str(found.get("fleet", fleet))
        except FileNotFoundError:
            other = fleet
        except (ValueError, LookupError, TypeError, ArithmeticError, IsADirectoryError) as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"remove {path} once `weightsync fleet status` at another member shows what "
                f"should be served: the file is damaged ({error}), so this host cannot know "
                "whether it may serve",
            ) from error

        if other != fleet:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"start this server with --fleet {other}, or remove {path} if this host is no "
                "longer a member of that fleet: the file records the decisions of that fleet, "
                f"not of {fleet}",
            )

    def check(self, history: History) -> None:
        """Refuse a register that does not say any more what was read there."""
        why = history.lacks(self.seen)
        self.refusal = self.refusal_of(why) if why else ""
        if why:
            raise WeightSyncError(Reason.DATA_CORRUPT, self.refusal)

    def refusal_of(self, why: str) -> str:
        """Return what is said of a register that lacks something, with what is to be done."""
        return (
            "restore the newest state of the register: it was emptied or restored from an older "
            f"copy ({why}), so this member does not follow it; if that state is lost, stop all "
            f"members that refuse, remove {self._path} here and start them, so that they follow "
            "the register, then apply again the version that they serve now"
        )

    async def stop(self, number: int) -> None:
        """Write down, durably, that the host is about to be stopped.

        `number` is that of the apply, or 0 where there is another reason.
        """
        # Above 0 also before any apply was read.
        stopped_in = number or self.seen.number or 1
        if stopped_in == self.stopped_in:
            # Between a decision and what follows it nobody waits for a disk.
            return
        async with self._turn:
            await self._write(stopped_in, self.seen)

    async def serve(self) -> None:
        async with self._turn:
            await self._write(0, self.seen)

    async def see(self, seen: Seen) -> None:
        """Know how far the fleet is; a verdict alone is written by the next call."""
        async with self._turn:
            # Of a plan that was read and is damaged now, what was read stays known.
            if (seen.number, bool(seen.nonce)) < (self.seen.number, bool(self.seen.nonce)):
                return
            if seen[:2] == self.seen[:2] and not self._pending:
                self._pending, self.seen = seen.written != self.seen.written, seen
            else:
                await self._write(self.stopped_in, seen)

    def follow(self, number: int) -> None:
        """Know that all was followed until an apply; the next call writes it."""
        if number > self.followed:
            self.followed, self._pending = number, True

    async def keep(self) -> None:
        """Return when all that is known is written down."""
        async with self._turn:
            await self._write(self.stopped_in, self.seen)

    async def _write(self, stopped_in: int, seen: Seen) -> None:
        if self._pending or (stopped_in, seen.written) != (self.stopped_in, self.seen.written):
            said = {"followed": self.followed, "fleet": self._fleet}
            document = {"stopped_in": stopped_in, **seen.written, **said}
            with translate_os_errors(f"writing {self._path}"):
                await in_thread(write_document, self._path, document)
        self.stopped_in, self.seen, self._pending = stopped_in, seen, False
