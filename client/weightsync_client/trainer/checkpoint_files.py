"""A version as a folder that a new vLLM loads: safetensors, and what came beside those."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync.wire.file_limits import write_remedy
from weightsync_client.errors import refuse
from weightsync_client.trainer.checkpoint_marks import (
    FolderOwner,
    mark_folder,
    remove_old,
    remove_unfinished,
    work_folder,
)
from weightsync_client.trainer.synced_folder import sync_folder, sync_path

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection

    from weightsync_client.attach import Attached
    from weightsync_client.client import Client
    from weightsync_client.errors import ClientError

__all__ = ["write_checkpoint"]

logger = logging.getLogger(__name__)

#: What holds weights, or tells where they lie: the version's own take their place.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_CONFIG = "config.json"
#: Files of which each tokenizer has one; tokenizer_config.json alone is none.
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "tekken.json", "*.tiktoken")


def write_checkpoint(
    client: Client,
    attached: Attached,
    version: int,
    target: Path,
    owner: FolderOwner,
    stop: threading.Event,
    others: Collection[str] = (),
) -> str:
    """Write a version; the folder appears whole, proved and durable, or not at all.

    Of the folders that this owner has made below the same one the oldest goes, where there are
    more than it keeps; never one that it has not made, or that somebody has changed.

    Return what a vLLM would miss in it, one sentence; "": nothing.

    Beside the weights it has the files of the engine's checkpoint, such as configuration and
    tokenizer; of one that is not on this host's disk only `config.json`.

    Args:
        client: Pulls the version.
        attached: Knows what the engine has loaded.
        version: Its number.
        target: The folder, which is not there.
        owner: Whose it is.
        stop: Set once nobody waits for it any more.
        others: What other engines of this host have loaded, as `attached.checkpoint`: it stays.

    Raises:
        ClientError: It cannot be written, the version cannot be pulled, or it was stopped.
    """
    work = work_folder(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(target.parent, owner)
        _make(work)
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        mark_folder(work, target, owner)
        _pull(client, version, work, stop)
        _copy_others(attached, work)
        missing = _missing(attached, work)
        mark_folder(work, target, owner)
        sync_folder(work)
        if target.exists():
            raise refuse(Reason.REQUEST_INVALID, f"{target} is there already; name another folder")
        _check(stop)
        work.rename(target)
        sync_path(target.parent)
        _make_room(target, owner, {attached.checkpoint, *others})
        return missing
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unwritable(target: Path, error: OSError) -> ClientError:
    remedy = write_remedy(error, "the server's user")
    return refuse(
        Reason.DISK_EXHAUSTED, f"{target} cannot be written ({error.strerror or error}); {remedy}"
    )


def _make(work: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if any(work.iterdir()):
            raise refuse(
                Reason.REQUEST_INVALID,
                f"remove {work}, which this server has not made, or name another folder",
            )
        work.rmdir()
    work.mkdir()


def _pull(client: Client, version: int, work: Path, stop: threading.Event) -> None:
    # Inside the folder that is known as ours, whatever a process that dies here leaves.
    weights = work / "weights"
    client.pull(weights, version, on_progress=lambda _done, _total: _check(stop))
    for file in weights.iterdir():
        file.rename(work / file.name)
    weights.rmdir()


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise refuse(
            Reason.CANCELLED,
            "request the checkpoint again: the caller left before it was finished",
        )


def _make_room(target: Path, owner: FolderOwner, loaded: Collection[str]) -> None:
    found = [folder for name in loaded if (folder := _local(name)) is not None]
    try:
        remove_old(target.parent, owner, found)
    except OSError as error:
        # The new one is there and durable; the next one tries again.
        logger.warning("an old checkpoint below %s is not removed: %s", target.parent, error)


def _copy_others(attached: Attached, folder: Path) -> None:
    source = _local(attached.checkpoint)
    if source is not None:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    config = folder / _CONFIG
    if not config.exists() and attached.config:
        config.write_text(json.dumps(dict(attached.config), indent=2))


def _missing(attached: Attached, folder: Path) -> str:
    names = [] if (folder / _CONFIG).exists() else [_CONFIG]
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        names.append("tokenizer")
    if not names:
        return ""
    return (
        f"the folder has no {' and no '.join(names)}, for none was found beside the engine's "
        f"checkpoint {attached.checkpoint}; copy what is missing into it before a vLLM loads it"
    )


def _local(checkpoint: str) -> Path | None:
    """Return the folder of what the engine has loaded; None: it is not on this disk."""
    path = Path(checkpoint)
    if path.is_dir():
        return path
    try:
        # vLLM's own, where that runs; nothing is loaded for it.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(checkpoint, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None
