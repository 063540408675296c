"""The server of a node that is not an engine's first: it stages, and drives nothing."""

from __future__ import annotations
