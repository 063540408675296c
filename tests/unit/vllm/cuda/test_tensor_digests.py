"""Small tensors come to the host at once, wherever each of them lies."""

from __future__ import annotations

import pytest
import torch

from tests.support.host_kernels import HostKernels
from weightsync.vllm.cuda.staging_proof import digests_of, small_digests
from weightsync.vllm.plan.int_views import tensor_digest_of


def test_tensors_of_several_devices_are_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(8.0), "b": torch.arange(4), "other": torch.arange(6.0)}
    cat = torch.cat
    joined: list[int] = []

    def note(parts: list[torch.Tensor]) -> torch.Tensor:
        assert len({part.device for part in parts}) == 1
        joined.append(len(parts))
        # There is one device here: what lies on the other has no bytes.
        return cat(parts) if parts[0].device.type == "cpu" else torch.zeros(24, dtype=torch.uint8)

    monkeypatch.setattr(torch, "cat", note)
    found = small_digests({**tensors, "other": tensors["other"].to("meta")})
    assert sorted(joined) == [1, 2]
    assert found["a"] == tensor_digest_of(tensors["a"])
    assert found["b"] == tensor_digest_of(tensors["b"])
    assert set(found) == set(tensors)


def test_what_is_large_or_empty_is_left_out() -> None:
    assert set(small_digests({"big": torch.zeros(2000), "none": torch.zeros(0)})) == set()


def test_a_kernel_is_given_no_memory_of_another_kind() -> None:
    kernels = HostKernels()
    tensors = {"here": torch.arange(1000.0), "there": torch.zeros(1000, device="meta")}
    assert set(digests_of(kernels, tensors)) == {"here"}
    assert kernels.ran == ["digest_texts"]
