"""The log of a real server as JSON: every line, how many there are, and what they are about."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from safetensors.torch import save_file

from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Access, Client, ClientError, PushKind

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_TRACEPARENT = (("traceparent", f"00-{_TRACE}-b7ad6b7169203331-01"),)
_SECRET = "a-token-that-no-line-has"
_MOST = 4

_Line = dict[str, Any]


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 33), float(seed), dtype=torch.bfloat16), "b": torch.zeros(5)}


class _Site:
    """A server whose log is JSON, at the level DEBUG; its first push meets a fault."""

    def __init__(self, folder: Path) -> None:
        model = folder / "model.safetensors"
        save_file(_tensors(1), model)
        flags = ["--engine=memory", f"--model={model}", "--ranks=2", "--name=policy"]
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[*flags, "--same-host", "--log-level=debug"],
            variables={
                "WEIGHTSYNC_LOG_FORMAT": "json",
                failpoints.VARIABLE: "receive.begin=1*error(EIO)",
            },
        )

    def __enter__(self) -> Self:
        self.server.start()
        self.server.wait_serving()
        access = Access(token=_SECRET)
        self.client = Client(self.server.address, model="policy", access=access)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        assert self.server.stop() == 0, self.server.log

    def lines(self) -> list[_Line]:
        """Return all lines so far, each of which is JSON."""
        return [json.loads(line) for line in self.server.log.splitlines()]

    @contextlib.contextmanager
    def logged(self, method: str) -> Iterator[list[_Line]]:
        """Fill a list with the lines of the body, which ends with a call of a method."""
        before, new = len(self.lines()), list[_Line]()
        yield new
        end = time.monotonic() + 30
        # A call is answered a moment before its audit line is written.
        while not any(line.get("method") == method for line in new):
            assert time.monotonic() < end, self.server.log
            new[:] = self.lines()[before:]
            time.sleep(0.05)

    def push(self, tensors: dict[str, torch.Tensor]) -> int:
        """Return the version once all lines of its push are there."""
        with self.logged("CommitPush"):
            return self.client.push(tensors).version

    def apply(self, **fields: Any) -> pb.ApplyVersionResponse:
        request = pb.ApplyVersionRequest(model="policy", **fields)
        answer: pb.ApplyVersionResponse = self.server.stub.ApplyVersion(
            request, timeout=30, metadata=_TRACEPARENT
        )
        return answer


@pytest.fixture(scope="module")
def site() -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsl") as name, _Site(Path(name)) as made:
        with contextlib.suppress(ClientError):
            made.client.push(_tensors(0))
        yield made


def _infos(lines: list[_Line]) -> list[_Line]:
    return [line for line in lines if line["level"] == "INFO"]


def _named(lines: list[_Line], event: str) -> _Line:
    (found,) = [line for line in lines if line["event"] == event]
    return found


def test_a_fault_is_one_line(site: _Site) -> None:
    (fault,) = [line for line in site.lines() if "exception" in line]
    assert fault["message"] == "BeginPush failed"
    assert fault["exception"].startswith("Traceback (most recent call last):\n")
    assert fault["exception"].splitlines()[-1].startswith("OSError: [Errno 5]")


@pytest.mark.parametrize("way", ["auto", "never"], ids=["same host", "streams"])
@pytest.mark.parametrize("delta", ["never", "auto"], ids=["in full", "delta"])
def test_a_push_is_at_most_four_lines(site: _Site, way: str, delta: str) -> None:
    # Another run of the trainer, too.
    with Client(site.server.address, model="policy") as trainer:
        tensors = _tensors(2)
        if delta == "auto":
            with site.logged("CommitPush"):
                trainer.push(tensors, same_host=way)
            tensors["w"][0, 0] += 1
        with site.logged("CommitPush") as lines:
            pushed = trainer.push(tensors, same_host=way, delta=delta)
    assert pushed.kind is (PushKind.DELTA if delta == "auto" else PushKind.FULL)
    infos = _infos(lines)
    assert 3 <= len(infos) <= _MOST, infos
    assert {line["version"] for line in infos} == {pushed.version}
    (push_id,) = {line["push_id"] for line in infos}
    assert {line["event"] for line in infos} <= {"audit.call", "audit.same_host"}
    for event in ("push.begun", "push.committed"):
        line = _named(lines, event)
        assert (line["version"], line["push_id"]) == (pushed.version, push_id)
    assert {line["model"] for line in lines} == {"policy"}


def test_an_apply_is_at_most_four_lines_and_each_says_which(site: _Site) -> None:
    version = site.push(_tensors(3))
    with site.logged("ApplyVersion") as lines:
        report = site.apply(version=version).report
    infos = _infos(lines)
    assert len(infos) == 2 <= _MOST
    for line in (_named(lines, "apply.begun"), *infos):
        assert (line["version"], line["apply_id"]) == (version, report.apply_id)
        assert line["trace_id"] == _TRACE
    for line in infos:
        assert line["engine"] == "memory"
    done = _named(lines, "apply.done")
    assert done["previous_version"] == report.previous_version
    assert done["paused_ms"] > 0
    with site.logged("Rollback") as lines:
        back = site.client.rollback().report
    infos = _infos(lines)
    assert 3 == len(infos) <= _MOST
    assert {line["apply_id"] for line in infos} == {back.apply_id}
    assert _named(lines, "rollback.done")["rejected_version"] == version
    assert all("trace_id" not in line for line in infos)


def test_a_refused_apply_says_why(site: _Site) -> None:
    misfit = site.push({"other": torch.zeros(1)})
    with site.logged("ApplyVersion") as lines, pytest.raises(ClientError):
        site.client.apply(misfit)
    refused = _named(lines, "apply.refused")
    assert (refused["level"], refused["version"]) == ("INFO", misfit)
    assert "push this model" in refused["message"]
    audit = _named(lines, "audit.call")
    assert (audit["outcome"], audit["reason"]) == ("FAILED_PRECONDITION", "ENGINE_REFUSED")
    assert len(_infos(lines)) <= _MOST


def test_the_engine_s_own_lines_name_it(site: _Site) -> None:
    lines = site.lines()
    assert _named(lines, "engine.attached")["engine"] == "memory"
    serving = _named(lines, "engine.serving")
    assert (serving["engine"], serving["version"]) == ("memory", 1)
    assert _named(lines, "server.starting")["store"].startswith("file://")


def test_no_line_has_a_secret(site: _Site) -> None:
    site.push(_tensors(4))
    assert _SECRET not in site.server.log
    assert "Bearer" not in site.server.log


def test_a_server_that_cannot_start_says_so_in_a_line() -> None:
    with tempfile.TemporaryDirectory(prefix="wsl") as name:
        folder = Path(name)
        flags = ["--engine=memory", f"--model={folder}/none", "--log-format=json"]
        server = WeightSyncServer(folder / "run", folder / "state", flags=flags)
        with pytest.raises(RuntimeError, match="did not start"):
            server.start()
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert _named(lines, "server.failed")["message"].startswith("--model ")


def test_a_wrong_flag_is_a_sentence_before_there_is_a_log() -> None:
    with tempfile.TemporaryDirectory(prefix="wsl") as name:
        folder = Path(name)
        flags = ["--log-format=json", "--slots=many"]
        server = WeightSyncServer(folder / "run", folder / "state", flags=flags)
        with pytest.raises(RuntimeError, match="did not start"):
            server.start()
        (line,) = server.log.splitlines()
    assert line.startswith("weightsync-server: slots: ")
