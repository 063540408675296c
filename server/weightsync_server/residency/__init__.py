"""Which versions lie in shared memory: slots, segments, leases, staging."""

from __future__ import annotations
