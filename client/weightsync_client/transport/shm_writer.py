"""Shards and boxes are written into memory that the server on this host lends for one push."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from weightsync.errors import WeightSyncError
from weightsync.model.digest import TensorDigester
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.tensor_slices import SliceSpan, span_of
from weightsync.shm.same_host import SameHostClient, WriteLease, map_lease
from weightsync.shm.segments import reserved_size
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.push_reasons import Streamed, TransferPath
from weightsync_client.source.shards import ByteSink, Part, Shard, pieces
from weightsync_client.source.slice_shards import SliceShard
from weightsync_client.source.tensors import Scratch
from weightsync_client.transport.cuda_ipc import CudaIpcTransport
from weightsync_client.transport.messages import RowCopy, ShardDigester
from weightsync_client.transport.protocol import Sent, ShardDigests
from weightsync_client.transport.shard_queue import ShardTurns

if TYPE_CHECKING:
    import torch

    from weightsync_client.source.source import Source


logger = logging.getLogger(__name__)


class _Runs:
    def __init__(self, span: SliceSpan, target: memoryview) -> None:
        self._span, self._target, self._at = span, target, 0
        self._digester = TensorDigester()
        self.digest = self._digester.digest

    def update(self, piece: memoryview) -> None:
        self._digester.update(piece)
        self._span.put(self._target, self._at, piece)
        self._at += len(piece)


_T = TypeVar("_T")


class LeaseRequests:
    """Borrows memory before it is needed, and gives it back while others go on writing.

    The connection answers one request at a time, so one thread does them all, in order. Any thread
    may call the methods. `ahead` shards have memory before it is asked for. `on_error` is called
    once, with the first refusal or fault.
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
        """Return a shard and its memory, which the caller gives back; None: there is none left."""
        with self._lock:
            if not self._requested:
                return None
            shard, lease = self._requested.popleft()
            self._request()
        return shard, lease.result()

    def written(self, shard: Shard, digests: Sequence[bytes], then: Callable[[], None]) -> None:
        """Have the server told of a written shard whose memory was given back, then call `then`."""

        def report() -> None:
            self._client.written(shard.index, digests)
            then()

        with contextlib.suppress(RuntimeError):  # `close` was called.
            self._thread.submit(self._watched, report)

    def finish(self) -> None:
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
                lease = self._thread.submit(self._watched, self._client.take_lease, shard.index)
                self._requested.append((shard, lease))

    def _watched(self, do: Callable[..., _T], *arguments: object) -> _T:
        try:
            return do(*arguments)
        except BaseException as error:
            # The first tells what is wrong; those after it, that the connection has ended.
            on_error, self._on_error = self._on_error, lambda _: None
            on_error(error)
            raise


#: Bytes that are digested and written, times the number of threads: between two pieces a thread
#: waits for the interpreter, and the longer, the more there are.
_PIECE = 512 << 10
#: At least so many, however few threads.
_LEAST_PIECE = 4 << 20
#: Parts in one call of pwritev(2) (IOV_MAX).
_MOST_PARTS = 1024
#: Threads at most; each fills one shard after the other.
_MOST_THREADS = 16
#: Of so many cores one is left to the server, which digests at the same time.
_CORES = 4

#: Seconds from one sign of life to the next; a server waits for a minute.
_ALIVE_S = 10.0

_Write = Callable[[Sequence[Part], int], None]


class ShmWriter:
    """Writes the shards of one push, as `ShmTransport` has it; `run` is called once."""

    def __init__(
        self,
        source: Source,
        sink: ByteSink | None,
        on_bytes: Callable[[int], None],
        *,
        collects: bool = True,
    ) -> None:
        self._source = source
        self._sink = sink
        self._keep = sink.keep if sink else None
        self._on_bytes = on_bytes
        self._collects = collects
        self._devices = {t.device for t in source.tensors if t.device is not None}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._piece = _LEAST_PIECE
        self._client: SameHostClient | None = None
        self._error: BaseException | None = None
        #: Tensors and digests of every shard that the server took, by index.
        self.done: dict[int, ShardDigests] = {}
        #: Those of them that it copied from a GPU itself.
        self.copied: set[int] = set()
        #: Shards that were read of an iterable and that the server did not take.
        self.left: tuple[Shard, ...] = ()
        #: `cancel` was called.
        self.cancelled = False
        #: Why some of them went through this process, in place of being copied by the server.
        self.slower: Streamed | None = None

    def run(self, offer: pb.SameHostOffer, shards: Iterable[Shard]) -> None:
        """Write shards to the server.

        Raises WeightSyncError if it refuses, OSError if unreachable; `sent` tells what it has.
        """
        collection = self._collection()
        self._client = SameHostClient(offer.socket, offer.secret)
        try:
            # The largest first, so that nobody begins one when the others have ended.
            waiting = sorted(shards, key=lambda shard: -shard.entry.size)
            waiting = collection.begin(self._client, waiting, self._stop)
            self._note_slower(collection)
            cores = len(os.sched_getaffinity(0))
            count = min(_MOST_THREADS, cores - cores // _CORES, len(waiting))
            self._piece = max(_LEAST_PIECE, _PIECE * count)
            # One more than can be written: its memory is ready when a thread comes for it.
            requests = LeaseRequests(self._client, iter(waiting), count + 1, self._fail)
            try:
                self._write_all(requests, count)
            finally:
                requests.close()
            if not self._stop.is_set():
                collection.finish(self._client, self._note_collected)
        finally:
            self._client.close()
            collection.release()
        if self._error is not None:
            raise self._error

    def run_in_turn(self, offer: pb.SameHostOffer, shards: Iterator[Shard]) -> None:
        """Write shards that come one after the other; the iterable is read in this thread.

        Raises as `run` and the iterable do; `left` has what was read.
        """
        self._client = SameHostClient(offer.socket, offer.secret)
        turns = ShardTurns(shards, self._tell_alive, _ALIVE_S)
        outline = self._source.outline
        fail = partial(self._fail_in_turn, turns)
        requests = LeaseRequests(self._client, iter(outline), 2, fail)
        thread = threading.Thread(
            target=self._work_in_turn, args=(requests, turns), name="weightsync-hand-off"
        )
        thread.start()
        try:
            turns.read(self._stop)
        except BaseException:
            self._stop.set()
            raise
        finally:
            thread.join()
            requests.close()
            self._client.close()
            self.left = tuple(shard for shard in turns.pending if shard.index not in self.done)
        if self._error is not None:
            raise self._error

    def sent(self, reason: Streamed | None) -> Sent:
        """Return what was done; `reason` says why shards are left over, None if none are."""
        return Sent(
            shards=dict(self.done),
            way=TransferPath.SAME_HOST if self.done else TransferPath.STREAM,
            reason=reason or self.slower,
            by_server=reason is None and self.done.keys() == self.copied != set(),
        )

    def _collection(self) -> CudaIpcTransport:
        tensors = {tensor.name: tensor for tensor in self._source.tensors}
        return CudaIpcTransport(tensors if self._collects else {}, self._sink)

    def _note_slower(self, collection: CudaIpcTransport) -> None:
        if collection.mixed:
            self.slower = Streamed.SEVERAL_GPUS
            logger.warning(
                "this push has shards with tensors of several GPUs (%d), which are read through "
                "this process, slower than the server copies them; push the tensors of one GPU "
                "after those of the other, or choose smaller shard_bytes",
                collection.mixed,
            )
        elif collection.refusal:
            self.slower = Streamed.NOT_COPIED
            logger.warning(
                "tensors on a GPU are read through this process, slower than the server would copy "
                "them: %s",
                collection.refusal,
            )

    def _note_collected(self, shard: Shard, digests: list[bytes]) -> None:
        self._note(shard, digests)
        self.copied.add(shard.index)
        self._on_bytes(shard.entry.size)

    def _write_all(self, requests: LeaseRequests, count: int) -> None:
        threads = [
            threading.Thread(target=self._work, args=(requests,), name="weightsync-hand-off")
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            self._wait(thread)
        if not self._stop.is_set():
            requests.finish()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop.set()

    def _wait(self, thread: threading.Thread) -> None:
        while True:
            thread.join(_ALIVE_S)
            if not thread.is_alive():
                return
            self._tell_alive()

    def _tell_alive(self) -> None:
        if self._client is not None and not self._stop.is_set():
            # Where it has ended, the threads meet that themselves.
            with contextlib.suppress(OSError, WeightSyncError):
                self._client.alive()

    def cancel(self) -> None:
        self.cancelled = True
        self._stop.set()
        if self._client is not None:
            self._client.close()

    def _work(self, requests: LeaseRequests) -> None:
        scratch = Scratch(views=True)
        try:
            with _own_streams(self._devices):
                while not self._stop.is_set() and (lease := requests.next()) is not None:
                    self._hand(requests, *lease, scratch)
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self._fail(error)

    def _work_in_turn(self, requests: LeaseRequests, turns: ShardTurns) -> None:
        scratch = Scratch(views=True)
        try:
            while not self._stop.is_set() and (shard := turns.next()) is not None:
                lease = requests.next()
                if lease is not None:
                    taken = partial(turns.done, shard)
                    self._hand(requests, shard, lease[1], scratch, taken)
                del shard
            if not self._stop.is_set():
                requests.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by run_in_turn
            self._fail(error)
        finally:
            turns.give_up()

    def _fail_in_turn(self, turns: ShardTurns, error: BaseException) -> None:
        self._fail(error)
        turns.give_up()

    def _hand(
        self,
        requests: LeaseRequests,
        shard: Shard,
        lease: WriteLease,
        scratch: Scratch,
        taken: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            if isinstance(shard, SliceShard):
                digests = self._boxes_written(shard, lease, scratch)
            else:
                digests = self._written(shard, lease, scratch)
        finally:
            # Before it is told as written: the server makes sure that nobody can write any more.
            if self._client is not None:
                self._client.give_back(lease)
        if not self._stop.is_set():
            every = shard.all_digests(digests) if isinstance(shard, SliceShard) else digests
            requests.written(shard, every, partial(self._note, shard, digests, taken))

    def _written(self, shard: Shard, lease: WriteLease, scratch: Scratch) -> list[bytes]:
        """Write a shard; return the digests of its tensors, unless it was stopped."""
        with _mapped(lease, shard.entry.size) as target:
            digester = ShardDigester(shard, self._keep, target)
            write = partial(_pwrite, lease.fd) if target is None else None
            self._fill(shard, digester, write, scratch)
        return digester.digests

    def _boxes_written(self, shard: SliceShard, lease: WriteLease, scratch: Scratch) -> list[bytes]:
        """Write the boxes of a shard; return their digests, unless it was stopped."""
        digests: list[bytes] = []
        # Runs of a few kilobytes would each be a call of pwrite(2).
        with contextlib.closing(map_lease(lease, shard.whole.entry.size)) as mapping:
            for local in shard.sent:
                tensor = shard.whole.tensors[local.tensor]
                begin = shard.whole.entry.data_start + tensor.begin
                span = span_of(local.box, tensor.shape, DTYPE_BITS[tensor.dtype], begin)
                sink = (
                    _Runs(span, mapping.view)
                    if span.counts
                    else RowCopy(mapping.view, span.begin, span.size)
                )
                read = local.bytes.reader(scratch)
                for at in range(0, span.size, self._piece):
                    data = memoryview(read(at, min(at + self._piece, span.size)))
                    sink.update(data)
                    if self._keep is not None:
                        self._keep(local.bytes.name, at, data)
                    self._on_bytes(len(data))
                    if self._stop.is_set():
                        return digests
                digests.append(sink.digest())
        return digests

    def _note(
        self, shard: Shard, digests: list[bytes], taken: Callable[[], None] = lambda: None
    ) -> None:
        with self._lock:
            self.done[shard.index] = ShardDigests(shard.tensors, digests)
        taken()

    def _fill(
        self, shard: Shard, digester: ShardDigester, write: _Write | None, scratch: Scratch
    ) -> None:
        with contextlib.closing(shard.open(scratch)) as reader:
            for begin, end in pieces(shard, self._piece, apart=bool(self._devices)):
                if self._stop.is_set():
                    return
                parts = reader.read(begin, end)
                at = begin
                for part in parts:
                    digester.update(at, part)
                    at += len(part)
                if write is not None:
                    write(parts, begin)
                self._on_bytes(end - begin)
        # Empty tensors at the very end have no byte to go by.
        digester.update(shard.entry.size, b"")


@contextlib.contextmanager
def _mapped(lease: WriteLease, size: int) -> Iterator[memoryview | None]:
    """Lend the memory itself where that is faster than pwrite(2)."""
    reserved = reserved_size(size)
    # Without huge pages, mapping costs more than the calls of pwrite(2) do. A mapping that is kept
    # would cost nothing, but while it is there nobody can prove that nobody writes.
    if not lease.huge or os.fstat(lease.fd).st_size < reserved:
        yield None
        return
    mapping = map_lease(lease, reserved)
    try:
        yield mapping.view
    finally:
        mapping.close()


def _pwrite(fd: int, parts: Sequence[Part], position: int) -> None:
    for first in range(0, len(parts), _MOST_PARTS):
        some = parts[first : first + _MOST_PARTS]
        size, done = sum(map(len, some)), os.pwritev(fd, some, position)
        while done < size:
            done += os.pwrite(fd, b"".join(some)[done:], position + done)
        position += size


@contextlib.contextmanager
def _own_streams(devices: set[torch.device]) -> Iterator[None]:
    """Within the block the thread copies from GPUs beside the trainer's work, not behind it."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            if device.type == "cuda":
                import torch

                own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
                stack.enter_context(torch.cuda.stream(own))
        yield
