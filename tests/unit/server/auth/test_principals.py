"""Tokens and authority files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.clocks import Clocks
from tests.support.secured import authority_text
from weightsync.errors import WeightSyncError
from weightsync_server.auth import Role
from weightsync_server.auth.principals import (
    AuthorityFile,
    Principal,
    Principals,
    Token,
    new_token,
    parse_authority,
    token_hash,
)
from weightsync_server.auth.tls import read_private

ENTRY = {"name": "a", "roles": ["read", "push"], "models": ["m"]}


def test_tokens_are_long_and_never_twice() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(token) >= 46 for token in tokens)


def test_a_token_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    token = Token(token_hash("t"), expires=1000.0)
    clocks = Clocks.over(monkeypatch)
    clocks.wall = 999.0
    assert token.matches(token_hash("t"))
    clocks.wall = 1000.0
    assert not token.matches(token_hash("t"))
    assert Token(token_hash("t")).matches(token_hash("t"))


def test_every_hash_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def note(token: Token, digest: str) -> bool:
        compared.append(token.hash)
        return token.hash == digest

    monkeypatch.setattr(Token, "matches", note)
    principals = Principals(
        Principal(str(i), frozenset({Role.READ}), tokens=(Token(token_hash(str(i))),))
        for i in range(5)
    )
    found = principals.by_token("0")
    assert found is not None
    assert found.name == "0"
    assert len(compared) == 5


@pytest.mark.parametrize("as_json", [True, False])
def test_both_notations_say_the_same(as_json: bool) -> None:
    entry = ENTRY | {"tokens": [token_hash("t")], "certificates": ["a.test"]}
    text = json.dumps({"principal": [entry]}) if as_json else authority_text([entry])
    principals = parse_authority(text.encode(), as_json=as_json)
    found = principals.by_token("t")
    assert found is principals.by_certificate(["x", "a.test"])
    assert found is not None
    assert found.roles == {Role.READ, Role.PUSH}
    assert found.covers("m")
    assert not found.covers("other")
    assert principals.by_token("T") is None
    assert principals.by_token(token_hash("t")) is None


@pytest.mark.parametrize("expires", ["2020-01-01T00:00:00Z", "2020-01-01T00:00:00+02:00"])
def test_a_token_with_an_end_is_read(expires: str) -> None:
    text = authority_text([ENTRY]) + f'[[principal.tokens]]\nhash = "{token_hash("t")}"\n'
    assert parse_authority(f"{text}expires = 2099-01-01T00:00:00Z\n".encode()).by_token("t")
    assert parse_authority(f"{text}expires = {expires}\n".encode()).by_token("t") is None
    with pytest.raises(ValueError, match="time zone"):
        parse_authority(f"{text}expires = 2099-01-01T00:00:00\n".encode())


@pytest.mark.parametrize(
    "data", [b"\xff", b"principal = 3", b"a" * 100, b"[" * 5000, b"principal = " + b"[" * 5000]
)
@pytest.mark.parametrize("as_json", [True, False])
def test_what_is_none_is_refused(data: bytes, as_json: bool) -> None:
    with pytest.raises(ValueError):
        parse_authority(data, as_json=as_json)


def test_a_pipe_or_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "", "none"):
        with pytest.raises(WeightSyncError):
            read_private(tmp_path / name, "it")


def test_a_link_that_is_turned_is_noticed(tmp_path: Path) -> None:
    # As Kubernetes replaces a mounted secret.
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_text(authority_text([ENTRY | {"tokens": [token_hash(name)]}]))
        path.chmod(0o440)
    link = tmp_path / "link"
    link.symlink_to("one")
    file = AuthorityFile(link)
    assert file.current().by_token("one")
    turned = tmp_path / "turned"
    turned.symlink_to("two")
    turned.rename(link)
    assert file.current().by_token("two")
    assert not file.current().by_token("one")
