"""What the API process gives to extensions, and what it asks of them, without knowing any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.engine import EngineState, UpdateFeed

if TYPE_CHECKING:
    from weightsync.vllm.bridge.live_versions import LiveVersions
    from weightsync.vllm.bridge.sleep_guard import DeviceTurns
    from weightsync.vllm.env import EngineSettings


@dataclass(frozen=True)
class EngineOffer:
    """What an engine's adapter offers, once, to each maker of updates.

    Attributes:
        llm: VLLM's AsyncLLM.
        backend: Of vLLM's weight transfer; "": it has none.
        call: Calls a worker method on every rank; one reply per rank, in order. It runs to its end
            although nobody waits for it any more.
        condition: Returns the engine's state and the reason for it.
        turns: When ranks may wait for a trainer.
    """

    llm: Any
    backend: str
    call: Callable[[str, Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]
    condition: Callable[[], tuple[EngineState, str]]
    turns: DeviceTurns
    settings: EngineSettings


#: Returns what an engine receives by itself.
MakeUpdates = Callable[[EngineOffer], "UpdateFeed"]

#: An application of ASGI.
AsgiApp = Callable[..., Awaitable[None]]


class Middleware(Protocol):
    """A middleware of vLLM's HTTP API; it adds nothing to answers before it is started."""

    def wrap(self, app: AsgiApp) -> AsgiApp:
        """Return the application with the middleware before it."""

    def start(self, llm: Any, live: LiveVersions, settings: EngineSettings) -> None:
        """Work for an AsyncLLM from now on, which serves the versions of `live`."""
