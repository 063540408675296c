"""An in-memory engine in a process of its own, behind the real bridge protocol: the soak's vLLM.

python -m tests.soak.engine RUN_DIR [SOCKET [CONTENT]]

It serves EngineService on SOCKET, by default RUN_DIR/engine.sock, and on a socket beside it that
ends in .probe tells every caller what it generates with: one line of JSON with its state, whether a
pause of it goes on, and the digest of its live parameters, of each rank where they differ. It has
two ranks, the failpoints of real ones, and reads versions as they come. Its checkpoint has the
content with that number, 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from tests.soak.contents import KINDS, MemoryContents
from weightsync import failpoints
from weightsync.engine import READ_AHEAD, EngineState, Lease, PauseSpec
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.model.digest import content_digest, tensor_digest
from weightsync.shm.incoming_version import ArrivalReader
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.testing import MemoryEngine
from weightsync.testing.memory_rank import MemoryRank
from weightsync.vllm.bridge.engine_servicer import EngineServicer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.engine import EngineInfo, SwitchOrder, SwitchOutcome

__all__ = ["main"]


#: What a rank tells that it may take to read ahead: a server asks for it where there is room.
_ROOM = 1 << 20
_PATIENCE_S = 5.0


class _SlowRank(MemoryRank):
    """Writes its parameters one by one, so that a mixture can be seen where there is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: What was read while it came in, by its name; what a prepare names is taken from here.
        self._early: dict[str, dict[str, bytes]] = {}
        self._reading: threading.Thread | None = None
        self._enough = threading.Event()
        self._ahead_of = ""

    def write(self, tensors: Mapping[str, bytes]) -> None:
        """Put bytes into the live parameters."""
        failpoints.hit("worker.commit")
        for number, (name, data) in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                failpoints.hit("worker.half")
            self.live[name] = data
            time.sleep(0.001)
        failpoints.hit("worker.written")

    # The worker methods.

    def _state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.state")
        return _falsified("worker.tell", super()._state(args))

    def _commit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return _falsified("worker.reply", super()._commit(args))

    def _ahead(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._end_reading()
        self._enough.clear()
        self._reading = threading.Thread(target=self._read_ahead, args=(dict(args),), daemon=True)
        self._reading.start()
        return {}

    def _read_ahead(self, args: dict[str, Any]) -> None:
        with (
            contextlib.suppress(OSError, ValueError, EOFError),
            SegmentClient(self._socket) as client,
        ):
            failpoints.hit("worker.ahead")
            reader = ArrivalReader(_mapped(client, str(args["document"])))
            found = self._early[str(args["apply_id"])] = {}
            for arrival in reader.arrivals(self._enough.wait, _PATIENCE_S):
                if arrival.on_gpu:
                    continue
                view = _mapped(client, reader.segments[arrival.shard])
                start = 8 + int.from_bytes(view[:8], "little")
                for tensor in reader.layout.by_shard[arrival.shard]:
                    found[tensor.name] = bytes(view[start + tensor.begin : start + tensor.end])

    def _end_reading(self) -> None:
        self._enough.set()
        if self._reading is not None:
            self._reading.join()
            self._reading = None

    def _prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.prepare")
        self._end_reading()
        self._ahead_of = str(args.get("ahead", ""))
        return super()._prepare(args)

    def _read(self, document: str) -> Any:
        prepared = super()._read(document)
        # As a rank does: what was read ahead is not read again.
        prepared.tensors |= self._early.pop(self._ahead_of, {})
        return prepared

    def _ready(self, *args: Any) -> dict[str, Any]:
        return super()._ready(*args) | {"device_room": _ROOM}

    def _verify(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.verify")
        return super()._verify(args)

    def _release(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.release")
        self._end_reading()
        self._early = {}
        return super()._release(args)


class SlowEngine(_SlowRank, MemoryEngine):
    """Two ranks; a step is not under way while they switch between two of them."""

    def __init__(self, checkpoint: Any, socket: Path) -> None:
        super().__init__(checkpoint, socket, attachable=True)
        other = _SlowRank("0/0/1", checkpoint, socket, self._serving, attachable=True)
        self.ranks = (self, other)
        self._stands = False

    def tell(self) -> dict[str, Any]:
        """Return what it generates with; runs on the loop, on which its state changes."""
        generating = self._condition is EngineState.SERVING and not self._stands
        contents = {
            content_digest((n, *KINDS[n], tensor_digest(rank.live[n])) for n in KINDS)
            for rank in self.ranks
        }
        return {
            "generating": generating,
            "content": ", ".join(sorted(contents)),
            "leased": bool(self._lease.id),
        }

    async def hello(self) -> EngineInfo:
        """Tell what the engine is."""
        info = await super().hello()
        return dataclasses.replace(info, capabilities=info.capabilities | {READ_AHEAD})

    async def _switch(self, order: SwitchOrder) -> SwitchOutcome:
        """Stand between two steps meanwhile."""
        self._stands = True
        try:
            return await super()._switch(order)
        finally:
            self._stands = False

    async def pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        """Stand still."""
        await failpoints.reach("bridge.pause")
        return await super().pause(spec, lease_s)

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        """Serve a version that the parameters were proved to hold."""
        await failpoints.reach("bridge.resume")
        return await super().resume(lease_id, version, content_digest)

    async def fence(self, reason: str) -> None:
        """Stand still for a reason."""
        await failpoints.reach("bridge.fence")
        await super().fence(reason)


def _falsified(point: str, reply: dict[str, Any]) -> dict[str, Any]:
    field = failpoints.lie(point)
    return reply | {field: "falsified"} if field else reply


def _mapped(client: SegmentClient, name: str) -> memoryview:
    ((fd, size),) = client.map([name])
    return MappedSegment(fd, size).view


async def main(run_dir: Path, bridge: Path, content: int) -> None:
    """Serve until the process is ended."""
    tensors = MemoryContents().tensors(content)
    checkpoint = {name: (*KINDS[name], data) for name, data in tensors.items()}
    engine = SlowEngine(checkpoint, run_dir / "segments.sock")
    server = grpc.aio.server()
    servicer = EngineServicer(cast("Any", engine), str(run_dir / "segments.sock"))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{bridge}")
    await server.start()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(engine.tell()).encode() + b"\n")
        writer.close()

    probe = bridge.with_suffix(".probe")
    async with await asyncio.start_unix_server(answer, str(probe)) as listener:
        await listener.serve_forever()


if __name__ == "__main__":
    folder, *more = sys.argv[1:]
    socket = Path(more[0]) if more else Path(folder) / "engine.sock"
    for left in (socket, socket.with_suffix(".probe")):
        left.unlink(missing_ok=True)
    asyncio.run(main(Path(folder), socket, int(more[1]) if len(more) > 1 else 0))
