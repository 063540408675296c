"""The configuration of vLLM, from a rank to its own child: over a pipe that only the two have.

It is the one place where a pickle is read: it was written by this program's parent, which could run
any code here anyway, and no third process can reach the pipe.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any

from weightsync.vllm.plan.model_parts import PartNames

__all__ = ["ModelLoad", "PartLoad", "dump_config", "fresh_config", "load_config"]


@dataclass(frozen=True)
class PartLoad:
    """What vLLM was asked to load.

    Attributes:
        config: VLLM's VllmConfig.
        model_config: VLLM's ModelConfig.
        prefix: Of its layers' names.
        names: How what belongs to it is called in the whole model.
    """

    config: Any
    model_config: Any
    prefix: str
    names: PartNames

    def fresh(self) -> PartLoad:
        """Return it without what belongs to a model that was loaded before."""
        return replace(self, config=fresh_config(self.config))


@dataclass(frozen=True)
class ModelLoad:
    """A target, and a draft behind it if there is one.

    Attributes:
        parts: Both, the target first.
        shared: Paths of the draft's modules that are the target's, and their paths there.
    """

    parts: tuple[PartLoad, ...]
    shared: Mapping[str, str] = field(default_factory=dict)


def dump_config(load: ModelLoad) -> bytes:
    """Return for its loader what a rank has loaded.

    Raises:
        PicklingError, TypeError, AttributeError: It holds what cannot be sent.
    """
    return pickle.dumps(replace(load, parts=tuple(part.fresh() for part in load.parts)))


def load_config(pipe: IO[bytes]) -> ModelLoad:
    """Return what the parent of this process wrote into its standard input."""
    load: ModelLoad = pickle.load(pipe)  # noqa: S301 - see above
    return load


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
