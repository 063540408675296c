"""Engines are told which shards of a push are here, so that they read them before its commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.state import PushState
    from weightsync_server.residency.incoming import IncomingReader, IncomingVersions

__all__ = ["PushAnnouncement"]


class PushAnnouncement:
    """What engines know of one push; nothing, until `begin`.

    Args:
        state: The push.
        arrivals: Announces versions to engines.
    """

    def __init__(self, state: PushState, arrivals: IncomingVersions) -> None:
        self._state = state
        self._arrivals = arrivals
        self._reader: IncomingReader | None = None

    def begin(self, layout: Layout) -> None:
        """Let engines read the version as it comes, if all of it is new and has its memory."""
        state = self._state
        if state.delta is not None or state.existing is not None:
            return
        segments = [state.shards[index].segment for index in range(len(layout.shards))]
        known = [segment for segment in segments if segment is not None]
        if len(known) == len(segments):
            self._reader = self._arrivals.announce(state.record, layout, known)

    def announce_ipc(self, shard: ShardState, where: IpcAddresses) -> None:
        """Tell where a trainer has a shard on a GPU."""
        if self._reader is not None:
            self._reader.announce_ipc(shard.index, where)

    def mark_complete(self, shard: ShardState) -> None:
        """Tell that a shard is proved."""
        if self._reader is not None:
            self._reader.mark_complete(shard.index)

    def end(self) -> None:
        """Tell of no more shards; further calls do nothing."""
        if self._reader is not None:
            self._reader.end()
            self._reader = None
