"""Who a call is from where nothing is asked, and where it was passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.secured import authority_text
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.admission import Admission, Proofs
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.principals import EVERYBODY, AuthorityFile, new_token, token_hash
from weightsync_server.auth.roles import Endpoint, Role
from weightsync_server.ops import traces
from weightsync_server.ops.metrics import Metrics
from weightsync_server.usecases.methods import GET_STATUS

if TYPE_CHECKING:
    from pathlib import Path

_FORWARDED = ("forwarded", 'for="10.0.0.7:1234"')


def _gate(endpoint: Endpoint, file: AuthorityFile | None = None) -> Admission:
    return Admission(endpoint, file, "default", Audit("default", Metrics("default")))


def _proofs(*headers: tuple[str, str]) -> Proofs:
    return Proofs(headers=headers)


def test_what_was_passed_on_needs_a_token_where_nobody_is_asked() -> None:
    gate = _gate(Endpoint("127.0.0.1:1"))
    assert gate.identify(_proofs()) is EVERYBODY
    bearer = ("authorization", "Bearer anything")
    for proofs in ([_FORWARDED], [bearer, _FORWARDED]):
        with pytest.raises(
            WeightSyncError, match=("start this server with --authority FILE")
        ) as caught:
            gate.identify(_proofs(*proofs))
        assert caught.value.reason is Reason.UNAUTHENTICATED


def test_what_was_passed_on_is_its_sender_s(tmp_path: Path) -> None:
    token, file = new_token(), tmp_path / "authority.toml"
    principal = {"name": "t", "roles": ["train"], "models": ["*"], "tokens": [token_hash(token)]}
    file.touch(mode=0o600)
    file.write_text(authority_text([principal]))
    gate = _gate(Endpoint("127.0.0.1:1"), AuthorityFile(file))
    assert gate.identify(_proofs(("authorization", f"Bearer {token}"), _FORWARDED)).name == "t"
    with pytest.raises(WeightSyncError, match="no valid token or client certificate"):
        gate.identify(_proofs(_FORWARDED))


def test_a_socket_with_a_role_stands_for_it_in_any_case() -> None:
    gate = _gate(Endpoint("unix:/x", Role.TRAIN))
    assert gate.identify(_proofs(_FORWARDED)).roles == {Role.TRAIN}


def test_a_call_that_names_two_spans_names_none() -> None:
    gate = _gate(Endpoint("127.0.0.1:1"))
    first, second = (("traceparent", f"00-{digit * 32}-{digit * 16}-01") for digit in "12")
    for headers, found in (((first,), first[1]), ((first, second), ""), ((), "")):
        gate.admit(_proofs(*headers), GET_STATUS)
        assert traces.caller() == found
