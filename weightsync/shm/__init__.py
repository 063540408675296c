"""Memory that processes share: segments, status pages, and how both are handed over."""

from __future__ import annotations
