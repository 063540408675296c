"""Which part of a checkpoint goes where in a rank's parameters."""

from __future__ import annotations
