"""Shards that wait for a lane, and the signs of life while there is none."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Generator
from dataclasses import dataclass

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.source.shards import Shard
from weightsync_client.transport.digester import ShardDigester
from weightsync_client.transport.messages import Message, heartbeat_message, join_message

__all__ = ["Jobs", "ShardJob"]

#: Silence after which a lane tells the server that the source is still at work.
_HEARTBEAT_S = 10.0


@dataclass(slots=True)
class ShardJob:
    """One shard to send.

    Attributes:
        shard: The shard.
        digester: Digests its tensors while they are sent.
        offset: Bytes that the server holds.
        layout_known: Whether it knows the layout.
    """

    shard: Shard
    digester: ShardDigester
    offset: int = 0
    layout_known: bool = False

    def take_up(self, progress: pb.ShardProgress | None) -> None:
        """Note what the server holds."""
        self.layout_known = progress is not None
        # Of a shard that outlived the server more may be there than this process sends of it.
        self.offset = min(progress.received_bytes, self.shard.entry.size) if progress else 0


class Jobs(queue.SimpleQueue[ShardJob | None]):
    """The queue from the source to the lanes; None in it tells one lane that it is done."""

    def soon(self) -> ShardJob | None:
        """Return the next shard, or None at the end.

        Raises:
            queue.Empty: There was none for so long that the server wants a sign of life.
        """
        return self.get(timeout=_HEARTBEAT_S)

    def now(self) -> ShardJob | None:
        """Return a shard that lies ready, if there is one."""
        with contextlib.suppress(queue.Empty):
            job = self.get_nowait()
            if job is not None:
                return job
            self.put(None)
        return None

    def heartbeats(
        self, push_id: str, writer: int, found: list[ShardJob | None]
    ) -> Generator[Message, None, None]:
        """Yield the messages of a stream that stays open until there is something to `found`."""
        yield join_message(push_id, writer)
        while not found:
            yield heartbeat_message()
            with contextlib.suppress(queue.Empty):
                found.append(self.soon())
