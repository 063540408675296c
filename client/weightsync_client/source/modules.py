"""The tensors of a PyTorch module under the names that its checkpoint has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync_client.errors import refuse

if TYPE_CHECKING:
    import torch

__all__ = ["check_plain", "is_module", "module_tensors", "plain_name", "unwrapped"]

#: What PyTorch puts into names for a wrapper around a part of a model: torch.compile, activation
#: checkpointing and FSDP.
_INFIXES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: Of state that is no tensor of the model, as Transformer Engine keeps it.
_EXTRA_STATE = "_extra_state"


def is_module(value: object) -> bool:
    """Whether a value is a PyTorch module; PyTorch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def module_tensors(
    module: torch.nn.Module, *, state: Iterable[tuple[str, torch.Tensor]] | None = None
) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a module as a checkpoint of it has them.

    Wrappers leave no trace in the names: DistributedDataParallel and DataParallel, torch.compile,
    activation checkpointing. Of a model of transformers it is what its `save_pretrained` writes:
    tied weights once, experts that it fused one by one, under the names that they had. Those
    experts are copied for it, on their device; no other tensor is.

    Args:
        module: The model, or a wrapper around it.
        state: Its tensors by name, where those of its state dict are not what it computes with.

    Raises:
        InvalidError: Its parameters are not its weights: FSDP1 holds flat ones, DeepSpeed ZeRO-3
            parts of them.
    """
    model = unwrapped(module)
    check_plain(model)
    named: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items() if state is None else state:
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
    return _saved(model, named)


def plain_name(name: str) -> str:
    """Return the name of a tensor or a part as it is without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _INFIXES)


def unwrapped(module: Any) -> Any:
    """Return the model that DistributedDataParallel, DataParallel and torch.compile wrap."""
    import torch

    around = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while isinstance(module, around) or "_orig_mod" in module._modules:  # noqa: SLF001 - torch.compile's
        module = module.module if isinstance(module, around) else module._orig_mod  # noqa: SLF001
    return module


def check_plain(model: Any) -> None:
    """Refuse a model whose parameters are not its weights.

    Raises:
        InvalidError: So it is; the sentence says what to push instead.
    """
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
        if target in named and source in named and _same(model, named, target, source)
    }
    kept = {name: tensor for name, tensor in named.items() if name not in left_out}
    # Releases before 5 fuse nothing when they load.
    revert = getattr(transformers, "revert_weight_conversion", None)
    return kept if revert is None else dict(revert(model, kept))


def _same(model: Any, named: Mapping[str, torch.Tensor], target: str, source: str) -> bool:
    """Whether two names are of one tensor, on all ranks alike."""
    one, other = named[target], named[source]
    if hasattr(one, "to_local") or hasattr(other, "to_local"):
        # A DTensor lies nowhere, and what a rank has of it may be empty.
        own = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        return own.get(target) is own.get(source) is not None
    where = one.data_ptr(), one.shape, one.stride(), one.dtype
    return where == (other.data_ptr(), other.shape, other.stride(), other.dtype)
