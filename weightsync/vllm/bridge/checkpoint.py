"""The files that the engine loaded its first weights from, offered to the server as descriptors."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentClient
from weightsync.vllm.bridge.renamed_file import renamed
from weightsync.vllm.draft import draft_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.shm.segment_socket import OfferedFile

__all__ = ["checkpoint_files", "offer_files"]


def _directory(model_config: Any, load_config: Any) -> Path:
    model = model_config.model
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    # vLLM has loaded it, so it is in the cache; nothing is downloaded here.
    return Path(
        snapshot_download(
            model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    )


def _indexed(directory: Path, index: str, files: list[Path]) -> list[Path]:
    """Keep the files of the index where there is one: some repositories hold tensors twice."""
    path = directory / index
    if not path.is_file():
        return files
    named = set(json.loads(path.read_text())["weight_map"].values())
    return [file for file in files if file.name in named]


def checkpoint_files(model_config: Any, load_config: Any) -> list[Path]:
    """Return the safetensors files that vLLM loads for a model, sorted by name.

    Args:
        model_config: VLLM's ModelConfig.
        load_config: VLLM's LoadConfig.

    Raises:
        WeightSyncError: ENGINE_UNSUPPORTED when it loads no safetensors files.
    """
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    try:
        directory = _directory(model_config, load_config)
    except OSError as error:
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED, f"the engine's checkpoint was not found: {error}"
        ) from error
    consolidated = sorted(directory.glob("consolidated*.safetensors"))
    if load_format in ("auto", "mistral") and consolidated:
        return _indexed(directory, "consolidated.safetensors.index.json", consolidated)
    files = [f for f in sorted(directory.glob("*.safetensors")) if f not in consolidated]
    files = _indexed(directory, "model.safetensors.index.json", files)
    if not files or load_format not in ("auto", "hf", "safetensors", "fastsafetensors"):
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED,
            f"the engine loads {model_config.model} in format {load_format}, which holds no "
            "safetensors files to prove the load plan with; serve a safetensors checkpoint",
        )
    return files


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the engine's checkpoint cannot be read: {error}; put the file back, readable to vLLM",
        ) from error


def _descriptors(config: Any) -> Iterator[tuple[str, int]]:
    """Yield name and descriptor of every file of the target's checkpoint and of the draft's."""
    for path in checkpoint_files(config.model_config, config.load_config):
        yield path.name, _opened(path)
    if not (prefix := draft_names(config)):
        return
    spec = config.speculative_config
    load_config = getattr(spec, "draft_load_config", None) or config.load_config
    for path in checkpoint_files(spec.draft_model_config, load_config):
        fd = _opened(path)
        try:
            yield prefix + path.name, renamed(fd, prefix)
        finally:
            os.close(fd)


def offer_files(config: Any, segment_socket: str, offer_id: str) -> list[str]:
    """Send read-only descriptors of the checkpoint files; returns their names in order.

    Raises:
        WeightSyncError: ENGINE_UNSUPPORTED as in `checkpoint_files`; ENGINE_REFUSED when a file
            cannot be read, or the server's segment socket does not take them.
    """
    with contextlib.ExitStack() as stack:
        offered: list[OfferedFile] = []
        for name, fd in _descriptors(config):
            stack.callback(os.close, fd)
            offered.append((name, os.fstat(fd).st_size, fd))
        try:
            client = stack.enter_context(SegmentClient(segment_socket))
            client.offer(offer_id, offered)
        except (OSError, LookupError) as error:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"the segment socket {segment_socket} did not take the checkpoint ({error}); "
                "share it with vLLM",
            ) from error
        return [name for name, _, _ in offered]
