"""One error for everything that can be refused: a reason, one sentence, and the remedy in it."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

__all__ = ["STATUS", "Reason", "WeightSyncError"]


class Reason(enum.StrEnum):
    """Stable, machine-readable cause of a refusal; sent as `google.rpc.ErrorInfo.reason`."""

    @staticmethod
    def _generate_next_value_(name: str, *_: object) -> str:
        # ErrorInfo wants UPPER_SNAKE_CASE, so a value is its name.
        return name

    REQUEST_INVALID = enum.auto()
    LAYOUT_INVALID = enum.auto()
    SHARD_INVALID = enum.auto()
    DIGEST_MISMATCH = enum.auto()
    DATA_CORRUPT = enum.auto()
    MODEL_UNKNOWN = enum.auto()
    VERSION_UNKNOWN = enum.auto()
    PUSH_UNKNOWN = enum.auto()
    SERVICE_UNKNOWN = enum.auto()
    VERSION_CONFLICT = enum.auto()
    VERSION_NOT_ABOVE = enum.auto()
    VERSION_JUMP = enum.auto()
    VERSION_IN_USE = enum.auto()
    VERSION_REJECTED = enum.auto()
    VERSION_BELOW_LIVE = enum.auto()
    VERSION_NOT_DURABLE = enum.auto()
    NO_ROLLBACK = enum.auto()
    EPOCH_STALE = enum.auto()
    BASE_MISMATCH = enum.auto()
    PUSH_INCOMPLETE = enum.auto()
    OFFSET_MISMATCH = enum.auto()
    SHARD_BUSY = enum.auto()
    WRITER_LEFT = enum.auto()
    PUSH_ABORTED = enum.auto()
    NO_SLOT = enum.auto()
    MEMORY_EXHAUSTED = enum.auto()
    DISK_EXHAUSTED = enum.auto()
    LIMIT_EXCEEDED = enum.auto()
    ENGINE_AWAY = enum.auto()
    ENGINE_FENCED = enum.auto()
    ENGINE_UNSUPPORTED = enum.auto()
    ENGINE_REFUSED = enum.auto()
    ENGINE_ASLEEP = enum.auto()
    APPLY_BUSY = enum.auto()
    APPLY_RESTORED = enum.auto()
    FETCHER_FAILED = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    SHUTTING_DOWN = enum.auto()
    SERVER_AWAY = enum.auto()
    UNAUTHENTICATED = enum.auto()
    PERMISSION_DENIED = enum.auto()
    CANCELLED = enum.auto()
    NOT_SUPPORTED = enum.auto()
    FAULT = enum.auto()


#: The one table from reason to the name of its grpc.StatusCode; a test proves that it is total.
#: Names, because fetchers and workers raise these errors and do without importing grpc.
STATUS: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.REQUEST_INVALID: "INVALID_ARGUMENT",
        Reason.LAYOUT_INVALID: "INVALID_ARGUMENT",
        Reason.SHARD_INVALID: "INVALID_ARGUMENT",
        Reason.DIGEST_MISMATCH: "INVALID_ARGUMENT",
        Reason.DATA_CORRUPT: "DATA_LOSS",
        Reason.MODEL_UNKNOWN: "NOT_FOUND",
        Reason.VERSION_UNKNOWN: "NOT_FOUND",
        Reason.PUSH_UNKNOWN: "NOT_FOUND",
        Reason.SERVICE_UNKNOWN: "NOT_FOUND",
        Reason.VERSION_CONFLICT: "ALREADY_EXISTS",
        Reason.VERSION_NOT_ABOVE: "FAILED_PRECONDITION",
        Reason.VERSION_JUMP: "OUT_OF_RANGE",
        Reason.VERSION_IN_USE: "FAILED_PRECONDITION",
        Reason.VERSION_REJECTED: "FAILED_PRECONDITION",
        Reason.VERSION_BELOW_LIVE: "FAILED_PRECONDITION",
        Reason.VERSION_NOT_DURABLE: "FAILED_PRECONDITION",
        Reason.NO_ROLLBACK: "FAILED_PRECONDITION",
        Reason.EPOCH_STALE: "FAILED_PRECONDITION",
        # A delta whose base is not what the server has: its ErrorInfo tells what is held.
        Reason.BASE_MISMATCH: "FAILED_PRECONDITION",
        Reason.PUSH_INCOMPLETE: "FAILED_PRECONDITION",
        Reason.OFFSET_MISMATCH: "ABORTED",
        Reason.SHARD_BUSY: "ABORTED",
        # A trainer on this host told a shard as written and can still write into its memory.
        Reason.WRITER_LEFT: "FAILED_PRECONDITION",
        Reason.PUSH_ABORTED: "ABORTED",
        Reason.NO_SLOT: "RESOURCE_EXHAUSTED",
        Reason.MEMORY_EXHAUSTED: "RESOURCE_EXHAUSTED",
        Reason.DISK_EXHAUSTED: "RESOURCE_EXHAUSTED",
        Reason.LIMIT_EXCEEDED: "RESOURCE_EXHAUSTED",
        Reason.ENGINE_AWAY: "UNAVAILABLE",
        Reason.ENGINE_FENCED: "FAILED_PRECONDITION",
        Reason.ENGINE_UNSUPPORTED: "FAILED_PRECONDITION",
        Reason.ENGINE_REFUSED: "FAILED_PRECONDITION",
        Reason.ENGINE_ASLEEP: "FAILED_PRECONDITION",
        Reason.APPLY_BUSY: "ABORTED",
        Reason.APPLY_RESTORED: "ABORTED",
        Reason.FETCHER_FAILED: "UNAVAILABLE",
        Reason.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
        Reason.SHUTTING_DOWN: "UNAVAILABLE",
        Reason.SERVER_AWAY: "UNAVAILABLE",
        Reason.UNAUTHENTICATED: "UNAUTHENTICATED",
        Reason.PERMISSION_DENIED: "PERMISSION_DENIED",
        Reason.CANCELLED: "CANCELLED",
        Reason.NOT_SUPPORTED: "UNIMPLEMENTED",
        # An uncaught exception in the server. Its text stays in the log: it may hold secrets.
        Reason.FAULT: "UNAVAILABLE",
    }
)


class WeightSyncError(Exception):
    """A refusal that changed nothing, or says in its sentence what it changed.

    Args:
        reason: Stable cause; decides the gRPC status through `STATUS`.
        message: One sentence that names the remedy.
        metadata: Facts for programs, such as the offset to resume from. Values are strings.
        retry_after_s: Seconds after which a retry may succeed; sent as `RetryInfo`.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status of this error's reason."""
        import grpc

        return grpc.StatusCode[STATUS[self.reason]]
