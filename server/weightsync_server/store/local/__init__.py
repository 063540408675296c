"""Versions in a directory of this host."""

from __future__ import annotations
