"""What a commit uses was used before: where it is compiled or loaded first, that takes a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.host_kernels import HostKernels
from weightsync.vllm.cuda.cuda_ops import warm_up
from weightsync.vllm.cuda.device_patch import DevicePatch
from weightsync.vllm.cuda.uploader import Uploader


@pytest.mark.parametrize("own", [True, False], ids=["own", "torch"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=str)
def test_a_patch_is_written_whatever_the_dtypes(
    monkeypatch: pytest.MonkeyPatch, of: torch.dtype, to: torch.dtype, own: bool
) -> None:
    written: list[int] = []
    write = DevicePatch.write

    def noted(self: DevicePatch, threads: Any) -> None:
        written.append(sum(scatter.positions.numel() for scatter in self.scatters))
        write(self, threads)

    monkeypatch.setattr(DevicePatch, "write", noted)
    uploader = Uploader(torch.empty(2 << 20, dtype=torch.uint8), None)
    mask = torch.zeros(1 << 20, dtype=torch.bool)
    with torch.inference_mode():
        warm_up(of, to, uploader, mask, HostKernels() if own else None)
    # One element of each of two parameters.
    assert written == [2]
