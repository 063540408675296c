"""vLLM's verbs at weightsync-server, with a real vLLM that generates meanwhile."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.servers import free_port
from tests.support.following import until
from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_PROMPTS = ("hello world", "the quick brown fox")
_TOKENS = 400


class _Site:
    """A vLLM, a server and two checkpoints below its import folder; the first is served."""

    def __init__(self, root: Path) -> None:
        port = free_port()
        self.root = root
        self.steps = [make_checkpoint(root / f"broadcasts/step_{n}", seed=n) for n in range(2)]
        self.vllm = VllmServer(self.steps[0], root / "run")
        flags = (f"--http=127.0.0.1:{port}", f"--import-dir={root}/broadcasts")
        self.server = WeightSyncServer(root / "run", root / "state", flags=flags)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def answers(self) -> list[Any]:
        return [self.vllm.complete(prompt) for prompt in _PROMPTS]

    def update(self, step: Path, **pause: str) -> httpx.Response:
        """Ask as prime-rl does, with its own way to pause unless another is named."""
        params = pause or {"mode": "keep", "clear_cache": "false"}
        self.http.post("/pause", params=params).raise_for_status()
        try:
            return self.http.post("/update_weights", json={"weight_dir": str(step)})
        finally:
            self.http.post("/resume").raise_for_status()


@pytest.fixture(scope="module")
def site() -> Iterator[_Site]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    root = Path(tempfile.mkdtemp(prefix="wv-"))
    made = _Site(root)
    try:
        made.server.start()
        made.vllm.start()
        made.server.wait_serving()
        yield made
    finally:
        made.http.close()
        made.server.stop()
        made.vllm.stop()
        shutil.rmtree(root)


def _long(site: _Site) -> tuple[int, Any]:
    body = {
        "model": "model",
        "prompt": "a",
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return site.vllm.request("/v1/completions", body, timeout=200)


def test_folders_are_served_and_requests_go_on(site: _Site) -> None:
    assert site.http.get("/health").status_code == 200
    first = site.answers()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(_long, site)
        reply = site.update(site.steps[1])
        assert reply.status_code == 200, reply.text
        status, answer = running.result()
        assert status == 200
        assert answer["usage"]["completion_tokens"] == _TOKENS
    second = site.answers()
    assert second != first
    with Client(site.server.address) as client:
        assert client.verify().content_digest == reply.json()["content_digest"]
    back = site.update(site.steps[0], mode="wait")
    assert back.status_code == 200, back.text
    assert (back.json()["pause_mode"], back.json()["cache"]) == ("wait", "recompute")
    assert site.answers() == first


def test_another_model_leaves_nothing(site: _Site) -> None:
    served = site.answers()
    tensors = load_file(next(site.steps[1].glob("*.safetensors")))
    tensors["model.unknown.weight"] = torch.zeros(3)
    wrong = site.root / "broadcasts/wrong"
    wrong.mkdir()
    save_file(tensors, wrong / "model.safetensors")
    with Client(site.server.address) as client:
        before = [version.version for version in client.versions()]
        reply = site.update(wrong)
        assert reply.status_code == 409
        assert "model.unknown.weight" in reply.json()["error"]
        assert [version.version for version in client.versions()] == before
        assert client.verify().verified
    assert site.answers() == served


def _lagging(site: _Site, lag: int) -> tuple[int, str]:
    """Return the status of a request that bounds its lag, and why it is refused."""
    body = {"model": "model", "prompt": "x", "max_tokens": 1, "weightsync_max_lag": lag}
    status, answer = site.vllm.request("/v1/completions", body)
    return status, "" if status == 200 else answer["error"]["message"]


def test_a_lag_is_counted_from_what_the_server_has_committed(site: _Site) -> None:
    with Client(site.server.address) as client:
        live = client.get_version().version
        newest = max(version.version for version in client.versions())
        tensors: dict[str, torch.Tensor] = {}
        for file in site.steps[1].glob("*.safetensors"):
            tensors |= load_file(file)
        for _ in range(2):
            newest = client.push(tensors, version=newest + 1).version
        # The server tells it twice a second.
        sentence = f"the newest version is {newest} and {live} is live, more than"
        until(lambda: sentence in _lagging(site, 0)[1], "the engine knows the newest")
        assert _lagging(site, newest - live - 1)[0] == 409
        assert _lagging(site, newest - live) == (200, "")
        client.apply(newest)
        assert _lagging(site, 0) == (200, "")
        client.rollback()
        assert _lagging(site, 0)[0] == 409


def _why_not(site: _Site) -> str:
    """Return what vLLM says where it answers 503, or nothing."""
    body = {"model": "model", "prompt": "x", "max_tokens": 1}
    try:
        status, answer = site.vllm.request("/v1/completions", body, timeout=5)
    except TimeoutError:
        # It was admitted before the fence: it waits until an apply is proved.
        return ""
    return str(answer["error"]["message"]) if status == 503 else ""


def test_last_a_second_server_is_told_and_tells_whose_the_engine_is(site: _Site) -> None:
    served, http = site.answers(), f"127.0.0.1:{free_port()}"
    flags = [f"--engine=unix:{site.vllm.engine_socket}", f"--http={http}"]
    second = WeightSyncServer(site.root / "run2", site.root / "state2", flags=flags)

    def health() -> str:
        return str(httpx.get(f"http://{http}/health", timeout=30).json().get("error"))

    try:
        second.start()
        assert site.server.process is not None
        cause = f"stop the other weightsync-server (pid {site.server.process.pid}, "
        cause += f"run_dir {site.server.run_dir}), or name another engine here"
        until(lambda: health().startswith(cause), "its health names who owns the engine")
        assert second.log.count(f"engine engine: {cause}") == 1
        with Client(second.address) as client, pytest.raises(ClientError) as caught:
            client.apply()
        assert caught.value.reason == Reason.ENGINE_OWNED
        assert caught.value.message.startswith(cause)
        assert site.answers() == served
        assert site.http.get("/health").status_code == 200
        # What dies is replaced, here by a server that no rank can reach.
        site.server.kill()
        assert second.process is not None
        owner = f"weightsync-server (pid {second.process.pid}, run_dir {second.run_dir})"
        # Kept as it was said: another try of the server shows another state for a moment.
        said = [""]

        def named() -> bool:
            said.append(_why_not(site))
            return owner in said[-1]

        until(named, "vLLM names the server that fenced it")
        why = said[-1]
        assert why.startswith("fenced: the segment socket ")
        assert "share the socket with vLLM; the engine is that of weightsync-server" in why
        site.server.start()
        until(lambda: owner in _reason(site.server), "the first one is the newcomer now")
    finally:
        second.kill()
    site.server.wait_serving()
    assert site.answers() == served
    assert "Traceback" not in site.server.log + second.log


def _reason(server: WeightSyncServer) -> str:
    with Client(server.address) as client:
        return client.status().models[0].engine.reason
