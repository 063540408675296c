"""Training beside serving: the trainer that the server supervises. Light, as its settings are."""

from __future__ import annotations
