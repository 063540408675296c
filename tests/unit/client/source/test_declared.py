"""What an iterable declares: as its trainer has it, checked before a byte is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from weightsync.errors import Reason
from weightsync_client import Client, InvalidError
from weightsync_client.source.shards import LayoutCache
from weightsync_client.source.tensor_stream import Declaration, Declared

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Source(WeightSource):  # type: ignore[misc]  # vLLM's types are Any here
    """Counts what was asked of it."""

    def __init__(self) -> None:
        self.tensors = {f"layers.{i}.weight": torch.ones(10, 3 + i) for i in range(4)}
        self.tensors["head"] = torch.ones(2).to(torch.bfloat16)
        self.given = 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.tensors.items():
            self.given += 1
            yield pair


def test_a_source_of_vllm_declares_itself(client: Client) -> None:
    source = _Source()
    pushed = client.push(Declared(source, source.metadata()), delta="never")
    assert pushed.tensor_count == source.given == 5


@pytest.mark.parametrize(
    "about",
    [
        ("head", "BF16", (2, 3)),
        ("head", torch.bfloat16, torch.Size((2, 3))),
        ["head", "bfloat16", np.array([2, 3])],
        ParamMeta("head", torch.bfloat16, (2, 3)),
    ],
)
def test_what_is_declared_of_a_tensor_comes_in_several_forms(about: Any) -> None:
    declared = Declaration([about], 100, LayoutCache())
    (tensor,) = declared.layout.tensors
    assert (tensor.name, tensor.dtype, tensor.shape) == ("head", "BF16", (2, 3))


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ([("a", "F32")], "entry of type tuple that is not name, dtype and shape"),
        ([7], "entry of type int"),
        ([(b"a", "F32", (1,))], "entry of type tuple"),
        ([("a", "F32", "x")], "entry of type tuple"),
        ([("a", "F31", (1,))], "'a' has dtype F31"),
        ([("a", "F32", (1,)), ("a", "F32", (1,))], "in the version twice"),
        ([("a", "F32", (-1,))], "entry of type tuple"),
        ([], "no shard|no tensor"),
    ],
)
def test_what_is_no_layout_is_refused_and_leaves_no_rank_waiting(
    client: Client, layout: list[Any], word: str
) -> None:
    source = _Source()
    with pytest.raises(InvalidError, match=word) as caught:
        client.push(Declared(source, layout))
    assert caught.value.reason in (Reason.LAYOUT_INVALID, Reason.REQUEST_INVALID)
    assert source.given == 5


def test_several_processes_do_not_push_it_together(client: Client) -> None:
    source = _Source()
    with pytest.raises(InvalidError, match="from one process without these"):
        client.push(Declared(source, source.metadata()), step=1)
    assert source.given == 5
