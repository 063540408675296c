"""A real vLLM scores sequences in a pause: what it holds then, and nothing in flight is touched."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.key_scene import LENGTH_FLAGS, KeyScene
from tests.support.vllm_fixtures import running_bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_BLOCK = 32
#: So few that requests can have all.
_BLOCKS = 64
_FLAGS = [
    *LENGTH_FLAGS,
    *("--block-size", str(_BLOCK), "--num-gpu-blocks-override", str(_BLOCKS)),
    "--enable-prompt-tokens-details",
]
_TOKENS = range(10, 250)


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.battery)], ids=["tp1", "tp2"]
)
def scene(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], run_dir: Path
) -> Iterator[KeyScene]:
    models = [checkpoint(seed=seed, layers=4) for seed in (1, 2)]
    with running_bench(models[0], run_dir, tp=request.param, flags=_FLAGS) as bench:
        yield KeyScene.of(bench, models)


_DRAW = random.Random(3)


def _sequence(length: int) -> list[int]:
    return [_DRAW.choice(_TOKENS) for _ in range(length)]


def _own(scene: KeyScene, sequences: list[list[int]]) -> list[list[float]]:
    """What the live version answers to ordinary requests."""
    return [scene.score(tokens, 1) for tokens in sequences]


def _check(scene: KeyScene, found: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(one) for one in found] == [len(one) for one in wanted]
    for mine, own in zip(found, wanted, strict=True):
        scene.same(mine, own)


def test_scores_in_a_pause_are_those_of_what_the_ranks_hold_then(scene: KeyScene) -> None:
    client = scene.bench.client
    sequences = [_sequence(length) for length in (2, 33, 64, 96, 512)]
    before = _own(scene, sequences)
    _check(scene, client.score(sequences), before)
    other = 3 - scene.live
    for cache in ("recompute", "keep"):
        with scene.paused(other, cache) as lease:
            scored = client.score(sequences, lease)
            # In the pause it can be asked for again.
            _check(scene, client.score(sequences[:1], lease), scored[:1])
        after = _own(scene, sequences)
        _check(scene, scored, after)
        assert max(abs(a - b) for a, b in zip(after[1], before[1], strict=True)) > 0.1
        before, other = after, 3 - other


def test_in_flight_answers_are_the_same_with_a_score_as_without(scene: KeyScene) -> None:
    prompts = [_sequence(length) for length in (40, 41, 50, 64, 65, 70)]
    answers = []
    for scores in (False, True):
        running = scene.begin(*prompts)
        with scene.paused(scene.live, "keep") as lease:
            if scores:
                scene.bench.client.score([_sequence(200) for _ in range(8)], lease)
        # Blocks are few: it is over before they are full.
        answers.append([one.end(60) for one in running])
    for without, with_ in zip(*answers, strict=True):
        length = min(len(without.tokens), len(with_.tokens))
        assert length > 60
        assert without.tokens[:length] == with_.tokens[:length]
        scene.same(with_.logprobs[:length], without.logprobs[:length])


def test_requests_that_run_and_wait_go_on_after_it(scene: KeyScene) -> None:
    running = scene.begin(*(_sequence(40) for _ in range(8)))
    found: list[Any] = []
    shared = _sequence(100)
    waiting = [
        threading.Thread(target=lambda: found.append(scene.ask(shared, 4))) for _ in range(4)
    ]
    for one in waiting:
        one.start()
    scene.wait_for_requests(12)
    with scene.paused(3 - scene.live, "recompute") as lease:
        assert len(scene.bench.client.score([_sequence(64) for _ in range(8)], lease)) == 8
    for flight in running:
        flight.end(8)
    for one in waiting:
        one.join(120)
    own = scene.fresh(shared, 4)
    for answer in found:
        assert answer.tokens == own.tokens
        scene.same(answer.logprobs, own.logprobs)


def test_no_request_finds_a_key_of_a_scored_sequence(scene: KeyScene) -> None:
    sequence = _sequence(200)
    with scene.paused(scene.live, "keep") as lease:
        scene.bench.client.score([sequence], lease)
    assert scene.right(sequence).cached == 0
    other = _sequence(200)
    scene.bench.client.score([other])
    assert scene.right(other).cached == 0


def _refused(scene: KeyScene, *args: Any, **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        scene.bench.client.score(*args, **more)
    return refused.value.code(), refused.value.details() or ""


def test_without_a_free_block_it_ends_at_once_and_leaves_everything(scene: KeyScene) -> None:
    prompts = [_sequence(980), _sequence(980)]
    own = [scene.fresh(prompt, 8) for prompt in prompts]
    running = scene.begin(*prompts)
    began = time.monotonic()
    with scene.paused(scene.live, "keep") as lease:
        code, details = _refused(scene, [_sequence(400)], lease)
    assert time.monotonic() - began < 10
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no block of the key-value cache is free" in details
    for flight, answer in zip(running, own, strict=True):
        flight.end(10)
        scene.same(flight.logprobs[:8], answer.logprobs)


def test_what_leaves_meanwhile_or_takes_too_long_harms_nobody(scene: KeyScene) -> None:
    leaving = scene.begin(*(_sequence(40) for _ in range(3)))
    staying = scene.begin(_sequence(40))
    ends = [threading.Thread(target=one.end, args=(0,)) for one in leaving]
    with scene.paused(scene.live, "keep") as lease:
        for end in ends:
            end.start()
        many = [_sequence(500) for _ in range(64)]
        code, details = _refused(scene, many, lease, limit_s=0.05)
        assert (code, "in time" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        assert len(scene.bench.client.score(many[:2], lease)) == 2
    for end in ends:
        end.join(60)
    assert staying[0].end(8).tokens
    scene.right(_sequence(100))
    deadline = time.monotonic() + 30
    while scene.bench.client.health().requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_scored_is_refused(scene: KeyScene) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert _refused(scene, [[5]])[0] is invalid
    assert _refused(scene, [[5] * 513])[0] is invalid
    assert _refused(scene, [[5, 6]] * 65)[0] is invalid
    assert _refused(scene, [])[0] is invalid
    code, details = _refused(scene, [[5, 1 << 31]])
    assert (code, "use token ids below" in details) == (invalid, True)
    assert _refused(scene, [[5, 6]], limit_s=0.0)[0] is invalid
    refused = grpc.StatusCode.FAILED_PRECONDITION
    assert _refused(scene, [[5, 6]], "other")[0] is refused
    with scene.paused(scene.live, "keep"):
        assert _refused(scene, [[5, 6]])[0] is refused
