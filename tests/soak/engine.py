"""An in-memory engine in a process of its own, behind the real bridge protocol: the soak's vLLM.

python -m tests.soak.engine RUN_DIR

It serves EngineService on RUN_DIR/engine.sock, and on RUN_DIR/probe.sock tells every caller what it
generates with: one line of JSON with its state and the digest of its live parameters. It has the
failpoints of a real rank.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from tests.soak.contents import KINDS, MemoryContents
from weightsync import failpoints
from weightsync.digest import content_digest, tensor_digest
from weightsync.engine import EngineState, Lease, PauseSpec
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.testing import MemoryEngine
from weightsync.vllm.service import EngineServicer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["main"]


class SlowEngine(MemoryEngine):
    """Writes its parameters one by one, so that a mixture can be seen where there is one."""

    def write(self, tensors: Mapping[str, bytes]) -> None:
        """Put bytes into the live parameters."""
        failpoints.hit("worker.commit")
        for number, (name, data) in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                failpoints.hit("worker.half")
            self.live[name] = data
            time.sleep(0.001)
        failpoints.hit("worker.written")

    def tell(self) -> dict[str, Any]:
        """Return what it generates with; runs on the loop, on which its state changes."""
        generating = self._condition is EngineState.SERVING
        live = dict(self.live)
        content = content_digest((n, *KINDS[n], tensor_digest(live[n])) for n in KINDS)
        return {"generating": generating, "content": content}

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

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Do what a worker method does; a failpoint may falsify the reply."""
        (reply,) = await super().call_workers(method, args)
        point = {"weightsync_commit": "worker.reply", "weightsync_state": "worker.tell"}
        field = failpoints.lie(point[method]) if method in point else None
        return [reply | {field: "falsified"} if field else reply]

    # The worker methods.

    def _state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.state")
        return super()._state(args)

    def _prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.prepare")
        return super()._prepare(args)

    def _verify(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.verify")
        return super()._verify(args)

    def _release(self, args: Mapping[str, Any]) -> dict[str, Any]:
        failpoints.hit("worker.release")
        return super()._release(args)


async def main(run_dir: Path) -> None:
    """Serve until the process is ended."""
    tensors = MemoryContents().tensors(0)
    checkpoint = {name: (*KINDS[name], data) for name, data in tensors.items()}
    engine = SlowEngine(checkpoint, run_dir / "segments.sock")
    bridge = run_dir / "engine.sock"
    bridge.unlink(missing_ok=True)
    server = grpc.aio.server()
    servicer = EngineServicer(cast("Any", engine), str(run_dir / "segments.sock"))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{bridge}")
    await server.start()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(engine.tell()).encode() + b"\n")
        writer.close()

    probe = run_dir / "probe.sock"
    probe.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, str(probe)) as listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
