"""vLLM's verbs of a weight transfer, answered in the API process where the backend is ours.

vLLM's own methods of workers are not called: vLLM leaves the other ranks' replies of a call that
one rank fails in its queues, and every later call, ours included, would read a stale one.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weightsync.vllm.transfer import receiving_verbs
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

__all__ = ["BACKEND", "answer_verbs"]

#: As in `--weight-transfer-config '{"backend": "weightsync"}'`.
BACKEND = "weightsync"

Verb = Callable[..., Awaitable[None]]


def answer_verbs(llm_class: type) -> None:
    """Have vLLM's AsyncLLM answer the verbs by itself where our backend is asked for.

    Those of "weightsync" write nothing, pause nothing and reach no worker; those of the backends
    that receive are in `receiving_verbs`. Each refusal is a ValueError, which vLLM's HTTP API
    answers with 400. Repeating it is harmless, and other backends notice nothing.

    Args:
        llm_class: vLLM's AsyncLLM; verbs that its release does not have stay away.
    """
    for name, answer in _ANSWERS.items():
        own = getattr(llm_class, name, None)
        if own is not None and not hasattr(own, "_weightsync"):
            answers = dict.fromkeys(RECEIVING_BACKENDS, receiving_verbs.ANSWERS[name])
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
        msg = (
            f"this vLLM serves weight version {served!r}, not {version}; give the trainer the "
            "address of the weightsync-server that drives this vLLM"
        )
        raise ValueError(msg)


async def _finish(llm: Any, weight_version: str | None = None) -> None:
    """Label outputs, if the caller wants another label than the version's number."""
    if weight_version is not None:
        await llm.update_weight_version(weight_version)


def _foreign(what: str, info: Any) -> str:
    names = ", ".join(sorted(map(str, info))[:4]) if isinstance(info, Mapping) else "a list"
    return (
        f"{what} has {names or 'nothing'}, but the weights of this vLLM come through its "
        "weightsync-server, and no tensor or handle is taken here; have the trainer use the "
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
