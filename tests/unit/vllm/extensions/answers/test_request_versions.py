"""Which versions made an answer: exactly where outputs are labelled, else all that were live."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.vllm.extensions.processor import Llm
from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.extensions.answers.request_versions import RequestVersions, watch


class World:
    """An engine that serves version 41."""

    def __init__(self, *, labels: bool = True) -> None:
        self.llm = Llm(labels=labels)
        self.live = LiveVersions(labelled=labels)
        watch(self.llm, self.live)
        self.go(41)

    def go(self, version: int) -> None:
        """Serve a version, as a resume does."""
        self.live.begin(version)
        self.live.confirm()
        self.llm.label = str(version) if version else self.llm.label

    def asked(self, *names: str, pools: bool = False) -> RequestVersions:
        """Return a new HTTP request that asks for something of the engine."""
        versions = RequestVersions(self.live)
        with versions.answering():
            for name in names:
                self.llm.ask(name, pools=pools)
        return versions


async def test_a_request_that_spans_an_apply_names_both_in_order() -> None:
    world = World()
    versions = world.asked("a")
    assert await versions.so_far() == ()
    world.llm.token("a")
    world.go(42)
    assert await versions.so_far() == (41,)
    world.llm.token("a")
    assert await versions.so_far() == (41, 42)
    assert await versions.first() == (41,)


async def test_a_version_that_gave_it_no_token_is_not_named() -> None:
    world = World()
    early, over = world.asked("early"), world.asked("over")
    world.llm.token("early")
    world.go(42)
    world.go(43)
    world.llm.token("over")
    assert await early.so_far() == (41,)
    assert await over.so_far() == (43,)


async def test_each_version_once_also_after_a_rollback() -> None:
    world = World()
    versions = world.asked("a")
    for version in (42, 41, 42):
        world.llm.token("a")
        world.go(version)
    world.llm.token("a")
    assert await versions.so_far() == (41, 42)
    after = world.asked("b")
    world.llm.token("b")
    world.go(41)
    world.llm.token("b")
    assert await after.so_far() == (42, 41)


async def test_sequences_of_one_request_are_named_together() -> None:
    world = World()
    versions = world.asked("a", "b")
    world.llm.token("a")
    world.go(42)
    world.llm.token("b")
    assert await versions.first() == (41, 42)
    assert await versions.so_far() == (41, 42)
    assert not versions.finished()
    world.llm.end("b")
    assert not versions.finished()
    world.llm.end("a")
    assert versions.finished()


async def test_requests_of_others_are_not_its_own() -> None:
    world = World()
    first, second = world.asked("a"), world.asked("b")
    world.llm.token("a")
    world.go(42)
    world.llm.token("b")
    assert (await first.so_far(), await second.so_far()) == ((41,), (42,))
    world.llm.ask("of no writer")
    world.llm.end("a")
    assert (first.finished(), second.finished()) == (True, False)
    assert not RequestVersions(world.live).finished()


async def test_tasks_of_a_request_ask_for_it() -> None:
    world = World()

    async def ask(name: str, versions: RequestVersions) -> None:
        with versions.answering():
            await asyncio.sleep(0)
            await asyncio.create_task(_ask(name))

    async def _ask(name: str) -> None:
        world.llm.ask(name)

    several = [RequestVersions(world.live) for _ in range(3)]
    await asyncio.gather(*(ask(str(at), one) for at, one in enumerate(several)))
    for at, one in enumerate(several):
        world.go(42 + at)
        world.llm.token(str(at))
        assert await one.so_far() == (42 + at,)


async def test_without_labels_all_that_were_live_meanwhile_are_named() -> None:
    world = World(labels=False)
    world.go(42)
    versions = world.asked("a")
    world.llm.token("a")
    assert await versions.first() == (42,)
    world.go(43)
    assert await versions.so_far() == (42, 43)
    assert await world.asked("b").so_far() == (43,)


async def test_what_has_no_tokens_names_all_that_were_live_meanwhile() -> None:
    world = World()
    versions = world.asked("a", pools=True)
    world.go(42)
    assert await versions.so_far() == (41, 42)


async def test_a_label_that_vllm_did_not_take_is_not_relied_on() -> None:
    world = World()
    versions = world.asked("a")
    world.llm.token("a")
    world.live.begin(42)
    world.live.unlabelled()
    world.llm.token("a")
    assert await versions.so_far() == (41, 42)


async def test_a_part_without_a_number_makes_the_answer_one_without() -> None:
    world = World()
    world.go(0)
    versions = world.asked("a")
    world.llm.token("a")
    assert await versions.so_far() == ()
    world.go(42)
    world.llm.token("a")
    assert await versions.so_far() == ()
    after = world.asked("b")
    world.llm.token("b")
    assert await after.so_far() == (42,)


async def test_a_label_of_a_trainer_stands_for_the_version_that_is_served() -> None:
    world = World()
    versions = world.asked("a")
    await world.llm.update_weight_version("7")
    assert world.llm.label == "7"
    world.llm.token("a")
    assert await versions.so_far() == (41,)
    world.go(42)
    world.llm.token("a")
    assert await versions.so_far() == (41, 42)


async def test_of_a_label_that_two_versions_had_all_that_were_live_are_named() -> None:
    world = World()
    await world.llm.update_weight_version("latest")
    versions = world.asked("a")
    world.llm.token("a")
    world.go(42)
    await world.llm.update_weight_version("latest")
    assert await versions.so_far() == (41, 42)
    after = world.asked("b")
    world.llm.token("b")
    assert await after.so_far() == (42,)


async def test_a_label_that_came_by_another_way_is_not_guessed_at() -> None:
    world = World()
    versions = world.asked("a")
    world.llm.label = "foreign"
    world.llm.token("a")
    assert await versions.so_far() == ()


@pytest.mark.parametrize("taken", [True, False])
async def test_a_switch_between_steps_names_both_sides_to_who_is_under_way(taken: bool) -> None:
    world = World()
    ended, spans = world.asked("ended"), world.asked("spans")
    world.llm.token("ended", "spans")
    world.live.attempt(42)
    # Its tokens are here, and none of the new version can be.
    assert await ended.so_far() == (41,)
    world.llm.label = "42"
    world.llm.token("spans")
    asking = asyncio.ensure_future(spans.so_far())
    await asyncio.sleep(0)
    assert not asking.done()
    world.live.settle(42 if taken else 41)
    assert await asking == ((41, 42) if taken else (41,))
    if not taken:
        world.go(41)
    after = world.asked("after")
    world.llm.token("after")
    assert await after.so_far() == ((42,) if taken else (41,))
    # One step may carry the label of the wrong side.
    late = World()
    versions = late.asked("a")
    late.live.attempt(42)
    late.live.settle(42)
    late.llm.token("a")
    assert await versions.so_far() == (41, 42)


async def test_of_a_switch_that_left_nobody_knows_what_no_number_is_named() -> None:
    world = World()
    versions = world.asked("a")
    world.live.attempt(42)
    world.llm.label = "42"
    world.llm.token("a")
    world.live.settle(0)
    assert await versions.so_far() == ()
