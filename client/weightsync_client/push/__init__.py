"""One push: what is sent, how it goes on, what is remembered for the next."""

from __future__ import annotations
