"""Settings of the server's own process that its event loop and its many segments need."""

from __future__ import annotations

import gc
import resource
import sys

from google.protobuf.internal import api_implementation

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.allocator import tune_allocator

__all__ = ["tune_process"]

#: Allocations between two collections; a version of 37,000 tensors is a few 100,000 objects, and
#: walking them costs 20 to 40 ms each time.
_GC_THRESHOLD = 200_000
#: How long a thread may keep the interpreter from the event loop, seconds; 0.005 by default.
_SWITCH_S = 0.001


def tune_process() -> None:
    """Prepare this process and those it starts; call it once, after all modules are imported.

    Raises:
        WeightSyncError: NOT_SUPPORTED; protobuf runs on its pure-Python parser.
    """
    if api_implementation.Type() == "python":
        # Slow enough to stop the event loop, and its limits on nesting have failed before.
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            "protobuf runs on its pure-Python backend; unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
            ", or install a protobuf wheel that is made for this platform",
        )
    # A core would hold weights and tokens.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tune_allocator()
    # What is imported now lives for ever: no collection needs to look at it again.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    sys.setswitchinterval(_SWITCH_S)
    # Every segment takes two descriptors, every connection one.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
