"""What a hand-off asks of the server, in a thread of its own: those who write never wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from weightsync.shm.same_host_client import SameHostClient
    from weightsync.shm.same_host_server import WriteLease
    from weightsync_client.source.shards import Shard

__all__ = ["LeaseRequests"]

_T = TypeVar("_T")


class LeaseRequests:
    """Borrows memory before it is needed, and gives it back while others go on writing.

    The connection answers one request at a time, so one thread does them all, in order. Its methods
    may be called by several threads.

    Args:
        client: The connection.
        shards: Whose memory is wanted, in this order.
        ahead: So many are borrowed before somebody asks for one.
        on_error: Called once, with the first refusal or fault.
    """

    def __init__(
        self,
        client: SameHostClient,
        shards: Iterator[Shard],
        ahead: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._client = client
        self._shards = shards
        self._on_error = on_error
        self._lock = threading.Lock()
        self._requested: deque[tuple[Shard, Future[WriteLease]]] = deque()
        self._thread = ThreadPoolExecutor(1, "weightsync-errands")
        for _ in range(ahead):
            self._request()

    def next(self) -> tuple[Shard, WriteLease] | None:
        """Return a shard and its memory, which the caller gives back; None: there is none left.

        Raises:
            OSError: The connection has ended.
            WeightSyncError: The server refused.
        """
        with self._lock:
            if not self._requested:
                return None
            shard, lease = self._requested.popleft()
            self._request()
        return shard, lease.result()

    def written(self, shard: Shard, digests: Sequence[bytes], then: Callable[[], None]) -> None:
        """Have the server told that a shard was written, whose memory was given back.

        Args:
            shard: The shard.
            digests: Of its tensors.
            then: Called once the server has taken it.
        """

        def report() -> None:
            self._client.written(shard.index, digests)
            then()

        with contextlib.suppress(RuntimeError):  # `close` was called.
            self._thread.submit(self._watched, report)

    def finish(self) -> None:
        """Return when everything was told."""
        self._thread.shutdown()

    def close(self) -> None:
        """Drop what is not done, and give back what nobody wrote to; nobody asks for more."""
        self._thread.shutdown(cancel_futures=True)
        while self._requested:
            _, lease = self._requested.popleft()
            with contextlib.suppress(Exception, CancelledError):
                self._client.give_back(lease.result())

    def _request(self) -> None:
        shard = next(self._shards, None)
        if shard is not None:
            with contextlib.suppress(RuntimeError):
                lease = self._thread.submit(self._watched, self._client.borrow, shard.index)
                self._requested.append((shard, lease))

    def _watched(self, do: Callable[..., _T], *arguments: object) -> _T:
        try:
            return do(*arguments)
        except BaseException as error:
            # The first tells what is wrong; those after it, that the connection has ended.
            on_error, self._on_error = self._on_error, lambda _: None
            on_error(error)
            raise
