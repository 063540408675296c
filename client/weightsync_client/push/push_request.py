"""How a push is opened: what the caller said, checked, what each try adds, and what refuses it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from weightsync.errors import Reason
from weightsync.model.digest import signature_of
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import ClientError, invalid, refuse
from weightsync_client.rpc import calls
from weightsync_client.rpc.calls import client_run
from weightsync_client.rpc.tensor_pages import version_tensors
from weightsync_client.rpc.validate import metadata, text, whole_number
from weightsync_client.snapshot.snapshot import BaseVersion
from weightsync_client.types import Serving

if TYPE_CHECKING:
    from weightsync_client.options import PushOptions, Timeouts
    from weightsync_client.push.push_history import PushHistory
    from weightsync_client.push_reasons import Fallback
    from weightsync_client.rpc.retry import Invoke
    from weightsync_client.rpc.tensor_pages import EngineLayout
    from weightsync_client.source.source import Source


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What every try of one push says of it.

    A `version` of 0 is the next one, an `epoch` of 0 the newest. With an empty `key`, each try gets
    an idempotency key of its own.
    """

    model: str
    version: int
    epoch: int
    key: str
    metadata: Mapping[str, str]

    @classmethod
    def from_options(cls, model: str, options: PushOptions) -> Self:
        return cls(
            model,
            whole_number("version", options.get("version", 0)),
            whole_number("epoch", options.get("epoch", 0)),
            text("idempotency_key", options.get("idempotency_key") or ""),
            metadata(options.get("metadata", {})),
        )

    @property
    def run_id(self) -> str:
        return self.metadata.get("run_id", "")

    def request(
        self,
        source: Source,
        reason: Fallback | str,
        *,
        same_host: bool,
        base: NamedBase | None = None,
    ) -> pb.BeginPushRequest:
        """Return the request that opens a try.

        `reason` says why all is sent in place of a delta. `same_host` asks for the server's memory.
        `base` is the version whose other tensors several processes keep; with None they send all.
        """
        digest = base.content_digest if base else ""
        layout, delta, writer = source.layout, source.delta, source.writer
        return pb.BeginPushRequest(
            model=self.model,
            version=self.version,
            epoch=self.epoch,
            kind=pb.PUSH_KIND_DELTA if delta else pb.PUSH_KIND_FULL,
            base_content_digest=delta.base_content_digest if delta else digest,
            idempotency_key=writer.key if writer else self.key or uuid.uuid4().hex,
            layout_digest=layout.digest if layout else "",
            total_bytes=layout.size if layout else 0,
            shard_count=len(layout.shards) if layout else 0,
            metadata=self.metadata,
            stream=None if same_host else pb.StreamSource(),
            same_host=pb.SameHostSource() if same_host else None,
            fallback_reason=reason,
            writers=writer.count if writer else 0,
            writer=writer.number if writer else 0,
            partial=base is not None,
            base_version=base.version if base else 0,
            client_run=client_run(),
        )


class NamedBase(NamedTuple):
    """Which version one of several processes keeps the absent tensors of.

    A `version` of 0 is that of the others, or the live one. `content_digest` is that of the
    version, empty if it is not known here.
    """

    version: int
    content_digest: str


def check_part(options: PushOptions) -> None:
    wanted = whole_number("base", options.get("base", 0))
    if wanted and not options.get("partial"):
        raise invalid(
            f"base={wanted} is given, but partial=True is not: a push of all tensors keeps none",
        )


def _wanted(
    options: PushOptions, history: PushHistory, invoke: Invoke, timeouts: Timeouts, model: str
) -> int:
    """Return the caller's base, else this client's last one unless refused, else 0 (live)."""
    if wanted := options.get("base", 0):
        return wanted
    if history.committed:
        try:
            version, _, _ = invoke(calls.get_version(model, history.committed, timeouts))
        except ClientError as error:
            if error.reason is not Reason.VERSION_UNKNOWN:
                raise
        else:
            if version.serving in (Serving.REJECTED, Serving.HELD):
                return 0
    return history.committed


def named_base(
    options: PushOptions, history: PushHistory, invoke: Invoke, timeouts: Timeouts, model: str
) -> NamedBase:
    """Return the version that the caller names, else the last that this client has committed."""
    wanted = _wanted(options, history, invoke, timeouts, model)
    return NamedBase(wanted, history.committed_digest if wanted == history.committed else "")


def base_of_part(
    options: PushOptions, history: PushHistory, invoke: Invoke, timeouts: Timeouts, model: str
) -> BaseVersion:
    """Return the version whose tensors stay where the push has none.

    It is the one that the caller names, else the last one that this client has committed and that
    is neither rejected nor held, else the live one. A copy held here is used. Raises
    VERSION_UNKNOWN if there is none.
    """
    wanted = _wanted(options, history, invoke, timeouts, model)
    copied = history.snapshot.current
    if copied is not None and wanted == copied.version:
        return copied
    try:
        version, infos = version_tensors(invoke, timeouts, model, wanted)
    except ClientError as error:
        if error.reason is not Reason.VERSION_UNKNOWN:
            raise
        which = f"version {wanted}" if wanted else "a live version"
        raise refuse(
            Reason.VERSION_UNKNOWN,
            f"a partial push keeps the tensors of {which}, which the server does not have; name "
            "another one with base=, or push all tensors",
        ) from error
    # Imported late: who pushes in full needs no NumPy kernels.
    from weightsync_client.snapshot.host_tensor import RemoteTensor

    if copied is not None and copied.content_digest == version.content_digest:
        return replace(copied, version=version.version)
    ordered = sorted(infos, key=lambda info: info.name)
    return BaseVersion(
        version.version,
        version.content_digest,
        version.size_bytes,
        signature_of((info.name, info.dtype, info.shape) for info in ordered),
        version.metadata.get("run_id", ""),
        {info.name: RemoteTensor(info) for info in ordered},
    )


def explain_cast(error: ClientError, source: Source, now: EngineLayout | None) -> ClientError:
    """Return an error, with the remedy where the engine changed while processes asked.

    Each process asks by itself which dtypes the engine has. `error` is LAYOUT_INVALID. `source` is
    what this one pushed, as it was cast. `now` is what the engine holds by now, or None if that is
    not known.
    """
    then = source.casting.layout
    if source.layout is None or now is None or now is then:
        return error
    known = then.kinds if then is not None else {}
    for tensor in source.layout.tensors:
        kind = now.kinds.get(tensor.name)
        if kind is not None and kind.dtype != tensor.dtype and kind != known.get(tensor.name):
            return _reworded(
                error,
                "push again: the engine, or another one, became ready after this process asked "
                f"for its tensors (tensor {tensor.name!r} was sent as {tensor.dtype} and is "
                f"{kind.dtype} there), and other processes may have asked later; {error.message}",
            )
    return error


def explain_base(error: ClientError, named: NamedBase, now: NamedBase) -> ClientError:
    """Return an error of a joint push, with the remedy where its base was rejected meanwhile.

    `named` is the base that this process named, `now` the one that it would name.
    """
    if named == now:
        return error
    return _reworded(
        error,
        f"push again: version {named.version} was rejected after this process named it as the "
        f"base, and other processes may have named a later one; {error.message}",
    )


def explain_lacking(error: ClientError, source: Source, engine: EngineLayout | None) -> ClientError:
    """Return an error with the tensors that this process lacks, or the same one.

    The server knows only sums of what each process would push. `engine` is None if what it holds is
    not known.
    """
    if source.layout is None or engine is None:
        return error
    names = {tensor.name for tensor in source.layout.tensors}
    lacking = [name for name in engine.kinds if name not in names]
    if not lacking:
        return error
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return _reworded(
        error,
        f"{error.message}; this process did not push tensor {lacking[0]!r}{more} of the engine's",
    )


def _reworded(error: ClientError, message: str) -> ClientError:
    return type(error)(
        error.reason,
        message,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
        code=error.code,
    )
