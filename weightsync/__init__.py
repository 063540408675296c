"""What the WeightSync client, server and vLLM plugin share."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
