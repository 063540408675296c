"""The ways in: each brings a shard's bytes from one kind of source."""

from __future__ import annotations
