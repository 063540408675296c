"""The tensors of a PyTorch module under the names that its checkpoint has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync_client.errors import refuse

if TYPE_CHECKING:
    import torch

__all__ = ["is_module", "module_tensors"]

#: What PyTorch puts into names for a wrapper around a part of a model: torch.compile, activation
#: checkpointing and FSDP.
_INFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: Of state that is no tensor of the model, as Transformer Engine keeps it.
_EXTRA_STATE = "_extra_state"


def is_module(value: object) -> bool:
    """Whether a value is a PyTorch module; PyTorch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def module_tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a module as a checkpoint of it has them.

    Wrappers leave no trace in the names: DistributedDataParallel and DataParallel, torch.compile,
    activation checkpointing. Of a model of transformers it is what its `save_pretrained` writes:
    tied weights once, experts that it fused one by one, under the names that they had. Those
    experts are copied for it, on their device; no other tensor is.

    Args:
        module: The model, or a wrapper around it.

    Raises:
        InvalidError: Its parameters are not its weights: FSDP1 holds flat ones, DeepSpeed ZeRO-3
            parts of them, PEFT adapters beside them.
    """
    model = _unwrapped(module)
    _check_plain(model)
    named: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        plain = ".".join(part for part in name.split(".") if part not in _INFIXES)
        if plain.rpartition(".")[2] == _EXTRA_STATE:
            continue
        if plain in named:
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"two tensors of the module are called {plain!r} without its wrappers; push its "
                "state_dict() under names of your own",
            )
        named[plain] = tensor
    return _saved(model, named)


def _unwrapped(module: Any) -> Any:
    import torch

    around = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while isinstance(module, around) or "_orig_mod" in module._modules:  # noqa: SLF001 - torch.compile's
        module = module.module if isinstance(module, around) else module._orig_mod  # noqa: SLF001
    return module


def _check_plain(model: Any) -> None:
    problem = ""
    # Not imported: who uses it has.
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None and any(
        isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()
    ):
        problem = "is wrapped by FSDP1, which holds flat parameters; push its full state_dict()"
    elif any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        problem = (
            "is partitioned by DeepSpeed ZeRO-3; push its state_dict() inside of "
            "deepspeed.zero.GatheredParameters"
        )
    elif getattr(model, "peft_config", None) and hasattr(model, "merge_adapter"):
        problem = (
            "is a PEFT model, whose adapters lie beside the weights; merge them into a copy "
            "(merge_and_unload) and push that"
        )
    if problem:
        raise refuse(Reason.REQUEST_INVALID, f"the module {problem}")


def _saved(model: Any, named: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return what transformers saves of its models; any other is saved as it is."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return named
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    left_out |= {
        target
        for target, source in tied.items()
        if target in named and source in named and _same(named[target], named[source])
    }
    kept = {name: tensor for name, tensor in named.items() if name not in left_out}
    # Releases before 5 fuse nothing when they load.
    revert = getattr(transformers, "revert_weight_conversion", None)
    return kept if revert is None else dict(revert(model, kept))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    where = one.data_ptr(), one.shape, one.stride(), one.dtype
    return where == (other.data_ptr(), other.shape, other.stride(), other.dtype)
