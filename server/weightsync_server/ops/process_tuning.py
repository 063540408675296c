"""Settings of the process that its event loop, its many segments and large messages need."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys

from google.protobuf.internal import api_implementation

from weightsync.errors import Reason, WeightSyncError

#: Allocations between two collections; a version of 37,000 tensors is a few 100,000 objects, and
#: walking them costs 20 to 40 ms each time.
_GC_THRESHOLD = 200_000
#: How long a thread may keep the interpreter from the event loop, seconds; 0.005 by default.
_SWITCH_S = 0.001
# The option numbers of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def tune_process() -> None:
    """Prepare this process and those it starts; call it once, after all modules are imported."""
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


def tune_allocator() -> bool:
    """Keep freed chunk buffers in the heap; return whether the C library took the settings.

    With glibc's defaults every 1 MiB chunk is a fresh mapping: 370,000 page faults per GiB and 0.6
    of the throughput. Two arenas keep the heap of a many-threaded server from creeping.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, 64 << 20),
        (_M_TRIM_THRESHOLD, 256 << 20),
        (_M_ARENA_MAX, 2),
    )
    return all(mallopt(option, value) == 1 for option, value in settings)
