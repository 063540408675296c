"""Trainers whose ranks act together, and flat parameters: PyTorch's FSDP1 and DeepSpeed's ZeRO-3.

Both lay tensors out in a row and cut that into one range for each process. Nothing is gathered, no
other process takes part, and neither library is imported. A rank that raised alone would leave the
others in the next collective of the training.
"""

# ruff: noqa: SLF001 - neither library has a public name for what a process holds

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weightsync_client.errors import ClientError, invalid
from weightsync_client.source.sharded_tensors import FlatRange, is_sharded

if TYPE_CHECKING:
    import torch


#: By the module that has a parameter, and its name in there.
Ranges = dict[Any, dict[str, FlatRange]]


def has_flat_parameters(module: torch.nn.Module) -> bool:
    return bool(_fsdp1_units(module)) or any(map(_is_parted, module.parameters()))


def flat_ranges_of(module: torch.nn.Module) -> Ranges:
    """Return what this process holds of a module's flat parameters, under each of their names."""
    ranges: Ranges = {}
    for unit in _fsdp1_units(module):
        if unit._handle is not None:
            _note_fsdp1(unit, ranges)
    known: dict[int, FlatRange] = {}
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and _is_parted(parameter):
                if id(parameter) not in known:
                    known[id(parameter)] = _of_zero3(joined(path, name), parameter)
                ranges.setdefault(part, {})[name] = known[id(parameter)]
    return ranges


def whole_state(
    module: torch.nn.Module, model: torch.nn.Module, ranges: Ranges
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state dict of `model`, a part of `module`; flat parameters are without bytes."""
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
            yield joined(path, name), tensor


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_parted(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def _refused(name: str, problem: str) -> Exception:
    return invalid(f"parameter {name!r} {problem}")


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


T = TypeVar("T")


def holds_parts(model: Any) -> bool:
    """Whether a rank has parts of a model, as with FSDP, ZeRO-3 or tensor parallel, and not all."""
    if has_flat_parameters(model) or any(map(is_sharded, model.parameters())):
        return True
    # Between a forward pass and the next backward, FSDP2 may show whole parameters.
    fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, fsdp2) for module in model.modules())


class RankGoneError(RuntimeError):
    """A rank does not talk to the others any more."""


class TrainerRanks:
    """All ranks of torch.distributed; each calls the same methods in the same order.

    To make one is such a call. Where one has gone, what it says to the others raises
    `RankGoneError`. A `group` of None is the default one.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed

        self._distributed: Any = torch.distributed
        self._group = group
        self.count: int = self._distributed.get_world_size()
        self.number: int = self._distributed.get_rank()
        self._name: str = self.agree(uuid.uuid4().hex)
        self._keys = 0

    def for_a_thread(self) -> TrainerRanks:
        """Return the same ranks for another thread; end them with `close`.

        Two threads in one group would mix up what they say.
        """
        return TrainerRanks(self._distributed.new_group(backend="gloo"))

    def close(self) -> None:
        # Whoever ends torch.distributed has ended it before.
        if self._group is not None and self._distributed.is_initialized():
            self._distributed.destroy_process_group(self._group)

    def agree(self, value: T) -> T:
        """Return the value of rank 0; a small one that can be pickled."""
        values = [value]
        with _name_gone_rank():
            self._distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def next_key(self) -> str:
        """Return a key that all ranks get, and that none gets again."""
        self._keys += 1
        return f"{self._name}/{self._keys}"

    def together(self, call: Callable[[], T]) -> T:
        """Call it on every rank, and return when all have.

        Raises:
            ClientError: Of the lowest rank that failed; notes have those of others that differ.
            Exception: Its own, if it is none of the client's.
            RuntimeError: Another rank raised such a one.
        """
        try:
            result = call()
        except Exception as error:
            self._settle(error)
            raise
        self._settle(None)
        return result

    def on_first(self, call: Callable[[], T]) -> T | None:
        """Return the result of `call` on rank 0; the others return None when it is done.

        Raises as `together` does.
        """
        first: Callable[[], T | None] = call
        return self.together(first if self.number == 0 else lambda: None)

    def broadcast(self, call: Callable[[], T]) -> T:
        """Return on all ranks the result, which can be pickled, of `call` on rank 0.

        Raises as `together` does.
        """
        return cast("T", self.agree(self.on_first(call)))

    def _settle(self, own: Exception | None) -> None:
        mine = (
            own if own is None or isinstance(own, ClientError) else f"{type(own).__name__}: {own}"
        )
        all_errors: list[Any] = [None] * self.count
        with _name_gone_rank():
            self._distributed.all_gather_object(all_errors, mine, group=self._group)
        errors = {rank: error for rank, error in enumerate(all_errors) if error is not None}
        crashed = next((rank for rank, error in errors.items() if isinstance(error, str)), None)
        if crashed is not None:
            # A fault of the program; an adapter that logs errors must end on all ranks, too.
            if own is not None and isinstance(mine, str):
                raise own
            raise RuntimeError(f"rank {crashed} of the trainer failed: {errors[crashed]}")
        if errors:
            raise _first_of(errors)


@contextmanager
def _name_gone_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        msg = f"a rank of the trainer has exited ({first})"
        raise RankGoneError(msg) from error


def _first_of(errors: dict[int, ClientError]) -> ClientError:
    (_, first), *others = errors.items()
    for rank, error in others:
        if error.message != first.message:
            first.add_note(f"rank {rank}: {error.message}")
    return first
