"""Every error of the client, and the one place that knows gRPC's.

WeightSyncError            reason, message, metadata, retry_after_s, code
└── ClientError
    ├── InvalidError       INVALID_ARGUMENT, OUT_OF_RANGE, UNIMPLEMENTED, TLS that does not
    │                      fit: correct the call
    ├── NotFoundError      NOT_FOUND: no such model, version or push
    ├── RefusedError       FAILED_PRECONDITION, ALREADY_EXISTS: do what the sentence says
    ├── AbortedError       ABORTED, CANCELLED: read the state again, then retry
    ├── ExhaustedError     RESOURCE_EXHAUSTED: no slot, memory or disk
    ├── UnavailableError   UNAVAILABLE, and a link that broke: retry the same call
    ├── DeadlineError      DEADLINE_EXCEEDED
    ├── DeniedError        UNAUTHENTICATED, PERMISSION_DENIED
    └── DataError          DATA_LOSS: bytes no longer have their digest
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.grpc_channels import proxy_hint
from weightsync.wire.rpc_status import error_details


class ClientError(WeightSyncError):
    """Base of all errors that the client raises.

    Args:
        reason: Stable cause.
        message: One sentence that names the remedy.
        metadata: Facts for programs.
        retry_after_s: Seconds after which a retry may succeed.
        code: The status that the server or the link gave; default: that of the reason.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        code: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(reason, message, metadata=metadata, retry_after_s=retry_after_s)
        self._code = code

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status."""
        return self._code or super().code


class InvalidError(ClientError):
    """The call, its layout or its bytes are wrong: correct them."""


class NotFoundError(ClientError):
    """No such model, version or push."""


class RefusedError(ClientError):
    """The state does not allow it: do what the sentence says, a retry does not help."""


class AbortedError(ClientError):
    """Something else changed the state meanwhile: read it again, then retry."""


class ExhaustedError(ClientError):
    """Out of slots, memory or disk; `retry_after_s` says when to try again, where known."""


class UnavailableError(ClientError):
    """The server, its engine or the link is away: retry the same call later."""


class DeadlineError(ClientError):
    """The call took longer than its timeout."""


class DeniedError(ClientError):
    """The token is missing, wrong, or lacks the role."""


class DataError(ClientError):
    """Bytes that were stored, staged or received do not have their digest."""


_CODE = grpc.StatusCode

# Total: a test asks for every status. A link that breaks shows up as UNAVAILABLE, UNKNOWN or
# INTERNAL; the last two never come from our server. The reason is for a status without ErrorInfo,
# or with a reason of a newer server.
_STATUSES: Mapping[grpc.StatusCode, tuple[type[ClientError], Reason]] = MappingProxyType(
    {
        _CODE.OK: (UnavailableError, Reason.FAULT),
        _CODE.CANCELLED: (AbortedError, Reason.CANCELLED),
        _CODE.UNKNOWN: (UnavailableError, Reason.SERVER_AWAY),
        _CODE.INVALID_ARGUMENT: (InvalidError, Reason.REQUEST_INVALID),
        _CODE.DEADLINE_EXCEEDED: (DeadlineError, Reason.DEADLINE_EXCEEDED),
        _CODE.NOT_FOUND: (NotFoundError, Reason.VERSION_UNKNOWN),
        _CODE.ALREADY_EXISTS: (RefusedError, Reason.VERSION_CONFLICT),
        _CODE.PERMISSION_DENIED: (DeniedError, Reason.PERMISSION_DENIED),
        _CODE.RESOURCE_EXHAUSTED: (ExhaustedError, Reason.LIMIT_EXCEEDED),
        _CODE.FAILED_PRECONDITION: (RefusedError, Reason.ENGINE_REFUSED),
        _CODE.ABORTED: (AbortedError, Reason.PUSH_ABORTED),
        _CODE.OUT_OF_RANGE: (InvalidError, Reason.REQUEST_INVALID),
        _CODE.UNIMPLEMENTED: (InvalidError, Reason.NOT_SUPPORTED),
        _CODE.INTERNAL: (UnavailableError, Reason.SERVER_AWAY),
        _CODE.UNAVAILABLE: (UnavailableError, Reason.SERVER_AWAY),
        _CODE.DATA_LOSS: (DataError, Reason.DATA_CORRUPT),
        _CODE.UNAUTHENTICATED: (DeniedError, Reason.UNAUTHENTICATED),
    }
)

#: What the caller did, by the RPC that it became, and the command that does so; "": none.
CALLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "AcquireEpoch": ("the request for an epoch", "epoch"),
        "BeginPush": ("the push", "push"),
        "PushWeights": ("the push", "push"),
        "CommitPush": ("the commit of the push", "push"),
        "AbortPush": ("the abort of the push", "abort"),
        "GetPush": ("the push", "push"),
        "ApplyVersion": ("the apply", "apply"),
        "Rollback": ("the rollback", "rollback"),
        "ListVersions": ("the query for the versions", "versions"),
        "GetVersion": ("the query for the version", "versions"),
        "GetEngineLayout": ("the push", "push"),
        "WatchVersions": ("the watch", "watch"),
        "PinVersion": ("the pin", "pin"),
        "DeleteVersion": ("the deletion", "delete"),
        "PullWeights": ("the pull", "pull"),
        "VerifyVersion": ("the verification", "verify"),
        "ReportLogprobs": ("the report of log probabilities", ""),
        "ListApplies": ("the query for the applies", "applies"),
        "GetStatus": ("the query for the status", "status"),
        "GetFleetStatus": ("the query for the state of the fleet", "fleet status"),
        "AbortFleetApply": ("the abort of the fleet's apply", "fleet abort"),
        "Train": ("the training", "train"),
        "Checkpoint": ("the checkpoint", "checkpoint"),
        "GetTrainStatus": ("the query for the state of the trainer", "train status"),
        "CancelTrain": ("the end of the job", "train cancel"),
        "Check": ("the health check", ""),
    }
)

_LINK_CODES = (_CODE.UNAVAILABLE, _CODE.UNKNOWN, _CODE.INTERNAL, _CODE.OK)


def refuse(reason: Reason, message: str, **metadata: str) -> ClientError:
    """Return the error of the right class for something that the client itself found."""
    kind, _ = _STATUSES[ClientError(reason, message).code]
    return kind(reason, message, metadata=metadata)


def invalid(message: str) -> ClientError:
    """Return the error for what a caller gave and nothing can be done with."""
    return refuse(Reason.REQUEST_INVALID, message)


def cancelled_error() -> AbortedError:
    """Return what a push raises that was cancelled by its caller."""
    return AbortedError(Reason.PUSH_ABORTED, "the push was cancelled here; push again")


def passing(error: BaseException) -> bool:
    """Return whether a repeated call may soon succeed: the link broke, or the refusal says so."""
    if isinstance(error, (ExhaustedError, DeadlineError)):
        # A timeout of this client's own comes without an advice.
        return error.retry_after_s is not None
    if isinstance(error, AbortedError):
        # What a gRPC that is flooded, or that ends, does to calls under way.
        return error.reason is Reason.CANCELLED
    return isinstance(error, UnavailableError)


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Give errors that the shared checks raise their place in the tree."""
    try:
        yield
    except ClientError:
        raise
    except WeightSyncError as error:
        raise refuse(error.reason, error.message, **error.metadata) from None


# What gRPC says of a peer that speaks otherwise or shows another certificate. A link that breaks
# during the handshake says none of it.
_TLS_REFUSALS = ("SSL_ERROR_SSL", "Custom verification check failed")


def _cause(details: str) -> str:
    # gRPC lists every address it tried; the last cause says enough.
    last = re.split(r"last error: (?:UNKNOWN: )?", details)[-1]
    # BoringSSL's verdict on a verification that did not fail, or that never began.
    return re.sub(r"(: Invalid certificate verification context)?: OK$", "", last)


def _tls_refused(code: grpc.StatusCode, details: str) -> bool:
    return code is _CODE.UNAVAILABLE and any(words in details for words in _TLS_REFUSALS)


def _through(address: str) -> str:
    hint = proxy_hint(address)
    return f"; {hint}" if hint else ""


def _sentence(code: grpc.StatusCode, details: str, *, action: str, address: str) -> str:
    if code in _LINK_CODES:
        cause = _cause(details) or code.name.lower()
        if _tls_refused(code, details):
            return (
                f"{address} and this client do not agree on TLS ({cause}){_through(address)}; "
                "check that the server speaks TLS, that WEIGHTSYNC_TLS_CA (tls_ca) holds the CA "
                "of its certificate, and that its certificate names this host"
            )
        hint = ", then try again"
        if "Socket closed" in cause and not address.startswith("unix:"):
            # All that plain text to a TLS server, or TLS 1.3 without the certificate that it wants,
            # gets to see.
            hint = (
                "; if it speaks TLS, set WEIGHTSYNC_TLS_CA (tls_ca), and WEIGHTSYNC_TLS_CERT and "
                "WEIGHTSYNC_TLS_KEY (tls_cert, tls_key) if it asks clients for a certificate"
            )
        return (
            f"no answer from {address} to {action} ({cause}){_through(address)}; check that "
            f"weightsync-server runs there and that the address is right{hint}"
        )
    if code is _CODE.DEADLINE_EXCEEDED:
        return (
            f"{action} on {address} did not end within its timeout{_through(address)}; check the "
            "status, then try again or allow more time"
        )
    if code in (_CODE.UNAUTHENTICATED, _CODE.PERMISSION_DENIED):
        return (
            f"{address} refused {action} ({details}); check the token, which WEIGHTSYNC_TOKEN or "
            "WEIGHTSYNC_TOKEN_FILE gives (token, token_file)"
        )
    if code is _CODE.UNIMPLEMENTED:
        return (
            f"{address} does not serve {action} ({details}); check that it is a weightsync-server"
        )
    if code is _CODE.CANCELLED:
        return f"{action} on {address} was cancelled; call again"
    if code is _CODE.RESOURCE_EXHAUSTED and "Sent message larger than max" in details:
        return f"{action} does not fit into one message ({details}); send less in one call"
    return details or f"{action} on {address} failed with {code.name}"


def from_rpc(error: Any, *, method: str, address: str) -> ClientError:
    """Return our error for one of gRPC's (sync or asyncio); nothing of gRPC's is left in it.

    Args:
        error: `grpc.RpcError` that is also a call, or `grpc.aio.AioRpcError`.
        method: Name of the RPC, for the sentence.
        address: Where it was sent, for the sentence and the metadata.
    """
    code = error.code() or _CODE.UNKNOWN
    sentence = error.details() or ""
    reason: Reason | None = None
    metadata: dict[str, str] = {}
    details = error_details(error)
    if details is None:
        if _tls_refused(code, sentence):
            # Neither time nor another try mends it: settings are wrong, as with a CA that is none.
            reason = Reason.REQUEST_INVALID
        action, _ = CALLS.get(method, (method, ""))
        sentence = _sentence(code, sentence, action=action, address=address)
        metadata = {"address": address}
    elif details.reason:
        reason = Reason.__members__.get(details.reason)
        # One that only a newer server knows.
        newer = {} if reason else {"reason": details.reason}
        metadata = details.metadata | newer
        code = _CODE.UNKNOWN if code is _CODE.OK else code
    kind, usual = _STATUSES[code]
    if reason is Reason.REQUEST_INVALID:
        kind = InvalidError
    return kind(
        reason or usual,
        sentence,
        metadata=metadata,
        retry_after_s=details.retry_after_s if details else None,
        code=code,
    )
