"""Calls: their options, retries and conversions."""

from __future__ import annotations
