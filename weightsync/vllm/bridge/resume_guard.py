"""Keeps everybody but us from starting an engine that must stand still, or have it sleep unseen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from weightsync.engine import EngineState
from weightsync.errors import Reason, WeightSyncError

#: What every call of vLLM that reaches an engine core goes through: the first that it has.
_WAYS = (("_call_utility_async",), ("call_utility_async", "call_utility_all_async"))
#: What ends a pause, of an engine core.
_RESUME = "resume_scheduler"
#: Sleep mode, by the same names of AsyncLLM and of an engine core; older releases have some of it.
SLEEP_MODE = ("sleep", "release_kv_cache_memory", "wake_up")

_ours: ContextVar[bool] = ContextVar("weightsync_starts_vllm", default=False)
_refusals: ContextVar[list[str] | None] = ContextVar("weightsync_refused_resumes", default=None)


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Let through what starts vLLM or is of sleep mode, in the block and tasks that begin there."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


@contextlib.contextmanager
def refusals_of_request() -> Iterator[list[str]]:
    """Give a list of what is refused in the block, for vLLM's routes make an error 500 of all."""
    refused: list[str] = []
    token = _refusals.set(refused)
    try:
        yield refused
    finally:
        _refusals.reset(token)


class ResumeGuard:
    """Nobody but us starts a fenced engine, one in a pause of ours, or one that nobody has proved.

    Frameworks resume vLLM by AsyncLLM, by its engine core, by HTTP. All of it ends in one call of
    AsyncLLM's `engine_core`, and that is guarded. A resume between two pauses of ours is vLLM's own
    matter. Sleep mode is for `SleepGuard` alone, which stands before AsyncLLM.

    Args:
        changing: Tells whether vLLM is being asked to stand still or to start.
        resumed: Awaited when somebody else has started vLLM.
    """

    def __init__(
        self,
        client: Any,
        condition: Callable[[], tuple[EngineState, str]],
        changing: Callable[[], bool],
        resumed: Callable[[], Awaitable[None]],
    ) -> None:
        self._condition = condition
        self._changing = changing
        self._resumed = resumed
        found = next((names for names in _WAYS if hasattr(client, names[0])), ())
        if not found:
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "use a vLLM release from 0.26 to 0.33: in this one, nothing stops other code "
                "from resuming a paused engine",
            )
        for name in found:
            setattr(client, name, self._guarded(getattr(client, name)))

    def _guarded(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(call)
        async def guarded(method: str, *args: Any, **kwargs: Any) -> Any:
            foreign = not _ours.get()
            if foreign:
                self._check(method)
            answer = await call(method, *args, **kwargs)
            if foreign and method == _RESUME:
                await self._resumed()
            return answer

        return guarded

    def _check(self, method: str) -> None:
        if method in SLEEP_MODE:
            raise _noted(
                Reason.ENGINE_REFUSED,
                f"call {method} of AsyncLLM instead of its engine core's: weightsync has to know "
                "whether the engine is asleep",
            )
        if method != _RESUME:
            return
        state, reason = self._condition()
        if state is not EngineState.SERVING or self._changing():
            raise _noted(*_refusal(state, reason))


def _noted(reason: Reason, message: str) -> WeightSyncError:
    refused = _refusals.get()
    if refused is not None:
        refused.append(message)
    return WeightSyncError(reason, message)


def _refusal(state: EngineState, reason: str) -> tuple[Reason, str]:
    if state in (EngineState.SERVING, EngineState.PAUSED):
        return (
            Reason.APPLY_BUSY,
            (
                "leave out this resume: weightsync has paused the engine and resumes it when its "
                "weights are one verified version"
            ),
        )
    return (
        Reason.ENGINE_FENCED,
        (
            f"leave out this resume: weightsync keeps the engine from serving ({reason}) and "
            "resumes it when its weights are one verified version"
        ),
    )
