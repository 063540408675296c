"""A CUDA vLLM with graphs keeps keys apart by version, with 256 requests running as well.

Needs a GPU and the vLLM release of its host; shown on 0.26.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.key_scene import LENGTH_FLAGS, KeyScene
from tests.support.vllm_fixtures import running_bench
from tests.vllm.test_cache_lineage import (
    BLOCK,
)
from tests.vllm.test_cache_lineage import (
    test_a_new_request_finds_no_key_of_another_version_and_all_of_its_own_again as test_new,
)
from tests.vllm.test_cache_lineage import (
    test_share_reads_the_keys_that_are_there_and_their_name_is_never_used_again as test_share,
)
from tests.vllm.test_cache_lineage import (
    test_what_is_in_flight_leaves_no_mixed_key_for_others as test_in_flight,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["test_in_flight", "test_new", "test_share"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_FLAGS = [
    *LENGTH_FLAGS,
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
    *("--gpu-memory-utilization", "0.3", "--max-num-seqs", "256"),
    *("--block-size", str(BLOCK), "--enable-prompt-tokens-details"),
]


@pytest.fixture(scope="module")
def scene(checkpoint: Callable[..., Path], run_dir: Path) -> Iterator[KeyScene]:
    sizes = {"dtype": "bfloat16", "hidden": 512, "layers": 4}
    models = [checkpoint(seed=seed, **sizes) for seed in (1, 2)]
    with running_bench(models[0], run_dir, dtype="bfloat16", flags=_FLAGS) as bench:
        made = KeyScene.of(bench, models)
        # Logits of 20 in bfloat16; keys of another version differ by more than 3.
        made.noise = 0.5
        yield made


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_256_requests_are_cut_or_preempted_at_once(
    scene: KeyScene, cache: str, record_testsuite_property: Callable[[str, object], None]
) -> None:
    prompts = [[10 + at // 16, 30 + at % 16, *range(50, 160)] for at in range(256)]
    running = scene.begin(*prompts, wait=False)
    scene.wait_for_requests(250)
    before = scene.bench.client.health().cut_requests
    scene.apply(3 - scene.live, cache)
    after = scene.bench.client.health()
    for one in running:
        one.end()
    if cache == "keep":
        assert after.cut_requests > before + 100
    record_testsuite_property(cache, after.key_move.ToMicroseconds())
    assert after.key_move.ToMilliseconds() < 1000
