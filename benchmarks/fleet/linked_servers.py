"""Servers on linked hosts, which trust each other by TLS and a token, as on hosts of a network."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.shaped_links import LinkedHost
from benchmarks.servers import weightsync_server
from tests.support.certificates import Authority, Pair
from tests.support.secured import authority_text
from weightsync_server.auth.principals import new_token, token_hash
from weightsync_server.auth.roles import Role

__all__ = ["Trust", "linked_server", "make_trust", "own_address", "tcp_address"]

_PORT = 50551


@dataclass(frozen=True)
class Trust:
    """Files by which hosts and the trainer know each other.

    Attributes:
        authority: Of certificates, PEM.
        pair: That every server shows.
        principals: Who may do what.
        token_file: Of one who may do everything.
    """

    authority: Path
    pair: Pair
    principals: Path
    token_file: Path


def make_trust(folder: Path, names: Sequence[str]) -> Trust:
    """Write the files for hosts of these names."""
    authority, token = Authority(folder / "pki"), new_token()
    principals, token_file = folder / "authority.toml", folder / "token"
    for path in (principals, token_file):
        path.touch(mode=0o600)
    known = {"name": "bench", "roles": [Role.ADMIN], "models": ["bench"]}
    known["tokens"] = [token_hash(token)]
    principals.write_text(authority_text([known]))
    token_file.write_text(token)
    pair = authority.sign("server", *names)
    return Trust(authority.ca, pair, principals, token_file)


def own_address(folder: Path) -> str:
    """Return where a server is reached without its link."""
    return f"unix:{folder}/server.sock"


def tcp_address(host: LinkedHost) -> str:
    """Return where other hosts reach a server."""
    return f"{host.name}:{_PORT}"


@contextlib.contextmanager
def linked_server(
    host: LinkedHost,
    folder: Path,
    trust: Trust,
    *flags: str,
    engine: str = "memory",
    store: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a weightsync-server on a host until the block ends.

    Args:
        host: Where.
        folder: Of its state, socket and log.
        trust: Whom it trusts.
        *flags: More flags.
        engine: `memory` or `none`.
        store: As of `weightsync_server`.
        environment: Variables of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secured = (
        *("--authority", str(trust.principals)),
        *("--tls-cert", str(trust.pair.certificate), "--tls-key", str(trust.pair.key)),
    )
    with weightsync_server(
        folder,
        [f"{own_address(folder)}?role={Role.ADMIN}", f"0.0.0.0:{_PORT}"],
        *secured,
        *flags,
        engine=engine,
        store=store,
        environment=environment,
        wrapper=host.on(),
    ) as running:
        yield running
