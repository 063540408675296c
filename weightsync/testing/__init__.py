"""Test doubles for users: an engine without vLLM that takes weights as a real one does."""

from __future__ import annotations

from weightsync.testing.memory_engine import MemoryEngine, memory_logprobs

__all__ = ["MemoryEngine", "memory_logprobs"]
