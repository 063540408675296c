"""Tensors of which a process holds boxes or ranges: DTensors, or as a caller describes them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from weightsync.errors import Reason
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.tensor_slices import Box, slice_name
from weightsync_client.errors import invalid, refuse
from weightsync_client.source.shards import is_strided, local_runs
from weightsync_client.source.tensors import SourceTensor, dtype_name, wrap

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class ShardedTensor(NamedTuple):
    """What one of several processes holds of a tensor, for frameworks without DTensors.

    Attributes:
        shape: Of the whole tensor, in elements.
        dtype: Its safetensors dtype name, such as "BF16".
        boxes: Offsets in the whole tensor, in elements, and the local tensor that begins there.
            Each element of the whole is in one box of one process; none: it holds nothing of it.
        replica: A lower writer holds the same boxes: it sends their bytes, this one digests, which
            are compared.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: Sequence[tuple[tuple[int, ...], Any]] = ()
    replica: bool = False


class BoxSource(NamedTuple):
    """A tensor, and what is pushed of it by this process.

    `whole` has no bytes. `boxes` says where in it each box begins and ends, and gives its bytes.
    With `replica`, a lower writer sends the same boxes.
    """

    whole: SourceTensor
    boxes: tuple[tuple[Box, SourceTensor], ...]
    replica: bool


def is_sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor) or _is_dtensor(value)


def box_source(name: str, value: object, writer: int) -> BoxSource:
    """Return what a process pushes of a tensor.

    `value` is a DTensor, a `ShardedTensor`, or a tensor that all hold whole and the first sends.
    `writer` is the number of this process among those that push.
    """
    if isinstance(value, ShardedTensor) or _is_dtensor(value):
        return _described(name, local_parts(name, value))
    tensor = wrap(name, value)
    whole = _whole(name, tensor.dtype, tensor.shape)
    box = Box((0,) * len(tensor.shape), tensor.shape)
    return BoxSource(whole, (_local(name, box, tensor),), replica=writer > 0)


def _is_dtensor(value: object) -> TypeGuard[DTensor]:
    # Not imported: who has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _whole(name: str, dtype: str, shape: Iterable[int]) -> SourceTensor:
    def no_bytes(_: object) -> Any:
        raise refuse(
            Reason.FAULT,
            f"report this fault: all of tensor {name!r} was asked of a process that has a part",
        )

    return SourceTensor(name, dtype, tuple(shape), no_bytes)


def _local(name: str, box: Box, tensor: SourceTensor) -> tuple[Box, SourceTensor]:
    # A process may hold several boxes of one tensor.
    return box, replace(tensor, name=slice_name(name, box), title=f"tensor {name!r}{box}")


def _described(name: str, value: ShardedTensor) -> BoxSource:
    if value.dtype not in DTYPE_BITS:
        raise refuse(
            Reason.LAYOUT_INVALID,
            f"tensor {name!r} has dtype {value.dtype!r}; use one of {' '.join(DTYPE_BITS)}",
        )
    boxes: list[tuple[Box, SourceTensor]] = []
    for offsets, local in value.boxes:
        tensor = wrap(name, local)
        dims = {len(offsets), len(tensor.shape), len(value.shape)}
        if tensor.dtype != value.dtype or len(dims) > 1 or min(offsets, default=0) < 0:
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"tensor {name!r} is {value.dtype} {list(value.shape)}, the box at {list(offsets)} "
                f"{tensor.dtype} {list(tensor.shape)}; give boxes of its dtype and dimensions",
            )
        # Of an empty tensor there is one box.
        if tensor.size or (0 in value.shape and not boxes):
            boxes.append(_local(name, Box(tuple(offsets), tensor.shape), tensor))
    return BoxSource(_whole(name, value.dtype, value.shape), tuple(boxes), value.replica)


def local_parts(name: str, value: ShardedTensor | DTensor) -> ShardedTensor:
    if isinstance(value, ShardedTensor):
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements, mesh = value.placements, value.device_mesh
    if any(placement.is_partial() for placement in placements):
        raise invalid(
            f"tensor {name!r} holds partial sums ({placements}); push its "
            "redistribute(placements=...) to shards or replicas",
        )
    dtype = dtype_name(name, str(value.dtype).removeprefix("torch."))
    if dtype == "F4":
        raise invalid(
            f"tensor {name!r} holds elements of half a byte; push its full_tensor()",
        )
    whole = tuple(value.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # This process is not in the mesh of the tensor.
        return ShardedTensor(whole, dtype)
    local, place = value.to_local(), tuple(coordinate)
    replica = _sender(mesh, tuple(placements), place) != int(mesh.mesh[place])
    if is_strided(placements):
        runs = local_runs(value.shape, placements, mesh.shape, place)
        parts = [(offsets, local[where]) for where, offsets in runs]
        if sum(part.numel() for _, part in parts) != local.numel():
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"tensor {name!r} has the local shape {list(local.shape)}, which is not what its "
                f"placements ({placements}) leave of it; push its full_tensor()",
            )
        return ShardedTensor(whole, dtype, parts, replica=replica)
    shape, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise refuse(
            Reason.LAYOUT_INVALID,
            f"tensor {name!r} has the local shape {list(local.shape)}, but its placements give "
            f"{list(shape)}; push its full_tensor()",
        )
    if not local.numel():
        return ShardedTensor(whole, dtype)
    return ShardedTensor(whole, dtype, [(tuple(offsets), local)], replica=replica)


@lru_cache(maxsize=64)
def _sender(
    mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> int:
    """Return the lowest of the ranks that hold what this one does, as far as the meshes tell.

    A tensor that tensor parallel leaves alone knows only the mesh of FSDP, but the ranks of the
    mesh that both are cut from hold it too. Without such a mesh several ranks send the same, which
    the server compares.
    """
    alike = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    holders = mesh.mesh[alike].reshape(-1).tolist()
    root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    places = {
        rank: (root.mesh == rank).nonzero().tolist() for rank in mesh.mesh.reshape(-1).tolist()
    }
    if any(len(place) != 1 for place in places.values()):
        return int(min(holders))
    seen = zip(*(place[0] for place in places.values()), strict=True)
    spanned = [len(set(along)) > 1 for along in seen]
    return min(int(_along(root.mesh, places[rank][0], spanned).min()) for rank in holders)


def _along(ranks: torch.Tensor, place: Sequence[int], spanned: Sequence[bool]) -> torch.Tensor:
    """Return the ranks at a place of a mesh, along all dimensions that are not spanned."""
    return ranks[tuple(at if own else slice(None) for at, own in zip(place, spanned, strict=True))]


class FlatRange(NamedTuple):
    """What a process holds of a tensor.

    `whole` is the tensor on PyTorch's meta device. `begin` counts elements row by row. `data` has
    one dimension, and is empty where the process holds nothing. With `replica`, a lower process
    holds the same.
    """

    whole: torch.Tensor
    begin: int
    data: torch.Tensor
    replica: bool = False


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that a range of elements is, in its order: at most 2 * dimensions - 1.

    `begin` and `end`, which is exclusive, count row by row.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        return _in_row(shape, last, begin, end)
    boxes = _in_row(shape, first - 1, begin, first * row)
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], index: int, begin: int, end: int) -> list[Box]:
    start = index * math.prod(shape[1:])
    return [
        Box((index, *box.offsets), (1, *box.sizes))
        for box in boxes_of(shape[1:], begin - start, end - start)
    ]


class FlatRanges:
    """Ranges of a model's tensors, while it is found out what a checkpoint makes of these.

    That uses tensors without bytes. A checkpoint may have a part of one as a tensor of its own,
    such as a fused expert. Each of `ranges` is given once per name.
    """

    def __init__(self, ranges: Iterable[FlatRange]) -> None:
        self._ranges = {id(part.whole): part for part in ranges}

    def views(self) -> AbstractContextManager[object]:
        """Within the block a part of a tensor is never copied, so that `local_part` finds it."""
        from torch.overrides import TorchFunctionMode

        class Views(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                del types
                if getattr(func, "__name__", "") == "contiguous" and args[0].is_meta:
                    return args[0]
                return func(*args, **(kwargs or {}))

        return Views()

    def local_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | ShardedTensor:
        """Return what the process holds of a meta tensor or a part of one; others as they are."""
        if not tensor.is_meta:
            return tensor
        base = tensor._base  # noqa: SLF001 - PyTorch has no other name for it
        part = self._ranges.get(id(tensor if base is None else base))
        if part is None or not tensor.is_contiguous():
            raise invalid(
                f"tensor {name!r} is not in the order in which the processes hold its elements; "
                "train with FSDP2 (fully_shard), or push a full state dict",
            )
        start = int(tensor.storage_offset())
        begin = max(part.begin, start)
        end = min(part.begin + len(part.data), start + tensor.numel())
        boxes, at = [], begin - part.begin
        for box in boxes_of(tensor.shape, begin - start, end - start):
            boxes.append((box.offsets, part.data[at : at + box.elements].view(box.sizes)))
            at += box.elements
        dtype = dtype_name(name, str(part.data.dtype).removeprefix("torch."))
        return ShardedTensor(tuple(tensor.shape), dtype, boxes, part.replica)
