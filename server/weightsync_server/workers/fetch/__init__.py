"""Processes that do all that is heavy: digests, durable writes, reads from stores.

The child process is a module of this package and must start without asyncio and subprocess.
"""

from __future__ import annotations
