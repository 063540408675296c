"""What runs in vLLM's API process: one engine, driven over a unix socket."""

from __future__ import annotations
