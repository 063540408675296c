"""The configuration of vLLM, from a rank to its own child: over a pipe that only the two have.

It is the one place where a pickle is read: this program's parent wrote it, which could run any code
here anyway.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any

from weightsync.vllm.plan.model_parts import PartNames


@dataclass(frozen=True)
class PartLoad:
    """A part of a model as vLLM is asked to load it.

    `prefix` is that of its layers' names; `names` says what they are called in the whole.
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

    `shared` maps modules of the draft that are the target's to their paths there.
    """

    parts: tuple[PartLoad, ...]
    shared: Mapping[str, str] = field(default_factory=dict)


def dump_config(load: ModelLoad) -> bytes:
    """Return for its loader what a rank has loaded; pickle's errors: that cannot be sent."""
    return pickle.dumps(replace(load, parts=tuple(part.fresh() for part in load.parts)))


def load_config(pipe: IO[bytes]) -> ModelLoad:
    """Return what the parent of this process wrote into its standard input."""
    load: ModelLoad = pickle.load(pipe)  # noqa: S301 - see above
    return load


def fresh_config(config: Any) -> Any:
    """Return a copy of a VllmConfig without the layers that a model before it has registered."""
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
