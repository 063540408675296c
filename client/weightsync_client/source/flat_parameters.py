"""What a process holds of models with flat parameters: PyTorch's FSDP1 and DeepSpeed's ZeRO-3.

Both lay tensors out in a row and cut that into one range for each process. Nothing is gathered, and
no other process takes part. Neither library is imported: who has such a model has done so.
"""

# ruff: noqa: SLF001 - neither library has a public name for what a process holds

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync_client.errors import refuse
from weightsync_client.source.flat_ranges import FlatRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["flat_ranges_of", "has_flat_parameters", "whole_state"]

#: By the module that has a parameter, and its name in there.
Ranges = dict[Any, dict[str, FlatRange]]


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether FSDP1 or ZeRO-3 has parted parameters of a module."""
    return bool(_fsdp1_units(module)) or any(map(_is_parted, module.parameters()))


def flat_ranges_of(module: torch.nn.Module) -> Ranges:
    """Return what this process holds of the flat parameters of a module, and of its parts.

    A parameter with several names is the same range under each.

    Raises:
        InvalidError: What it holds of one of them cannot be pushed.
    """
    ranges: Ranges = {}
    for unit in _fsdp1_units(module):
        if unit._handle is not None:
            _note_fsdp1(unit, ranges)
    known: dict[int, FlatRange] = {}
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and _is_parted(parameter):
                if id(parameter) not in known:
                    known[id(parameter)] = _of_zero3(_joined(path, name), parameter)
                ranges.setdefault(part, {})[name] = known[id(parameter)]
    return ranges


def whole_state(
    module: torch.nn.Module, model: torch.nn.Module, ranges: Ranges
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the state dict of a model would have, but for flat parameters without bytes.

    Args:
        module: The model with all that is around it.
        model: The part whose state is meant.
        ranges: Of the flat parameters.
    """
    dtypes = _buffer_dtypes(module)
    for path, part in model.named_modules(remove_duplicate=False):
        tensors = {
            name: parameter.detach()
            for name, parameter in part._parameters.items()
            if parameter is not None and not hasattr(parameter, "_is_flat_param")
        }
        tensors |= {name: local.whole for name, local in ranges.get(part, {}).items()}
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors[name] = buffer.to(dtypes.get(id(buffer), buffer.dtype))
        for name, tensor in tensors.items():
            yield _joined(path, name), tensor


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_parted(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def _refused(name: str, problem: str) -> Exception:
    return refuse(Reason.REQUEST_INVALID, f"parameter {name!r} {problem}")


# FSDP1.


def _fsdp1_units(module: torch.nn.Module) -> Sequence[Any]:
    wrappers = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return wrappers.FullyShardedDataParallel.fsdp_modules(module) if wrappers else ()


def _note_fsdp1(unit: Any, ranges: Ranges) -> None:
    import torch

    handle, flat = unit._handle, unit._handle.flat_param
    if handle._use_orig_params and not handle._skip_writeback_check:
        # As before each forward: what was put in the place of a parameter's memory is copied.
        handle._writeback_orig_params()
    # While a unit computes, its data are those of all processes, or of another dtype.
    shard = getattr(flat, "_local_shard", flat.data)
    replica = _is_replica(unit)
    facts = flat._param_infos, flat._fqns, flat._shapes, flat._shard_param_infos
    flags = flat._contiguities, flat._param_extensions
    for info, fqn, shape, span, contiguous, extension in zip(*facts, *flags, strict=True):
        if extension is not None:
            raise _refused(
                fqn,
                "is sharded by FSDP1 and by tensor parallelism; use FSDP2 (fully_shard) with that, "
                "or push a full state dict",
            )
        if not contiguous:
            raise _refused(
                fqn,
                "has its elements in another order than its shape, such as channels_last; make it "
                "contiguous before FSDP1 wraps it, or push a full state dict",
            )
        begin, data = 0, shard[:0]
        if span.in_shard:
            begin, at = span.intra_param_start_idx, span.offset_in_shard
            data = shard[at : at + span.numel_in_shard]
        whole = torch.empty(shape, dtype=shard.dtype, device="meta")
        of_module = ranges.setdefault(info.module, {})
        of_module[info.param_name] = FlatRange(whole, begin, data, replica)
    for shared in flat._shared_param_infos:
        prime = ranges[shared.prim_module][shared.prim_param_name]
        ranges.setdefault(shared.module, {})[shared.param_name] = prime


def _is_replica(unit: Any) -> bool:
    """Whether a process of a lower number holds the same of a unit's parameters."""
    from torch.distributed import get_process_group_ranks, get_rank

    alike = getattr(unit, "_inter_node_pg", None)
    if not unit._handle.uses_sharded_strategy:
        alike = unit.process_group
    return alike is not None and get_rank() != min(get_process_group_ranks(alike))


def _buffer_dtypes(module: torch.nn.Module) -> dict[int, torch.dtype]:
    """Return what dtypes buffers have in a checkpoint, where they compute with another."""
    dtypes: dict[int, torch.dtype] = {}
    for unit in _fsdp1_units(module):
        from torch.distributed.fsdp._common_utils import clean_tensor_name

        known = unit._buffer_name_to_orig_dtype
        for name, buffer in unit.named_buffers():
            dtypes[id(buffer)] = known.get(clean_tensor_name(name), buffer.dtype)
    return dtypes


# ZeRO-3.


def _of_zero3(name: str, parameter: Any) -> FlatRange:
    import torch

    partition = parameter.ds_tensor
    if partition.status.name != "AVAILABLE":
        raise _refused(
            name,
            "is offloaded to a disk by ZeRO-3; offload parameters to the CPU, or push its full "
            "state dict, gathered by deepspeed.zero.GatheredParameters",
        )
    if hasattr(partition, "ds_quant_scale"):
        raise _refused(
            name,
            "is kept quantised by ZeRO-3; train without zero_quantized_nontrainable_weights, or "
            "push its full state dict, gathered by deepspeed.zero.GatheredParameters",
        )
    begin = partition.ds_numel * parameter.ds_zero_partition_rank
    # The last of them are filled up.
    count = max(0, min(partition.ds_numel, parameter.ds_numel - begin))
    whole = torch.empty(parameter.ds_shape, dtype=partition.dtype, device="meta")
    return FlatRange(whole, begin, partition.detach().reshape(-1)[:count])
