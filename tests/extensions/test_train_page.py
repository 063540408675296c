"""The commands of how-to/train-beside-serving.md as they stand there, one after the other.

Only folders and ports are those of this machine; engine, sockets and state come by environment
variables, which a user sets as well. The engine is the one for tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.servers import free_port
from examples.demo.model import make_model
from tests.support.asgi_site import serving_app
from tests.support.following import until
from tests.support.processes import stop
from tests.support.secured import authority_text
from weightsync.vllm.extensions.train_forward import TrainForward, Upstream
from weightsync_client import Access, Client, ClientError, TrainerState
from weightsync_server.auth.principals import new_token, token_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("uvicorn")
applications = pytest.importorskip("starlette.applications")
pytestmark = pytest.mark.timeout(180)

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / "docs/how-to/train-beside-serving.md").read_text()
_BIN = Path(sys.executable).parent


def _commands(program: str) -> list[str]:
    """Return the command lines of a program on the page, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", _PAGE, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.split(" ")[0] == program]


class _Machine:
    """One on which the page's commands may be typed.

    Args:
        folder: In place of the root; a short path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.http, self.vllm = free_port(), free_port()
        self.token = new_token()
        model = make_model(folder / "model")
        authority = folder / "etc/weightsync/authority.toml"
        authority.parent.mkdir(parents=True)
        authority.touch(mode=0o600)
        one = {"name": "t", "roles": ["train"], "models": ["*"], "tokens": [token_hash(self.token)]}
        authority.write_text(authority_text([one]))
        self.address = f"unix:{folder}/server.sock"
        self.variables = {
            **os.environ,
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
            "HF_HUB_OFFLINE": "1",
            "WEIGHTSYNC_ADDRESS": self.address,
            "WEIGHTSYNC_TOKEN": self.token,
        }
        self.server_variables = {
            "WEIGHTSYNC_ENGINE": "memory",
            "WEIGHTSYNC_MODEL": str(model),
            "WEIGHTSYNC_LISTEN": json.dumps([self.address]),
            "WEIGHTSYNC_RUN_DIR": str(folder / "run"),
            "WEIGHTSYNC_STATE_DIR": str(folder / "state"),
            "WEIGHTSYNC_METRICS": "",
        }

    def words(self, line: str) -> list[str]:
        """Return the words of a command, for this machine."""
        for page, here in (
            ("/etc/", f"{self.folder}/etc/"),
            ("/srv/", f"{self.folder}/srv/"),
            ("127.0.0.1:8551", f"127.0.0.1:{self.http}"),
            ("127.0.0.1:8000", f"127.0.0.1:{self.vllm}"),
            ("$WEIGHTSYNC_TOKEN", self.token),
        ):
            line = line.replace(page, here)
        return shlex.split(line)

    def type(self, line: str) -> str:
        """Return what a command prints; it ends well."""
        done = subprocess.run(
            self.words(line), env=self.variables, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def machine() -> Iterator[_Machine]:
    with tempfile.TemporaryDirectory(prefix="wstp") as name, contextlib.ExitStack() as stack:
        made = _Machine(Path(name))
        (line,) = _commands("weightsync-server")
        log = stack.enter_context((made.folder / "server.log").open("wb"))
        server = subprocess.Popen(
            made.words(line), env=made.variables | made.server_variables, stdout=log, stderr=log
        )
        stack.callback(stop, server)
        client = stack.enter_context(_client(made))
        until(lambda: _state(client) is TrainerState.READY, "the trainer is ready")
        yield made


def _client(machine: _Machine) -> Client:
    return Client(machine.address, access=Access(token=machine.token))


def _state(client: Client) -> TrainerState | None:
    with contextlib.suppress(ClientError):
        return client.train_status().state
    return None


def test_the_commands(machine: _Machine) -> None:
    train, status, cancel, checkpoint, folder = _commands("weightsync")
    assert "job" in machine.type(train).splitlines()[-1]
    assert machine.type(status).startswith("trainer ready")
    assert re.match(r"version \d+ is durable$", machine.type(checkpoint))
    assert str(machine.folder / "srv/checkpoints/first") in machine.type(folder)
    assert (machine.folder / "srv/checkpoints/first/model.safetensors").exists()
    with _client(machine) as client:
        job = client.train({"examples": [], "steps": 0})
        assert machine.words(cancel)[-1] == "JOB"
        done = subprocess.run(
            [*machine.words(cancel)[:-1], next(job).job_id], env=machine.variables, check=False
        )
        # It may have ended by then: there was nothing to do.
        assert done.returncode in (0, 3)


def test_the_request_to_vllm_s_port(machine: _Machine, program: Callable[[str, str], str]) -> None:
    program("curl", "curl")
    (line,) = _commands("curl")
    state = TrainForward()
    state.upstream = Upstream(f"http://127.0.0.1:{machine.http}")
    app = applications.Starlette()
    app.add_middleware(state.wrap)
    with serving_app(app, machine.vllm):
        events = [json.loads(part) for part in re.findall(r"(?m)^data: (.*)$", machine.type(line))]
    assert [event["event"] for event in events] == ["queued", "started", "step", "step", "finished"]
    # The page says what is in them.
    for event in events:
        assert {f"`{name}`" for name in event} <= {
            f"`{name}`" for name in re.findall(r"[`\"](\w+)[`\"]", _PAGE)
        }


def test_what_is_refused_is_said_so() -> None:
    """Every sentence that the page quotes is in the code."""
    rows = re.findall(r"(?m)^\| (`.*?) \|", _PAGE.partition("\n## Refused\n")[2])
    quoted = [words for row in rows for words in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 9
    sources = " ".join(
        re.sub(r'"\s+f?"', "", path.read_text())
        for root in ("server/weightsync_server", "client/weightsync_client", "weightsync")
        for path in (_ROOT / root).rglob("*.py")
        if not path.stem.endswith("_pb2")
    )
    assert [words for words in quoted if words not in sources] == []
