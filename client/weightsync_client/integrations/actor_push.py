"""A framework on Ray: the actor's rank 0 pushes what all gather, and rollouts wait for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from weightsync.errors import Reason
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, DeadlineError, UnavailableError, invalid, refuse
from weightsync_client.integrations.step_push import PushedStep, StepOptions
from weightsync_client.options import ApplyOptions, PushOptions
from weightsync_client.rpc.validate import text
from weightsync_client.source.tensor_stream import drained_on_error
from weightsync_client.types import ModelStatus, PushResult

Pair = tuple[str, torch.Tensor]


class ActorPush:
    """Pushes weights that arrive one after the other, and has the engine serve them.

    The client is opened in the process that uses it, and stays, with its copy for the next delta.

    Args:
        address: Of the server. Token and TLS are as the environment says.
        model: Name of the model; None: the server's only one.
        push: Options of every push; any mapping, as frameworks have their own for settings.
        apply: Options of every apply; the same. Not for `push_only`.

    Raises:
        ClientError: REQUEST_INVALID; an argument cannot be.
        TypeError: There is no such option.
    """

    def __init__(
        self,
        address: str,
        model: str | None,
        push: PushOptions | None,
        apply: ApplyOptions | None,
    ) -> None:
        self._address, self._model = text("address", address), model
        self._options = StepOptions(PushOptions(**(push or {})), ApplyOptions(**(apply or {})))
        self._opened: Client | None = None

    def client(self) -> Client:
        """Return the client, open."""
        if self._opened is None:
            self._opened = Client(self._address, model=self._model)
        return self._opened

    def status(self) -> ModelStatus:
        """Return the state of the model.

        Raises:
            ClientError: No server answers, or it has no such model.
        """
        client = self.client()
        models = {model.model: model for model in client.status().models}
        if client.model not in models:
            raise refuse(
                Reason.MODEL_UNKNOWN,
                f"the server has no model {client.model!r}, but {', '.join(models)}; correct model",
            )
        return models[client.model]

    def engine_ranks(self) -> int:
        """Return how many ranks of all engines serve a version; 0: none yet, or all are away.

        Raises:
            ClientError: As of `status`.
        """
        status = self.status()
        # An earlier server tells of the one that it has.
        engines = status.engines or (status.engine,)
        return len([rank for engine in engines for rank in engine.ranks if rank.version])

    async def push_only(
        self, pairs: Iterator[Pair], labels: Callable[[], Mapping[str, str]]
    ) -> PushedStep:
        """Push weights, and read them to their end, whatever fails.

        Args:
            pairs: All of the model.
            labels: Makes the metadata of the version; its error is one of the push.

        Raises:
            ClientError: Of the push.
        """
        started = time.monotonic()
        pushed = await asyncio.to_thread(self._push, pairs, labels)
        return PushedStep(pushed, None, time.monotonic() - started, 0.0)

    async def make_live(
        self, pairs: Iterator[Pair], labels: Callable[[], Mapping[str, str]], rollout_ranks: int
    ) -> PushedStep:
        """Push weights as `push_only` does, and have the engine serve them.

        Args:
            pairs: All of the model.
            labels: Makes the metadata of the version.
            rollout_ranks: Ranks that have to serve it.

        Raises:
            ClientError: Of push or apply; a note says so if the version exists.
        """
        pushed = await self.push_only(pairs, labels)
        # Apart from the push: a weight sync that was cancelled makes nothing live.
        return await asyncio.to_thread(self._apply, pushed, rollout_ranks)

    def _push(self, pairs: Iterator[Pair], labels: Callable[[], Mapping[str, str]]) -> PushResult:
        with drained_on_error(pairs, collective=True):
            options: dict[str, Any] = {**self._options.push, "collective": True}
            options["metadata"] = {**options.get("metadata", {}), **labels()}
            return self.client().push(pairs, **options)

    def _apply(self, pushed: PushedStep, rollout_ranks: int) -> PushedStep:
        started, version = time.monotonic(), pushed.push.version
        try:
            report = self.client().apply(version, **(self._options.apply or {}))
        except ClientError as error:
            error.add_note(f"the weights are version {version}, which was not applied")
            raise
        check_ranks(len(report.ranks), rollout_ranks)
        return replace(pushed, apply=report, apply_s=time.monotonic() - started)


def check_ranks(engine: int, rollout: int) -> None:
    """Refuse a rollout that has ranks which the engine of the server does not have.

    Raises:
        InvalidError: They would go on with old weights.
    """
    if engine != rollout:
        raise invalid(
            f"the rollout has {rollout} ranks, but the engine of the server has {engine}, and the "
            "others would keep old weights; give all ranks of the rollout to one replica",
        )


async def take_part(pairs: Iterator[Pair]) -> None:
    """Read the weights to their end, as a rank that pushes nothing."""
    await asyncio.to_thread(deque, pairs, 0)


def on_callers_stream(weights: Iterable[Pair]) -> Iterator[Pair]:
    """Return the weights, to be read by any thread as the calling thread would.

    A thread starts on device 0 and with gradients: the collectives of a rank would be on the wrong
    device, and what they return would be part of a graph.
    """
    stream = torch.cuda.current_stream() if _uses_cuda() else None
    return _read_on(iter(weights), stream)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _read_on(pairs: Iterator[Pair], stream: torch.cuda.Stream | None) -> Iterator[Pair]:
    while True:
        with torch.no_grad(), torch.cuda.stream(stream):
            try:
                pair = next(pairs)
            except StopIteration:
                return
        if stream is not None:
            stream.synchronize()  # The push copies on another one.
        yield pair


T = TypeVar("T")

#: Every rank of the rollout asks so often, seconds.
_POLL_S = 0.2


async def wait_for(find: Callable[[], T | None], timeout_s: float, sentence: str) -> T:
    """Return what is found at last; a server that restarts meanwhile is waited for.

    Args:
        find: Asks the server, in a thread; None: not yet.
        timeout_s: How long, in seconds.
        sentence: What the error says if it is not found.

    Raises:
        ClientError: DEADLINE_EXCEEDED, or that no server answers; any other of `find` at once.
    """
    until = time.monotonic() + timeout_s
    last: ClientError | None = None
    while True:
        try:
            found = await asyncio.to_thread(find)
            if found is not None:
                return found
            last = None
        except (UnavailableError, DeadlineError) as error:
            last = error  # A server that restarts goes on with what it was doing.
        if time.monotonic() >= until:
            raise last or refuse(Reason.DEADLINE_EXCEEDED, sentence)
        await asyncio.sleep(_POLL_S)
