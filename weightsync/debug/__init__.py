"""Making a server fail on purpose, for tests."""

from __future__ import annotations
