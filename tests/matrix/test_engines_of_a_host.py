"""Several engines beside one real server, as clients, commands and the HTTP verbs see them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.servers import free_port
from tests.support.following import until
from tests.support.memory_bridge import memory_bridge
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, EngineState, InvalidError, Reason, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync_client.types import EngineStatus

_SIZE = 1000


def _tensors(seed: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    return {"a": np.full(_SIZE, seed, np.float32)}


class Host:
    """A server, the folder of its engines, and a client."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.engines = folder / "run", folder / "engines"
        self.imports = folder / "imports"
        for made in (self.run_dir, self.engines, self.imports):
            made.mkdir()
        port = free_port()
        self.http = f"http://127.0.0.1:{port}"
        self.server = WeightSyncServer(
            self.run_dir,
            folder / "state",
            flags=[
                f"--engines={self.engines}",
                "--engine=none",
                "--slots=3",
                f"--http=127.0.0.1:{port}",
                f"--import-dir={self.imports}",
            ],
        )
        self._stacks: dict[str, contextlib.ExitStack] = {}

    def appear(self, name: str, tensor: str = "a") -> None:
        """Start an engine."""
        data = np.zeros(_SIZE, np.float32).tobytes()
        stack = self._stacks[name] = contextlib.ExitStack()
        socket = self.engines / f"{name}.sock"
        tensors = {tensor: ("F32", (_SIZE,), data)}
        stack.enter_context(memory_bridge(self.run_dir, tensors, socket=socket))

    def disappear(self, name: str) -> None:
        """End an engine, and its socket with it."""
        self._stacks.pop(name).close()

    def close(self) -> None:
        """End all engines."""
        for name in list(self._stacks):
            self.disappear(name)

    def until(self, client: Client, so: Callable[[dict[str, EngineStatus]], bool]) -> None:
        """Return when the engines are so."""
        until(lambda: so(_engines(client)), "the engines are as they should be")

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run the command, and return its exit code and what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "weightsync_client.cli", *arguments],
            env={"WEIGHTSYNC_ADDRESS": self.server.address, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def _engines(client: Client) -> dict[str, EngineStatus]:
    (model,) = client.status().models
    return {one.name: one for one in model.engines}


def _serving(*names: str) -> Callable[[dict[str, EngineStatus]], bool]:
    return lambda engines: (
        engines.keys() == {*names}
        and all(one.state is EngineState.SERVING for one in engines.values())
    )


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="wse") as name:
        made = Host(Path(name))
        made.server.start()
        try:
            yield made
        finally:
            made.close()
            assert made.server.stop() == 0, made.server.log
        assert "Traceback" not in made.server.log, made.server.log


def test_engines_come_take_versions_and_go(host: Host) -> None:
    with Client(host.server.address) as client:
        assert "  no engine\n" in host.run("status")[1]
        assert host.run("apply")[0] == 5
        for name in ("e0", "e1"):
            host.appear(name)
        host.until(client, _serving("e0", "e1"))
        version = client.push(_tensors(2)).version
        report = client.apply(version)
        assert [(one.engine, one.absent) for one in report.engines] == [("e0", ""), ("e1", "")]
        assert report.written_bytes == 2 * 4 * _SIZE
        again = client.push(_tensors(3)).version
        code, out = host.run("apply", "--order", "rolling", "--max-unavailable", "1", "--json")
        assert (code, [one["engine"] for one in json.loads(out)["engines"]]) == (0, ["e0", "e1"])
        code, out = host.run("status")
        assert f"  engine e0: version {again}, serving bridge" in out
        assert f"  engine e1: version {again}, serving bridge" in out
        assert [one.verified for one in client.verify().engines] == [True, True]
        back = client.rollback(order="rolling")
        assert (back.report.version, back.rejected_version) == (version, again)
        host.disappear("e1")
        host.until(client, _serving("e0"))
        client.push(_tensors(4))
        client.apply()
        host.appear("e1")
        host.until(client, _serving("e0", "e1"))
        assert {one.live_version for one in _engines(client).values()} == {again + 1}


def test_one_engine_goes_its_own_way(host: Host) -> None:
    with Client(host.server.address) as client:
        for name in ("e0", "e1"):
            host.appear(name)
        host.until(client, _serving("e0", "e1"))
        version = client.push(_tensors(2)).version
        report = client.apply(version, engine="e1")
        assert [one.engine for one in report.engines] == ["e1"]
        (model,) = client.status().models
        assert model.live_version == 0, "they differ"
        assert [one.live_version for one in model.engines] == [1, version]
        assert f"live 1 and {version}, newest" in host.run("status")[1]
        assert client.verify(engine="e0").version == 1
        with pytest.raises(RefusedError, match=f"e1 from {version} to 1") as caught:
            client.rollback()
        assert caught.value.reason is Reason.NO_ROLLBACK
        with pytest.raises(InvalidError, match="this host has e0, e1"):
            client.apply(version, engine="e7")
        assert "(before: 1)" in host.run("apply")[1]
        assert {one.live_version for one in _engines(client).values()} == {version}


def test_a_folder_goes_to_all_and_who_took_no_part_is_named(host: Host) -> None:
    with Client(host.server.address) as client:
        host.appear("e0")
        host.until(client, _serving("e0"))
        host.appear("other", tensor="b")
        host.until(client, lambda e: "other" in e and e["other"].state is EngineState.FENCED)
        step = host.imports / "step_5"
        step.mkdir()
        save_file(_tensors(5), step / "model.safetensors")
        answer = httpx.post(
            f"{host.http}/update_weights", json={"weight_dir": str(step)}, timeout=30
        ).json()
        assert answer.get("status") == "ok", answer
        assert set(answer["absent_engines"]) == {"other"}
        assert _engines(client)["e0"].live_version == answer["version"]
        assert httpx.get(f"{host.http}/health").status_code == 200, "one serves"
        assert httpx.get(f"{host.http}/is_paused").json() == {"is_paused": True}, "not all do"
