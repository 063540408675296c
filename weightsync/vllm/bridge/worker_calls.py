"""Calls of our worker methods on every rank of one engine, and what the ranks said they hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.llm_calls import error_text
from weightsync.vllm.bridge.rank_replies import Pairing, agreed
from weightsync.vllm.bridge.step_switch import SWITCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from weightsync.vllm.bridge.llm_calls import VllmCalls

__all__ = ["COMMIT", "TOUCH_WEIGHTS", "WorkerCalls"]

COMMIT = "weightsync_commit"
#: Worker methods that read or write live parameters, which sleep mode takes away.
TOUCH_WEIGHTS = frozenset(
    f"weightsync_{word}"
    for word in (
        *("ahead", "attach", "capture", "check", "digest", "load", "prepare", "commit", "switch"),
        "verify",
    )
)
#: How often workers are asked whether they have done what they do in the background.
_SETTLE_S = 0.05
#: How long that may take, seconds: a loader that hangs is ended after 120.
_SETTLED_S = 150.0


class WorkerCalls:
    """One reply per rank, in order; none is taken for the answer to another call.

    Args:
        vllm: Calls the workers.
        ranks: `dp/pp/tp` in the order of replies.
        check: Refuses a call of a method.
        on_failure: Awaited, with one sentence, when vLLM could not carry a call out.

    Attributes:
        failure: That sentence; "": every call was carried out.
        committed: Digest that every rank reported after the last commit; None: no commit since the
            resume.
        commits: How many times ranks were asked to write.
        touching: Calls under way that read or write live parameters.
        versions: The label of each content digest that is known to have one.
    """

    def __init__(
        self,
        vllm: VllmCalls,
        ranks: Sequence[str],
        check: Callable[[str], None],
        on_failure: Callable[[str], Awaitable[None]],
    ) -> None:
        self.failure = ""
        self.committed: str | None = None
        self.commits = 0
        self.touching = 0
        self.versions: dict[str, int] = {}
        self._vllm = vllm
        self._count = len(ranks)
        self._pairing = Pairing(ranks)
        self._check = check
        self._on_failure = on_failure

    async def call(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run a method on every rank.

        Raises:
            WeightSyncError: As `check`; ENGINE_AWAY: vLLM could not carry the call out.
        """
        self._check(method)
        if method in (COMMIT, SWITCH):
            self.committed = ""
            self.commits += 1
        named = self._pairing.name(args)
        touches = method in TOUCH_WEIGHTS
        self.touching += touches
        try:
            replies = self._pairing.own(await self._vllm.rpc(method, named), named)
        except Exception as error:
            # Our methods never raise, so vLLM itself failed, and its reply queues may now hold
            # replies of this call.
            self.failure = f"a worker call failed inside vLLM ({error_text(error)}); restart vLLM"
            await self._on_failure(self.failure)
            raise WeightSyncError(Reason.ENGINE_AWAY, self.failure) from error
        finally:
            self.touching -= touches
        if method == COMMIT:
            self.committed = agreed(replies, self._count)
            if self.committed and (version := int(args.get("version", 0))):
                # Should the server not live to resume, its label is known.
                self.versions[self.committed] = version
        return replies

    async def proved(self) -> str:
        """Return the one digest that all ranks tell of what they hold now, or ""."""
        return agreed(await self.call("weightsync_state", {}), self._count)

    async def as_loaded(self) -> bool:
        """Whether every rank tells that nobody has written since vLLM loaded its weights."""
        replies = await self.call("weightsync_state", {})
        # A rank that does not say is of an older plugin, and asks for nothing.
        untouched = [reply["ok"] and not reply.get("written", True) for reply in replies]
        return len(untouched) == self._count and all(untouched)

    async def settle(self) -> None:
        """Return when no rank works in the background any more; what reads ahead is ended.

        Raises:
            RuntimeError: One does not come to an end.
        """
        deadline = clock.monotonic() + _SETTLED_S
        while True:
            replies = await self.call("weightsync_state", {"settle": True})
            busy = [reply for reply in replies if reply.get("busy") or not reply["ok"]]
            if not busy:
                return
            if clock.monotonic() > deadline:
                why = busy[0]["error"] or "it is at work"
                msg = f"rank {busy[0]['rank']} does not let go of the weights ({why}); try again"
                raise RuntimeError(msg)
            await asyncio.sleep(_SETTLE_S)
