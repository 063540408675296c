"""What this machine's processor can do."""

from __future__ import annotations

__all__ = ["packs_vectors"]


def packs_vectors() -> bool:
    """Return whether one instruction moves the chosen lanes of a vector to its front."""
    from llvmlite import binding

    features: dict[str, bool] = binding.get_host_cpu_features()
    return features.get("avx512vbmi2", False) and features.get("avx512bw", False)
