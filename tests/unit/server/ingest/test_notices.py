"""However much happens at the doors, the server is told sums and nobody ends for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire import child_channel
from weightsync_server.auth.caller import RejectedCall
from weightsync_server.ingest.connection import Notices

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NOBODY = RejectedCall()
STRANGER = WeightSyncError(Reason.UNAUTHENTICATED, "send a token")


@contextlib.asynccontextmanager
async def connected(notices: Notices) -> AsyncIterator[asyncio.StreamReader]:
    ours, theirs = socket.socketpair()
    reader, kept = await asyncio.open_unix_connection(sock=theirs, limit=1 << 10)
    _, writer = await asyncio.open_unix_connection(sock=ours)
    notices.begin(writer)
    try:
        yield reader
    finally:
        for end in (writer, kept):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()


async def told(reader: asyncio.StreamReader, answer: int) -> tuple[Counter[str], int, set[str]]:
    """Return refusals by reason, the number of messages, and all sentences, up to an answer."""
    counts: Counter[str] = Counter()
    sentences: set[str] = set()
    for number in range(10_000):
        document, _ = await child_channel.read(reader)
        if document.get("id") == answer:
            return counts, number, sentences
        if document["op"] == "refused":
            counts[document["reason"]] += document["times"]
            sentences.add(document["message"])
    raise AssertionError


async def test_what_happens_before_the_process_is_ready_is_told_after() -> None:
    notices = Notices()
    notices.refuse(STRANGER, NOBODY)
    notices.fault()
    async with connected(notices) as reader, asyncio.timeout(5):
        assert (await child_channel.read(reader))[0] == {"op": "fault"}
        refused, _ = await child_channel.read(reader)
        assert (refused["message"], refused["times"]) == (STRANGER.message, 1)


async def test_a_server_that_does_not_read_gets_sums_when_it_reads_again() -> None:
    notices = Notices()
    async with connected(notices) as reader, asyncio.timeout(20):
        sent = 0
        # More rounds than a socket holds messages.
        for answer in range(1000):
            for number in range(5):
                notices.refuse(STRANGER, NOBODY)
                name = f"caller {answer} {number}"
                notices.refuse(WeightSyncError(Reason.PERMISSION_DENIED, name), NOBODY)
                sent += 1
            notices.answer({"id": answer})
        # A sum that grew while nothing could be sent is told by itself.
        counts: Counter[str] = Counter()
        while min(counts[STRANGER.reason], counts[Reason.PERMISSION_DENIED]) < sent:
            document, _ = await child_channel.read(reader)
            if "id" not in document:
                counts[document["reason"]] += document["times"]
        assert counts == {STRANGER.reason: sent, Reason.PERMISSION_DENIED: sent}
        notices.answer({"id": 5000})
        assert await told(reader, 5000) == (Counter(), 0, set())


async def test_addresses_of_strangers_leave_room_for_who_was_denied() -> None:
    notices = Notices()
    for port in range(1000):
        notices.refuse(STRANGER, RejectedCall("", "PushWeights", f"ipv4:10.0.0.1:{port}"))
    denied = RejectedCall("reader", "PushWeights", "ipv4:10.0.0.2:1")
    notices.refuse(WeightSyncError(Reason.PERMISSION_DENIED, "no"), denied)
    async with connected(notices) as reader, asyncio.timeout(5):
        first, second = [(await child_channel.read(reader))[0] for _ in range(2)]
    assert (first["times"], first["attempt"]) == (1000, ["", "", ""])
    assert (second["times"], second["attempt"]) == (1, list(denied))


async def test_the_sentences_of_one_sum_are_bounded() -> None:
    notices = Notices()
    for number in range(1000):
        notices.refuse(WeightSyncError(Reason.PERMISSION_DENIED, f"caller {number}"), NOBODY)
    async with connected(notices) as reader, asyncio.timeout(5):
        notices.answer({"id": 1})
        counts, messages, sentences = await told(reader, 1)
        assert counts == {Reason.PERMISSION_DENIED: 1000}
        assert messages < 50
        assert "caller 0" in sentences
