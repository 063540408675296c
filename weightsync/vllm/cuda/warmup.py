"""Everything that a commit on a device uses, used once while the engine stands.

The first use of a kernel takes tens of milliseconds, which must be those of no pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.cuda.blocks import lay_out
from weightsync.vllm.cuda.device_patch import DevicePatch
from weightsync.vllm.cuda.direct_write import Direct
from weightsync.vllm.cuda.patch_find import PatchFinder, fill, groups_of
from weightsync.vllm.cuda.read_progress import ReadProgress
from weightsync.vllm.cuda.scatter import Scatter, launch_of
from weightsync.vllm.cuda.staged_write import Staged, send_blocks
from weightsync.vllm.cuda.tensor_digests import digests_of
from weightsync.vllm.cuda.uploader import StreamThrottle
from weightsync.vllm.plan.int_views import as_ints
from weightsync.vllm.plan.live_params import LiveParameters, Targets
from weightsync.vllm.plan.load_plan import Slice, Strides

if TYPE_CHECKING:
    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.cuda.uploader import Uploader

__all__ = ["warm_up"]

_SIDE = 64
_WHOLE = Strides(0, (_SIDE, _SIDE), (_SIDE, 1))
#: The left half of a matrix, as row-parallel layers have it.
_HALF = Strides(0, (_SIDE, _SIDE // 2), (_SIDE, 1))


def warm_up(
    of: torch.dtype,
    to: torch.dtype,
    uploader: Uploader,
    mask: torch.Tensor,
    kernels: Kernels | None,
) -> None:
    """Stage, find, write and compare two small tensors in every way, on the current stream.

    Args:
        of: Dtype of the tensors.
        to: Dtype of the parameters that they are copied to.
        uploader: As in earnest.
        mask: As in earnest.
        kernels: As in earnest.
    """
    device, threads = mask.device, SliceThreads(1)
    model = torch.nn.Module()
    for name, width in (("whole", _SIDE), ("left", _SIDE // 2)):
        model.register_buffer(name, torch.zeros(_SIDE, width, dtype=to, device=device))
    narrow = Strides(0, (_SIDE, _SIDE // 2), (_SIDE // 2, 1))
    slices = [
        Slice("whole", "whole", _WHOLE, _WHOLE, cast=of != to),
        Slice("left", "left", _HALF, narrow, cast=of != to),
    ]
    tensor = torch.zeros(_SIDE, _SIDE, dtype=of)
    # A change whatever it is converted to: the smallest bit would be nothing in another dtype.
    tensor[0, 0] = 1
    sources = [tensor, tensor[:, : _SIDE // 2]]
    targets = Targets(LiveParameters(model), slices)
    blocks = lay_out(slices, {"whole": to, "left": to})
    targets.views()
    memory = torch.zeros(blocks.size, dtype=torch.uint8, device=device)
    pace = StreamThrottle(device)
    reading = ReadProgress([0, 0], 1, lambda _: None)
    send_blocks(blocks, sources, memory, uploader, pace, bool, reading)
    staged = Staged(targets, blocks.all, memory, mask, kernels)
    _patch(staged, pace, threads)
    direct = Direct(targets, slices, sources, range(2), uploader, mask, [None] * 2, None)
    digests_of(kernels, dict(enumerate(targets.views())))
    for work in (staged, direct):
        work.write(threads)
        work.verify(threads)


def _patch(staged: Staged, pace: StreamThrottle, threads: SliceThreads) -> None:
    found = PatchFinder().find(staged, pace, bool)
    if found is None:
        return
    made = {}
    for width, count in found.counts.items():
        row = as_ints(staged.targets.param("whole")).reshape(-1)
        positions = torch.zeros(count, dtype=torch.int64, device=row.device)
        whole = torch.zeros(count, dtype=torch.int64, device=row.device)
        values = row.new_zeros(count)
        launch = launch_of(staged.kernels, row, positions, values)
        made[width] = Scatter(row, positions, values, whole.view(row.dtype)[:count], whole, launch)
    fill(found, made, pace, bool)
    # Also as for what our kernels do not look at.
    plain = Staged(staged.targets, staged.blocks, staged.memory, staged.mask)
    (group,) = groups_of(plain, plain.blocks)
    for scatter in made.values():
        group.finder.count(pace.step)
        chosen, begin = [True] * len(group.pieces), scatter.row.data_ptr()
        group.finder.take(chosen, begin, scatter.positions, scatter.values, pace.step)
        # Both parameters are not in one row here.
        scatter.positions.zero_()
    rest = Staged(staged.targets, found.dense, staged.memory, staged.mask, staged.kernels)
    patch = DevicePatch("", staged.targets, list(made.values()), rest)
    patch.write(threads)
    patch.verify(threads)
