"""What refused calls leave behind in a server: a GetVersion of a version that does not exist.

start_mib    anonymous memory of a fresh server's process that has answered a few of them
end_mib      after --calls of them, at once
idle_mib     the same after --idle seconds without a call
growth_mib   the larger of the two over start_mib; wanted at most 100 after 45,000 calls

The store is memory://, and no engine is attached.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import grpc

from benchmarks import report
from benchmarks.servers import rss_anon, weightsync_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["main"]

_FEW = 100
#: Calls under way at any time.
_AT_ONCE = 32
_MIB = 1 << 20


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--calls", type=int, default=45_000, help="(default 45000)")
    parser.add_argument("--idle", type=float, default=10, help="seconds (default 10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        address = f"unix:{name}/control.sock"
        # As many per second as come: these calls are refused for what they ask alone.
        unlimited = ("--max-calls-per-s", "1000000")
        with weightsync_server(Path(name), [address], *unlimited) as server:
            asyncio.run(_refused(address, _FEW))
            start, begin = rss_anon([server.pid]), time.monotonic()
            asyncio.run(_refused(address, options.calls))
            seconds, end = time.monotonic() - begin, rss_anon([server.pid])
            time.sleep(options.idle)
            idle = rss_anon([server.pid])
    facts = {
        "calls_per_s": round(options.calls / seconds),
        "start_mib": round(start / _MIB, 1),
        "end_mib": round(end / _MIB, 1),
        "idle_mib": round(idle / _MIB, 1),
        "growth_mib": round((max(end, idle) - start) / _MIB, 1),
    }
    parameters = {"calls": options.calls, "idle_s": options.idle, "at_once": _AT_ONCE}
    report.emit("refusals", parameters, {}, facts, as_json=options.json)


async def _refused(address: str, count: int) -> None:
    """Make so many calls, all of which must be refused."""
    left = iter(range(count))
    request = pb.GetVersionRequest(model="bench", version=7)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = weightsync_pb2_grpc.WeightSyncStub(channel)

        async def ask() -> None:
            for _ in left:
                code = await stub.GetVersion(request).code()
                if code is not grpc.StatusCode.NOT_FOUND:
                    msg = f"a version that does not exist was answered with {code}"
                    raise RuntimeError(msg)

        await asyncio.gather(*(ask() for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    main()
