"""What became of applies, asked of a real server over gRPC, HTTP and by command, and restarted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.servers import free_port
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import (
    ApplyKind,
    ApplyRecord,
    ApplyResult,
    ApplyStrategy,
    Client,
    NotFoundError,
    RefusedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 32), float(seed), dtype=torch.bfloat16), "b": torch.ones(5) * seed}


class _Site:
    """A server with two ranks in its memory, whose versions and records outlive it."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        model = folder / "model.safetensors"
        save_file(_tensors(1), model)
        flags = ["--engine=memory", f"--model={model}", "--ranks=2", "--apply-history=50"]
        self.server = WeightSyncServer(
            folder / "run", folder / "state", flags=[*flags, f"--http=127.0.0.1:{port}"]
        )
        self.file = folder / "state/applies.jsonl"
        self.url = f"http://127.0.0.1:{port}/v1/weightsync/applies"
        self.client = Client(self.server.address)

    def start(self) -> None:
        self.server.start()
        self.server.wait_serving()

    def restart(self) -> None:
        assert self.server.stop() == 0, self.server.log
        self.start()

    def shown(self, **fields: Any) -> list[tuple[Any, ...]]:
        return [_short(one) for one in self.client.applies(**fields)]

    def run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "weightsync_client.cli", *arguments]
        address = ["--address", self.server.address]
        return subprocess.run(
            [*command, *address], check=True, capture_output=True, text=True
        ).stdout


def _short(one: ApplyRecord) -> tuple[Any, ...]:
    return one.kind, one.previous_version, one.version, one.result


@pytest.fixture
def site() -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsa") as name:
        made = _Site(Path(name))
        made.start()
        yield made
        made.client.close()
        assert made.server.stop() == 0, made.server.log
        assert "Traceback" not in made.server.log, made.server.log


_FIRST = (ApplyKind.RECOVERY, 0, 1, ApplyResult.APPLIED)
_APPLIED = (ApplyKind.APPLY, 1, 2, ApplyResult.APPLIED)
_BACK = (ApplyKind.ROLLBACK, 2, 1, ApplyResult.APPLIED)
_REJECTED = (ApplyKind.APPLY, 1, 2, ApplyResult.REFUSED)
_UNKNOWN = (ApplyKind.APPLY, 1, 9, ApplyResult.REFUSED)


def test_applies_are_listed_everywhere_and_outlive_the_server(site: _Site) -> None:
    client = site.client
    client.push(_tensors(2))
    client.apply(2)
    (model,) = client.status().models
    assert model.newest_not_live == ""
    assert model.live_age_s == pytest.approx(model.newest_age_s, abs=1)
    client.rollback("it babbles")
    for _ in range(3):
        with pytest.raises(RefusedError, match="it babbles"):
            client.apply(2)
    with pytest.raises(NotFoundError):
        client.apply(9)
    assert site.shown() == [_UNKNOWN, _REJECTED, _BACK, _APPLIED, _FIRST]
    assert site.shown(last=2) == [_UNKNOWN, _REJECTED]
    assert site.shown(version=9) == [_UNKNOWN]
    _check_facts(site)
    _check_status(site)
    _check_commands(site)
    _check_http(site)
    before = client.applies()
    site.restart()
    # What the engine had in memory is gone with its server, so it is restored.
    (placed, *others) = client.applies()
    assert _short(placed) == (ApplyKind.RECOVERY, 1, 1, ApplyResult.APPLIED)
    assert others == before
    client.push(_tensors(3))
    client.apply(3)
    site.restart()
    assert site.shown(last=2) == [
        (ApplyKind.RECOVERY, 3, 3, ApplyResult.APPLIED),
        (ApplyKind.APPLY, 1, 3, ApplyResult.APPLIED),
    ]
    # As a crash in the middle of a line leaves it.
    site.server.kill()
    with site.file.open("ab") as file:
        file.write(b'{"number": "99", "requested')
    site.start()
    assert [one.number for one in client.applies(last=0)] == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert "damaged lines" in site.server.log


def _check_facts(site: _Site) -> None:
    unknown, rejected, back, applied, first = site.client.applies()
    assert (rejected.times, rejected.error_reason) == (3, "VERSION_REJECTED")
    assert "it babbles" in rejected.reason
    assert (rejected.phases, rejected.slowest) == (None, None)
    assert unknown.error_reason == "VERSION_UNKNOWN"
    assert back.cause == "it babbles"
    assert (first.requested_by, first.cause) == ("server", "this server connected to the engine")
    assert applied.requested_by == "unix socket", "there is no authority file"
    assert applied.phases is not None
    assert 0 < applied.phases.paused_total_s <= applied.took_s
    assert applied.pause is not None
    assert applied.written_bytes == 2 * (64 * 32 * 2 + 5 * 4)
    assert applied.strategy is ApplyStrategy.COPY
    assert applied.slowest is not None
    assert applied.slowest.rank in ("0/0/0", "0/0/1")
    (engine,) = applied.engines
    assert engine.report is not None
    assert [rank.rank for rank in engine.report.ranks] == ["0/0/0", "0/0/1"]


def _check_status(site: _Site) -> None:
    status = site.client.status()
    assert 0 < status.uptime_s < 180
    (model,) = status.models
    assert (model.live_version, model.newest_version) == (1, 2)
    assert model.newest_age_s is not None
    assert model.live_age_s is not None
    assert 0 <= model.newest_age_s <= model.live_age_s < 180
    assert "clear_rejected" in model.newest_not_live
    assert "it babbles" in model.newest_not_live
    assert model.last_apply is not None
    assert _short(model.last_apply) == _UNKNOWN
    shown = site.run("status")
    assert "version 2 is not live: give --clear-rejected to apply it" in shown
    assert "  last apply at " in shown


def _check_commands(site: _Site) -> None:
    lines = site.run("applies").splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("number  began (UTC)")
    assert lines[0].endswith("  why")
    for column in ("what", "result", "paused", "written", "why"):
        at = lines[0].index(column)
        for line in lines:
            # One without a reason ends before the last column.
            assert (line[at - 2 : at].strip(), line[at : at + 1]) != ("", " "), column
            assert not line[at - 2 : at].strip(), column
    assert "refused 3 times" in lines[2]
    assert lines[2].endswith("give --clear-rejected to apply it anyway")
    assert lines[3].endswith("  it babbles")
    assert len(site.run("applies", "--last", "1").splitlines()) == 2
    found = json.loads(site.run("applies", "--version", "9", "--json"))
    assert [(one["version"], one["result"]) for one in found] == [(9, "refused")]


def _check_http(site: _Site) -> None:
    found = httpx.get(site.url).json()["applies"]
    assert [(one["kind"], one["version"], one["result"]) for one in found] == [
        ("apply", 9, "refused"),
        ("apply", 2, "refused"),
        ("rollback", 1, "applied"),
        ("apply", 2, "applied"),
        ("recovery", 1, "applied"),
    ]
    assert found[0]["phases"] is None
    assert 0 < found[3]["phases"]["paused_total_s"] <= found[3]["took_s"]
    assert found[3]["strategy"] == "copy"
    page = httpx.get(site.url, params={"last": "2"}).json()
    assert [one["number"] for one in page["applies"]] == [5, 4]
    more = httpx.get(site.url, params={"page_token": page["next_page_token"]}).json()
    assert [one["number"] for one in more["applies"]] == [3, 2, 1]
    assert httpx.get(site.url, params={"version": "9"}).json()["applies"] == found[:1]
    assert httpx.head(site.url).status_code == 200
    assert httpx.post(site.url).status_code == 405
    for query in ("last=-1", "last=many", "version=99999999999999999999", "since=1"):
        reply = httpx.get(f"{site.url}?{query}")
        assert (reply.status_code, reply.json()["reason"]) == (400, "REQUEST_INVALID")
