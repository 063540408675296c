"""Hashes the blocks of requests by version, inside vLLM's EngineCore.

vLLM finds a block by a hash chained over all tokens before it, and the first link takes the
request's `cache_salt` in. Here that salt gets the key of the version. A request that a switch finds
with blocks is either preempted, so that it computes them again, or cut: what it computes from then
on is found by this request alone, because it was computed from keys of more than one version.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from weightsync.vllm.lineage.cache_key import GROUP_PREFIX, salted

__all__ = ["CoreKeys", "lacking", "preempt"]

#: vLLM's function that hashes the full blocks of a request that have no hash yet.
Hasher = Callable[[Any], list[Any]]

#: Attributes that we add to a vLLM Request.
_KEY, _OWN_SALT, _CUT = "weightsync_key", "weightsync_salt", "weightsync_cut"


class _Cut:
    """Blocks from `at` on belong to one request alone."""

    __slots__ = ("at", "mark")

    def __init__(self, at: int, mark: str) -> None:
        self.at = at
        self.mark = mark

    def hash(self, request: Any, base: Hasher) -> list[Any]:
        found = request.block_hashes
        if len(found) > self.at:
            return base(request)
        # A streaming session can lose blocks from before the cut; what follows is mixed as well.
        self.at = len(found)
        if not found:
            salt, request.cache_salt = request.cache_salt, f"{request.cache_salt}|{self.mark}"
            try:
                return base(request)
            finally:
                request.cache_salt = salt
        # The parent of the next block: the one place of the chain that a later block can enter.
        parent = found[-1]
        found[-1] = hashlib.sha256(parent + self.mark.encode()).digest()
        try:
            return base(request)
        finally:
            found[-1] = parent


class CoreKeys:
    """Gives requests the key of the version that will compute them, and cuts those in flight.

    All but hashing runs on EngineCore's only thread; a request may be hashed for the first time on
    the thread that receives it, with the key before, and is hashed again when it is scheduled.

    Args:
        core: vLLM's EngineCore.
        key: The key to begin with.
    """

    def __init__(self, core: Any, key: str) -> None:
        self.key = key
        #: Requests that have been hashed again since the last `move`.
        self._moved = 0
        self._cuts = 0
        self._core = core
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        self._base: Hasher | None = core.request_block_hasher
        if self._base is not None:
            core.request_block_hasher = self.hash
            for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
                if hasattr(self._manager, name):
                    self._look_up_first(name)
            for request in self._scheduler.requests.values():
                self._follow(request)

    def _look_up_first(self, name: str) -> None:
        find = getattr(self._manager, name)

        def found(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.admit(request)
            return find(request, *args, **kwargs)

        setattr(self._manager, name, found)

    def hash(self, request: Any) -> list[Any]:
        """Return the hashes of the request's full blocks that have none, as vLLM's own does."""
        assert self._base is not None  # noqa: S101 - else this is not called
        added = vars(request)
        if _KEY not in added:
            self._name(request, request.cache_salt)
        cut = added.get(_CUT)
        return self._base(request) if cut is None else cut.hash(request, self._base)

    def admit(self, request: Any) -> None:
        """Let a request without computed tokens read keys of the present version alone."""
        added = vars(request)
        if request.num_computed_tokens or _in_group(request):
            return
        self._follow(request)
        if added.get(_KEY) == self.key and _CUT not in added:
            return
        self._moved += _KEY in added
        added.pop(_CUT, None)
        self._name(request, added.get(_OWN_SALT, request.cache_salt))
        request.block_hashes.clear()
        request.update_block_hashes()

    def _follow(self, request: Any) -> None:
        """Have a request hashed here that came before this began."""
        if request._block_hasher != self.hash:  # noqa: SLF001 - vLLM gives it at construction alone
            request._block_hasher = self.hash  # noqa: SLF001 - as above

    def _name(self, request: Any, salt: str | None) -> None:
        # Read once: another thread may move the key.
        key = self.key
        setattr(request, _OWN_SALT, salt)
        setattr(request, _KEY, key)
        request.cache_salt = salted(key, salt)

    def move(self, key: str, *, recompute: bool) -> dict[str, float]:
        """Begin with the keys of another version, whose weights compute every step from now on.

        Args:
            key: Its name. The present one changes nothing.
            recompute: Requests in flight compute all their keys again, and no other request loses
                any; else they go on with those that they have.

        Returns:
            How many requests were cut, preempted and, since the last call, hashed again, and the
            seconds it took.
        """
        begin = time.perf_counter()
        cut = preempted = 0
        moved, self._moved = self._moved, 0
        if key != self.key:
            self.key = key
            running = self._scheduler.running
            again = filter(_restarts, running) if recompute else self._with_encoder_inputs(running)
            preempted = preempt(self._scheduler, list(again))
            cut = sum(map(self._cut, self._scheduler.requests.values()))
            self._forget_encoded()
        seconds = time.perf_counter() - begin
        return {"cut": cut, "preempted": preempted, "moved": moved, "seconds": seconds}

    def _cut(self, request: Any) -> bool:
        if self._base is None or not request.num_computed_tokens or _in_group(request):
            return False
        cached = _cached_tokens(self._manager, request.request_id)
        at = min(cached // self._scheduler.hash_block_size, len(request.block_hashes))
        self._follow(request)
        self._cuts += 1
        setattr(request, _CUT, _Cut(at, f"{request.request_id}.{self._cuts}"))
        del request.block_hashes[at:]
        request.update_block_hashes()
        return True

    def _with_encoder_inputs(self, running: list[Any]) -> list[Any]:
        """Return requests that still read what an encoder made, by the weights before."""
        inputs = self._scheduler.encoder_cache_manager.get_cached_input_ids
        return [one for one in running if one.mm_features and inputs(one)]

    def _forget_encoded(self) -> None:
        # Found by the image alone, whatever the salt.
        if getattr(self._scheduler.encoder_cache_manager, "cached", None):
            self._scheduler.reset_encoder_cache()
            self._core.model_executor.reset_encoder_cache()


def preempt(scheduler: Any, requests: list[Any]) -> int:
    """Preempt running requests, as vLLM does when it clears the cache, which differs by release.

    Returns how many there were; what they have computed stays in the cache.
    """
    if not requests:
        return 0
    manager = scheduler.kv_cache_manager
    others = [one for one in scheduler.running if one not in requests]
    ran = {one.request_id for one in others} & scheduler.prev_step_scheduled_req_ids
    scheduler.running = list(requests)
    # No block is cleared; each is found under the key that it has.
    manager.reset_prefix_cache = lambda: True
    try:
        scheduler.reset_prefix_cache(reset_running_requests=True)
    finally:
        del manager.reset_prefix_cache
        scheduler.running = [*others, *scheduler.running]
        scheduler.prev_step_scheduled_req_ids.update(ran)
    return len(requests)


def _restarts(request: Any) -> bool:
    """Whether a request can compute its keys again.

    vLLM has forgotten which prompt logprobs it owes where the last of them are in flight; a group's
    keys belong to no version.
    """
    params = request.sampling_params
    owes = params is not None and params.prompt_logprobs is not None
    in_flight = int(getattr(request, "num_in_flight_tokens", 0)) > 0
    return not (owes and in_flight) and not _in_group(request)


def _in_group(request: Any) -> bool:
    return (request.cache_salt or "").startswith(GROUP_PREFIX)


def _cached_tokens(manager: Any, request_id: str) -> int:
    """Return how many tokens every group of layers has filed full blocks of."""
    return min(
        (
            one.num_cached_block.get(request_id, 0) * one.block_size
            for one in manager.coordinator.single_type_managers
            if getattr(one.kv_cache_spec, "prefix_cacheable", True)
        ),
        default=0,
    )


def lacking(core: Any) -> str:
    """Return which attribute of vLLM's this needs and does not find; "": none."""
    scheduler = getattr(core, "scheduler", None)
    manager = getattr(scheduler, "kv_cache_manager", None)
    coordinator = getattr(manager, "coordinator", None)
    needs = {
        "EngineCore": (core, ("request_block_hasher", "model_executor")),
        "Scheduler": (
            scheduler,
            (
                *("running", "requests", "hash_block_size", "reset_prefix_cache"),
                *("prev_step_scheduled_req_ids", "encoder_cache_manager", "reset_encoder_cache"),
            ),
        ),
        "KVCacheManager": (manager, ("get_computed_blocks", "reset_prefix_cache")),
        "KVCacheCoordinator": (coordinator, ("single_type_managers",)),
    }
    for owner, (found, names) in needs.items():
        for name in names:
            if not hasattr(found, name):
                return f"{owner}.{name}"
    for one in coordinator.single_type_managers:  # type: ignore[union-attr]  # Found above
        if not hasattr(one, "num_cached_block"):
            return f"{type(one).__name__}.num_cached_block"
    return ""
