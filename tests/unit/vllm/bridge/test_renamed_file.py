"""A draft's checkpoint comes to the server with the names that versions have."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load, save, save_file

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentServer
from weightsync.vllm.bridge.checkpoint import offer_files, renamed

if TYPE_CHECKING:
    from pathlib import Path


def _renamed(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        with os.fdopen(renamed(fd, "draft."), "rb") as copy:
            copy.seek(0)
            return copy.read()
    finally:
        os.close(fd)


def test_only_the_names_differ(tmp_path: Path) -> None:
    tensors = {"fc": torch.randn(5, 3), "norm": torch.ones(3, dtype=torch.bfloat16)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = load(_renamed(path))
    assert found.keys() == {"draft.fc", "draft.norm"}
    assert all(torch.equal(found[f"draft.{name}"], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, save({"a": torch.ones(1)})[:20]])
def test_what_is_no_safetensors_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightSyncError, match="the draft's checkpoint cannot be read") as caught:
        _renamed(path)
    assert caught.value.reason is Reason.ENGINE_REFUSED


def test_the_draft_is_offered_beside_its_target(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), len(name))}, tmp_path / name / "model.safetensors")
    load_config = SimpleNamespace(load_format="auto", download_dir=None)
    model, draft = (
        SimpleNamespace(model=str(tmp_path / name), revision=None) for name in ("target", "draft")
    )
    config = SimpleNamespace(
        model_config=model,
        load_config=load_config,
        speculative_config=SimpleNamespace(method="eagle", draft_model_config=draft),
    )
    server = SegmentServer(tmp_path / "s.sock")
    offer = server.expect_offer("o")
    names = ["model.safetensors", "draft.model.safetensors"]
    assert offer_files(config, str(tmp_path / "s.sock"), "o") == names
    found: dict[str, torch.Tensor] = {}
    for _, size, fd in offer.result(5):
        with os.fdopen(fd, "rb") as file:
            found |= load(os.pread(file.fileno(), size, 0))
    server.close()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "w": [6, 6],
        "draft.w": [5, 5],
    }
