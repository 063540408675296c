"""What a fleet stands on, as real processes of this machine: etcd and a server that speaks S3."""

from __future__ import annotations

import http.client
import shutil
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from examples.demo.processes import Processes, ProcessesError, free_port

__all__ = ["Store", "check_programs", "start_etcd", "start_store"]

_BUCKET = "weights"
#: Where `make setup` puts moto, which needs other releases of what this project needs.
_MOTO = Path(sys.prefix) / "opt" / "moto"
#: A proxy that the user has set is not for this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Store:
    """A bucket.

    Attributes:
        url: Of the versions in it.
        variables: Environment variables of whoever reads or writes there.
    """

    url: str
    variables: dict[str, str]


def check_programs() -> str:
    """Return the path of etcd, the S3 server being there too.

    Raises:
        ProcessesError: Something that the demo needs is not installed; the message says what to do.
    """
    etcd = shutil.which("etcd")
    if etcd is None:
        raise ProcessesError(
            "etcd is not installed: install the Debian package etcd-server, "
            "or put etcd 3.4 or newer on PATH"
        )
    if not _MOTO.is_dir():
        raise ProcessesError(f"the S3 server is not installed ({_MOTO}): run `make setup`")
    return etcd


def start_etcd(processes: Processes, etcd: str, folder: Path, deadline: float) -> str:
    """Start one member that keeps its data in `folder`, and return the register's URL."""
    url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [
        *(etcd, "--name", "demo", "--data-dir", str(folder / "etcd"), "--logger", "zap"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"demo={peer}"),
    ]
    processes.start("etcd", command)
    processes.wait(lambda: _answers("GET", f"{url}/health"), "etcd", deadline)
    return f"etcd://{url.removeprefix('http://')}/demo"


def start_store(processes: Processes, deadline: float) -> Store:
    """Start the server that speaks S3, and make a bucket in it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    processes.start("s3", command, {"PYTHONPATH": str(_MOTO)})
    address = f"http://127.0.0.1:{port}"
    processes.wait(lambda: _answers("PUT", f"{address}/{_BUCKET}"), "the S3 server", deadline)
    variables = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
    }
    return Store(f"s3://{_BUCKET}/demo", variables)


def _answers(method: str, url: str) -> bool:
    request = urllib.request.Request(url, method=method)  # noqa: S310 - http, of this machine
    try:
        with _OPENER.open(request, timeout=2) as answer:
            return bool(answer.status == http.HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False
