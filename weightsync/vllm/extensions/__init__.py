"""The list of what can be taken away inside vLLM, for `plugin` and `endpoint` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from weightsync.vllm.bridge.extension_points import MakeUpdates, Middleware

if TYPE_CHECKING:
    from weightsync.vllm.worker.worker_methods import WorkerMethod


def process_starts() -> tuple[Callable[[], None], ...]:
    """Return what is called in every process of vLLM, before a worker is built."""
    from weightsync.vllm.extensions.received.verbs import register_transfer

    return (register_transfer,)


def worker_methods() -> Mapping[str, WorkerMethod]:
    """Return methods of ranks, by the names that `collective_rpc` calls them by."""
    from weightsync.vllm.extensions.received import UPDATE
    from weightsync.vllm.extensions.received.update_receiver import receive_update

    return {UPDATE: receive_update}


def update_makers() -> tuple[MakeUpdates, ...]:
    from weightsync.vllm.extensions.received.received_updates import receive_updates

    return (receive_updates,)


def inner_middlewares() -> tuple[Middleware, ...]:
    """Return new ones for requests that the readiness gate has let through."""
    from weightsync.vllm.extensions.answers import AnswerVersions
    from weightsync.vllm.extensions.request_spans import RequestSpans

    return (AnswerVersions(), RequestSpans())


def outer_middlewares() -> tuple[Middleware, ...]:
    """Return new ones that stand before the readiness gate, where vLLM runs on its own."""
    from weightsync.vllm.extensions.train_forward import TrainForward

    return (TrainForward(),)
