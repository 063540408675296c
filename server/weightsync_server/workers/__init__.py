"""Processes that the server starts, and what they do."""

from __future__ import annotations
