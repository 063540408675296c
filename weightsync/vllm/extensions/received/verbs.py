"""vLLM's verbs of a weight transfer, answered in the API process where the backend is ours.

What comes becomes a version of weightsync-server: the last verb returns when the engine serves that
version, and raises if it goes on with what it serves. vLLM's own methods of workers are not called:
a call that one rank fails leaves the other ranks' replies in its queues, and every later call would
read a stale one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weightsync.errors import WeightSyncError
from weightsync.vllm.extensions.received.ipc_handles import HANDLES, PICKLED, to_plain
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

_PICKLED = (
    f"{PICKLED} is refused, because what is unpickled runs code, and vLLM's HTTP client pickles "
    "the handles of CUDA memory; call update_weights of AsyncLLM in its own process, or of its Ray "
    f"actor, with {HANDLES}, or use the backend weightsync_nccl or weightsync"
)


def _updates(llm: Any) -> Any:
    found = getattr(llm, "weightsync_updates", None)
    if found is None:
        raise ValueError(
            "this vLLM has no bridge to a weightsync-server, which makes versions of the "
            "updates; start vLLM with VLLM_PLUGINS=weightsync and a weightsync-server beside it"
        )
    return found


async def _refusing(work: Awaitable[None]) -> None:
    try:
        await work
    except WeightSyncError as error:
        # vLLM's HTTP API answers it with 400 and the sentence.
        raise ValueError(error.message) from error


async def _open(llm: Any, request: Any) -> None:
    await _refusing(_updates(llm).open(dict(_field(request, "init_info"))))


async def _leave(llm: Any) -> None:
    await _refusing(_updates(llm).leave())


async def _begin(llm: Any) -> None:
    await _refusing(_updates(llm).start())


async def _refuse_draft(llm: Any) -> None:
    _updates(llm)
    msg = "a draft model is written with the version that has its tensors; send them with the rest"
    raise ValueError(msg)


async def _receive(llm: Any, request: Any) -> None:
    await _refusing(_updates(llm).receive(_plain(_field(request, "update_info"))))


async def _commit(llm: Any, weight_version: str | None = None) -> None:
    await _refusing(_updates(llm).finish(weight_version or ""))
    if weight_version is not None and hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(weight_version)


def _field(request: Any, name: str) -> Any:
    """Return what a request holds, which trainers of some releases send as a dictionary."""
    return request[name] if isinstance(request, Mapping) else getattr(request, name)


def _plain(info: Any) -> dict[str, Any]:
    """Return an update info as plain data; ValueError: it holds pickles, or is none."""
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
    "init_weight_transfer_engine": _open,
    "shutdown_weight_transfer_engine": _leave,
    "start_weight_update": _begin,
    "start_draft_weight_update": _refuse_draft,
    "update_weights": _receive,
    "finish_weight_update": _commit,
}


#: As in `--weight-transfer-config '{"backend": "weightsync"}'`.
BACKEND = "weightsync"

Verb = Callable[..., Awaitable[None]]


def answer_verbs(llm_class: type) -> None:
    """Have vLLM's AsyncLLM answer the verbs by itself where our backend is asked for.

    Those of "weightsync" reach no worker; those of the backends that receive are in `ANSWERS`. A
    refusal is a ValueError, for vLLM's HTTP API answers that with 400. Repeating it is harmless,
    and verbs that vLLM's release does not have stay away.
    """
    for name, answer in _ANSWERS.items():
        own = getattr(llm_class, name, None)
        if own is not None and not hasattr(own, "_weightsync"):
            answers = dict.fromkeys(RECEIVING_BACKENDS, ANSWERS[name])
            setattr(llm_class, name, _routed(own, {**answers, BACKEND: answer}))


def _routed(own: Verb, answers: Mapping[str, Verb]) -> Verb:
    @functools.wraps(own)
    async def verb(self: Any, *args: Any, **kwargs: Any) -> None:
        config = getattr(self.vllm_config, "weight_transfer_config", None)
        answer = answers.get(getattr(config, "backend", ""), own)
        await answer(self, *args, **kwargs)

    verb._weightsync = True  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    return verb


async def _accept(llm: Any) -> None:
    """Do nothing: an apply is whole by itself, and begins and ends at the server."""
    del llm


async def _init(llm: Any, request: Any) -> None:
    del llm
    if request.init_info:
        raise ValueError(_foreign("init_info", request.init_info))


async def _start_draft(llm: Any) -> None:
    del llm
    msg = "a draft model is written with the version that has its tensors; leave this verb out"
    raise ValueError(msg)


async def _update(llm: Any, request: Any) -> None:
    """Return if outputs carry the version that a trainer has made live, as its server says."""
    info = request.update_info
    version = info.get("version") if isinstance(info, Mapping) and len(info) == 1 else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(_foreign("update_info", info))  # noqa: TRY004 - vLLM answers it with 400
    ask = getattr(llm, "get_weight_version", None)
    served = await ask() if ask is not None else str(version)
    if served != str(version):
        raise ValueError(
            f"this vLLM serves weight version {served!r}, not {version}; give the trainer the "
            "address of the weightsync-server that drives this vLLM"
        )


async def _finish(llm: Any, weight_version: str | None = None) -> None:
    """Label outputs, if the caller wants another label than the version's number."""
    if weight_version is not None:
        await llm.update_weight_version(weight_version)


def _foreign(what: str, info: Any) -> str:
    names = ", ".join(sorted(map(str, info))[:4]) if isinstance(info, Mapping) else "a list"
    return (
        f"{what} has {names or 'nothing'}, but this vLLM gets its weights through its "
        "weightsync-server and accepts no tensor or handle here; have the trainer use the "
        f"backend {BACKEND!r}"
    )


_ANSWERS: Mapping[str, Verb] = {
    "init_weight_transfer_engine": _init,
    "shutdown_weight_transfer_engine": _accept,
    "start_weight_update": _accept,
    "start_draft_weight_update": _start_draft,
    "update_weights": _update,
    "finish_weight_update": _finish,
}


def register_transfer() -> None:
    """Register our three transfer backends and answer their verbs; harmless to repeat.

    A vLLM without such backends stays as it is.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    engines = {BACKEND: "WeightSyncTransferEngine"}
    engines |= dict.fromkeys(RECEIVING_BACKENDS, "ReceivingTransferEngine")
    for backend, engine in engines.items():
        # The factory refuses a name that it knows; plugins may run more than once.
        with contextlib.suppress(ValueError):
            WeightTransferEngineFactory.register_engine(
                backend, "weightsync.vllm.extensions.received.transfer_engine", engine
            )
    answer_verbs(AsyncLLM)
