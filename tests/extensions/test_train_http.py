"""The trainer of a real server over HTTP, through vLLM's port, and by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.servers import free_port
from tests.support.asgi_site import serving_app
from tests.support.secured import Secured
from tests.support.weightsync_server import WeightSyncServer
from weightsync.vllm.extensions.train_forward import TrainForward, Upstream
from weightsync_client import Client, TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("uvicorn")
applications = pytest.importorskip("starlette.applications")
pytestmark = pytest.mark.timeout(120)

_ROOT = Path(__file__).resolve().parents[2]
_TRAIN, _STATUS = "/v1/weightsync/train", "/v1/weightsync/train/status"
_CANCEL, _CHECKPOINT = "/v1/weightsync/train/cancel", "/v1/weightsync/checkpoint"


def _flags(folder: Path, http: int) -> list[str]:
    (folder / "model").mkdir(parents=True)
    save_file({"w": torch.zeros(8, 4)}, folder / "model/model.safetensors")
    return [
        *("--engine=memory", f"--model={folder}/model", f"--http=127.0.0.1:{http}"),
        "--trainer=tests.support.adding_trainer:AddingTrainer",
        *("--trainer-queue=1", f"--checkpoint-dir={folder}/checkpoints", "--slots=3"),
        # Beside the sockets of the roles, of which the trainer's own has the name of one.
        f"--run-dir={folder}/own",
    ]


def _until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class _Site:
    """A server that asks who calls, with a trainer, and vLLM's port before it.

    Attributes:
        secured: The server.
        http: Its HTTP API.
        vllm: What is passed on to it; made as vLLM's own.
    """

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        port = free_port()
        self.secured = Secured(folder, tls=tls, flags=_flags(folder, port))
        scheme, host = ("https", "localhost") if tls else ("http", "127.0.0.1")
        self.http = f"{scheme}://{host}:{port}"
        self.ca = str(self.secured.ca.ca) if tls else ""
        state = TrainForward()
        state.upstream = Upstream(self.http, self.ca)
        app = applications.Starlette()
        app.add_middleware(state.wrap)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.secured.stop)
        try:
            self.secured.start()
            self.vllm = self._stack.enter_context(serving_app(app))
            address = self.secured.socket("admin")
            self.client = self._stack.enter_context(Client(address))
            self.ready()
        except BaseException:
            self._stack.close()
            raise

    def ready(self) -> None:
        """Wait until the trainer waits for jobs."""
        _until(lambda: self.client.train_status().state is TrainerState.READY)

    def headers(self, role: str) -> dict[str, str]:
        """Return what proves a role."""
        return {"Authorization": f"Bearer {self.secured.tokens[role]}"}

    def post(self, path: str, body: Any, role: str = "train", url: str = "") -> httpx.Response:
        """Return the answer to a request to the server, or to another address."""
        headers = self.headers(role) if role else {}
        return httpx.post((url or self.http) + path, json=body, headers=headers, timeout=60)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def site() -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsth") as name:
        made = _Site(Path(name))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(params=["server", "vllm"])
def url(request: pytest.FixtureRequest, site: _Site) -> str:
    """Where requests go; the answers are the same."""
    site.ready()
    return site.http if request.param == "server" else site.vllm


def test_a_job_is_a_stream_of_events(site: _Site, url: str) -> None:
    live = site.client.status().models[0].live_version
    answer = site.post(_TRAIN, {"steps": 2, "add": 1.5}, url=url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream"
    queued, started, *steps, finished = _events(answer.text)
    job_id = queued["job_id"]
    assert queued == {"event": "queued", "job_id": job_id, "ahead": 0}
    assert (started["event"], started["version"]) == ("started", live)
    assert [(step["event"], step["version"], step["tokens"]) for step in steps] == [
        ("step", live + 1, 4),
        ("step", live + 2, 4),
    ]
    assert (finished["event"], finished["version"], finished["steps"]) == ("finished", live + 2, 2)
    assert finished["duration_s"] > 0
    assert site.client.verify().verified
    audit = [line for line in site.secured.audit() if line["method"] == "Train"]
    assert (audit[-1]["who"], audit[-1]["outcome"]) == ("train", "OK")


def test_events_come_as_they_happen_and_who_leaves_cancels(site: _Site, url: str) -> None:
    before = site.client.train_status().cancelled
    ask = {"steps": 1000, "wait_s": 0.05, "quiet": 0}
    headers = site.headers("train")
    with httpx.stream("POST", url + _TRAIN, json=ask, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        assert '"queued"' in next(lines)
        while '"step"' not in next(lines):
            pass
        status = httpx.get(url + _STATUS, headers=headers).json()
        assert status["state"] == "training"
        assert status["running_steps"] > 0
    _until(lambda: site.client.train_status().cancelled == before + 1)
    assert site.client.train_status().running_job_id == ""


def test_a_job_is_cancelled_by_its_name_and_more_than_may_wait_are_refused(
    site: _Site, url: str
) -> None:
    long = {"wait_s": 60}
    with contextlib.closing(site.client.train(long)) as running_job:
        job_id = next(running_job).job_id
        _until(lambda: site.client.train_status().running_job_id == job_id)
        with contextlib.closing(site.client.train(long)) as waiting_job:
            next(waiting_job)
            refused = site.post(_TRAIN, {}, url=url)
            assert (refused.status_code, refused.json()["reason"]) == (503, "LIMIT_EXCEEDED")
            assert int(refused.headers["retry-after"]) >= 1
        cancelled = site.post(_CANCEL, {"job_id": job_id}, url=url)
        assert (cancelled.status_code, cancelled.json()) == (200, {"job_id": job_id})
        with pytest.raises(Exception, match="was cancelled"):
            list(running_job)
    unknown = site.post(_CANCEL, {"job_id": job_id}, url=url)
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "JOB_UNKNOWN")


def test_what_the_class_raises_is_the_last_event(site: _Site, url: str) -> None:
    answer = site.post(_TRAIN, {"raise": "inside"}, url=url)
    assert answer.status_code == 200
    error = _events(answer.text)[-1]
    assert error["reason"] == "TRAINER_FAILED"
    assert "diverged inside the transaction" in error["error"]
    assert "adding_trainer.py" in error["traceback"]
    assert site.client.verify().verified


def test_a_checkpoint_is_a_folder(site: _Site, url: str) -> None:
    name = "by-server" if url == site.http else "by-vllm"
    done = site.post(_CHECKPOINT, {"folder": name}, url=url)
    folder = site.secured.folder / "checkpoints" / name
    live = site.client.status().models[0].live_version
    assert done.status_code == 200
    found = done.json()
    assert found.pop("missing").startswith("copy config.json and tokenizer into the folder")
    assert found == {"version": live, "path": str(folder)}
    assert (folder / "model.safetensors").exists()
    again = site.post(_CHECKPOINT, {"folder": name}, url=url)
    assert (again.status_code, again.json()["reason"]) == (400, "REQUEST_INVALID")


def test_checkpoints_of_callers_who_left_are_written_by_nobody(site: _Site, url: str) -> None:
    root = site.secured.folder / "checkpoints"
    ours = "left-server" if url == site.http else "left-vllm"
    with contextlib.closing(site.client.train({"wait_s": 60})) as running:
        job_id = next(running).job_id
        _until(lambda: site.client.train_status().running_job_id == job_id)
        for number in range(60):
            _leave(site, url, {"folder": f"{ours}-{number}"})
        # Of those who stay as many wait as jobs may, and one more.
        staying = [_stay(site, url, {"folder": f"{ours}-stay{number}"}) for number in range(2)]
        with contextlib.closing(staying[0]), contextlib.closing(staying[1]):
            refused = site.post(_CHECKPOINT, {"folder": "late"}, url=url)
            assert (refused.status_code, refused.json()["reason"]) == (503, "LIMIT_EXCEEDED")
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(url + _STATUS, headers=site.headers("train")).status_code == 200
            assert site.post(_CANCEL, {"job_id": job_id}, url=url).status_code == 200
            for connection in staying:
                assert connection.makefile("rb").readline().split()[1] == b"200"
    made = {path.name for path in root.iterdir() if path.name.startswith(ours)}
    assert made == {f"{ours}-stay0", f"{ours}-stay1"}
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


def _ask(site: _Site, url: str, body: dict[str, Any]) -> socket.socket:
    """Post for a checkpoint; return the connection, whose answer is to come."""
    content = json.dumps(body)
    head = [f"POST {_CHECKPOINT} HTTP/1.1", "Host: h", f"Content-Length: {len(content)}"]
    head += [f"{name}: {value}" for name, value in site.headers("train").items()]
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60)
    connection.sendall("\r\n".join([*head, "", content]).encode())
    return connection


def _leave(site: _Site, url: str, body: dict[str, Any]) -> None:
    """Post for a checkpoint and leave when the server has the request."""
    with contextlib.closing(_ask(site, url, body)) as connection:
        _waits(connection, 0.05)


def _stay(site: _Site, url: str, body: dict[str, Any]) -> socket.socket:
    """Post for a checkpoint until it waits, and is not refused because of others; they leave."""
    while not _waits(connection := _ask(site, url, body), 1.0):
        connection.close()
    return connection


def _waits(connection: socket.socket, seconds: float) -> bool:
    """Return whether no answer comes for so long."""
    return not select.select([connection], [], [], seconds)[0]


@pytest.mark.parametrize(
    ("role", "train", "status"), [("", 401, 401), ("push", 403, 200), ("other", 403, 403)]
)
def test_who_may(site: _Site, url: str, role: str, train: int, status: int) -> None:
    for path, body in ((_TRAIN, {}), (_CANCEL, {"job_id": "x"}), (_CHECKPOINT, {})):
        refused = site.post(path, body, role, url)
        assert refused.status_code == train
        assert refused.json()["reason"] == (
            "UNAUTHENTICATED" if train == 401 else "PERMISSION_DENIED"
        )
    headers = site.headers(role) if role else {}
    assert httpx.get(url + _STATUS, headers=headers).status_code == status


@pytest.mark.parametrize(
    ("path", "content", "wrong"),
    [
        (_TRAIN, b"[1]", "the body must be one JSON object"),
        (_TRAIN, b"{", "the body must be one JSON object"),
        (_TRAIN, b"", "the body must be one JSON object in UTF-8; send {} where none is needed"),
        (_TRAIN, b'{"a": 9007199254740993}', "which would be rounded"),
        (f"{_TRAIN}?a=b", b"{}", "leave the query out"),
        (_CANCEL, b"{}", "job_id must be given"),
        (_CANCEL, b'{"job": "x"}', "'job' is not a field"),
        (_CHECKPOINT, b'{"folder": 3}', "folder must be given, as text"),
        (_CHECKPOINT, b'{"folder": ""}', "folder must be given, as text"),
        (_CHECKPOINT, b'{"folder": "../x"}', "folder must be a name"),
    ],
)
def test_requests_that_are_none(
    site: _Site, url: str, path: str, content: bytes, wrong: str
) -> None:
    answer = httpx.post(url + path, content=content, headers=site.headers("train"))
    assert (answer.status_code, answer.json()["reason"]) == (400, "REQUEST_INVALID")
    assert wrong in answer.json()["error"]


def test_methods_browsers_and_large_bodies(site: _Site, url: str) -> None:
    headers = site.headers("train")
    assert httpx.get(url + _TRAIN, headers=headers).status_code == 405
    assert httpx.post(url + _STATUS, headers=headers).status_code == 405
    browser = httpx.get(url + _STATUS, headers=headers | {"Origin": "http://localhost"})
    assert (browser.status_code, browser.json()["reason"]) == (403, "PERMISSION_DENIED")
    # 900 kB are read of whoever may train, and of nobody else.
    large = {"quiet": 0, "text": "x" * 900_000}
    assert _events(site.post(_TRAIN, large, url=url).text)[-1]["event"] == "finished"
    stranger = site.post(_TRAIN, large, "", url)
    assert (stranger.status_code, stranger.json()["reason"]) == (401, "UNAUTHENTICATED")
    too_large = site.post(_TRAIN, {"text": "x" * 1_100_000}, url=url)
    assert (too_large.status_code, too_large.json()) == (
        413,
        {
            "error": "the body is too large; send at most 1048576 bytes",
            "reason": "REQUEST_INVALID",
        },
    )


def test_what_vllm_passes_on_needs_a_token_where_nobody_is_asked() -> None:
    with tempfile.TemporaryDirectory(prefix="wsth") as name:
        folder, port = Path(name), free_port()
        flags = [*_flags(folder, port), f"--listen=unix:{folder}/run/server.sock"]
        server = WeightSyncServer(folder / "run", folder / "state", store="memory://", flags=flags)
        state = TrainForward()
        state.upstream = Upstream(f"http://127.0.0.1:{port}")
        app = applications.Starlette()
        app.add_middleware(state.wrap)
        try:
            server.start()
            with serving_app(app) as vllm:
                assert httpx.get(f"http://127.0.0.1:{port}{_STATUS}").status_code == 200
                for headers in ({}, {"Authorization": "Bearer ws_x"}):
                    answer = httpx.get(vllm + _STATUS, headers=headers)
                    assert answer.status_code == 401
                    assert "start this server with --authority FILE" in answer.json()["error"]
        finally:
            server.stop()


def test_over_tls() -> None:
    with tempfile.TemporaryDirectory(prefix="wsth") as name:
        site = _Site(Path(name), tls=True)
        try:
            done = site.post(_TRAIN, {}, url=site.vllm)
            assert _events(done.text)[-1].get("event") == "finished", done.text
        finally:
            site.close()


# The command line.


def _command(site: _Site, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "WEIGHTSYNC_ADDRESS": site.secured.address,
        "WEIGHTSYNC_TOKEN": site.secured.tokens["train"],
    }
    return subprocess.Popen(
        [sys.executable, "-m", "weightsync_client.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _done(command: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = command.communicate(timeout=60)
    return command.returncode, out, err


def test_the_commands(site: _Site) -> None:
    site.ready()
    code, out, err = _done(_command(site, "train", "--request", '{"steps": 2}'))
    assert (code, err) == (0, "")
    assert re.search(r"(?m)^job \w+ has ended: 2 steps in [\d.]+ s, version \d+ is live$", out)
    code, out, _ = _done(_command(site, "train", "status"))
    assert (code, out.splitlines()[0].partition(",")[0]) == (0, "trainer ready")
    code, out, _ = _done(_command(site, "checkpoint", "by-command", "--json"))
    assert (code, Path(json.loads(out)["path"]).name) == (0, "by-command")
    code, _, err = _done(_command(site, "train", "--request", '{"raise": "after"}'))
    assert code == 4
    assert "Traceback" in err
    assert "weightsync: " in err.splitlines()[-1]
    code, _, err = _done(_command(site, "train", "cancel", "x"))
    assert (code, err.count("\n")) == (3, 1)


def test_an_interrupt_cancels_the_job(site: _Site) -> None:
    site.ready()
    before = site.client.train_status().cancelled
    command = _command(site, "train", "--request", '{"wait_s": 60}')
    # Once it shows progress: while gRPC began the call, an interrupt was lost once.
    assert command.stdout is not None
    assert command.stdout.readline()
    _until(lambda: site.client.train_status().running_job_id)
    command.send_signal(signal.SIGINT)
    code, _, err = _done(command)
    assert code == 130
    assert "the job is cancelled" in err
    _until(lambda: site.client.train_status().cancelled == before + 1)
