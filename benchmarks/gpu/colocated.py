"""A trainer on the engine's GPU: with tensors of its own, and in the engine's own memory.

With tensors of its own, which go from GPU memory to GPU memory first (`Attached.update`):

update_end_to_end_device_s  from the trainer's call to the first token of the new weights; beside it
                            vLLM's ipc backend's of this run
device_served_s             from the call until the trainer is told that the engine generates
device_commit_s             of the slowest rank digesting what it holds
device_pause_s              from the request to pause until the engine runs
host_copy_follows_s         from then until the host's copy was made and proved, and the trainer's
                            call has returned
push_slowdown               median token gap meanwhile, over that without

The same by a push and an apply, with the host's copy first:

update_end_to_end_pushed_s, pushed_slowdown, push_s, pause_total_s; rollback_s of the rollback right
after each

In the engine's own memory:

attach_s                    until every parameter is there as a tensor; attach_first_s with the
                            start of CUDA in the trainer
read_s                      one read of all parameters by the trainer, while nothing else runs
in_place_begin_s            from the call until the trainer may write; in_place_write_s of writing
in_place_commit_s           of the slowest rank, which reads all that it holds and digests it;
                            over_read over read_s
in_place_call_s             from the trainer's call for the commit until the engine runs
in_place_pause_s            from the request to pause until the engine runs
in_place_copy_follows_s     from then until the trainer's commit has returned
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.loading import until_compared

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.gpu.engine import Site
    from benchmarks.gpu.link import TrainerLink
    from benchmarks.gpu.ours import Ours

__all__ = ["Colocated"]

_CHECK_S = 60.0
#: The first ones make segments and warm up.
_WARM_UP = 2
#: Where less follows than so many gaps between tokens, they tell nothing of it.
_GAPS = 10
#: What a push and an apply are called here, whose host's copy comes first.
_PUSHED = {
    "update_end_to_end_s": "update_end_to_end_pushed_s",
    "push_slowdown": "pushed_slowdown",
    "push_max_gap_s": "pushed_max_gap_s",
}


@dataclass
class Colocated:
    """Measures all three in one engine.

    Args:
        ours: Applies in the engine, and the trainer with tensors of its own.
        attached: The trainer that has none.
    """

    ours: Ours
    attached: TrainerLink
    _mask: int = 0

    @property
    def _site(self) -> Site:
        return self.ours.site

    async def pushed(self) -> None:
        """Push and apply, and go back right after it."""
        ours, results = self.ours, self._site.results
        with results.attempt("pushes and applies from the trainer's GPU"):
            for _ in range(_WARM_UP):
                await ours.pushed("", None)
            back = []
            for _ in results.rounds(ours.rounds, "push from the trainer's GPU", 90.0):
                figures = await ours.pushed("", None)
                named = {_PUSHED.get(name, name): value for name, value in figures.items()}
                begin = time.perf_counter()
                await ours.applied("_rollback", back=True)
                results.add(**named, rollback_s=time.perf_counter() - begin)
                back.append(await self._verified())
            if back:
                results.facts["pushed_rollback_verified"] = all(back)
                await ours.applied("", back=False)

    async def device(self) -> None:
        """Write a trainer's own tensors into the engine's memory, and go back right after it."""
        ours, results, trainer = self.ours, self._site.results, self.ours.trainer
        with results.attempt("the trainer's tensors in place"):
            await trainer.do("attach", address=ours.address)
            back = []
            for number in results.rounds(1 + ours.rounds, "the trainer's tensors", 60.0):
                seen = await self._transaction(partial(trainer.do, "put"))
                if number:  # The first one warms up.
                    results.add(
                        update_end_to_end_device_s=seen["first_token"] - seen["called"],
                        device_served_s=seen["served"] - seen["called"],
                        device_commit_s=seen["digest_s"],
                        device_pause_s=seen["paused_s"],
                        device_max_gap_s=seen["gap_s"],
                        host_copy_follows_s=max(0.0, seen["ended"] - seen["runs"]),
                        **({"push_slowdown": seen["slowdown"]} if "slowdown" in seen else {}),
                    )
                await ours.applied("_device_rollback", back=True)
                back.append(await self._verified())
                await ours.applied("_device_again", back=False)
            if back:
                results.facts["device_rollback_verified"] = all(back)
            await trainer.do("detach")

    async def in_place(self) -> None:
        """Attach, and write in transactions."""
        results = self._site.results
        with results.attempt("transactions in place"):
            results.facts["attach_first_s"] = await self._attach()
            for _ in results.rounds(self.ours.rounds, "attach", 60.0):
                await self.attached.do("detach")
                results.add(attach_s=await self._attach())
            read_s = results.facts["read_s"] = await self._read()
            for number in results.rounds(1 + self.ours.rounds, "transaction", 60.0):
                seen = await self._transaction(self._step)
                if number:  # The first one warms up.
                    results.add(
                        in_place_begin_s=seen["begun"] - seen["called"],
                        in_place_write_s=seen["written"] - seen["begun"],
                        in_place_commit_s=seen["digest_s"],
                        over_read=seen["digest_s"] / read_s,
                        in_place_call_s=seen["runs"] - seen["written"],
                        in_place_pause_s=seen["paused_s"],
                        in_place_max_gap_s=seen["gap_s"],
                        in_place_copy_follows_s=max(0.0, seen["ended"] - seen["runs"]),
                    )
            await self.ours.applied("_in_place_rollback", back=True)
            results.facts["in_place_rollback_verified"] = await self._verified()
            await self.ours.applied("_in_place_again", back=False)
            await self.attached.do("detach")

    async def _attach(self) -> float:
        """Return how long it took; what is compared because of it is over."""
        seconds = float((await self.attached.do("attach"))["seconds"])
        await self._compared()
        return seconds

    async def _compared(self) -> None:
        await until_compared(self.ours.client, self.ours.version, seconds=_CHECK_S)

    async def _verified(self) -> bool:
        return (await asyncio.to_thread(self.ours.client.verify)).verified

    async def _read(self) -> float:
        calls = self._site.calls
        await calls.pause("keep", clear_cache=False)
        try:
            return float((await self.attached.do("read"))["seconds"])
        finally:
            await calls.resume()

    async def _step(self) -> dict[str, Any]:
        """Change in place what the other trainer has changed in its own memory."""
        return await self.attached.do("step", mask=self._mask)

    async def _transaction(self, work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, float]:
        """Return when what happened in a transaction that changes every value.

        Returns:
            What `work` has, `called`, `ended` and `version` among it, and `Site.settled`; `runs`:
            when the engine ran again; `slowdown`: of tokens from then until it had ended, if that
            is long enough to see it.
        """
        await self._compared()
        calm_s = await self._site.calm()
        self._mask = (await self.ours.trainer.do("change"))["mask"]
        begin = time.perf_counter()
        done = await work()
        self.ours.version = done["version"]
        seen = done | await self._site.settled(begin)
        seen["runs"] = seen["paused_at"] + seen["paused_s"]
        # The pause itself is the gap before the first token of each request.
        since = seen["first_token"] + calm_s
        if seen["ended"] - since > _GAPS * calm_s:
            gaps = self._site.load.gaps(since, seen["ended"])
            seen["slowdown"] = statistics.median(gaps) / calm_s
        return seen
