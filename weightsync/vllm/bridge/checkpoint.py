"""The files that the engine loaded its first weights from, offered to the server as descriptors."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import (
    INDEX,
    CheckpointFile,
    CheckpointFolder,
    in_memory,
    packed,
    read_file,
    read_header,
    read_index,
    shown,
)
from weightsync.shm.segment_socket import OfferedFile, SegmentClient
from weightsync.vllm.draft import draft_names

logger = logging.getLogger(__name__)


def renamed(fd: int, prefix: str, name: str = "model.safetensors") -> int:
    """Return a descriptor of the same tensors with longer names, in memory; the caller closes it.

    `name` is that of the file, for errors. Raises ENGINE_REFUSED when `fd` is no safetensors file,
    or there is no memory.
    """
    size = os.fstat(fd).st_size
    try:
        header = read_header(name, fd, size)
        names = {
            name if name == "__metadata__" else prefix + name: value
            for name, value in json.loads(header).items()
        }
    except (ValueError, AttributeError, RecursionError, WeightSyncError) as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the draft's checkpoint cannot be read: {error}; restore its files",
        ) from error
    text = json.dumps(names, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        return in_memory(text, fd, [(8 + len(header), size)], "the draft's checkpoint")
    except WeightSyncError as error:
        raise WeightSyncError(Reason.ENGINE_REFUSED, error.message) from error


_MISTRAL_INDEX = "consolidated.safetensors.index.json"
#: What decides between copies, as `CheckpointFolder` says it.
_ORDER = "the order in which vLLM reads files"


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


def _index(directory: Path, name: str) -> Mapping[str, str]:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return read_index(folder, name)
    except (WeightSyncError, OSError) as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED, f"the engine's checkpoint cannot be read: {error}"
        ) from error
    finally:
        os.close(folder)


def checkpoint_files(
    model_config: Any, load_config: Any
) -> tuple[list[Path], str, Mapping[str, str]]:
    """Return the safetensors files that vLLM loads for a model, by name, and their index, named.

    Raises ENGINE_UNSUPPORTED if there are none, ENGINE_REFUSED if their index cannot be read.
    """
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    try:
        directory = _directory(model_config, load_config)
    except OSError as error:
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED, f"the engine's checkpoint was not found: {error}"
        ) from error
    consolidated = sorted(directory.glob("consolidated*.safetensors"))
    mistral = load_format in ("auto", "mistral") and bool(consolidated)
    others = [f for f in sorted(directory.glob("*.safetensors")) if f not in consolidated]
    name = _MISTRAL_INDEX if mistral else INDEX
    index = _index(directory, name)
    # Some repositories hold tensors twice: vLLM, too, reads the files of the index alone.
    named = set(index.values())
    files = [f for f in (consolidated if mistral else others) if not index or f.name in named]
    if mistral:
        return files, name, index
    if not files or load_format not in ("auto", "hf", "safetensors", "fastsafetensors"):
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED,
            f"the engine loads {model_config.model} in format {load_format}, which has no "
            "safetensors files to check the load plan against; serve a safetensors checkpoint",
        )
    return files, name, index


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the engine's checkpoint cannot be read: {error}; put the file back, readable to vLLM",
        ) from error


def _descriptors(config: Any, stack: contextlib.ExitStack) -> Iterator[tuple[str, int]]:
    yield from _settled(config.model_config, config.load_config, stack)
    if not (prefix := draft_names(config)):
        return
    spec = config.speculative_config
    load_config = getattr(spec, "draft_load_config", None) or config.load_config
    with contextlib.ExitStack() as drafts:
        for name, fd in _settled(spec.draft_model_config, load_config, drafts):
            copy = renamed(fd, prefix, name)
            stack.callback(os.close, copy)
            yield prefix + name, copy


def _settled(
    model_config: Any, load_config: Any, stack: contextlib.ExitStack
) -> Iterator[tuple[str, int]]:
    """Yield the files without the copies of tensors that vLLM has overwritten.

    vLLM reads every file that its index names, and holds what it reads last, whatever the index
    prefers. The same goes for what an index tells and no file holds.
    """
    paths, name, index = checkpoint_files(model_config, load_config)
    files: list[CheckpointFile | tuple[str, int]] = []
    for path in paths:
        fd = _opened(path)
        stack.callback(os.close, fd)
        try:
            files.append(read_file(path.name, fd))
        except (WeightSyncError, OSError):
            # The server says what is wrong with it.
            files.append((path.name, fd))
    read = tuple(file for file in files if isinstance(file, CheckpointFile))
    if len(read) < len(files):
        yield from ((f.name, f.fd) if isinstance(f, CheckpointFile) else f for f in files)
        return
    folder = CheckpointFolder(read, index, index_name=name)
    for wrong in folder.wrong_entries():
        logger.warning("%s; the engine's checkpoint is taken as its files are", wrong)
        break
    last = {name: max(of, key=_turn) for name, of in folder.holders.items() if len(of) > 1}
    try:
        yield from _packed(replace(folder, index={**index, **last}, index_name=_ORDER), stack)
    except WeightSyncError as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED, f"the engine's checkpoint cannot be read: {error.message}"
        ) from error


def _turn(name: str) -> list[tuple[int, str]]:
    """Return when vLLM reads a file: by its name, with each number in it as a number."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _packed(folder: CheckpointFolder, stack: contextlib.ExitStack) -> Iterator[tuple[str, int]]:
    for file, tensors in zip(folder.files, folder.chosen(), strict=True):
        if tensors == file.tensors:
            yield file.name, file.fd
        elif tensors:
            fd = packed(file, tensors, shown(file.name))
            stack.callback(os.close, fd)
            yield file.name, fd


def offer_files(config: Any, segment_socket: str, offer_id: str) -> list[str]:
    """Send read-only descriptors of the checkpoint files; returns their names in order."""
    with contextlib.ExitStack() as stack:
        offered: list[OfferedFile] = []
        for name, fd in _descriptors(config, stack):
            offered.append((name, os.fstat(fd).st_size, fd))
        try:
            client = stack.enter_context(SegmentClient(segment_socket))
            client.offer(offer_id, offered)
        except (OSError, LookupError) as error:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"the segment socket {segment_socket} did not accept the checkpoint ({error}); "
                "share the socket with vLLM",
            ) from error
        return [name for name, _, _ in offered]
