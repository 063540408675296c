"""Folders that a new vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightsync.errors import Reason
from weightsync_client import ClientError
from weightsync_client.errors import refuse
from weightsync_client.trainer.checkpoint_files import write_checkpoint


class _Client:
    """Pulls a version."""

    error: ClientError | None = None

    def pull(self, path: Path, version: int) -> None:
        path.mkdir()
        (path / "model.safetensors").write_text(f"weights of {version}")
        if self.error:
            raise self.error


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        (folder / name).write_text(name)
    for name in ("model-1.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_text("old weights")
    return folder


def _write(checkpoint: str, target: Path, client: Any = None, **config: Any) -> str:
    attached = SimpleNamespace(checkpoint=checkpoint, config=config)
    return write_checkpoint(client or cast("Any", _Client()), cast("Any", attached), 7, target)


def test_it_has_the_weights_and_what_came_beside_the_old_ones(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made/below/here"
    assert _write(str(source), target) == ""
    assert {path.name for path in target.iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
    }
    assert (target / "model.safetensors").read_text() == "weights of 7"
    assert [path.name for path in target.parent.iterdir()] == ["here"]


def test_without_files_it_has_the_configuration(tmp_path: Path) -> None:
    missing = _write("no such/model", tmp_path / "x", hidden_size=4)
    assert json.loads((tmp_path / "x/config.json").read_text()) == {"hidden_size": 4}
    assert missing.startswith("the folder has no tokenizer, for none was found")


def test_what_a_vllm_would_miss_is_named(source: Path, tmp_path: Path) -> None:
    missing = _write("memory", tmp_path / "x")
    assert missing.startswith("the folder has no config.json and no tokenizer, for none was found")
    assert "beside the engine's checkpoint memory; copy" in missing
    (source / "config.json").unlink()
    assert "has no config.json, for" in _write(str(source), tmp_path / "y")


def test_one_that_is_there_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    with pytest.raises(ClientError, match="is there already"):
        _write(str(source), target)
    assert not [*target.iterdir()]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "x"}


def test_what_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    client = _Client()
    client.error = refuse(Reason.VERSION_UNKNOWN, "it has gone")
    with pytest.raises(ClientError, match="it has gone"):
        _write(str(source), tmp_path / "x", client)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    # What a process that died has left is in nobody's way.
    (tmp_path / ".x.new").mkdir()
    _write(str(source), tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "x"}


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClientError, match="cannot be written"):
        _write(str(source), tmp_path / "file/x")
