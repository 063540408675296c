"""A server that follows another one: it fetches what is committed there, before anybody asks."""

from __future__ import annotations
