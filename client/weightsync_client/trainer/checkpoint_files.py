"""A version as a folder that a new vLLM loads: safetensors, and what came beside those."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync_client.errors import refuse
from weightsync_client.trainer.synced_folder import sync_folder, sync_path

if TYPE_CHECKING:
    from weightsync_client.attach import Attached
    from weightsync_client.client import Client

__all__ = ["write_checkpoint"]

#: What holds weights, or tells where they lie: the version's own take their place.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_CONFIG = "config.json"
#: Files of which each tokenizer has one; tokenizer_config.json alone is none.
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "tekken.json", "*.tiktoken")


def write_checkpoint(client: Client, attached: Attached, version: int, target: Path) -> str:
    """Write a version; the folder appears whole, proved and durable, or not at all.

    Return what a vLLM would miss in it, one sentence; "": nothing.

    Beside the weights it has the files of the engine's checkpoint, such as configuration and
    tokenizer; of one that is not on this host's disk only `config.json`.

    Args:
        client: Pulls the version.
        attached: Knows what the engine has loaded.
        version: Its number.
        target: The folder, which is not there.

    Raises:
        ClientError: It cannot be written, or the version cannot be pulled.
    """
    work = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        client.pull(work, version)
        _copy_others(attached, work)
        missing = _missing(attached, work)
        sync_folder(work)
        if target.exists():
            raise refuse(Reason.REQUEST_INVALID, f"{target} is there already; name another folder")
        work.rename(target)
        sync_path(target.parent)
        return missing
    except OSError as error:
        raise refuse(
            Reason.DISK_EXHAUSTED,
            f"{target} cannot be written ({error.strerror or error}); free some space, or let the "
            "server's user write there",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
