"""Who a call is from where nothing is asked, and where it was passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.secured import authority_text
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.authenticator import Authenticator
from weightsync_server.auth.authority_file import AuthorityFile
from weightsync_server.auth.endpoints import Endpoint
from weightsync_server.auth.principals import EVERYBODY, new_token, token_hash
from weightsync_server.auth.roles import Role

if TYPE_CHECKING:
    from pathlib import Path

_FORWARDED = ("forwarded", 'for="10.0.0.7:1234"')


class _Context:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


def test_what_was_passed_on_needs_a_token_where_nobody_is_asked() -> None:
    gate = Authenticator(Endpoint("127.0.0.1:1"), None)
    assert gate.identify(_Context()) is EVERYBODY
    bearer = ("authorization", "Bearer anything")
    for proofs in ([_FORWARDED], [bearer, _FORWARDED]):
        with pytest.raises(WeightSyncError, match="start it with --authority FILE") as caught:
            gate.identify(_Context(*proofs))
        assert caught.value.reason is Reason.UNAUTHENTICATED


def test_what_was_passed_on_is_its_sender_s(tmp_path: Path) -> None:
    token, file = new_token(), tmp_path / "authority.toml"
    principal = {"name": "t", "roles": ["train"], "models": ["*"], "tokens": [token_hash(token)]}
    file.touch(mode=0o600)
    file.write_text(authority_text([principal]))
    gate = Authenticator(Endpoint("127.0.0.1:1"), AuthorityFile(file))
    assert gate.identify(_Context(("authorization", f"Bearer {token}"), _FORWARDED)).name == "t"
    with pytest.raises(WeightSyncError, match="proves nobody's authority"):
        gate.identify(_Context(_FORWARDED))


def test_a_socket_with_a_role_stands_for_it_in_any_case() -> None:
    gate = Authenticator(Endpoint("unix:/x", Role.TRAIN), None)
    assert gate.identify(_Context(_FORWARDED)).roles == {Role.TRAIN}
