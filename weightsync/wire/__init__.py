"""What travels between processes: statuses, addresses, descriptors."""

from __future__ import annotations
