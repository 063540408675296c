"""One error for everything that can be refused: a reason, one sentence, and the remedy in it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import grpc

__all__ = ["EXPLANATIONS", "STATUS", "Explanation", "Reason", "WeightSyncError"]


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
    SERVER_FOLLOWS = enum.auto()
    NO_SLOT = enum.auto()
    MEMORY_EXHAUSTED = enum.auto()
    DISK_EXHAUSTED = enum.auto()
    LIMIT_EXCEEDED = enum.auto()
    ENGINE_AWAY = enum.auto()
    ENGINE_FENCED = enum.auto()
    ENGINE_UNSUPPORTED = enum.auto()
    ENGINE_REFUSED = enum.auto()
    ENGINE_ASLEEP = enum.auto()
    ENGINE_OWNED = enum.auto()
    APPLY_BUSY = enum.auto()
    APPLY_RESTORED = enum.auto()
    GATE_HELD = enum.auto()
    FETCHER_FAILED = enum.auto()
    TRAINER_FAILED = enum.auto()
    TRAINER_AWAY = enum.auto()
    JOB_UNKNOWN = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    SHUTTING_DOWN = enum.auto()
    SERVER_AWAY = enum.auto()
    UNAUTHENTICATED = enum.auto()
    PERMISSION_DENIED = enum.auto()
    CANCELLED = enum.auto()
    NOT_SUPPORTED = enum.auto()
    FAULT = enum.auto()


class Explanation(NamedTuple):
    """What a reason means to the caller who gets it.

    Attributes:
        status: Name of its grpc.StatusCode; a name, because fetchers and workers raise these errors
            and do without importing grpc.
        meaning: One sentence.
        remedy: One sentence; that of the error itself is more exact.
    """

    status: str
    meaning: str
    remedy: str


#: The one table of reasons, of which docs/reference/errors.md is made; a test checks it is total.
EXPLANATIONS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.REQUEST_INVALID: Explanation(
            "INVALID_ARGUMENT",
            "The request, a setting or a file is invalid, whatever the server's state.",
            "Correct what the message names, then call again.",
        ),
        Reason.LAYOUT_INVALID: Explanation(
            "INVALID_ARGUMENT",
            "Names, dtypes, shapes or offsets of tensors are not valid in safetensors shards, or "
            "differ from what was declared.",
            "Correct the layout and push the version again.",
        ),
        Reason.SHARD_INVALID: Explanation(
            "INVALID_ARGUMENT",
            "The bytes of a shard do not match its layout or its delta.",
            "Send what was declared: push the version again, and a delta as a full push.",
        ),
        Reason.DIGEST_MISMATCH: Explanation(
            "INVALID_ARGUMENT",
            "The received bytes do not have the digest that the trainer computed.",
            "Push the version again; if this repeats, the tensors change while they are sent.",
        ),
        Reason.DATA_CORRUPT: Explanation(
            "DATA_LOSS",
            "Bytes that were stored, staged or received no longer match their digest, or cannot "
            "be read.",
            "Push the version again or restore the file; if this repeats, check memory, disk or "
            "GPU.",
        ),
        Reason.MODEL_UNKNOWN: Explanation(
            "NOT_FOUND",
            "The server has no model of this name.",
            "Use a name that the message lists.",
        ),
        Reason.VERSION_UNKNOWN: Explanation(
            "NOT_FOUND",
            "This version does not exist, no version can be chosen, or none has that content.",
            "Choose a version from ListVersions, or push it.",
        ),
        Reason.PUSH_UNKNOWN: Explanation(
            "NOT_FOUND",
            "No open or recently ended push has this id.",
            "If ListVersions does not show it as committed, begin it again.",
        ),
        Reason.SERVICE_UNKNOWN: Explanation(
            "NOT_FOUND",
            "The standard health service has no service of this name.",
            "Ask about `push`, `serving` or the empty name.",
        ),
        Reason.VERSION_CONFLICT: Explanation(
            "ALREADY_EXISTS",
            "The version number or idempotency key is already used for something else.",
            "Push it with a higher number or 0; use a key for one push only.",
        ),
        Reason.VERSION_NOT_ABOVE: Explanation(
            "FAILED_PRECONDITION",
            "The version is not above the highest that was ever committed.",
            "Push it as 0 for the next number, or above the number in `newest_version`.",
        ),
        Reason.VERSION_JUMP: Explanation(
            "OUT_OF_RANGE",
            "The version is further above the newest than `max_version_jump` allows.",
            "Choose a lower number, or raise the setting.",
        ),
        Reason.VERSION_IN_USE: Explanation(
            "FAILED_PRECONDITION",
            "The version is live, staged for an apply, pinned, or the base of another version.",
            "Do what the message says first, such as unpin it or apply another version.",
        ),
        Reason.VERSION_REJECTED: Explanation(
            "FAILED_PRECONDITION",
            "A rollback or the engine rejected the version.",
            "Apply another version, or set `clear_rejected`.",
        ),
        Reason.VERSION_BELOW_LIVE: Explanation(
            "FAILED_PRECONDITION",
            "An apply cannot go below the live version.",
            "Call Rollback, or push the weights as a new version.",
        ),
        Reason.VERSION_NOT_DURABLE: Explanation(
            "FAILED_PRECONDITION",
            "Reserved for a version that is not durable; this release reports PUSH_INCOMPLETE.",
            "Commit its push first.",
        ),
        Reason.NO_ROLLBACK: Explanation(
            "FAILED_PRECONDITION",
            "There is no earlier verified version.",
            "Push the wanted weights as a new version.",
        ),
        Reason.EPOCH_STALE: Explanation(
            "FAILED_PRECONDITION",
            "Another process has become the writer since, or pushes under an epoch that it "
            "acquired.",
            "Stop this writer, or call AcquireEpoch if it should take over.",
        ),
        Reason.BASE_MISMATCH: Explanation(
            "FAILED_PRECONDITION",
            "The base of the delta is not the version that the server has; the metadata gives "
            "that.",
            "Push the version in full; our client does so by itself.",
        ),
        Reason.PUSH_INCOMPLETE: Explanation(
            "FAILED_PRECONDITION",
            "Shards, bytes or digests of the version are missing, or it is not committed.",
            "Send what the message lists, then commit.",
        ),
        Reason.OFFSET_MISMATCH: Explanation(
            "ABORTED",
            "A chunk begins beyond the bytes received, or its bytes are already here.",
            "Resume from `received_bytes`, in the metadata and from GetPush.",
        ),
        Reason.SHARD_BUSY: Explanation(
            "ABORTED",
            "Another stream or process is sending, copying or able to write this shard.",
            "Send another shard, or wait until that one is done.",
        ),
        Reason.WRITER_LEFT: Explanation(
            "FAILED_PRECONDITION",
            "A trainer on this host reported a shard as written, but can still write into its "
            "memory.",
            "Close every descriptor and mapping first, then push the version again.",
        ),
        Reason.PUSH_ABORTED: Explanation(
            "ABORTED",
            "The push was aborted, dropped or superseded by another push.",
            "Begin it again.",
        ),
        Reason.SERVER_FOLLOWS: Explanation(
            "FAILED_PRECONDITION",
            "This server follows an origin, and takes versions only from there.",
            "Push to the origin that the message names.",
        ),
        Reason.NO_SLOT: Explanation(
            "RESOURCE_EXHAUSTED",
            "No slot for the bytes of a version became free in time.",
            "Retry after `retry_after`; abort open pushes, unpin versions, or raise `slots`.",
        ),
        Reason.MEMORY_EXHAUSTED: Explanation(
            "RESOURCE_EXHAUSTED",
            "Shared or host memory, or its limit, is used up.",
            "Free memory, raise `memory_bytes`, lower `slots`, or delete or unpin versions.",
        ),
        Reason.DISK_EXHAUSTED: Explanation(
            "RESOURCE_EXHAUSTED",
            "The disk of the store or of `state_dir` is full, or files cannot be opened.",
            "Free space, delete versions, or raise the limit on open files.",
        ),
        Reason.LIMIT_EXCEEDED: Explanation(
            "RESOURCE_EXHAUSTED",
            "There are more calls, streams or pushes than allowed at once, or a message is too "
            "large.",
            "Retry after `retry_after`, send smaller messages, or raise the limit that the "
            "message names.",
        ),
        Reason.ENGINE_AWAY: Explanation(
            "UNAVAILABLE",
            "vLLM does not answer, is not ready, or exited during an apply.",
            "Start it with VLLM_PLUGINS=weightsync, check GetStatus, then apply again.",
        ),
        Reason.ENGINE_FENCED: Explanation(
            "FAILED_PRECONDITION",
            "The engine is blocked from serving: its weights are not known to be one whole "
            "version.",
            "Wait for the server's next try, or restart vLLM; it then gets the live version.",
        ),
        Reason.ENGINE_UNSUPPORTED: Explanation(
            "FAILED_PRECONDITION",
            "This engine, its model or its configuration cannot be updated in place.",
            "Change what the message names, then restart vLLM.",
        ),
        Reason.ENGINE_REFUSED: Explanation(
            "FAILED_PRECONDITION",
            "The engine or one of its ranks refused; it still serves the previous version.",
            "Do what the message says, such as push tensors that fit the model.",
        ),
        Reason.ENGINE_ASLEEP: Explanation(
            "FAILED_PRECONDITION",
            "The engine is in vLLM's sleep mode, or has given back the memory of its caches.",
            "Wake it up, then call again.",
        ),
        Reason.ENGINE_OWNED: Explanation(
            "FAILED_PRECONDITION",
            "Another running weightsync-server owns this engine.",
            "Stop the server that the message names, or choose another engine.",
        ),
        Reason.APPLY_BUSY: Explanation(
            "ABORTED",
            "Another apply is running, or too many calls wait for the engine.",
            "Wait for it, then call again.",
        ),
        Reason.APPLY_RESTORED: Explanation(
            "ABORTED",
            "The apply failed, and the previous version was restored and verified on every rank.",
            "Push the version again, or apply another one.",
        ),
        Reason.GATE_HELD: Explanation(
            "FAILED_PRECONDITION",
            "The gate of an earlier apply held the version, because its probes were over a limit.",
            "Apply it with `--accept`, or push another version.",
        ),
        Reason.FETCHER_FAILED: Explanation(
            "UNAVAILABLE",
            "A process that digests, stores or reads bytes failed more than once.",
            "Check the server's log, then try again.",
        ),
        Reason.TRAINER_FAILED: Explanation(
            "FAILED_PRECONDITION",
            "The class that `--trainer` names raised an exception; the metadata has the end of "
            "its traceback, and what it had not committed was undone.",
            "Correct the request or the class, then send the job again.",
        ),
        Reason.TRAINER_AWAY: Explanation(
            "UNAVAILABLE",
            "The trainer's process has exited, or cannot be started.",
            "Check GetTrainStatus and the server's log, correct what they name, then send the job "
            "again.",
        ),
        Reason.JOB_UNKNOWN: Explanation(
            "NOT_FOUND",
            "No job with this id is waiting or running.",
            "Take the id from GetTrainStatus.",
        ),
        Reason.DEADLINE_EXCEEDED: Explanation(
            "DEADLINE_EXCEEDED",
            "The call, a stream or a step of an apply exceeded its time limit.",
            "Check the state, then call again; allow more time.",
        ),
        Reason.SHUTTING_DOWN: Explanation(
            "UNAVAILABLE",
            "The server is shutting down.",
            "Call again when it is back.",
        ),
        Reason.SERVER_AWAY: Explanation(
            "UNAVAILABLE",
            "The server cannot be reached, or one of its processes exited during a stream.",
            "Check that it runs and that the address is right, then resume the push.",
        ),
        Reason.UNAUTHENTICATED: Explanation(
            "UNAUTHENTICATED",
            "The caller has not proved who it is.",
            "Send a valid token or client certificate, or use a socket that gives a role.",
        ),
        Reason.PERMISSION_DENIED: Explanation(
            "PERMISSION_DENIED",
            "The caller's role does not allow the call, or not for this model.",
            "Use a principal with the role that the message names.",
        ),
        Reason.CANCELLED: Explanation(
            "CANCELLED",
            "The call was cancelled before it was answered.",
            "Read the state, then call again.",
        ),
        Reason.NOT_SUPPORTED: Explanation(
            "UNIMPLEMENTED",
            "This server, host or store does not support the request.",
            "Use what the message names, or install what it needs.",
        ),
        Reason.FAULT: Explanation(
            "UNAVAILABLE",
            "A fault inside the server or its engine; details are only in its log, because they "
            "may hold secrets.",
            "Check the server's log and report the fault; the call may be repeated.",
        ),
    }
)

#: The name of each reason's grpc.StatusCode.
STATUS: Mapping[Reason, str] = MappingProxyType(
    {reason: explanation.status for reason, explanation in EXPLANATIONS.items()}
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it anew: frameworks bring errors of their workers to the driver so."""
        return type(self), (self.reason, self.message), self.__dict__

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status of this error's reason."""
        import grpc

        return grpc.StatusCode[STATUS[self.reason]]


def invalid_request(message: str) -> WeightSyncError:
    """Return the refusal of what is wrong in itself, whatever the state is; see REQUEST_INVALID."""
    return WeightSyncError(Reason.REQUEST_INVALID, message)
