"""Which versions exist, who may write them, and which one is live."""

from __future__ import annotations
