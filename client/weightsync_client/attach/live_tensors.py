"""The memory that a rank handed out, as tensors of PyTorch, alone or in a model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weightsync.errors import Reason
from weightsync.gpu.ipc import DeviceError, device_of
from weightsync.model.dtypes import torch_dtype
from weightsync.shm.attach_socket import RankMemory
from weightsync.shm.live_views import LiveBox
from weightsync_client.errors import ClientError, invalid, refuse
from weightsync_client.source.sharded_tensors import is_sharded
from weightsync_client.source.tensors import dtype_name


def open_memory(rank: RankMemory, stack: contextlib.ExitStack) -> list[torch.Tensor]:
    """Return each allocation of a rank as bytes; those of a GPU stay open until the stack ends.

    Raises a ClientError if this process does not see the rank's GPU.
    """
    if not rank.views.device:
        return [torch.frombuffer(mapping.view, dtype=torch.uint8) for mapping in rank.mappings]
    try:
        device = device_of(rank.views.device)
        # Each is opened once in this process: what shares it is a view.
        spans = [stack.enter_context(device.opened(handle)) for handle in rank.handles]
    except DeviceError as error:
        raise refuse(
            Reason.ENGINE_REFUSED,
            f"the GPU of rank {rank.views.rank} cannot be reached from here ({error}); run the "
            "trainer where vLLM's GPUs are visible, and in a container that shares vLLM's process "
            "namespace",
        ) from error
    where = f"cuda:{device.ordinal}"
    return [torch.as_tensor(_DeviceBytes(*span), device=where) for span in spans]


class _DeviceBytes:
    """Memory of a GPU as PyTorch takes it without a copy; `size` is in bytes."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def view_of_box(box: LiveBox, memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what lies in a box, without a copy; `memory` is its rank's allocations.

    Raises a ClientError if it is not within them, or of a dtype that this PyTorch lacks.
    """
    dtype = torch_dtype(box.dtype)
    if dtype is None:
        raise refuse(
            Reason.NOT_SUPPORTED,
            f"{box.tensor} is {box.dtype}, which this PyTorch has not; install a newer one",
        )
    steps = zip(box.lengths, box.stride, strict=True)
    last = sum((length - 1) * step for length, step in steps)
    end = box.begin + (last + 1) * dtype.itemsize
    if box.memory >= len(memory) or end > memory[box.memory].numel():
        raise refuse(
            Reason.FAULT,
            f"{box.tensor} is outside the memory that was shared; install the same weightsync "
            "release on both sides",
        )
    whole = memory[box.memory][box.begin : end].view(dtype)
    return whole.as_strided(box.lengths, box.stride)


class TensorKind(NamedTuple):
    """Safetensors dtype and shape of a whole tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def without_ties(tensors: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return tensors without those of an unknown name that are the same memory as a known one.

    Raises InvalidError unless all are tensors by name that have memory.
    """
    if not isinstance(tensors, Mapping):
        raise invalid(
            f"update takes tensors by name, not {type(tensors).__name__}; give it "
            "model.state_dict()",
        )
    for name, value in tensors.items():
        if not (is_sharded(value) or _is_dense(value)):
            raise invalid(
                f"{name} is not a dense PyTorch tensor with memory; give it as one",
            )
    places = {_place(tensor) for name, tensor in tensors.items() if name in known}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in known or _place(tensor) not in places
    }


def _is_dense(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout is torch.strided and not value.is_meta


def _place(tensor: Any) -> object:
    if is_sharded(tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def kind_of(name: str, tensor: Any) -> TensorKind:
    """Return what a tensor is; raises InvalidError if safetensors has no such dtype."""
    dtype = dtype_name(name, str(tensor.dtype).removeprefix("torch."))
    return TensorKind(dtype, tuple(tensor.shape))


#: What transformers 5 puts behind each other for each expert, as checkpoints of Qwen's and the
#: models after it call it; vLLM has them in this order as well.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

#: Experts, the rows of one, and their length.
_DIMS = 3


def fused_view(
    name: str, shape: Sequence[int], live: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return one view of experts that lie one behind the other, or None if they do not.

    `name` is the parameter's, such as `model.layers.0.mlp.experts.gate_up_proj`. `shape` is the
    number of experts, the rows of one, and their length. `live` has views by checkpoint name.
    """
    prefix, _, kind = name.rpartition(".")
    if kind not in _PARTS or len(shape) != _DIMS:
        return None
    names = [
        f"{prefix}.{expert}.{part}.weight" for expert in range(shape[0]) for part in _PARTS[kind]
    ]
    if any(each not in live for each in names):
        return None
    views = [live[each] for each in names]
    first, at = views[0], int(views[0].storage_offset())
    for view in views:
        if not _follows(view, first, at) or view.shape[1] != shape[2]:
            return None
        at += view.numel()
    if at - first.storage_offset() != math.prod(shape):
        return None
    stride = (shape[1] * shape[2], shape[2], 1)
    return first.as_strided(tuple(shape), stride, first.storage_offset())


def _follows(view: torch.Tensor, first: torch.Tensor, at: int) -> bool:
    """Tell whether a view begins at an element of the memory that another one lies in."""
    if view.dtype != first.dtype or view.ndim != first.ndim or not view.is_contiguous():
        return False
    same = view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return same and view.storage_offset() == at


#: Names in one refusal.
_SHOWN = 3


class _Place(NamedTuple):
    """Where a model keeps a tensor that has no memory yet."""

    module: torch.nn.Module
    table: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor


def put_into(model: torch.nn.Module, live: Mapping[str, torch.Tensor]) -> None:
    """Replace every parameter and buffer on the meta device by the live one of its name.

    The model's names are those of the checkpoint. Buffers that no checkpoint has, such as those of
    rotary embeddings, are computed by the model's own code if it is one of transformers. Tied
    tensors stay tied. A ClientError names what is not there; the model is unchanged.
    """
    places = list(_on_meta(model))
    if not places:
        raise invalid(
            "no tensor of the model is on the meta device; build it under `with "
            'torch.device("meta")`, so that it has no memory of its own',
        )
    found = _matched(model, places, live)
    device = next((view.device for view in found.values()), torch.device("cpu"))
    rest = [place for place in places if id(place.tensor) not in found]
    computed = _computed(model, rest, device)
    made: dict[int, torch.Tensor] = {}
    for place in places:
        key = id(place.tensor)
        if key in found and key not in made:
            made[key] = _alike(found[key], place.tensor)
        place.table[place.key] = made[key] if key in found else computed[place.name]


def _on_meta(model: torch.nn.Module) -> Iterator[_Place]:
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):  # noqa: SLF001 - as torch's loaders do
            for key, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    name = f"{prefix}.{key}" if prefix else key
                    yield _Place(module, table, key, name, tensor)


def _alike(view: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return a view as a parameter where what it replaces is one."""
    if not isinstance(old, torch.nn.Parameter):
        return view
    return torch.nn.Parameter(view, requires_grad=old.requires_grad)


def _matched(
    model: torch.nn.Module, places: Sequence[_Place], live: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return what replaces each tensor that a checkpoint has, by the identity of the tensor."""
    # A tied parameter has several names, of which the checkpoint may have one only.
    views = {place.name: _view(place, live) for place in places}
    found = {id(p.tensor): view for p in places if (view := views[p.name]) is not None}
    stored = model.state_dict(keep_vars=True).keys()
    lacking = [p.name for p in places if id(p.tensor) not in found and p.name in stored]
    if lacking:
        raise _refused(
            "the model has tensors that are not contiguous in the engine's memory",
            lacking,
            "build it with the names of the engine's checkpoint, and with tensor parallelism use "
            "boxes",
        )
    known = [place for place in places if id(place.tensor) in found]
    other = [p.name for p in known if found[id(p.tensor)].shape != p.tensor.shape]
    if other:
        raise _refused(
            "the model has tensors whose shape differs from the engine's",
            other,
            "build it from the configuration that Attached.config has",
        )
    return found


def _view(place: _Place, live: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if place.name in live:
        return live[place.name]
    return fused_view(place.name, place.tensor.shape, live)


def _computed(
    model: torch.nn.Module, rest: Sequence[_Place], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return what the model computes of its buffers that no checkpoint has, by name."""
    made = {place.name: _poisoned(place.tensor, device) for place in rest}
    initialise = getattr(model, "_init_weights", None)
    try:
        for place in rest:
            place.table[place.key] = made[place.name]
        for module in {id(place.module): place.module for place in rest}.values():
            if callable(initialise) and not list(module.parameters(recurse=False)):
                initialise(module)
    finally:
        for place in rest:
            place.table[place.key] = place.tensor
    left = [name for name, tensor in made.items() if not _filled(tensor)]
    if left:
        raise _refused(
            "these buffers are in no checkpoint, so their values are not known",
            left,
            'build them outside of `with torch.device("meta")`, so that they have values',
        )
    return made


def _poisoned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(tensor, device=device)
    return new.fill_(float("nan")) if new.is_floating_point() else new


def _filled(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isnan().any())


def _refused(what: str, names: Sequence[str], remedy: str) -> ClientError:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return refuse(Reason.ENGINE_REFUSED, f"{what} ({shown}{more}); {remedy}")
