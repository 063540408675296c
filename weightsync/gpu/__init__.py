"""Kernels of ours on CUDA devices, for ranks and for trainers; compiled where they are used."""

from __future__ import annotations
