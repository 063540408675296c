"""A real etcd on loopback: members that can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.certificates import Authority, Pair

__all__ = ["Etcd", "ProtectedEtcd", "free_ports"]

_START_S = 40


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as open_sockets:
        found = []
        for _ in range(count):
            one = open_sockets.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(one.getsockname()[1])
        return found


class Etcd:
    """A cluster of etcd's members.

    Args:
        program: The binary.
        folder: For data and logs.
        size: How many members.

    Attributes:
        addresses: HOST:PORT of each member.
    """

    scheme = "etcd"

    def __init__(self, program: str, folder: Path, size: int = 1) -> None:
        self._folder = folder
        ports = free_ports(2 * size)
        self.addresses = [self.address(port) for port in ports[:size]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        everyone = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        self._commands = [
            [
                *(program, "--name", f"m{number}", "--data-dir", str(folder / f"m{number}")),
                *("--listen-client-urls", self._url(ports[number])),
                *("--advertise-client-urls", self._url(ports[number])),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", everyone, "--logger", "zap", *self.flags()),
            ]
            for number, peer in enumerate(peers)
        ]
        self._running: list[subprocess.Popen[bytes] | None] = [None] * size
        for number in range(size):
            self.start(number)
        for number in range(size):
            self.wait(number)

    def address(self, port: int) -> str:
        return f"127.0.0.1:{port}"

    def flags(self) -> list[str]:
        return []

    def client(self) -> dict[str, Any]:
        """Return what httpx needs to speak with it."""
        return {}

    def _url(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def url(self, prefix: str) -> str:
        """Return the URL of a register in it."""
        return f"{self.scheme}://{','.join(self.addresses)}/{prefix}"

    def start(self, number: int) -> None:
        with (self._folder / f"m{number}.log").open("ab") as log:
            self._running[number] = subprocess.Popen(
                self._commands[number], stdout=log, stderr=log, cwd=self._folder
            )

    def mend(self) -> None:
        """Start what was killed, let what is frozen go on, and wait until all know a leader."""
        for number, running in enumerate(self._running):
            if running is None:
                self.start(number)
            else:
                self.signal(number, signal.SIGCONT)
        for number in range(len(self._running)):
            self.wait(number)

    def wait(self, number: int) -> None:
        """Wait until a member knows a leader."""
        end = time.monotonic() + _START_S
        while not self.status(number).get("leader"):
            if time.monotonic() > end:
                log = (self._folder / f"m{number}.log").read_text()[-2000:]
                raise TimeoutError(f"etcd's member {number} found no leader:\n{log}")
            time.sleep(0.05)

    def status(self, number: int) -> dict[str, Any]:
        """Return what a member says of itself; empty: nothing."""
        try:
            return self.ask("maintenance/status", number=number)
        except httpx.HTTPError:
            return {}

    def ask(self, what: str, number: int = 0, **request: Any) -> dict[str, Any]:
        """Send a request to a member by HTTP."""
        scheme = "https" if self.client() else "http"
        with httpx.Client(timeout=2, trust_env=False, **self.client()) as client:
            reply = client.post(f"{scheme}://{self.addresses[number]}/v3/{what}", json=request)
        reply.raise_for_status()
        return dict(reply.json())

    def leader(self) -> int:
        """Return the number of the member that leads."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            for number in range(len(self.addresses)):
                status = self.status(number)
                if status and status.get("leader") == status["header"]["member_id"]:
                    return number
            time.sleep(0.05)
        raise TimeoutError("etcd has no leader")

    def signal(self, number: int, what: signal.Signals) -> None:
        running = self._running[number]
        assert running is not None
        running.send_signal(what)
        if what == signal.SIGKILL:
            running.wait(10)
            self._running[number] = None

    def close(self) -> None:
        for number, running in enumerate(self._running):
            if running is not None:
                self.signal(number, signal.SIGKILL)


class ProtectedEtcd(Etcd):
    """One member behind TLS that wants certificates of clients.

    Args:
        program: The binary.
        folder: For data and logs.
        authority: Signs its certificate and its clients'.
        client: A client that may ask by HTTP.
    """

    scheme = "etcds"

    def __init__(self, program: str, folder: Path, authority: Authority, client: Pair) -> None:
        self._authority, self._client = authority, client
        self._pair = authority.sign("localhost", "localhost", file="etcd")
        super().__init__(program, folder)

    def address(self, port: int) -> str:
        return f"localhost:{port}"

    def flags(self) -> list[str]:
        return [
            *("--cert-file", str(self._pair.certificate), "--key-file", str(self._pair.key)),
            *("--client-cert-auth", "--trusted-ca-file", str(self._authority.ca)),
        ]

    def client(self) -> dict[str, Any]:
        import ssl

        context = ssl.create_default_context(cafile=str(self._authority.ca))
        context.load_cert_chain(self._client.certificate, self._client.key)
        return {"verify": context}

    def _url(self, port: int) -> str:
        return f"https://127.0.0.1:{port}"
