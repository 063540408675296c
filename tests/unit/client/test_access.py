"""Tokens and TLS of a client: where they come from, where they never go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority
from weightsync.errors import Reason
from weightsync_client import Access, AsyncClient, Client, ClientError
from weightsync_client.access import VARIABLES
from weightsync_client.rpc.channels import Link

SECRET = "ws_s3cret-s3cret-s3cret"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_the_environment_says_it_all(
    monkeypatch: pytest.MonkeyPatch, token_file: Path, tmp_path: Path
) -> None:
    ca = Authority(tmp_path / "pki")
    pair = ca.sign("me")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN_FILE", str(token_file))
    monkeypatch.setenv("WEIGHTSYNC_TLS_CA", str(ca.ca))
    monkeypatch.setenv("WEIGHTSYNC_TLS_CERT", str(pair.certificate))
    monkeypatch.setenv("WEIGHTSYNC_TLS_KEY", str(pair.key))
    access = Access.from_environment()
    assert access.bearer() == SECRET
    assert access.channel_credentials() is not None


def test_the_variables_of_a_server_do_not_disturb_a_client_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As a health check in the server's container has them.
    monkeypatch.setenv("WEIGHTSYNC_TLS_CERT", str(tmp_path / "server.pem"))
    monkeypatch.setenv("WEIGHTSYNC_TLS_KEY", str(tmp_path / "server.key"))
    assert Access.from_environment() == Access()
    monkeypatch.setenv("WEIGHTSYNC_TLS_CA", str(tmp_path / "ca.pem"))
    Client(f"unix:{tmp_path}/read.sock").close()


def test_a_token_file_is_read_for_every_call(token_file: Path) -> None:
    link = Link("localhost:1", Access(token_file=token_file))
    assert link.metadata == (("authorization", f"Bearer {SECRET}"),)
    token_file.write_text("another")
    assert link.metadata == (("authorization", "Bearer another"),)


@pytest.mark.parametrize(
    "address", ["10.0.0.1:1", "trainer.example:1", "dns:///127.0.0.1:1", "[2001:db8::1]:1"]
)
def test_a_token_never_leaves_the_host_in_plain_text(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ClientError, match="in plain text; set WEIGHTSYNC_TLS_CA") as caught:
            kind(address, access=Access(token=SECRET))
        assert SECRET not in str(caught.value)
    # Nor by a data port that the server names.
    link = Link("localhost:1", Access(token=SECRET))
    with pytest.raises(ClientError, match="in plain text"):
        link.channel(address)
    Link(address, Access(token=SECRET, credentials=grpc.ssl_channel_credentials()))


def test_plain_text_to_this_host_takes_no_proxy() -> None:
    link = Link("localhost:1")
    _, options = link._protection("127.0.0.1:1")
    assert ("grpc.enable_http_proxy", 0) in options
    _, options = link._protection("10.0.0.1:1")
    assert ("grpc.enable_http_proxy", 1) in options


def test_nothing_shows_a_token(token_file: Path) -> None:
    access = Access(token=SECRET)
    for thing in (access, Link("localhost:1", access), Access(token_file=token_file)):
        assert "s3cret" not in f"{thing!r}{thing}"


def test_mistakes_get_one_sentence(tmp_path: Path, token_file: Path) -> None:
    ca = Authority(tmp_path / "pki")
    pair, other = ca.sign("one"), ca.sign("two")
    opened, empty = tmp_path / "opened", tmp_path / "empty"
    for path, mode, text in ((opened, 0o644, SECRET), (empty, 0o600, "\n")):
        path.write_text(text)
        path.chmod(mode)
    cases: dict[str, Callable[[], object]] = {
        "both a token and a token file": lambda: Access(token=SECRET, token_file=token_file),
        "go together": lambda: Access(tls_ca=ca.ca, tls_cert=pair.certificate),
        "and need tls_ca": lambda: Access(tls_cert=pair.certificate, tls_key=pair.key),
        "credentials and TLS files": lambda: Access(
            tls_ca=ca.ca, credentials=grpc.ssl_channel_credentials()
        ),
        "cannot be read": lambda: Link("a:1", Access(tls_ca=tmp_path / "none")),
        "no PEM certificates": lambda: Link("a:1", Access(tls_ca=pair.key)),
        "not a PEM certificate and its key": lambda: Link(
            "a:1", Access(tls_ca=ca.ca, tls_cert=pair.certificate, tls_key=other.key)
        ),
        "token file": lambda: Access(token_file=tmp_path / "none").bearer(),
        "open to other users": lambda: Access(token_file=opened).bearer(),
        "is empty": lambda: Access(token_file=empty).bearer(),
        "spaces or control characters": lambda: Access(token="a b").bearer(),
        "control characters": lambda: Access(token="s3cret\nx").bearer(),
        "or control": lambda: Access(token="schlüssel").bearer(),
    }
    for sentence, act in cases.items():
        with pytest.raises(ClientError, match=sentence) as caught:
            act()
        assert caught.value.reason is Reason.REQUEST_INVALID
        assert "s3cret" not in caught.value.message


def test_the_command_takes_no_token_as_an_argument() -> None:
    command = [sys.executable, "-m", "weightsync_client.cli", "status"]
    ran = subprocess.run(
        [*command, "--token", SECRET], check=False, capture_output=True, text=True, timeout=50
    )
    assert ran.returncode == 2
    shown = subprocess.run(
        [*command[:-1], "--help"], check=True, capture_output=True, text=True, timeout=50
    )
    assert all(variable in shown.stdout for variable in VARIABLES)
