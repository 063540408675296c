"""The shards of a version that still comes in, in the order in which they come."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from weightsync.shm.incoming_version import ArrivalReader
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.vllm.worker.rank_job import Job

__all__ = ["open_arrivals", "turns"]

#: A trainer that is slower than this is not worth a thread that waits for it, and segments that
#: stay mapped for it, seconds.
_PATIENCE_S = 10.0


@contextlib.contextmanager
def open_arrivals(socket: str, document: str) -> Iterator[ArrivalReader | None]:
    """Map what the server tells of a version that comes in, for as long as the body runs.

    It is None when the push was over before: nothing more comes.

    Raises:
        OSError: Nobody listens on the segment socket.
    """
    try:
        with SegmentClient(socket) as client:
            ((fd, size),) = client.map([document])
    except LookupError:
        yield None
        return
    mapped = MappedSegment(fd, size)
    try:
        yield ArrivalReader(mapped.view)
    finally:
        mapped.close()


def turns(reader: ArrivalReader, job: Job) -> Iterator[tuple[int, IpcAddresses | None]]:
    """Yield the place in `Layout.largest_first` of each shard that has come; ends with the job.

    With one that has not, but lies on a GPU, where that is.
    """
    place = {shard: turn for turn, shard in enumerate(reader.layout.largest_first)}
    for shard, on_gpu in reader.arrivals(job.cancelled.wait, _PATIENCE_S):
        yield place[shard], reader.ipc_addresses(shard) if on_gpu else None
