"""Real servers that ask who calls, and callers of every kind."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks.servers import free_port
from tests.support.certificates import Authority, Pair
from tests.support.weightsync_server import WeightSyncServer
from weightsync.debug.v1 import debug_pb2
from weightsync.node.v1 import node_pb2
from weightsync.v1 import attach_pb2, train_pb2
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth.principals import new_token, token_hash
from weightsync_server.auth.roles import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["DEBUG_METHODS", "METHODS", "Secured", "authority_text", "code_of"]


def _methods(*files: Any) -> dict[str, Any]:
    return {
        f"/{service.full_name}/{method.name}": method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


#: Exact path to descriptor of every method that the server serves, from the protos themselves.
METHODS: Mapping[str, Any] = _methods(
    pb.DESCRIPTOR,
    attach_pb2.DESCRIPTOR,
    train_pb2.DESCRIPTOR,
    node_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
#: Of those that are there only where failpoints are.
DEBUG_METHODS: Mapping[str, Any] = _methods(debug_pb2.DESCRIPTOR)


def authority_text(principals: Sequence[Mapping[str, Any]]) -> str:
    """Return an authority file."""
    lines: list[str] = []
    for principal in principals:
        lines.append("[[principal]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in principal.items()]
    return "\n".join(lines) + "\n"


#: Ingest processes that a test may ask for.
_MOST_INGEST = 2


@dataclass
class Secured:
    """A weightsync-server process with an authority file.

    Principals: one for each role, `other` with every role for another model. Each has a token in
    `tokens` and the certificate name `<principal>.test`.

    Attributes:
        folder: Everything of it; short, because unix sockets allow 107 bytes.
        tls: Whether TCP has TLS.
        mutual: Whether clients need a certificate as well.
        flags: More flags.
    """

    folder: Path
    tls: bool = False
    mutual: bool = False
    flags: Sequence[str] = ()
    tokens: dict[str, str] = field(default_factory=dict)
    _channels: list[grpc.Channel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ca = Authority(self.folder / "pki")
        self.pair: Pair = self.ca.sign("server", "localhost", "server.test")
        # Ingest processes listen on those that follow.
        self.port = free_port(1 + _MOST_INGEST)
        self.file = self.folder / "authority.toml"
        self.tokens = {name: new_token() for name in (*Role, "other")}
        self.write()
        flags = [f"--listen=unix:{self.folder}/run/{role}.sock?role={role}" for role in Role]
        flags += [f"--listen={'0.0.0.0' if self.tls else '127.0.0.1'}:{self.port}"]
        if self.tls:
            flags += [f"--tls-cert={self.pair.certificate}", f"--tls-key={self.pair.key}"]
        if self.mutual:
            flags += [f"--tls-client-ca={self.ca.ca}"]
        self.metrics_port = free_port()
        flags += ["--metrics", f"127.0.0.1:{self.metrics_port}"]
        self.server = _Server(
            self.folder / "run",
            self.folder / "state",
            store="memory://",
            flags=(f"--authority={self.file}", *flags, *self.flags),
        )

    def write(self, **tokens: str) -> None:
        """Write the authority file, with these tokens in the place of those from before."""
        self.tokens |= tokens
        principals = [
            {
                "name": name,
                "roles": list(Role) if name == "other" else [name],
                "models": ["elsewhere" if name == "other" else "default"],
                "certificates": [f"{name}.test"],
                "tokens": [token_hash(token)],
            }
            for name, token in self.tokens.items()
        ]
        fresh = self.file.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(authority_text(principals))
        fresh.replace(self.file)

    @property
    def address(self) -> str:
        """Where it listens on TCP."""
        return f"localhost:{self.port}" if self.tls else f"127.0.0.1:{self.port}"

    def socket(self, role: str) -> str:
        """Address of the socket of a role."""
        return f"unix:{self.folder}/run/{role}.sock"

    def start(self) -> Secured:
        """Return when it answers."""
        self.server.start()
        return self

    def stop(self) -> int:
        """Close every channel, end the server, return its exit code."""
        for channel in self._channels:
            channel.close()
        return self.server.stop()

    def channel(self, pair: Pair | None = None, address: str = "") -> grpc.Channel:
        """Open a channel; with TLS where the server has it."""
        # A pool of its own: a later channel must not find the connection of an earlier one.
        options = [("grpc.use_local_subchannel_pool", 1)]
        target = address or self.address
        if not self.tls or target.startswith("unix:"):
            channel = grpc.insecure_channel(target, options)
        else:
            key, chain = (
                (pair.key.read_bytes(), pair.certificate.read_bytes()) if pair else (None, None)
            )
            credentials = grpc.ssl_channel_credentials(self.ca.ca.read_bytes(), key, chain)
            channel = grpc.secure_channel(target, credentials, options)
        self._channels.append(channel)
        return channel

    def bearer(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata that proves a principal."""
        return (("authorization", f"Bearer {self.tokens[name]}"),)

    def scrape(self) -> str:
        """Return the metrics page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}", timeout=5) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Return the sum over all children of a metric."""
        values = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", self.scrape())
        return sum(float(value) for value in values)

    def audit(self) -> list[dict[str, Any]]:
        """Return the audit lines so far of calls that were let in."""
        return [line for line in self._lines() if "refused" not in line]

    def refusals(self) -> list[dict[str, Any]]:
        """Return the audit lines so far of calls that were refused at the door."""
        return [line for line in self._lines() if "refused" in line]

    def _lines(self) -> list[dict[str, Any]]:
        lines = [line for line in self.server.log.splitlines() if "weightsync.audit: " in line]
        return [json.loads(line.partition("weightsync.audit: ")[2]) for line in lines]


class _Server(WeightSyncServer):
    @property
    def address(self) -> str:
        return f"unix:{self.run_dir / 'admin.sock'}"


def code_of(
    channel: grpc.Channel,
    path: str,
    metadata: Sequence[tuple[str, str]] = (),
    request: bytes = b"",
    timeout_s: float = 10.0,
) -> grpc.StatusCode:
    """Return the status of one call of any method, sent as raw bytes.

    Streams of requests send one and no more; of streams of responses the first is awaited.
    """
    method = METHODS.get(path)
    streams = method is not None and method.client_streaming
    many = method is not None and method.server_streaming
    kind = f"{'stream' if streams else 'unary'}_{'stream' if many else 'unary'}"
    argument: Any = iter([request]) if streams else request
    deadline = time.monotonic() + timeout_s
    try:
        call = getattr(channel, kind)(path)(argument, metadata=metadata, timeout=timeout_s)
        if many:
            next(call, None)
            call.cancel()
    except grpc.RpcError as error:
        assert time.monotonic() < deadline + 5
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
