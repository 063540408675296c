"""What the servers of an engine's nodes say to each other."""

from __future__ import annotations
