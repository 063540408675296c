"""The ways a shard's bytes reach the server."""

from __future__ import annotations
