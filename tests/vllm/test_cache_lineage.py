"""A real vLLM reads keys of the version that computes a request, or the request's own.

Each answer is compared with that under a salt that nobody has used, so that it reads no cached key.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.key_scene import LENGTH_FLAGS, KeyScene
from tests.support.vllm_fixtures import running_bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 32
#: Largest token of the tests' vocabulary that is no special one.
TOKENS = range(10, 250)
FLAGS = [*LENGTH_FLAGS, "--block-size", str(BLOCK), "--enable-prompt-tokens-details"]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.battery)])
def scene(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], run_dir: Path
) -> Iterator[KeyScene]:
    models = [checkpoint(seed=seed, layers=4) for seed in (1, 2)]
    with running_bench(models[0], run_dir, tp=request.param, flags=FLAGS) as bench:
        yield KeyScene.of(bench, models)


@pytest.fixture
def draw() -> random.Random:
    return random.Random(7)


_PROMPTS = random.Random(1)


def _prompt(length: int = 200) -> list[int]:
    """Return tokens that no other prompt begins with."""
    return [_PROMPTS.choice(TOKENS) for _ in range(length)]


def _paused(cache: str) -> Any:
    return lambda scene, which: scene.apply(which, cache)


def _between(cache: str) -> Any:
    return lambda scene, which: scene.switch(which, cache)


CHANGES = [
    pytest.param(change(cache), id=f"{change.__name__.strip('_')}-{cache}")
    for change in (_paused, _between)
    for cache in ("recompute", "keep")
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_request_finds_no_key_of_another_version_and_all_of_its_own_again(
    scene: KeyScene, change: Any
) -> None:
    prompt = _prompt()
    first, other = scene.live, 3 - scene.live
    scene.right(prompt)
    cached = scene.right(prompt).cached
    assert cached >= len(prompt) - BLOCK
    change(scene, other)
    assert scene.right(prompt).cached == 0
    assert scene.right(prompt).cached == cached
    change(scene, first)
    # No block was thrown away by either change.
    assert scene.right(prompt).cached == cached


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_in_flight_leaves_no_mixed_key_for_others(scene: KeyScene, change: Any) -> None:
    first, other = scene.live, 3 - scene.live
    running = scene.begin(*(_prompt(length) for length in (40, 64, 200)))
    change(scene, other)
    whole = [one.prompt + one.end().tokens for one in running]
    for which in (other, first):
        change(scene, which) if which != scene.live else None
        for tokens in whole:
            for length in (70, 128, len(tokens) - 1):
                scene.right(tokens[:length])


def _own_scores(scene: KeyScene, tokens: list[int], start: int) -> dict[int, list[float]]:
    scores = {}
    for which in (scene.live, 3 - scene.live):
        if which != scene.live:
            scene.apply(which, "recompute")
        scores[which] = scene.score(tokens, start)
    return scores


@pytest.mark.parametrize("change", CHANGES)
def test_recompute_answers_as_one_version_or_the_other_and_keep_as_neither(
    scene: KeyScene, change: Any, request: pytest.FixtureRequest
) -> None:
    first, other = scene.live, 3 - scene.live
    (running,) = scene.begin(_prompt(100))
    change(scene, other)
    running.end()
    tokens = running.prompt + running.tokens
    own = _own_scores(scene, tokens, len(running.prompt))
    near = {
        which: [abs(a - b) <= scene.noise for a, b in zip(running.logprobs, scores, strict=True)]
        for which, scores in own.items()
    }
    before = near[first].index(False) if False in near[first] else len(near[first])
    assert 0 < before < len(running.tokens), "the change came when the request had ended"
    if "recompute" in request.node.callspec.id:
        assert all(near[other][before:])
    else:
        assert not all(near[other][before:])


def test_share_reads_the_keys_that_are_there_and_their_name_is_never_used_again(
    scene: KeyScene,
) -> None:
    prompt = _prompt()
    first, other = scene.live, 3 - scene.live
    scene.right(prompt)
    scene.apply(other, "share")
    answer, own = scene.ask(prompt, 4), scene.fresh(prompt, 4)
    assert answer.cached > 0
    assert max(abs(a - b) for a, b in zip(answer.logprobs, own.logprobs, strict=True)) > scene.noise
    longer = prompt + _prompt(80)
    scene.ask(longer, 1)
    # Those of the new version now lie under the name of the one before as well.
    scene.apply(first, "recompute")
    scene.right(longer)
    scene.apply(other, "keep")
    scene.right(longer)


def test_a_salt_keeps_its_users_apart_and_several_sequences_and_batches_are_right(
    scene: KeyScene,
) -> None:
    prompt, other = _prompt(), 3 - scene.live
    scene.right(prompt, cache_salt="mine")
    assert scene.ask(prompt, 1).cached == 0
    scene.apply(other, "keep")
    assert scene.right(prompt, cache_salt="mine").cached == 0
    assert scene.right(prompt, cache_salt="mine").cached > 0
    # What another request says its salt is cannot name a version.
    key = scene.bench.client.health().cache_key
    assert scene.ask(prompt, 1, cache_salt=key).cached == 0


def test_requests_that_wait_over_a_change_read_keys_of_the_version_after_it(
    scene: KeyScene,
) -> None:
    shared, other = _prompt(), 3 - scene.live
    scene.right(shared)
    before = scene.bench.client.health()
    # Eight run; these wait until one of them ends.
    running = scene.begin(*(_prompt(40) for _ in range(8)))
    found: list[Any] = []
    waiting = [
        threading.Thread(target=lambda: found.append(scene.ask(shared, 4))) for _ in range(4)
    ]
    for one in waiting:
        one.start()
    scene.wait_for_requests(12)
    scene.apply(other, "keep")
    for flight in running:
        flight.end()
    for one in waiting:
        one.join(120)
    own = scene.fresh(shared, 4)
    for answer in found:
        assert answer.tokens == own.tokens
        scene.same(answer.logprobs, own.logprobs)
    after = scene.bench.client.health()
    assert after.cut_requests >= before.cut_requests + 8


@pytest.mark.battery
def test_random_schedules_over_fifty_changes_are_right_to_the_last_token(
    scene: KeyScene, draw: random.Random
) -> None:
    prompts = [_prompt(draw.choice((48, 96, 160, 224))) for _ in range(6)]
    done: list[list[int]] = []
    for _ in range(50):
        running = scene.begin(
            *(
                draw.choice(prompts)[: draw.randint(40, 224)] + _prompt(8)
                for _ in range(16 if draw.random() < 0.3 else 4)
            ),
            wait=False,
        )
        scene.wait_for_requests(len(running))
        other, cache = 3 - scene.live, draw.choice(("keep", "recompute"))
        if draw.random() < 0.5:
            scene.switch(other, cache)
        else:
            scene.apply(other, cache, draw.choice(("keep", "abort", "keep")))
        done += [one.prompt + one.end(draw.randint(1, 48)).tokens for one in running]
        for tokens in draw.sample(done, min(3, len(done))):
            scene.right(tokens[: draw.randint(33, len(tokens))])
