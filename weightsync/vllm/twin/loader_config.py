"""The configuration of vLLM, from a rank to its own child: over a pipe that only the two have.

It is the one place where a pickle is read: it was written by this program's parent, which could run
any code here anyway, and no third process can reach the pipe.
"""

from __future__ import annotations

import copy
import pickle
from typing import IO, Any

__all__ = ["dump_config", "fresh_config", "load_config"]


def dump_config(config: Any) -> bytes:
    """Return a rank's VllmConfig for its loader.

    Raises:
        PicklingError, TypeError, AttributeError: It holds what cannot be sent.
    """
    return pickle.dumps(fresh_config(config))


def load_config(pipe: IO[bytes]) -> Any:
    """Return the VllmConfig that the parent of this process wrote into its standard input."""
    return pickle.load(pipe)  # noqa: S301 - see above


def fresh_config(config: Any) -> Any:
    """Return a VllmConfig without the layers that a model before it was registered with.

    Args:
        config: VLLM's VllmConfig; it stays as it is.
    """
    fresh = copy.copy(config)
    compilation = fresh.compilation_config = copy.copy(config.compilation_config)
    for registry, empty in (("static_forward_context", {}), ("static_all_moe_layers", [])):
        if hasattr(compilation, registry):
            setattr(compilation, registry, empty)
    fresh.load_config = copy.copy(config.load_config)
    # Whatever the engine loaded from, this comes from us.
    fresh.load_config.load_format = "auto"
    fresh.quant_config = copy.deepcopy(config.quant_config)
    return fresh
