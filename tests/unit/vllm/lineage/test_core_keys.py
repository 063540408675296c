"""Keys by version, over vLLM's own requests and hashes; a real engine is in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from weightsync.vllm.lineage.cache_key import GROUP_PREFIX
from weightsync.vllm.lineage.core_hooks import BEGIN, MOVE, SWITCH, add_utilities
from weightsync.vllm.lineage.core_keys import CoreKeys, lacking

BLOCK = 4


class Core:
    """What is used of vLLM's EngineCore; blocks are filed and found by hash alone."""

    def __init__(self) -> None:
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        self.request_block_hasher: Any = get_request_block_hasher(BLOCK, function)
        self.filed: set[bytes] = set()
        self.log: list[str] = []
        self.replies: list[dict[str, Any]] = []
        layers = SimpleNamespace(
            num_cached_block={}, block_size=BLOCK, kv_cache_spec=SimpleNamespace()
        )
        self.cached: dict[str, int] = layers.num_cached_block
        self.scheduler = SimpleNamespace(
            running=[],
            requests={},
            hash_block_size=BLOCK,
            prev_step_scheduled_req_ids=set(),
            kv_cache_manager=SimpleNamespace(
                coordinator=SimpleNamespace(single_type_managers=[layers]),
                get_computed_blocks=self._found,
                reset_prefix_cache=self._cleared,
            ),
            encoder_cache_manager=SimpleNamespace(
                cached={}, get_cached_input_ids=lambda request: request.mm_features
            ),
            reset_encoder_cache=lambda: self.log.append("encoder"),
            reset_prefix_cache=self._reset,
        )
        self.model_executor = SimpleNamespace(reset_encoder_cache=lambda: self.log.append("worker"))

    def _found(self, request: Any) -> int:
        count = 0
        for block in request.block_hashes:
            if block not in self.filed:
                break
            count += 1
        return count

    def _reset(self, *, reset_running_requests: bool) -> None:
        """As vLLM's Scheduler does it."""
        assert reset_running_requests
        while self.scheduler.running:
            request = self.scheduler.running.pop()
            self.log.append(f"preempt {request.request_id}")
            request.num_computed_tokens = 0
            self.cached.pop(request.request_id, None)
        self.scheduler.prev_step_scheduled_req_ids.clear()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def _cleared(self) -> bool:
        self.log.append("cleared")
        return True

    def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> Any:
        assert (method, timeout, args, kwargs) == ("weightsync_switch", None, ({"a": 1},), None)
        if not self.replies:
            raise RuntimeError("the workers are gone")
        return self.replies

    def request(self, name: str, tokens: list[int], salt: str | None = None) -> Any:
        """Return a request that waits."""
        made = Request(
            name, tokens, SamplingParams(max_tokens=64), None,
            cache_salt=salt, block_hasher=self.request_block_hasher,
        )  # fmt: skip
        self.scheduler.requests[name] = made
        return made

    def run(self, request: Any, computed: int) -> None:
        """Compute tokens of a request up to a number, and file its full blocks."""
        assert self.scheduler.kv_cache_manager.get_computed_blocks(request) >= 0
        if request not in self.scheduler.running:
            self.scheduler.running.append(request)
        request.num_computed_tokens = computed
        self.cached[request.request_id] = computed // BLOCK
        self.filed.update(request.block_hashes[: computed // BLOCK])

    def hits(self, tokens: list[int], salt: str | None = None) -> int:
        """Return how many blocks a new request finds."""
        made = self.request(f"ask{len(self.scheduler.requests)}", tokens, salt)
        del self.scheduler.requests[made.request_id]
        found: int = self.scheduler.kv_cache_manager.get_computed_blocks(made)
        return found


@pytest.fixture
def core() -> Core:
    made = Core()
    assert lacking(made) == ""
    return made


TOKENS = list(range(100, 121))


def test_a_version_finds_its_own_blocks_alone_and_again_when_it_returns(core: Core) -> None:
    keys = CoreKeys(core, "one")
    core.run(core.request("a", TOKENS), len(TOKENS))
    assert core.hits(TOKENS) == 5
    keys.move("two", recompute=True)
    assert core.hits(TOKENS) == 0
    keys.move("one", recompute=True)
    assert core.hits(TOKENS) == 5


@pytest.mark.parametrize("computed", [0, 3, 4, 6, 17, 21])
def test_what_is_computed_over_a_change_is_found_under_no_version(
    core: Core, computed: int
) -> None:
    keys = CoreKeys(core, "one")
    request = core.request("a", list(TOKENS))
    core.run(request, computed)
    assert keys.move("two", recompute=False)["cut"] == (computed > 0)
    for token in range(200, 220):
        request.append_output_token_ids(token)
    core.run(request, request.num_tokens)
    whole = list(request.all_token_ids)
    assert len(request.block_hashes) == len(whole) // BLOCK
    # One that had computed nothing is of the new version as a whole.
    assert core.hits(whole) == (0 if computed else len(whole) // BLOCK)
    keys.move("one", recompute=False)
    assert core.hits(whole) == computed // BLOCK


def test_a_cut_does_not_change_the_parents_that_vllm_tells_of(core: Core) -> None:
    keys = CoreKeys(core, "one")
    request = core.request("a", list(TOKENS))
    core.run(request, 8)
    before = list(request.block_hashes)
    keys.move("two", recompute=False)
    assert request.block_hashes[:2] == before[:2]
    assert not set(request.block_hashes[2:]) & set(before)


def test_two_cuts_of_the_same_tokens_differ(core: Core) -> None:
    keys = CoreKeys(core, "one")
    pair = [core.request(name, list(TOKENS)) for name in "ab"]
    for request in pair:
        core.run(request, 8)
    keys.move("two", recompute=False)
    once = list(pair[0].block_hashes)
    assert not set(once[2:]) & set(pair[1].block_hashes[2:])
    core.run(pair[0], 12)
    keys.move("three", recompute=False)
    assert pair[0].block_hashes[:3] == once[:3]
    assert not set(pair[0].block_hashes[3:]) & set(once)


def test_a_session_that_loses_blocks_from_before_a_cut_is_cut_there(core: Core) -> None:
    keys = CoreKeys(core, "one")
    request = core.request("a", list(TOKENS))
    core.run(request, 16)
    keys.move("two", recompute=False)
    # As the scheduler does for the next part of a streaming input.
    del request.block_hashes[2:]
    request.update_block_hashes()
    core.filed.update(request.block_hashes)
    assert core.hits(TOKENS) == 0
    keys.move("one", recompute=False)
    assert core.hits(TOKENS) == 4


def test_a_cut_request_that_is_preempted_reads_the_present_version_alone(core: Core) -> None:
    keys = CoreKeys(core, "one")
    request = core.request("a", list(TOKENS))
    core.run(request, 16)
    keys.move("two", recompute=False)
    request.num_computed_tokens = 0
    assert core.scheduler.kv_cache_manager.get_computed_blocks(request) == 0
    core.run(request, 20)
    assert core.hits(TOKENS) == 5
    keys.move("one", recompute=False)
    assert core.hits(TOKENS) == 4


def test_recompute_preempts_in_the_order_in_which_requests_run(core: Core) -> None:
    keys = CoreKeys(core, "one")
    for name in "abc":
        core.run(core.request(name, [ord(name), *TOKENS]), 8)
    core.scheduler.prev_step_scheduled_req_ids.update("abc")
    done = keys.move("two", recompute=True)
    # Each goes before those that wait, so that the first to run is preempted last.
    assert core.log == ["preempt c", "preempt b", "preempt a"]
    assert (done["preempted"], done["cut"]) == (3, 0)
    assert core.scheduler.running == []
    assert core.scheduler.prev_step_scheduled_req_ids == set()


def test_what_came_before_keys_were_kept_apart_is_cut_as_well(core: Core) -> None:
    early = [core.request(name, [ord(name), *TOKENS]) for name in "ab"]
    core.run(early[0], 8)
    keys = CoreKeys(core, "one")
    core.run(early[1], 8)
    keys.move("two", recompute=False)
    for request in early:
        core.run(request, 20)
        assert core.hits(list(request.all_token_ids)) == 0
    late = Request("c", list(TOKENS), SamplingParams(max_tokens=4), None)
    core.scheduler.kv_cache_manager.get_computed_blocks(late)
    assert len(late.block_hashes) == 5


@pytest.mark.parametrize(("in_flight", "kept"), [(0, False), (1, True)])
def test_prompt_logprobs_in_flight_are_not_lost_by_recompute(
    core: Core, in_flight: int, kept: bool
) -> None:
    keys = CoreKeys(core, "one")
    request = core.request("a", list(TOKENS))
    request.sampling_params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    core.run(request, 20)
    request.num_in_flight_tokens = in_flight
    done = keys.move("two", recompute=True)
    assert (done["cut"], done["preempted"]) == (int(kept), int(not kept))


def test_the_same_key_again_changes_nothing(core: Core) -> None:
    keys = CoreKeys(core, "one")
    request = core.request("a", list(TOKENS))
    core.run(request, 8)
    before = list(request.block_hashes)
    assert keys.move("one", recompute=True)["preempted"] == 0
    assert request.block_hashes == before


def test_salts_keep_their_users_apart_and_name_no_version(core: Core) -> None:
    keys = CoreKeys(core, "one")
    core.run(core.request("a", list(TOKENS), "mine"), 20)
    assert [core.hits(TOKENS, salt) for salt in ("mine", None, "one|mine")] == [5, 0, 0]
    keys.move("two", recompute=True)
    assert core.hits(TOKENS, "mine") == 0
    assert core.hits(TOKENS, "one") == 0


def test_a_group_shares_keys_over_versions_and_with_nobody_else(core: Core) -> None:
    keys = CoreKeys(core, "one")
    salt = f"{GROUP_PREFIX}7"
    request = core.request("a", list(TOKENS), salt)
    core.run(request, 8)
    assert keys.move("two", recompute=False)["cut"] == 0
    assert keys.move("three", recompute=True)["preempted"] == 0
    core.run(request, 20)
    assert (core.hits(TOKENS, salt), core.hits(TOKENS), core.hits(TOKENS, f"{GROUP_PREFIX}8")) == (
        5, 0, 0,
    )  # fmt: skip


def test_what_an_encoder_made_is_forgotten_and_who_still_reads_it_computes_it_again(
    core: Core,
) -> None:
    keys = CoreKeys(core, "one")
    core.scheduler.encoder_cache_manager.cached["image"] = {"a"}
    for name in "ab":
        core.run(core.request(name, [ord(name), *TOKENS]), 8)
    core.scheduler.running[0].mm_features = ["image"]
    core.scheduler.prev_step_scheduled_req_ids.update("ab")
    assert keys.move("two", recompute=False) | {"seconds": 0} == {
        "cut": 1, "preempted": 1, "moved": 0, "seconds": 0
    }  # fmt: skip
    assert core.log == ["preempt a", "encoder", "worker"]
    assert [one.request_id for one in core.scheduler.running] == ["b"]
    # It ran in the step before and runs on.
    assert core.scheduler.prev_step_scheduled_req_ids == {"b"}


def test_a_vllm_without_prefix_caching_preempts_all_the_same(core: Core) -> None:
    core.request_block_hasher = None
    keys = CoreKeys(core, "one")
    core.run(core.request("a", list(TOKENS)), 8)
    assert keys.move("two", recompute=False)["cut"] == 0
    assert keys.move("three", recompute=True)["preempted"] == 1


@pytest.mark.parametrize(
    ("owner", "name"),
    [("", "request_block_hasher"), ("scheduler", "running"), ("scheduler", "hash_block_size")],
)
def test_a_missing_hook_is_named(core: Core, owner: str, name: str) -> None:
    vars(getattr(core, owner) if owner else core).pop(name)
    add_utilities(Core)
    assert getattr(core, BEGIN)("one").endswith(f".{name}")


def test_a_move_that_fails_leaves_no_key(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    add_utilities(Core)
    assert getattr(core, BEGIN)("one") == ""
    core.run(core.request("a", list(TOKENS)), 8)
    monkeypatch.setattr(core.scheduler, "encoder_cache_manager", None)
    assert getattr(core, MOVE)("two", False) == {"cleared": 1}
    assert core.log == ["preempt a", "cleared", "encoder", "worker"]


OLD, NEW = "aa", "bb"


@pytest.mark.parametrize(
    ("replies", "key"),
    [
        ([(True, NEW), (True, NEW)], "two"),
        ([(False, OLD), (False, OLD)], "one"),
        ([(True, NEW), (False, OLD)], None),
        ([(True, OLD), (True, OLD)], None),
        ([(False, NEW), (False, NEW)], None),
        ([(True, ""), (True, "")], None),
    ],
)
def test_a_switch_moves_where_every_rank_holds_the_new_content(
    core: Core, replies: list[tuple[bool, str]], key: str | None
) -> None:
    add_utilities(Core)
    getattr(core, BEGIN)("one")
    core.replies = [{"ok": ok, "content_digest": digest} for ok, digest in replies]
    request = core.request("a", list(TOKENS))
    core.run(request, 8)
    before = list(request.block_hashes)
    answer = getattr(core, SWITCH)("weightsync_switch", {"a": 1}, [OLD, NEW], "two", False)
    assert answer[:-1] == core.replies
    present = core.weightsync_keys.key  # type: ignore[attr-defined]  # Set by BEGIN
    assert answer[-1]["key"] == present
    if key is None:
        assert present.startswith("weightsync:unknown.")
        assert core.log == ["preempt a"]
    else:
        assert present == key
        assert (request.block_hashes == before) is (key == "one")


def test_a_switch_that_fails_reads_no_key_of_before(core: Core) -> None:
    add_utilities(Core)
    getattr(core, BEGIN)("one")
    with pytest.raises(RuntimeError, match="gone"):
        getattr(core, SWITCH)("weightsync_switch", {"a": 1}, [OLD, NEW], "two", False)
    assert core.weightsync_keys.key.startswith("weightsync:unknown.")  # type: ignore[attr-defined]  # Set by BEGIN
