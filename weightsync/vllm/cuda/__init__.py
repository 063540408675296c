"""A rank whose parameters lie on a CUDA device: staging, commit and proof there.

All but `runtime` runs on any device that torch knows, so that it is tested without a GPU.
"""

from __future__ import annotations
