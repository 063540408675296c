"""Faults beside one real vLLM and one server, which all modules of this folder share."""

from __future__ import annotations
