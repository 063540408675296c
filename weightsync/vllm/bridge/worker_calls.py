"""Calls of our worker methods on every rank of one engine, and what the replies agree on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from weightsync import clock, failpoints
from weightsync.engine import SwitchOrder, SwitchOutcome
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.generation import GenerationControl
from weightsync.vllm.bridge.llm_calls import VllmCalls, WorkerRpc, error_text


def _own(reply: dict[str, Any], rank: str, call: str) -> dict[str, Any]:
    wrong = ""
    if reply.get("call") != call:
        wrong = "answered another call"
    elif reply.get("rank") != rank:
        wrong = f"answered as rank {reply.get('rank')!r}"
    return {"ok": False, "rank": rank, "error": wrong} if wrong else reply


def agreed(replies: Sequence[Mapping[str, Any]], count: int) -> str:
    """Return the one digest that all `count` ranks proved, or ""."""
    digests = {
        str(reply.get("content_digest", "")) if reply.get("ok") and not reply.get("dirty") else ""
        for reply in replies
    }
    return digests.pop() if len(digests) == 1 and len(replies) == count else ""


def served_after(replies: Sequence[Mapping[str, Any]], count: int, order: SwitchOrder) -> str:
    """Return the digest that all ranks hold after a switch; "" if they do not agree.

    It is the base's if every rank failed and is back on the base.
    """
    if agreed(replies, count) == order.content_digest:
        return order.content_digest
    back = len(replies) == count and not any(reply.get("ok") for reply in replies)
    digests = {reply.get("content_digest") for reply in replies}
    return order.base_digest if back and digests == {order.base_digest} else ""


#: The worker method.
SWITCH = "weightsync_switch"


def _numbered(serves: str, order: SwitchOrder, base_version: int) -> int:
    numbers = {order.base_digest: base_version, order.content_digest: order.version}
    return numbers.get(serves, 0)


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

    vLLM pairs replies with calls by their order: after one that was left in its queues every later
    call reads the one before (vllm#49972). So each call has a name. `ranks` are `dp/pp/tp` in the
    order of replies. `on_failure` is awaited, with one sentence, when vLLM could not carry a call
    out.

    Attributes:
        failure: That sentence; "" if every call was carried out.
        committed: Digest that all ranks reported after the last commit; None: no commit since the
            resume.
        commits: How many times ranks were asked to write.
        touching: Calls under way that read or write live parameters.
        switching: Whether the ranks switch; one switch at a time.
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
        self.switching = False
        self.versions: dict[str, int] = {}
        self._vllm = vllm
        self._ranks = tuple(ranks)
        self._count = len(ranks)
        self._before: list[dict[str, Any]] = []
        self._check = check
        self._on_failure = on_failure

    async def call(
        self, method: str, args: Mapping[str, Any], rpc: WorkerRpc | None = None
    ) -> list[dict[str, Any]]:
        """Run a method on every rank; ENGINE_AWAY if vLLM could not carry it out.

        `rpc` makes the call in place of vLLM's own.
        """
        rpc = rpc or self._vllm.rpc
        self._check(method)
        if method in (COMMIT, SWITCH):
            self.committed = ""
            self.commits += 1
        name = secrets.token_hex(8)
        touches = method in TOUCH_WEIGHTS
        self.touching += touches
        try:
            replies = self._own(await rpc(method, {**args, "call": name}), name)
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

    def _own(self, replies: list[dict[str, Any]], call: str) -> list[dict[str, Any]]:
        """Return the replies; what is not this rank's answer to this call has become a failure."""
        replies = self._confused(replies)
        if len(replies) != self._count:
            return replies
        pairs = zip(self._ranks, replies, strict=True)
        return [_own(reply, rank, call) for rank, reply in pairs]

    def _confused(self, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not failpoints.enabled():
            return replies
        before, self._before = self._before, replies
        lie = failpoints.lie("bridge.replies")
        return {"twice": replies * 2, "lost": [], "stale": before}.get(lie or "", replies)

    async def switch(
        self,
        order: SwitchOrder,
        base_version: int,
        generation: GenerationControl,
    ) -> SwitchOutcome:
        """Return what the ranks go on with, and label outputs accordingly.

        `base_version` is the label until now, 0 if there is none. Raises ENGINE_AWAY if vLLM
        failed.
        """
        live = generation.live
        args = {"apply_id": order.apply_id, "base_id": order.base_id, "limit_s": order.limit_s}
        self.switching = True
        try:
            live.attempt(order.version, generation.keys.kept(order.cache, cleared=False))
            call = asyncio.ensure_future(
                self.call(SWITCH, args, generation.keys.switching(order, self._vllm.rpc))
            )
            # Right behind the call in vLLM's queue, so that no step comes between the two.
            label = generation.label(order.version)
            replies = await call
            labelled = await label
            serves = served_after(replies, self._count, order)
            live.settle(_numbered(serves, order, base_version))
            if serves != order.content_digest and base_version:
                await generation.label(base_version)
        finally:
            # Of a switch that did not come to its end nobody knows what it left.
            live.settle(0)
            self.switching = False
        return SwitchOutcome(replies, serves, labelled)

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
        """End what reads ahead; return when no rank works in the background any more.

        Raises RuntimeError if one does not stop in time.
        """
        deadline = clock.monotonic() + _SETTLED_S
        while True:
            replies = await self.call("weightsync_state", {"settle": True})
            busy = [reply for reply in replies if reply.get("busy") or not reply["ok"]]
            if not busy:
                return
            if clock.monotonic() > deadline:
                why = busy[0]["error"] or "it is running"
                msg = f"rank {busy[0]['rank']} does not release the weights ({why}); try again"
                raise RuntimeError(msg)
            await asyncio.sleep(_SETTLE_S)
