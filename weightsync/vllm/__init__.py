"""Everything that runs inside vLLM's processes; no other package here imports vLLM."""

from __future__ import annotations
