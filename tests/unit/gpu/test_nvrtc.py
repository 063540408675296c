"""The kernels are compiled for every kind of device, and who has no compiler is told why."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.gpu import device_kernels
from weightsync.gpu.device_kernels import Kernels, NvrtcError, compile_source

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCE = device_kernels._SOURCE.read_text()


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the PyTorch of this host be one for CUDA."""
    device_kernels._library.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield
    device_kernels._library.cache_clear()


# T4, A100, L40, H100 and H200, B200.
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_the_kernels_are_compiled(capability: tuple[int, int]) -> None:
    code = compile_source(_SOURCE, "kernels.cu", capability)
    assert code.startswith(b"\x7fELF")
    for name in ("copy_spans", "compare_spans", "digest_texts"):
        assert name.encode() in code


def test_what_the_compiler_refuses_is_told_in_its_words() -> None:
    with pytest.raises(NvrtcError, match=r"NVRTC refused bad\.cu: .*identifier .nothing. is undef"):
        compile_source("__global__ void f(int* x) { *x = nothing; }", "bad.cu", (9, 0))


def test_a_device_that_there_is_not_is_told() -> None:
    with pytest.raises(NvrtcError, match="NVRTC refused"):
        compile_source(_SOURCE, "kernels.cu", (1, 0))


@pytest.mark.parametrize(
    ("version", "sentence"),
    [(None, "this PyTorch is not built for CUDA"), ("1.0", r"there is no NVRTC \(libnvrtc")],
)
def test_without_a_compiler_pytorchs_kernels_are_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    sentence: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(NvrtcError, match=sentence):
        compile_source(_SOURCE, "kernels.cu", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert Kernels.find(torch.device("cuda", 0)) is None
    assert "PyTorch's kernels are used on cuda" in caplog.text


def test_a_host_without_a_driver_uses_pytorchs_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = ctypes.CDLL

    def without(name: str, *args: Any, **named: Any) -> ctypes.CDLL:
        if name.startswith("libcuda.so"):
            raise OSError(name)
        return opened(name, *args, **named)

    monkeypatch.setattr(ctypes, "CDLL", without)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert Kernels.find(torch.device("cuda", 0)) is None
    assert "there is no CUDA driver" in caplog.text


def test_a_cpu_has_no_kernels() -> None:
    assert Kernels.find(torch.device("cpu")) is None
