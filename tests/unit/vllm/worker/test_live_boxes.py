"""Boxes of checkpoint tensors from the slices of load plans, against the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import (
    LoadPlan,
    PlanRefusedError,
    Slice,
    Strides,
    merge_neighbours,
)
from weightsync.vllm.worker.live_memory import placed_boxes


def _strides(view: torch.Tensor) -> Strides:
    return Strides(int(view.storage_offset()), tuple(view.shape), view.stride())


def _plan(
    shape: tuple[int, ...], *slices: Slice, same_as: dict[str, str] | None = None
) -> LoadPlan:
    tensors = {"t": ("F32", shape), **dict.fromkeys(same_as or {}, ("F32", shape))}
    return LoadPlan("s", tensors, slices, {"p": "F32"}, same_as=same_as or {})


def _copy(source: torch.Tensor, target: torch.Tensor) -> Slice:
    return Slice("t", "p", _strides(source), _strides(target), cast=False)


def _check(plan: LoadPlan, shape: tuple[int, ...], param: torch.Tensor) -> None:
    """Load a tensor by the plan; every box of it must show what the tensor has there."""
    tensor = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    flat = tensor.reshape(-1)
    for item in plan.slices:
        view_of(param, item.target).copy_(view_of(flat, item.source))
    boxes = placed_boxes(plan)
    seen = 0
    for box in boxes:
        item = plan.slices[box.index]
        live = param.as_strided(box.lengths, box.stride, item.target.offset)
        spans = zip(box.offsets, box.lengths, strict=True)
        assert torch.equal(live, tensor[tuple(slice(b, b + n) for b, n in spans)])
        seen += live.numel()
    assert seen == sum(item.source.numel for item in plan.slices)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((6, 4), (slice(2, 5), slice(None))),
        ((6, 4), (slice(None), slice(2, 4))),
        ((6, 4), (slice(1, 2), slice(None))),
        ((6, 1, 4), (slice(2, 4), slice(None), slice(0, 3))),
        ((5,), (slice(1, 4),)),
        ((3, 4, 5), (slice(1, 3), slice(1, 3), slice(None))),
        ((1, 1), (slice(None), slice(None))),
    ],
)
def test_a_part_is_its_box(shape: tuple[int, ...], part: tuple[slice, ...]) -> None:
    source = torch.zeros(shape)[part]
    param = torch.zeros(3, *source.shape)
    _check(_plan(shape, _copy(source, param[1])), shape, param)


def test_a_scalar_is_a_box() -> None:
    source, param = torch.zeros(()), torch.zeros(4)
    _check(_plan((), _copy(source, param[2])), (), param)


def test_a_transposed_copy_is_a_box_with_the_strides_of_the_parameter() -> None:
    source, param = torch.zeros(6, 4), torch.zeros(4, 6)
    _check(_plan((6, 4), _copy(source.T, param)), (6, 4), param)


def test_experts_that_were_joined_are_one_box_again() -> None:
    shape = (3, 4, 5)
    whole, param = torch.zeros(shape), torch.zeros(3, 2, 5)
    plan = merge_neighbours(_plan(shape, *(_copy(whole[i, 2:4], param[i]) for i in range(3))))
    assert len(plan.slices) == 1
    _check(plan, shape, param)


def test_all_that_was_joined_to_one_row_is_the_whole_tensor() -> None:
    shape = (3, 4, 5)
    whole, param = torch.zeros(shape), torch.zeros(shape)
    plan = merge_neighbours(_plan(shape, *(_copy(whole[i], param[i]) for i in range(3))))
    assert plan.slices[0].source.shape == (60,)
    _check(plan, shape, param)


def test_a_repeated_tensor_has_the_boxes_of_the_one_that_it_repeats() -> None:
    source, param = torch.zeros(6, 4), torch.zeros(6, 4)
    first, head = placed_boxes(_plan((6, 4), _copy(source, param), same_as={"head": "t"}))
    assert (first.tensor, head.tensor) == ("t", "head")
    assert (first.offsets, first.lengths, first.index) == (head.offsets, head.lengths, head.index)


def test_every_other_row_is_refused_by_name() -> None:
    source, param = torch.zeros(6, 4)[::2], torch.zeros(3, 4)
    with pytest.raises(PlanRefusedError, match="spread") as caught:
        placed_boxes(_plan((6, 4), _copy(source, param)))
    assert caught.value.names == ["t"]


def test_a_row_that_ends_in_the_next_one_is_refused() -> None:
    flat, param = torch.zeros(24), torch.zeros(4)
    with pytest.raises(PlanRefusedError):
        placed_boxes(_plan((6, 4), _copy(flat[2:6], param)))
