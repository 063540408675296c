"""The versions that made an answer, on the answer: what vLLM's HTTP API says of weights."""

from __future__ import annotations
