"""Making a prepared version live, on the host."""

from __future__ import annotations
