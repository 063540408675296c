"""Runs a Python module whose wall clock is wrong.

python -m tests.soak.clock SECONDS python -m MODULE ...

As NTP or an administrator would: the monotonic clock goes on as ever.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import time
from types import ModuleType
from typing import Any

__all__: list[str] = []


def main() -> None:
    """Put time.time and time.time_ns forward, then become the module."""
    ahead = float(sys.argv[1])
    now, now_ns = time.time, time.time_ns
    # gRPC adds its timeouts to this clock, and compares the sum with the kernel's: where a whole
    # machine is wrong, those two agree. Its compiled part gets a clock of its own.
    kernels = ModuleType("time")
    vars(kernels).update(vars(time))
    cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
    cygrpc.time = kernels

    def jumped() -> float:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return now() if caller.startswith("grpc") else now() + ahead

    time.time = jumped
    time.time_ns = lambda: now_ns() + int(ahead * 1e9)
    sys.argv = sys.argv[4:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
