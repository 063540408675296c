"""The tensors of a PyTorch module under the names that its checkpoint has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync_client.errors import invalid, refuse
from weightsync_client.source.flat_parameters import (
    flat_ranges_of,
    has_flat_parameters,
    whole_state,
)
from weightsync_client.source.sharded_tensors import FlatRanges

if TYPE_CHECKING:
    import torch

    from weightsync_client.source.sharded_tensors import ShardedTensor


#: What PyTorch puts into names for a wrapper around a part of a model: torch.compile, activation
#: checkpointing and FSDP.
_INFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: Of state that is no tensor of the model, as Transformer Engine keeps it.
_EXTRA_STATE = "_extra_state"
#: Wrappers of libraries that may not be there, all of which have the model as `module`; of this
#: one, `n_averaged` besides.
_AVERAGED = (("torch.optim.swa_utils", "AveragedModel"),)
_AROUND = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    *_AVERAGED,
)


def is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def module_tensors(
    module: torch.nn.Module, *, state: Iterable[tuple[str, torch.Tensor]] | None = None
) -> Mapping[str, Any]:
    """Return the tensors of a module as a checkpoint of it has them.

    Wrappers leave no trace in the names: DistributedDataParallel and DataParallel, torch.compile,
    activation checkpointing, FSDP, DeepSpeed's engine, AveragedModel. Of a model of transformers it
    is what its `save_pretrained` writes: tied weights once, experts that it fused one by one, under
    the names that they had. Those experts are copied for it, on their device; no other tensor is.
    Of FSDP1 and ZeRO-3 it is what this process holds, as `ShardedTensor`.

    `state` gives the tensors where those of the module's state dict are not what it computes with.

    Raises:
        InvalidError: Two have one name, or what is held of one cannot be pushed.
    """
    model = unwrapped(module)
    if state is None and has_flat_parameters(module):
        return _local_parts(module, model)
    return _saved(model, _named(model.state_dict().items() if state is None else state))


def _local_parts(module: Any, model: Any) -> Mapping[str, torch.Tensor | ShardedTensor]:
    ranges = flat_ranges_of(module)
    flat = FlatRanges(part for named in ranges.values() for part in named.values())
    with flat.views():
        saved = _saved(model, _named(whole_state(module, model, ranges)))
    return {name: flat.local_part(name, tensor) for name, tensor in saved.items()}


def _named(state: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for name, tensor in state:
        plain = plain_name(name)
        if plain.rpartition(".")[2] == _EXTRA_STATE:
            continue
        if plain in named:
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"two tensors of the module are called {plain!r} without its wrappers; push its "
                "state_dict() under names of your own",
            )
        named[plain] = tensor
    return named


def plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _INFIXES)


def unwrapped(module: Any) -> Any:
    """Return the model that whatever takes care of its processes, compiles or averages it wraps."""
    return _inside(module, _AROUND)


def innermost(module: Any) -> Any:
    """Return the part that computes without other processes wherever this one has all of it.

    It is compiled for no shapes. What gathers parts of other processes stays around it.
    """
    return _inside(module, _AVERAGED)


def _inside(module: Any, classes: Iterable[tuple[str, str]]) -> Any:
    import torch

    around: tuple[type[Any], ...] = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    around += tuple(_loaded(classes))
    while isinstance(module, around) or "_orig_mod" in module._modules:  # noqa: SLF001 - torch.compile's
        module = module.module if isinstance(module, around) else module._orig_mod  # noqa: SLF001
    return module


def _loaded(classes: Iterable[tuple[str, str]]) -> Iterable[type[Any]]:
    """Return the classes of modules that are loaded: who uses them has imported them."""
    return [getattr(sys.modules[path], name) for path, name in classes if path in sys.modules]


def check_plain(module: Any) -> None:
    """Refuse a model whose adapters would have to be merged into flat parameters."""
    if has_flat_parameters(module):
        raise invalid(
            "the module has adapters on weights that FSDP1 or ZeRO-3 has sharded; merge them "
            "into a full copy (merge_and_unload) and push that",
        )


def _saved(model: Any, named: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return named
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    left_out |= {
        target
        for target, source in tied.items()
        if target in named and source in named and _same(model, named, target, source)
    }
    kept = {name: tensor for name, tensor in named.items() if name not in left_out}
    # Releases before 5 fuse nothing when they load.
    revert = getattr(transformers, "revert_weight_conversion", None)
    return kept if revert is None else dict(revert(model, kept))


def _same(model: Any, named: Mapping[str, torch.Tensor], target: str, source: str) -> bool:
    """Whether two names are of one tensor, on all ranks alike."""
    one, other = named[target], named[source]
    if one.is_meta or other.is_meta:
        # They have no bytes, and stand for parameters of which each has one.
        return one is other
    if hasattr(one, "to_local") or hasattr(other, "to_local"):
        # A DTensor lies nowhere, and what a rank has of it may be empty.
        own = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        return own.get(target) is own.get(source) is not None
    where = one.data_ptr(), one.shape, one.stride(), one.dtype
    return where == (other.data_ptr(), other.shape, other.stride(), other.dtype)
