"""The program of a loader: loads versions for the rank that started it, and dies with that.

Its standard input brings vLLM's configuration; its only argument is a descriptor of the socket over
which the rank asks. Nothing heavy is imported before the kernel has been told to end this process
with the rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import traceback

from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.wire.child_channel import connect
from weightsync.wire.documents import receive, send


def _end_with(sock: socket.socket) -> None:
    """End this process when the other end of a socket is closed, whatever else it does."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> int:
    sock = connect()
    start = receive(sock)
    if os.getppid() != start["parent"]:
        # It died before the kernel was told to end this process with it.
        return 1
    threading.Thread(target=_end_with, args=(sock,), daemon=True).start()
    _name_lines(start["name"])
    try:
        failpoints.hit("loader.start")
        # PyTorch and vLLM are imported only now, which takes seconds.
        from weightsync.vllm.shadow.loader_service import begin

        loader = begin(start, sock)
        send(sock, {"event": "ready"})
        loader.serve()
    except EOFError:
        return 0
    except Exception as error:  # noqa: BLE001 - it goes to the log, and to the rank
        # Before the rank knows of it, which ends this process at once.
        traceback.print_exc()
        text = error.message if isinstance(error, WeightSyncError) else str(error)
        with contextlib.suppress(OSError):
            # A failed load leaks memory of its half-made layers: this process ends.
            send(sock, {"event": "failed", "error": f"{type(error).__name__}: {text}"[:500]})
        return 1
    return 0


def _name_lines(name: str) -> None:
    """Put the rank before every line in vLLM's log, where vLLM does that for its own processes."""
    with contextlib.suppress(ImportError):
        from vllm.utils.system_utils import decorate_logs

        decorate_logs(f"weightsync loader {name}")


if __name__ == "__main__":
    sys.exit(main())
