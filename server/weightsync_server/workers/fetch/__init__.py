"""Processes that do all that is heavy: digests, durable writes, reads from stores.

The child process must start without asyncio and subprocess.
"""

from __future__ import annotations
