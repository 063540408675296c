"""Object stores as processes on this host: moto and s3rver speak S3, azurite Azure's protocol."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "BUCKET",
    "MOTO",
    "MOTO_PROGRAM",
    "ObjectServer",
    "azurite",
    "moto",
    "npm_program",
    "s3rver",
]

BUCKET = "weights"

_OPT = Path(sys.prefix) / "opt"
#: It needs other releases of what this project needs.
MOTO = _OPT / "moto"
#: Its command line, without host and port. -P: the modules beside it are not for it to import.
MOTO_PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("moto_program.py")))
#: Published with azurite: an account that every copy has, and its key.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
#: Of the only account that s3rver has.
_S3RVER = "S3RVER"
_START_S = 30.0


@dataclass(frozen=True)
class ObjectServer:
    """One server.

    Attributes:
        port: Where it listens on the loopback interface.
        scheme: Of its URLs.
        pid: Of its process.
        account: Name and secret, where it is S3.
        host: Where clients find it.
    """

    port: int
    scheme: str
    pid: int
    account: tuple[str, str] = ("nobody", "nothing")
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        """The bucket."""
        return f"{self.scheme}://{BUCKET}"

    def environment(self, port: int = 0) -> Mapping[str, str]:
        """Return what a client needs to know, also of one that goes through a port of its own."""
        address = f"http://{self.host}:{port or self.port}"
        if self.scheme == "az":
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
                "AZURE_STORAGE_ENDPOINT": f"{address}/{_ACCOUNT}",
                "AZURE_ALLOW_HTTP": "true",
            }
        return {
            "AWS_ACCESS_KEY_ID": self.account[0],
            "AWS_SECRET_ACCESS_KEY": self.account[1],
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
        }


@contextlib.contextmanager
def moto(
    folder: Path, *, asks: bool = False, host: str = "127.0.0.1", wrapper: Sequence[str] = ()
) -> Iterator[ObjectServer]:
    """Run a server that speaks S3, with one bucket.

    Args:
        folder: For its log.
        asks: Whether it can be made to ask who calls, and for rights.
        host: Address that it listens on.
        wrapper: What its command line begins with, as where it runs in a network namespace.
    """
    port = _free_port()
    # It needs other releases of what the tests need, so it has a folder of its own.
    environment = os.environ | {"PYTHONPATH": str(MOTO)}
    if asks:
        environment |= {"INITIAL_NO_AUTH_ACTION_COUNT": "1000"}
    command = [*wrapper, *MOTO_PROGRAM, "-H", host, "-p", str(port)]
    with _running(command, folder, environment) as process:
        _until_up(lambda: httpx.put(f"http://{host}:{port}/{BUCKET}"), process, folder)
        yield ObjectServer(port, "s3", process.pid, host=host)


def npm_program(name: str) -> Path:
    """Return one of the programs that npm has installed; skip the test where it is not there."""
    program = _OPT / "azurite/node_modules/.bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed: it needs npm")
    return program


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[ObjectServer]:
    """Run a server that speaks Azure's protocol, with one container.

    Args:
        folder: For its log and what it keeps.
    """
    port = _free_port()
    command = [str(npm_program("azurite-blob")), "--skipApiVersionCheck", "--blobPort", str(port)]
    command += ["--location", str(folder), "--silent"]
    with _running(command, folder, os.environ) as process:
        _until_up(lambda: _create_container(port), process, folder)
        yield ObjectServer(port, "az", process.pid)


@contextlib.contextmanager
def s3rver(folder: Path) -> Iterator[ObjectServer]:
    """Run a server that speaks S3 but for conditions, which it ignores, with one bucket.

    Args:
        folder: For its log and what it keeps.
    """
    port = _free_port()
    command = [str(npm_program("s3rver")), "--directory", str(folder), "--port", str(port)]
    command += ["--address", "127.0.0.1", "--no-vhost-buckets", "--configure-bucket", BUCKET]
    with _running(command, folder, os.environ) as process:
        address = f"http://127.0.0.1:{port}/"
        # Without a signature it refuses, and is there.
        _until_up(lambda: httpx.head(address), process, folder)
        yield ObjectServer(port, "s3", process.pid, (_S3RVER, _S3RVER))


@contextlib.contextmanager
def _running(
    command: list[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _until_up(
    ask: Callable[[], httpx.Response], process: subprocess.Popen[bytes], folder: Path
) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            response = ask()
            if response.is_success:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the store did not start: {(folder / 'server.log').read_text()[-2000:]}")


def _create_container(port: int) -> httpx.Response:
    """Ask for the container, which obstore cannot do, signed as Azure's Shared Key wants it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT\n" + "\n" * 11 + canonical + resource
    digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    address = f"http://127.0.0.1:{port}/{_ACCOUNT}/{BUCKET}"
    return httpx.put(address, params={"restype": "container"}, headers=headers)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
