"""What the endpoint plugin puts before vLLM's routes, over test_adapter's stand-in for vLLM."""

from __future__ import annotations

import shutil
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import pytest

from benchmarks.servers import free_port
from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm
from weightsync.vllm.endpoint import BridgePlugin

if TYPE_CHECKING:
    from collections.abc import Iterator

applications = pytest.importorskip("starlette.applications")
responses = pytest.importorskip("starlette.responses")
routing = pytest.importorskip("starlette.routing")
pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def socket_in_a_short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the bridge a folder whose path is short enough for its socket."""
    folder = tempfile.mkdtemp(prefix="we")
    monkeypatch.setenv("WEIGHTSYNC_ENGINE_SOCKET", f"unix:{folder}/engine.sock")
    yield
    shutil.rmtree(folder)


class Served(Llm):
    """An engine that a route asks for something."""

    def __init__(self) -> None:
        super().__init__()
        states = self.output_processor.request_states
        self.output_processor.add_request = lambda request: states.update(
            {request.request_id: SimpleNamespace(weight_version_starts=[("7", 0)])}
        )

    async def ask(self, http_request: object) -> object:
        """Answer with what the engine was asked for."""
        self.output_processor.add_request(
            SimpleNamespace(request_id="r", pooling_params=None, cache_salt=None)
        )
        return responses.JSONResponse({})


@pytest.mark.parametrize(("switch", "status", "named"), [("1", 409, "7"), ("0", 200, None)])
async def test_answers_name_versions_unless_that_is_switched_off(
    switch: str, status: int, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("weightsync.vllm.extensions.answers")
    monkeypatch.setenv("WEIGHTSYNC_ANSWER_VERSIONS", switch)
    llm, bridge = Served(), BridgePlugin()
    app = applications.Starlette(routes=[routing.Route("/ask", llm.ask)])
    bridge.attach_router(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        # Nothing is proved: that comes first, whatever the request asks for.
        newest = {"x-weightsync-min-version": "8"}
        assert (await client.get("/ask", headers=newest)).status_code == 503
        await bridge.init_state(llm, None, SimpleNamespace(api_server_count=1))
        try:
            assert bridge._engine is not None
            await bridge._engine.resume("", 7, DIGEST)
            assert (await client.get("/ask", headers=newest)).status_code == status
            answer = await client.get("/ask")
        finally:
            await bridge.stop()
    assert answer.headers.get("x-weightsync-version") == named


async def test_requests_for_the_trainer_are_passed_on_in_every_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("weightsync.vllm.extensions.train_forward")
    monkeypatch.setenv("WEIGHTSYNC_HTTP", f"http://127.0.0.1:{free_port()}")
    llm, bridge = Served(), BridgePlugin()
    app = applications.Starlette(routes=[routing.Route("/ask", llm.ask)])
    bridge.attach_router(app)
    transport = httpx.ASGITransport(app=app)
    path = "/v1/weightsync/train/status"
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        early = await client.get(path)
        await bridge.init_state(llm, None, SimpleNamespace(api_server_count=1))
        try:
            # Nothing is proved yet: vLLM's own paths are shut.
            assert (await client.get("/ask")).status_code == 503
            known = await client.get(path)
        finally:
            await bridge.stop()
    assert (early.status_code, early.json()["reason"]) == (501, "NOT_SUPPORTED")
    assert (known.status_code, known.json()["reason"]) == (503, "SERVER_AWAY")
