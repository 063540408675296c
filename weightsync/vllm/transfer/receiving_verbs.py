"""vLLM's verbs of a weight transfer, where ours is the backend that receives over vLLM's wire.

They take what vLLM's own take. What comes becomes a version of weightsync-server: the last verb
returns when the engine serves that version, and raises if it goes on with what it serves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weightsync.errors import WeightSyncError
from weightsync.vllm.transfer.ipc_handles import HANDLES, PICKLED, to_plain

__all__ = ["ANSWERS"]

_PICKLED = (
    f"{PICKLED} is refused, because what is unpickled runs code, and vLLM's HTTP client pickles "
    "the handles of CUDA memory; call update_weights of AsyncLLM in its own process, or of its Ray "
    f"actor, with {HANDLES}, or use the backend weightsync_nccl or weightsync"
)


def _updates(llm: Any) -> Any:
    found = getattr(llm, "weightsync_updates", None)
    if found is None:
        msg = (
            "this vLLM has no bridge to a weightsync-server, which makes versions of what comes; "
            "start vLLM with VLLM_PLUGINS=weightsync and a weightsync-server beside it"
        )
        raise ValueError(msg)
    return found


async def _refusing(work: Awaitable[None]) -> None:
    try:
        await work
    except WeightSyncError as error:
        # vLLM's HTTP API answers it with 400 and the sentence.
        raise ValueError(error.message) from error


async def _init(llm: Any, request: Any) -> None:
    await _refusing(_updates(llm).open(dict(_field(request, "init_info"))))


async def _shutdown(llm: Any) -> None:
    await _refusing(_updates(llm).leave())


async def _start(llm: Any) -> None:
    await _refusing(_updates(llm).start())


async def _start_draft(llm: Any) -> None:
    _updates(llm)
    msg = "a draft model is written with the version that has its tensors; send them with the rest"
    raise ValueError(msg)


async def _update(llm: Any, request: Any) -> None:
    await _refusing(_updates(llm).receive(_plain(_field(request, "update_info"))))


async def _finish(llm: Any, weight_version: str | None = None) -> None:
    await _refusing(_updates(llm).finish(weight_version or ""))
    if weight_version is not None and hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(weight_version)


def _field(request: Any, name: str) -> Any:
    """Return what a request holds, which trainers of some releases send as a dictionary."""
    return request[name] if isinstance(request, Mapping) else getattr(request, name)


def _plain(info: Any) -> dict[str, Any]:
    """Return an update info without anything but plain data.

    Raises:
        ValueError: It holds pickles, or is none.
    """
    if not isinstance(info, Mapping):
        msg = "update_info is a list for each rank; send one for all, as vLLM's nccl and ipc do"
        raise ValueError(msg)  # noqa: TRY004 - vLLM answers it with 400
    if info.get(PICKLED) is not None:
        raise ValueError(_PICKLED)
    plain = {str(key): value for key, value in info.items() if key != PICKLED}
    if plain.get(HANDLES) is not None:
        plain[HANDLES] = to_plain(plain[HANDLES])
    return plain


ANSWERS: Mapping[str, Callable[..., Awaitable[None]]] = {
    "init_weight_transfer_engine": _init,
    "shutdown_weight_transfer_engine": _shutdown,
    "start_weight_update": _start,
    "start_draft_weight_update": _start_draft,
    "update_weights": _update,
    "finish_weight_update": _finish,
}
