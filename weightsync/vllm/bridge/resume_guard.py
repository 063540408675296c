"""Keeps everybody but us from starting an engine that must stand still."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from weightsync.engine import EngineState
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ["ResumeGuard", "ours", "refusals_of_request"]

#: What every call of vLLM that reaches an engine core goes through: the first that it has.
_WAYS = (("_call_utility_async",), ("call_utility_async", "call_utility_all_async"))
#: The utilities of an engine core after which its scheduler runs.
_STARTS = frozenset({"resume_scheduler", "wake_up"})

_ours: ContextVar[bool] = ContextVar("weightsync_starts_vllm", default=False)
_refusals: ContextVar[list[str] | None] = ContextVar("weightsync_refused_resumes", default=None)


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Let through what starts vLLM in the block, and in tasks that begin there."""
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

    Frameworks resume vLLM by themselves: by AsyncLLM, by its engine core, by HTTP. All of it ends
    in one call of the client of the engine cores, and that is guarded. A resume between two pauses
    of ours is vLLM's own matter, as a pause of vLLM's own is.

    Args:
        client: AsyncLLM's `engine_core`.
        condition: Returns the engine's state and the reason for it.
        changing: Whether that is about to change: vLLM is asked to stand still or to start.
    """

    def __init__(
        self,
        client: Any,
        condition: Callable[[], tuple[EngineState, str]],
        changing: Callable[[], bool],
    ) -> None:
        self._condition = condition
        self._changing = changing
        found = next((names for names in _WAYS if hasattr(client, names[0])), ())
        if not found:
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "use a vLLM release from 0.26 to 0.33; nothing keeps others from resuming this one",
            )
        for name in found:
            setattr(client, name, self._guarded(getattr(client, name)))

    def _guarded(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(call)
        async def guarded(method: str, *args: Any, **kwargs: Any) -> Any:
            if method in _STARTS and not _ours.get():
                self._check()
            return await call(method, *args, **kwargs)

        return guarded

    def _check(self) -> None:
        state, reason = self._condition()
        if state is EngineState.SERVING and not self._changing():
            return
        error = _refusal(state, reason)
        refused = _refusals.get()
        if refused is not None:
            refused.append(error.message)
        raise error


def _refusal(state: EngineState, reason: str) -> WeightSyncError:
    if state in (EngineState.SERVING, EngineState.PAUSED):
        return WeightSyncError(
            Reason.APPLY_BUSY,
            "leave out this resume: weightsync has paused the engine and resumes it by itself when "
            "its weights are one proved version",
        )
    return WeightSyncError(
        Reason.ENGINE_FENCED,
        f"leave out this resume: weightsync keeps the engine from serving ({reason}) and resumes "
        "it by itself when its weights are one proved version",
    )
