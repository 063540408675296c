"""What this machine's processor can do."""

from __future__ import annotations

__all__ = ["PACKS", "PLAIN", "SHUFFLES", "vectors"]

#: One instruction moves the chosen lanes of a vector to its front.
PACKS = "packs"
#: One instruction orders the 16 bytes of a vector.
SHUFFLES = "shuffles"
#: Neither.
PLAIN = "plain"


def vectors() -> str:
    """Return the best of these that the processor has."""
    from llvmlite import binding

    features: dict[str, bool] = binding.get_host_cpu_features()
    if features.get("avx512vbmi2") and features.get("avx512bw"):
        return PACKS
    return SHUFFLES if features.get("ssse3") else PLAIN
