"""What runs in each rank of vLLM."""

from __future__ import annotations
