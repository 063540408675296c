"""What counts as read of a version is what an operation read, not what was handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from weightsync.shm.staged_version import read_document
from weightsync.vllm.apply.segment_mappings import SegmentMappings
from weightsync.vllm.plan.model_parts import PartNames
from weightsync.vllm.plan.read_watch import ReadWatch
from weightsync.vllm.plan.staged_tensors import StagedTensors
from weightsync.vllm.shadow.vllm_load import VersionSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    made = Staging(tmp_path / "segments.sock")
    yield made
    made.close()


def test_only_what_was_read_counts(staging: Staging) -> None:
    tensors = {name: torch.randn(4, 6) for name in ("copied", "sliced", "converted", "left")}
    version = staging.stage_files([save(tensors)])
    path = str(staging.socket)
    staged = read_document(path, version.document.id)
    seen: list[int] = []
    target = torch.zeros(4, 6)
    layout, mappings = staged.manifest.layout, SegmentMappings()
    bytes_of = StagedTensors(layout, mappings.map(path, staged.segments))
    source = VersionSource(layout, bytes_of, seen.append)
    with ReadWatch() as watch:
        for name, tensor in source.of_part(PartNames(), watch):
            view = tensor.t()[1:].detach()
            if name == "copied":
                target.copy_(tensor)
            elif name == "sliced":
                target[0, :4] += view[0]
            elif name == "converted":
                tensor.to(torch.float64)
    assert watch.read == {"copied", "sliced", "converted"}
    assert seen == [0, 1, 2, 3]
    assert torch.equal(target[1:], tensors["copied"][1:])


def test_a_buffer_that_is_used_again_holds_the_last_tensor() -> None:
    buffer, target = torch.zeros(12), torch.zeros(6)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        # As readers that fill one buffer, piece by piece.
        yield from (("a", buffer[:6]), ("b", buffer[6:]), ("c", buffer[:4]), ("d", buffer))

    with ReadWatch() as watch:
        for name, tensor in watch.hand_out(stream()):
            if name in "bc":
                target[: tensor.numel()].copy_(tensor)
        assert watch.read == {"b", "c"}
        target.copy_(buffer[3:9])
    assert watch.read == {"b", "c", "d"}
