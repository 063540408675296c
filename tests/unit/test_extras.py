"""Where a package is missing that not everybody needs, one sentence says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SERVER = "import runpy; runpy.run_module('weightsync_server.cli', run_name='__main__')"


def _without(package: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a package is not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; {code}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=_ROOT,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("package", "arguments", "install"),
    [
        ("pydantic", (), "pip install 'weightsync[server]'"),
        ("pydantic_settings", ("--version",), "pip install 'weightsync[server]'"),
        ("prometheus_client", ("--store=memory://",), "pip install 'weightsync[server]'"),
        ("grpc_reflection", ("--store=memory://", "--engine=none"), "pip install 'weightsync[ser"),
        (
            "obstore",
            ("--store=s3://bucket/prefix",),
            "run `pip install 'weightsync[objects]'`: ",
        ),
        (
            "opentelemetry",
            ("--store=memory://", "--engine=none", "--traces"),
            "run `pip install 'weightsync[otel]'`: --traces needs opentelemetry",
        ),
        (
            "vllm",
            ("--engine=embedded", "--model=x", "--store=memory://"),
            "run `pip install vllm`: this configuration needs it",
        ),
    ],
)
def test_the_server_says_what_it_needs(
    package: str, arguments: tuple[str, ...], install: str, tmp_path: Path
) -> None:
    flags = (f"--state-dir={tmp_path}", f"--run-dir={tmp_path}", "--listen=127.0.0.1:0")
    ran = _without(package, _SERVER, *flags, *arguments)
    assert ran.returncode != 0
    assert install in ran.stderr, ran.stderr[-2000:]
    assert "Traceback" not in ran.stderr
    assert "ModuleNotFoundError" not in ran.stderr


@pytest.mark.parametrize(
    ("package", "call", "sentence"),
    [
        (
            "torch",
            "PulledTensor('t', 'F32', (1,), bytearray(4)).torch()",
            "run `pip install torch`: torch() needs it",
        ),
        (
            "torch",
            "Client('127.0.0.1:1', model='m').attach()",
            "run `pip install torch`: attach() needs it",
        ),
        ("grpc_health", "Client('127.0.0.1:1').health()", "grpcio-health-checking"),
    ],
)
def test_the_client_says_what_it_needs(package: str, call: str, sentence: str) -> None:
    code = (
        "from weightsync_client import Client, ClientError\n"
        "from weightsync_client.pull import PulledTensor\n"
        f"try:\n    {call}\nexcept ClientError as error:\n    print(error.reason, error)"
    )
    ran = _without(package, f"exec({code!r})")
    assert ran.stdout.startswith("NOT_SUPPORTED"), (ran.stdout, ran.stderr[-2000:])
    assert sentence in ran.stdout
    assert "install" in ran.stdout


def test_a_command_says_what_it_needs() -> None:
    code = "import runpy; runpy.run_module('weightsync_client.cli', run_name='__main__')"
    ran = _without("numpy", code, "diff", "tests/unit", "tests/unit")
    assert "Traceback" not in ran.stderr
    ran = _without("rich", code, "push", "x", "--address", "127.0.0.1:1")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "weightsync: run `pip install rich`: this command needs it\n"
