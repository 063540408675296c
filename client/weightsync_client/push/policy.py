"""A push from the call to its result: as a delta where that is less, else in full."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync.wire.grpc_channels import is_private
from weightsync_client.errors import ClientError, invalid, refuse, typed_errors
from weightsync_client.options import CHUNK_BYTES, PushOptions, Retry
from weightsync_client.probes import check_probes
from weightsync_client.push.push_request import (
    RequestTemplate,
    base_of_part,
    check_part,
    explain_base,
    explain_cast,
    explain_lacking,
    named_base,
)
from weightsync_client.push.session import NOTHING_SENT, PushSession, SourceRelease
from weightsync_client.push_reasons import MOST_CHANGED, PAYS_BELOW, DeltaUnsuitable, Fallback
from weightsync_client.rpc.retry import Invoke, RetryingCalls
from weightsync_client.rpc.validate import flag, whole_number
from weightsync_client.snapshot.snapshot import BaseVersion, Snapshot, roomy
from weightsync_client.transport.shm_transport import why_streamed
from weightsync_client.types import PushKind, PushResult

if TYPE_CHECKING:
    from weightsync_client.push.push_history import PushHistory
    from weightsync_client.push.push_request import NamedBase
    from weightsync_client.rpc.channels import Link
    from weightsync_client.snapshot.delta_shards import DeltaShards
    from weightsync_client.snapshot.host_tensor import SnapshotTensor
    from weightsync_client.snapshot.snapshot import SnapshotCapture
    from weightsync_client.source.shards import ByteSink
    from weightsync_client.source.source import Source
    from weightsync_client.source.tensors import SourceTensor


# Where a delta fails so, all of the tensors may do better: the server lacks the base, found other
# bytes than those that were made of ours, or knows no deltas.
_FALLBACKS = {
    Reason.BASE_MISMATCH: Fallback.BASE_MISMATCH,
    Reason.DATA_CORRUPT: Fallback.REFUSED,
    Reason.DIGEST_MISMATCH: Fallback.REFUSED,
    Reason.LAYOUT_INVALID: Fallback.REFUSED,
    Reason.NOT_SUPPORTED: Fallback.REFUSED,
    Reason.SHARD_INVALID: Fallback.REFUSED,
}


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise invalid(f"{option} is {value!r}; use one of {', '.join(allowed)}")
    return value


def _clear_frames(error: BaseException | None) -> None:
    """Empty the frames that an error has left: they hold tensors, and the old copy."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _on_gpus(tensors: Sequence[SourceTensor]) -> bool:
    """Whether there are tensors, and all lie on GPUs as the server can copy them."""
    filled = [tensor for tensor in tensors if tensor.size]
    return bool(filled) and all(t.in_place and t.device and t.device.type == "cuda" for t in filled)


def _drained(tensors: list[SourceTensor]) -> Iterator[SourceTensor]:
    """Yield tensors without holding those that were given."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def _check_writer(options: PushOptions) -> None:
    if options.get("delta") == "require":
        raise refuse(
            Reason.NOT_SUPPORTED,
            "one of several processes that cannot send a delta would have the others wait for it; "
            "use delta='auto'",
        )


class PushPolicy:
    """One push; `run` is called once.

    `retry` limits how long a cut link is taken up again. `on_source_free` is called once the source
    is not in use.
    """

    def __init__(
        self,
        link: Link,
        invoke: Invoke,
        model: str,
        source: Source,
        options: PushOptions,
        retry: Retry,
        history: PushHistory,
        on_source_free: Callable[[], None] | None = None,
    ) -> None:
        whole_number("streams", options.get("streams", 1), 1)
        whole_number("chunk_bytes", options.get("chunk_bytes", CHUNK_BYTES), 1)
        self._template = RequestTemplate.from_options(model, options)
        allowed = ("auto", "never", "require")
        self._wanted = _choice("delta", options.get("delta", "auto"), allowed)
        check_part(options)
        if source.writer is not None:
            _check_writer(options)
        allowed = ("auto", "always", "never")
        self._compress = _choice("compress", options.get("compress", "auto"), allowed)
        _choice("dtype", options.get("dtype", "auto"), ("auto", "exact", "keep"))
        flag("check_finite", options.get("check_finite", False))
        check_probes(options.get("probes"))
        _choice("same_host", options.get("same_host", "auto"), ("auto", "write", "never"))
        self._link = link
        self._invoke = invoke
        self._source = source
        self._options = options
        self._history = history
        self._release = SourceRelease(on_source_free, source.release)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        number = source.writer.number if source.writer else 0
        self._calls = RetryingCalls(link, invoke, retry, self._stop, number)
        self._push: PushSession | None = None
        # Of several processes, those that hold replicas alone send digests, which are no delta.
        sends = source.writer is None or bool(source.tensors)
        self._ticket = history.snapshot.line_up() if self._wanted != "never" and sends else None
        #: What a try as a delta has used up of an iterable.
        self._read: dict[str, SnapshotTensor] = {}
        self._before: list[SourceTensor] = []

    def drop(self) -> None:
        """Give up what `run` will never be called for."""
        self._source.release()
        if self._ticket is not None:
            self._history.snapshot.leave(self._ticket)

    def run(self) -> PushResult:
        started = time.monotonic()
        try:
            with self._turn():
                self._cast()
                self._source.ready()
                result = self._sent_as_wanted()
                self._history.committed = result.version
                self._history.committed_digest = result.content_digest
                self._history.tell_cast(self._source.casting)
        except ClientError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(self._push.state if self._push else NOTHING_SENT)
            raise
        finally:
            self._source.release()
            if self._source.flow is not None:
                self._source.flow.close()
        seconds = time.monotonic() - started
        return replace(result, seconds=seconds, cast=self._source.casting.cast.total)

    def cancel(self) -> None:
        """End the push from another thread; `run` then raises AbortedError."""
        with self._lock:
            self._stop.set()
            if self._push is not None:
                self._push.cancel()

    def _cast(self) -> None:
        casting = self._history.casting(self._options, self._calls, self._template.model)
        if casting.layout is not self._source.casting.layout:
            self._source = self._source.cast(casting)

    def _explained(self, error: ClientError) -> ClientError:
        if self._source.writer is None or error.reason is not Reason.LAYOUT_INVALID:
            return error
        now = None
        if self._options.get("dtype", "auto") == "auto":
            known = self._source.casting.layout
            with contextlib.suppress(ClientError):
                now = self._calls.engine_layout(self._template.model, known)
        explained = explain_cast(error, self._source, now)
        if explained is not error or self._options.get("partial"):
            return explained
        return explain_lacking(error, self._source, self._history.engine_layout)

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        if self._ticket is None:
            return contextlib.nullcontext()
        return self._history.snapshot.turn(self._ticket, self._stop)

    def _sent_as_wanted(self) -> PushResult:
        if self._options.get("partial"):
            return self._part() if self._source.writer is None else self._joint_part()
        return self._full("") if self._ticket is None else self._with_snapshot()

    def _with_snapshot(self) -> PushResult:
        try:
            return self._delta()
        except DeltaUnsuitable as unfit:
            self._settle_for(unfit)
            reason = unfit.reason
            _clear_frames(unfit)
        if reason is Fallback.COPIED or self._history.server_lacks_room:
            # The next one will be, too: a copy for a delta would only take memory.
            self._history.snapshot.current = None
            return self._full(reason)
        if reason is Fallback.FIRST and self._try_without_copy():
            result = self._full(reason)
            self._history.tried = True
            return result
        return self._kept(reason)

    def _settle_for(self, unfit: DeltaUnsuitable) -> None:
        if self._wanted == "require":
            raise refuse(
                Reason.BASE_MISMATCH,
                f"this push cannot be a delta: {unfit}; push with delta='auto'",
                fallback_reason=unfit.reason.value,
            )

    # As a delta.

    def _delta(self) -> PushResult:
        """Send what changed; DeltaUnsuitable: it cannot, or does not pay; nothing of it is left."""
        snapshot, layout = self._history.snapshot, self._source.layout
        self._refuse_slower()
        base = snapshot.base_of(self._source.signature, self._template.run_id)
        shards = self._changes(base)
        try:
            return self._sent_changes(shards, base, layout.size if layout else base.size)
        except (ClientError, DeltaUnsuitable) as error:
            unfit = self._unfit(error)
            if unfit is None:
                raise
            self._read_again(shards)
            raise unfit from error
        finally:
            shards.close()

    def _sent_changes(self, shards: DeltaShards, base: BaseVersion, dense: int) -> PushResult:
        """Send what changed; a copy of the base that is held here becomes the version."""
        push = self._begin(self._changed(shards))
        with typed_errors():
            result = push.run()
        if push.joined:
            # Committed before, under the caller's key; our copy may be of a later version.
            return result
        if isinstance(base, Snapshot):
            facts = self._template.run_id, shards.blobs, shards.threads
            self._history.snapshot.advance(base, result, *facts)
        return replace(
            result,
            kind=PushKind.DELTA,
            base_version=shards.base_version,
            changed_fraction=shards.changed_fraction,
            dense_bytes=dense,
        )

    def _changed(self, shards: DeltaShards) -> Source:
        source = self._source
        if source.writer is None:
            return replace(source, shards=shards, layout=None, delta=shards)
        from weightsync_client.snapshot.delta_shards import box_deltas

        with typed_errors():
            return replace(source, shards=box_deltas(source.shards, shards), delta=shards)

    def _part(self) -> PushResult:
        """Send what some tensors are now, as a delta that leaves all others as they are."""
        from weightsync_client.snapshot.delta_shards import (
            DeltaShards,
            as_they_come,
            by_size,
            default_threads,
        )

        source = self._source
        facts = self._options, self._history, self._invoke, self._link.timeouts
        base = base_of_part(*facts, self._template.model)
        groups = (
            as_they_come(source.flow, base.size)
            if source.flow is not None
            else by_size(source.tensors, default_threads())
        )
        shards = DeltaShards(groups, base, zstd=self._packs, partial=True)
        try:
            return self._sent_changes(shards, base, base.size)
        except DeltaUnsuitable as unfit:
            raise refuse(Reason.MEMORY_EXHAUSTED, f"{unfit}; free some and push again") from unfit
        finally:
            shards.close()

    def _joint_part(self) -> PushResult:
        """Send what this process holds of some tensors; the server keeps all others."""
        facts = self._options, self._history, self._invoke, self._link.timeouts
        base = named_base(*facts, self._template.model)
        push = self._begin(self._source, base=base)
        try:
            result = push.run()
        except ClientError as error:
            if error.reason is not Reason.LAYOUT_INVALID:
                raise
            now = base
            with contextlib.suppress(ClientError):
                now = named_base(*facts, self._template.model)
            explained = explain_base(error, base, now)
            if explained is error:
                raise
            raise explained from error
        return replace(result, kind=PushKind.DELTA, base_version=push.base_version)

    @property
    def _packs(self) -> bool:
        """Whether deltas are packed with zstd."""
        slow = self._history.link_speed.slow
        return self._compress == "always" or (self._compress == "auto" and slow)

    def _refuse_slower(self) -> None:
        """Raise DeltaUnsuitable if a delta would be slower, or the server lacks memory for it."""
        if self._source.writer is not None and self._history.server_lacks_room:
            raise DeltaUnsuitable(
                Fallback.NO_ROOM, "the server has no memory for changes in addition to a version"
            )
        if self._history.server_copies and self._may_be_copied():
            raise DeltaUnsuitable(Fallback.COPIED, "the server copies everything from the GPU")

    def _may_be_copied(self) -> bool:
        auto = self._wanted == self._options.get("same_host", "auto") == "auto"
        return auto and self._source.flow is None and _on_gpus(self._source.tensors)

    def _try_without_copy(self) -> bool:
        """Whether to find out first if the server copies all from GPUs, needing no copy here."""
        if self._history.tried or not self._may_be_copied() or not is_private(self._link.address):
            return False
        tensors = self._source.tensors
        return not {tensor.device for tensor in tensors if tensor.size} <= roomy(tensors)[0]

    def _changes(self, base: Snapshot) -> DeltaShards:
        from weightsync_client.snapshot.delta_shards import (
            DeltaShards,
            as_they_come,
            by_size,
            default_threads,
            of_boxes,
            sampled,
        )

        source, zstd = self._source, self._packs
        hurried = not (zstd or self._history.link_speed.slow or self._wanted == "require")
        most_changed = MOST_CHANGED if hurried else 1.0
        if source.flow is not None:
            groups = as_they_come(source.flow, base.size)
            return DeltaShards(groups, base, zstd=zstd, most_changed=most_changed)
        sample = sampled(source.tensors, base, zstd=zstd)
        if sample.ratio > PAYS_BELOW:
            raise DeltaUnsuitable(
                Fallback.TOO_DENSE, f"a sample of it needs {sample.ratio:.0%} of all bytes"
            )
        if sample.changed > most_changed:
            raise DeltaUnsuitable(
                Fallback.TOO_DENSE, f"{sample.changed:.0%} of a sample of it changed"
            )
        if source.writer is not None:
            return DeltaShards(of_boxes(source.shards), base, zstd=zstd, every=True)
        groups = by_size(source.tensors, default_threads(), sample.ratio)
        return DeltaShards(groups, base, zstd=zstd)

    def _unfit(self, error: ClientError | DeltaUnsuitable) -> DeltaUnsuitable | None:
        if isinstance(error, DeltaUnsuitable):
            return DeltaUnsuitable(error.reason, str(error))
        reason, flow = _FALLBACKS.get(error.reason), self._source.flow
        if self._source.writer is not None and reason is not Fallback.BASE_MISMATCH:
            # The push has failed for the others as well: with the next one all begin again.
            self._history.snapshot.current = None
            lacking = error.reason is Reason.MEMORY_EXHAUSTED
            self._history.server_lacks_room = self._history.server_lacks_room or lacking
            return None
        if reason is None or self._stop.is_set() or (flow is not None and flow.failed):
            return None
        if self._release.done and flow is None:
            # The tensors may hold other weights by now. The next push is in full, and heals it.
            self._history.snapshot.current = None
            return None
        return DeltaUnsuitable(reason, error.message)

    def _read_again(self, shards: DeltaShards) -> None:
        """Have what an iterable has given read from our copy, which is given up for that."""
        if self._source.flow is not None and self._wanted != "require":
            if shards.begun:
                self._history.snapshot.current = None
            with typed_errors():
                self._read, self._before = shards.read_again()

    # In full.

    def _full(self, reason: Fallback | str) -> PushResult:
        return self._sent(self._begin(self._source, reason), reason)

    def _kept(self, reason: Fallback) -> PushResult:
        """Send all, and keep it for the next delta once it is committed."""
        snapshot, source = self._history.snapshot, self._source
        capture: SnapshotCapture | None
        if source.flow is None:
            capture = snapshot.take(source.tensors)
        else:
            capture = snapshot.take_flow(self._read)
            self._read = {}
            source = replace(source, shards=source.flow.shards(_drained(self._before), capture.add))
        if capture is None:
            return self._full(Fallback.NO_ROOM if reason is Fallback.FIRST else reason)
        devices = capture.devices
        push = self._begin(source, reason, capture)
        result = self._sent(push, reason)
        size = source.size or result.size_bytes
        whole = capture.whole(result, self._template.run_id, push.digests, size)
        snapshot.current = whole or snapshot.current
        self._history.kernels.start(devices)
        if capture.gave_up and reason is Fallback.FIRST:
            return replace(result, fallback_reason=Fallback.NO_ROOM)
        return result

    def _sent(self, push: PushSession, reason: Fallback | str) -> PushResult:
        result = push.run()
        self._history.observe(push.sent, push.sending_s, result)
        return replace(result, fallback_reason=reason)

    # Both.

    def _begin(
        self,
        source: Source,
        reason: Fallback | str = "",
        sink: ByteSink | None = None,
        base: NamedBase | None = None,
    ) -> PushSession:
        same_host = why_streamed(self._link.address, source, self._options) is None
        request = self._template.request(source, reason, same_host=same_host, base=base)
        facts = self._calls, request, source, self._options, self._release, sink
        with self._lock:
            self._push = PushSession(*facts)
            return self._push
