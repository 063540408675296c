"""One error for everything that can be refused: a reason, one sentence, and the remedy in it."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """What a reason means to whoever gets it.

    Attributes:
        status: Name of its grpc.StatusCode; a name, because fetchers and workers raise these errors
            and do without importing grpc.
        meaning: One sentence.
        remedy: One sentence; that of the error itself is more exact.
    """

    status: str
    meaning: str
    remedy: str


#: The one table of reasons, of which docs/errors.md is made; a test proves that it is total.
EXPLANATIONS: Mapping[Reason, Explanation] = MappingProxyType(
    {
        Reason.REQUEST_INVALID: Explanation(
            "INVALID_ARGUMENT",
            "The request, a setting or a file is wrong in itself, whatever the server's state.",
            "Correct what the sentence names, then call again.",
        ),
        Reason.LAYOUT_INVALID: Explanation(
            "INVALID_ARGUMENT",
            "Names, dtypes, shapes or places of tensors are not those of well-formed "
            "safetensors shards, or differ from what was declared.",
            "Correct the layout and push the version again.",
        ),
        Reason.SHARD_INVALID: Explanation(
            "INVALID_ARGUMENT",
            "The bytes of a shard are not what its layout or its delta says.",
            "Send what was declared: push the version again, a delta as a full push.",
        ),
        Reason.DIGEST_MISMATCH: Explanation(
            "INVALID_ARGUMENT",
            "Bytes arrived with another digest than the trainer computed.",
            "Push the version again; if it stays so, the tensors changed while they were sent.",
        ),
        Reason.DATA_CORRUPT: Explanation(
            "DATA_LOSS",
            "Bytes that were stored, staged or received no longer have their digest, or "
            "cannot be read.",
            "Push the version again or restore the file; if it comes back, check memory, "
            "disk or GPU.",
        ),
        Reason.MODEL_UNKNOWN: Explanation(
            "NOT_FOUND",
            "The server does not serve a model of this name.",
            "Use the name that the sentence gives.",
        ),
        Reason.VERSION_UNKNOWN: Explanation(
            "NOT_FOUND",
            "There is no such version, none that could be chosen, or none with that content.",
            "Choose one of ListVersions, or push it.",
        ),
        Reason.PUSH_UNKNOWN: Explanation(
            "NOT_FOUND",
            "No open or recently ended push has this id.",
            "See in ListVersions whether it is committed, else begin it again.",
        ),
        Reason.SERVICE_UNKNOWN: Explanation(
            "NOT_FOUND",
            "The standard health service does not know a service of this name.",
            "Ask about `push`, `serving` or the empty name.",
        ),
        Reason.VERSION_CONFLICT: Explanation(
            "ALREADY_EXISTS",
            "The version, or the idempotency key, stands for something else already.",
            "Push it as a higher version or as 0; use a key for one push only.",
        ),
        Reason.VERSION_NOT_ABOVE: Explanation(
            "FAILED_PRECONDITION",
            "The version is not above the highest that was ever committed.",
            "Push it as 0 for the next number, or above the number in `newest_version`.",
        ),
        Reason.VERSION_JUMP: Explanation(
            "OUT_OF_RANGE",
            "The version is further above the newest than `max_version_jump` allows.",
            "Choose a lower one, or raise the setting.",
        ),
        Reason.VERSION_IN_USE: Explanation(
            "FAILED_PRECONDITION",
            "The version is live, staged for an apply, pinned, or the base of another one.",
            "Do what the sentence says first, such as unpin it or apply another version.",
        ),
        Reason.VERSION_REJECTED: Explanation(
            "FAILED_PRECONDITION",
            "The version was rejected by a rollback or by the engine.",
            "Apply another version, or set `clear_rejected`.",
        ),
        Reason.VERSION_BELOW_LIVE: Explanation(
            "FAILED_PRECONDITION",
            "An apply only goes up.",
            "Call Rollback, or push the weights as a new version.",
        ),
        Reason.VERSION_NOT_DURABLE: Explanation(
            "FAILED_PRECONDITION",
            "Kept for a version that is not durable; this release says PUSH_INCOMPLETE of it.",
            "Commit its push first.",
        ),
        Reason.NO_ROLLBACK: Explanation(
            "FAILED_PRECONDITION",
            "No earlier verified version is known.",
            "Push the wanted weights as a new version.",
        ),
        Reason.EPOCH_STALE: Explanation(
            "FAILED_PRECONDITION",
            "Another process has become the writer since, or pushes under an epoch that it took.",
            "Stop this writer, or call AcquireEpoch if it shall take over.",
        ),
        Reason.BASE_MISMATCH: Explanation(
            "FAILED_PRECONDITION",
            "The base of a delta is not what the server has; the metadata tells what it has.",
            "Push the version in full; our client does so by itself.",
        ),
        Reason.PUSH_INCOMPLETE: Explanation(
            "FAILED_PRECONDITION",
            "Shards, bytes or digests of the version are missing, or it is not committed.",
            "Send what the sentence lists, then commit.",
        ),
        Reason.OFFSET_MISMATCH: Explanation(
            "ABORTED",
            "A chunk begins beyond what has arrived, or bytes are here already.",
            "Go on from `received_bytes`, which the metadata and GetPush tell.",
        ),
        Reason.SHARD_BUSY: Explanation(
            "ABORTED",
            "Somebody else is sending, copying or still able to write this shard.",
            "Send another shard, or wait until that one has ended.",
        ),
        Reason.WRITER_LEFT: Explanation(
            "FAILED_PRECONDITION",
            "A trainer on this host told a shard as written and can still write into its memory.",
            "Close every descriptor and mapping first, and push the version again.",
        ),
        Reason.PUSH_ABORTED: Explanation(
            "ABORTED",
            "The push was aborted, dropped or overtaken by another one.",
            "Begin it again.",
        ),
        Reason.SERVER_FOLLOWS: Explanation(
            "FAILED_PRECONDITION",
            "The server follows another one, and takes versions from there alone.",
            "Push to the origin that the sentence names.",
        ),
        Reason.NO_SLOT: Explanation(
            "RESOURCE_EXHAUSTED",
            "No slot for the bytes of a version came free in time.",
            "Try again after `retry_after`; abort open pushes, unpin versions, or raise `slots`.",
        ),
        Reason.MEMORY_EXHAUSTED: Explanation(
            "RESOURCE_EXHAUSTED",
            "Shared or host memory, or its budget, is used up.",
            "Free memory, raise `memory_bytes`, lower `slots`, or delete or unpin versions.",
        ),
        Reason.DISK_EXHAUSTED: Explanation(
            "RESOURCE_EXHAUSTED",
            "The disk of the store or of `state_dir` is full, or files cannot be opened.",
            "Free space, delete versions, or raise the limit on open files.",
        ),
        Reason.LIMIT_EXCEEDED: Explanation(
            "RESOURCE_EXHAUSTED",
            "More calls, streams or pushes than are allowed at once, or a message that is "
            "too large.",
            "Come again after `retry_after`, send smaller messages, or raise the limit that "
            "is named.",
        ),
        Reason.ENGINE_AWAY: Explanation(
            "UNAVAILABLE",
            "vLLM does not answer, is not ready, or left in the middle of an apply.",
            "Start it with VLLM_PLUGINS=weightsync, look at GetStatus, then apply again.",
        ),
        Reason.ENGINE_FENCED: Explanation(
            "FAILED_PRECONDITION",
            "The engine is kept from serving: its weights are not known to be one whole version.",
            "Wait for the server's next try, or restart vLLM; it comes back with the live version.",
        ),
        Reason.ENGINE_UNSUPPORTED: Explanation(
            "FAILED_PRECONDITION",
            "This engine, its model or its configuration cannot be updated in place.",
            "Change what the sentence names, then restart vLLM.",
        ),
        Reason.ENGINE_REFUSED: Explanation(
            "FAILED_PRECONDITION",
            "The engine or one of its ranks refused; it serves what it served before.",
            "Do what the sentence says, such as push tensors that fit the model.",
        ),
        Reason.ENGINE_ASLEEP: Explanation(
            "FAILED_PRECONDITION",
            "vLLM's sleep mode holds the engine.",
            "Wake it up, then call again.",
        ),
        Reason.ENGINE_OWNED: Explanation(
            "FAILED_PRECONDITION",
            "Another weightsync-server that lives has this engine.",
            "Stop the server that the message names, or choose another engine.",
        ),
        Reason.APPLY_BUSY: Explanation(
            "ABORTED",
            "Another apply runs, or too many calls wait for the engine.",
            "Wait for it, then call again.",
        ),
        Reason.APPLY_RESTORED: Explanation(
            "ABORTED",
            "The apply failed, and the previous version was restored and verified on every rank.",
            "Push the version again, or apply another one.",
        ),
        Reason.FETCHER_FAILED: Explanation(
            "UNAVAILABLE",
            "A process that digests, stores or reads bytes failed more than once.",
            "See the server's log, then try again.",
        ),
        Reason.TRAINER_FAILED: Explanation(
            "FAILED_PRECONDITION",
            "The class that `--trainer` names raised; the metadata has the end of its traceback, "
            "and what it had not committed was taken back.",
            "Correct the request or the class, then send the job again.",
        ),
        Reason.TRAINER_AWAY: Explanation(
            "UNAVAILABLE",
            "The trainer's process has ended, or cannot be started.",
            "Look at GetTrainStatus and the server's log, correct what they name, then send the "
            "job again.",
        ),
        Reason.JOB_UNKNOWN: Explanation(
            "NOT_FOUND",
            "No job of this id waits or runs.",
            "See in GetTrainStatus which do.",
        ),
        Reason.DEADLINE_EXCEEDED: Explanation(
            "DEADLINE_EXCEEDED",
            "The call, a stream or a step of an apply took longer than it may.",
            "Look at the state, then call again; allow more time.",
        ),
        Reason.SHUTTING_DOWN: Explanation(
            "UNAVAILABLE",
            "The server is ending.",
            "Call again when it is back.",
        ),
        Reason.SERVER_AWAY: Explanation(
            "UNAVAILABLE",
            "The server cannot be reached, or one of its processes left in the middle of a stream.",
            "Check that it runs and that the address is right; resume the push.",
        ),
        Reason.UNAUTHENTICATED: Explanation(
            "UNAUTHENTICATED",
            "The caller has not proved who it is.",
            "Send a valid token or client certificate, or use a socket that gives a role.",
        ),
        Reason.PERMISSION_DENIED: Explanation(
            "PERMISSION_DENIED",
            "The caller's role does not allow the call, or not for this model.",
            "Use a principal with the role that the sentence names.",
        ),
        Reason.CANCELLED: Explanation(
            "CANCELLED",
            "The call was cancelled before it was answered.",
            "Read the state, then call again.",
        ),
        Reason.NOT_SUPPORTED: Explanation(
            "UNIMPLEMENTED",
            "This server, host or store does not have what was asked for.",
            "Use what the sentence names, or install what it needs.",
        ),
        Reason.FAULT: Explanation(
            "UNAVAILABLE",
            "A fault inside the server or its engine; the text stays in the log, for it may "
            "hold secrets.",
            "Look at the server's log and report it; the call may be repeated.",
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
