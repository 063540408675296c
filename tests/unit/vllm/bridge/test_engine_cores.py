from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm.bridge.llm_calls import EngineCores, VllmCalls


class Newer:
    """A client that answers for every core."""

    core_engines = (b"\0", b"\1")

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        return [(core, method, args) for core in self.core_engines]


class Older:
    """A client of which only one core at a time can be asked."""

    core_engines = (b"\0", b"\1")

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        return engine, method, args


@pytest.mark.parametrize("client", [Newer(), Older()], ids=["newer", "older"])
async def test_every_core_answers_in_order(client: Any) -> None:
    cores = EngineCores(client)
    assert cores.count == 2
    assert cores.answer_each
    assert await cores.ask("do", 1) == [(b"\0", "do", (1,)), (b"\1", "do", (1,))]


def test_a_client_without_a_list_has_one_core() -> None:
    assert EngineCores(object()).count == 1
    assert not EngineCores(object()).answer_each


async def test_a_worker_call_has_the_replies_of_all_cores_in_order() -> None:
    class Client(Newer):
        async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
            assert method == "collective_rpc"
            assert args == ("weightsync_state", None, ({"a": 1},), None)
            return [[{"rank": f"{core}/0/{tp}"} for tp in range(2)] for core in range(2)]

    calls = VllmCalls(SimpleNamespace(engine_core=Client()))
    replies = await calls.rpc("weightsync_state", {"a": 1})
    assert [reply["rank"] for reply in replies] == ["0/0/0", "0/0/1", "1/0/0", "1/0/1"]
