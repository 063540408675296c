from __future__ import annotations

import pickle
import re
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import errors
from weightsync_client.cli.cli_options import MEANINGS, ExitCode, exit_code

CODES = list(grpc.StatusCode)


class FakeRpcError(grpc.RpcError):
    def __init__(
        self, code: grpc.StatusCode, text: str = "", trailers: Any = (), details: Any = ()
    ) -> None:
        super().__init__()
        self._code, self._details, self._trailers = code, text, trailers
        if details:
            self._trailers = (("grpc-status-details-bin", self.pack(details)),)

    def pack(self, details: Any) -> bytes:
        packed = []
        for detail in details:
            item = any_pb2.Any()
            item.Pack(detail)
            packed.append(item)
        number = self._code.value[0]
        status = status_pb2.Status(code=number, message=self._details, details=packed)
        return bytes(status.SerializeToString())

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def convert(error: FakeRpcError) -> errors.ClientError:
    return errors.from_rpc(error, method="CommitPush", address="host:1")


@pytest.mark.parametrize("code", CODES)
def test_every_status_has_a_class_a_reason_and_a_sentence(code: grpc.StatusCode) -> None:
    error = convert(FakeRpcError(code, "odd detail"))
    assert type(error) is not errors.ClientError
    assert isinstance(error, WeightSyncError)
    assert error.code is code
    assert isinstance(error.reason, Reason)
    assert len(error.message) > 5
    assert error.metadata["address"] == "host:1"


def test_classes_name_distinct_remedies() -> None:
    kinds = {code: type(convert(FakeRpcError(code))) for code in CODES}
    assert len(set(kinds.values())) == 9
    assert kinds[grpc.StatusCode.DATA_LOSS] is errors.DataError
    assert kinds[grpc.StatusCode.UNAVAILABLE] is kinds[grpc.StatusCode.INTERNAL]
    assert kinds[grpc.StatusCode.UNAUTHENTICATED] is errors.DeniedError


@pytest.mark.parametrize("reason", list(Reason))
def test_rich_details_are_read(reason: Reason) -> None:
    code = WeightSyncError(reason, "").code
    info = error_details_pb2.ErrorInfo(
        reason=reason.name, domain="weightsync", metadata={"slots": "2"}
    )
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    error = convert(FakeRpcError(code, "no slot is free", details=[info, retry]))
    assert error.reason is reason
    assert error.metadata == {"slots": "2"}
    assert error.retry_after_s == 1.5
    assert error.message == str(error) == "no slot is free"
    assert error.code is code


def test_a_reason_of_a_newer_server_falls_back_to_the_status() -> None:
    info = error_details_pb2.ErrorInfo(reason="NEW_THING", domain="weightsync")
    error = convert(FakeRpcError(grpc.StatusCode.FAILED_PRECONDITION, "not now", details=[info]))
    assert isinstance(error, errors.RefusedError)
    assert error.metadata["reason"] == "NEW_THING"
    assert error.message == "not now"


def test_details_of_another_domain_are_not_ours() -> None:
    info = error_details_pb2.ErrorInfo(reason="NO_SLOT", domain="proxy.example")
    error = convert(FakeRpcError(grpc.StatusCode.UNAVAILABLE, "upstream", details=[info]))
    assert error.reason is not Reason.NO_SLOT


def test_garbage_in_the_trailer_is_survived() -> None:
    trailers = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    error = convert(FakeRpcError(grpc.StatusCode.ABORTED, "x", trailers))
    assert isinstance(error, errors.AbortedError)


def test_transport_errors_name_address_and_remedy() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4: refused"
    error = convert(FakeRpcError(grpc.StatusCode.UNAVAILABLE, details))
    assert error.message == (
        "no answer from host:1 to the commit of the push (ipv4:1.2.3.4: refused); check that "
        "weightsync-server runs there and that the address is right, then try again"
    )


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_way_through_a_proxy_is_told(
    code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example:3128")
    message = convert(FakeRpcError(code, "refused")).message
    assert (
        "add host to no_proxy to connect without the proxy: the connection goes through "
        "proxy.example:3128 (https_proxy)"
    ) in message
    monkeypatch.setenv("no_proxy", "host")
    assert "proxy" not in convert(FakeRpcError(code, "refused")).message


@pytest.mark.parametrize("code", CODES)
def test_no_sentence_names_a_call_of_the_protocol(code: grpc.StatusCode) -> None:
    calls = [method.name for method in pb.DESCRIPTOR.services_by_name["WeightSync"].methods]
    for method in [*calls, "Check"]:
        error = FakeRpcError(code, "upstream: refused")
        message = errors.from_rpc(error, method=method, address="host:1").message
        words = set(re.findall(r"\w+", message))
        assert not words & {*calls, "Check"}, message


def test_a_missing_token_names_the_variable() -> None:
    message = convert(FakeRpcError(grpc.StatusCode.UNAUTHENTICATED, "no token")).message
    assert "WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE" in message


@pytest.mark.parametrize("reason", list(Reason))
def test_errors_of_shared_checks_join_the_tree(reason: Reason) -> None:
    with pytest.raises(errors.ClientError) as caught, errors.typed_errors():
        raise WeightSyncError(reason, "sentence", metadata={"a": "b"})
    assert type(caught.value) is not errors.ClientError
    assert caught.value.reason is reason
    assert caught.value.metadata == {"a": "b"}


def test_exit_codes_are_total_and_told() -> None:
    assert set(MEANINGS) == set(ExitCode)
    for reason in Reason:
        assert exit_code(errors.refuse(reason, "")) in MEANINGS
    assert exit_code(errors.refuse(Reason.NO_SLOT, "")) == 7
    assert exit_code(errors.refuse(Reason.LAYOUT_INVALID, "")) == 6
    assert exit_code(errors.refuse(Reason.DATA_CORRUPT, "")) == 6
    assert exit_code(errors.refuse(Reason.ENGINE_AWAY, "")) == 5
    assert exit_code(errors.refuse(Reason.EPOCH_STALE, "")) == 4
    assert exit_code(errors.refuse(Reason.VERSION_UNKNOWN, "")) == 3
    assert exit_code(errors.refuse(Reason.REQUEST_INVALID, "")) == 2
    assert exit_code(errors.refuse(Reason.DEADLINE_EXCEEDED, "")) == 8
    for code in CODES:
        assert exit_code(convert(FakeRpcError(code))) != ExitCode.FAULT


@pytest.mark.parametrize("kind", [errors.RefusedError, errors.UnavailableError, WeightSyncError])
def test_an_error_reaches_another_process_whole(kind: type[WeightSyncError]) -> None:
    error = kind(Reason.NO_SLOT, "sentence", metadata={"a": "b"}, retry_after_s=2.0)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.reason, again.message, str(again)) == (Reason.NO_SLOT, "sentence", "sentence")
    assert (again.metadata, again.retry_after_s, again.code) == ({"a": "b"}, 2.0, error.code)
    assert again.__notes__ == ["a note"]
