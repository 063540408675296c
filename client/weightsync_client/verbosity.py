"""Keeps gRPC's log out of what the command `weightsync` prints.

gRPC reads GRPC_VERBOSITY when it is imported, so the package imports this first. A program that
uses the library decides for itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_command = Path(next(iter(sys.argv), "")).name
if _command == "weightsync" and os.environ.get("WEIGHTSYNC_LOG_LEVEL") != "DEBUG":
    # What it would log stands in the command's own sentence already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
