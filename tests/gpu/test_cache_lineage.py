"""A CUDA vLLM with graphs keeps keys apart by version, with 256 requests running as well.

Needs a GPU and the vLLM release of its host; shown on 0.26.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.key_scene import KeyScene
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
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
    *("--gpu-memory-utilization", "0.3", "--max-num-seqs", "256"),
    *("--block-size", str(BLOCK), "--enable-prompt-tokens-details"),
]
_MOVED = re.compile(r"(\d+) requests cut, (\d+) preempted, \d+ moved, ([\d.]+) ms")


@pytest.fixture(scope="module")
def scene(checkpoint: Callable[..., Path], run_dir: Path) -> Iterator[KeyScene]:
    sizes = {"dtype": "bfloat16", "hidden": 512, "layers": 4}
    models = [checkpoint(seed=seed, **sizes) for seed in (1, 2)]
    variables = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    with running_bench(
        models[0], run_dir, dtype="bfloat16", flags=_FLAGS, variables=variables
    ) as bench:
        made = KeyScene.of(bench, models)
        # Logits of 20 in bfloat16; keys of another version differ by more than 3.
        made.noise = 0.5
        yield made


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_256_requests_are_cut_or_preempted_at_once(
    scene: KeyScene, cache: str, record_property: Callable[[str, object], None]
) -> None:
    prompts = [[10 + at // 16, 30 + at % 16, *range(50, 160)] for at in range(256)]
    running = [scene.begin(prompt, 380, wait=False) for prompt in prompts]
    scene.wait_for_requests(250)
    scene.apply(3 - scene.live, cache)
    for one in running:
        one.end()
    time.sleep(1.0)  # For the log to be written.
    found = _MOVED.findall(scene.bench.vllm.log_path.read_text())
    assert found
    cut, preempted, milliseconds = found[-1]
    record_property("milliseconds", f"{cut} cut, {preempted} preempted, {milliseconds} ms")
    assert int(cut if cache == "keep" else preempted) > 100
