"""The client for ordinary code: every method returns when the answer is there."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc as pb_grpc
from weightsync.wire.extras import needing
from weightsync_client import types
from weightsync_client.access import Access
from weightsync_client.errors import (
    AbortedError,
    DeadlineError,
    UnavailableError,
    from_rpc,
    invalid,
    typed_errors,
)
from weightsync_client.logprob_gap import Versions, logprob_gaps
from weightsync_client.options import (
    DEFAULT_ADDRESS,
    SHARD_BYTES,
    ApplyOptions,
    FleetApplyOptions,
    FleetChoices,
    PushOptions,
    Retry,
    RollbackOptions,
    Timeouts,
    check_options,
)
from weightsync_client.probes import Probes
from weightsync_client.pull import PulledTensor, Puller
from weightsync_client.push.policy import PushPolicy
from weightsync_client.push.push_history import PushHistory
from weightsync_client.push.session import PushHandle
from weightsync_client.rpc import calls
from weightsync_client.rpc.calls import read_stream
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.retry import RetryingCalls, RetryState, call_again
from weightsync_client.source.source import PushSource, make_source, source_writer
from weightsync_client.train_calls import (
    CheckpointResult,
    TrainProgress,
    TrainStatus,
    cancel_train_call,
    checkpoint_call,
    train_call,
    train_status_call,
)

if TYPE_CHECKING:
    from weightsync_client.attach import Attached


T = TypeVar("T")


def default_holder() -> str:
    """Return who asks for an epoch, unless the caller says: host and process."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Client:
    """Speaks with one server about one model. Threads may share it.

    Errors are `ClientError`s (see `weightsync_client.errors`); nothing of gRPC's is raised. Calls
    that only read or can be repeated are tried again for about a second when the link breaks;
    pushes and pulls go on where a cut left them, and applies and rollbacks, which have keys, are
    asked again while a server restarts.

    Args:
        address: HOST:PORT or unix:PATH.
        model: Name of the model; None: the server's only one, asked for once.
        timeouts: Longest time of each kind of call.
        retry: How long a cut push, pull, apply or rollback is taken up again.
        access: Token and TLS; None: what the environment says (`Access.from_environment`), which
            is none where nothing is set. Unix sockets are always spoken to in plain text.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
        access: Access | None = None,
    ) -> None:
        self._link = Link(address, access or Access.from_environment(), timeouts or Timeouts())
        self._retry = retry or Retry()
        self._model = model
        self._channel = self._link.channel()
        self._stub = pb_grpc.WeightSyncStub(self._channel)
        self._history = PushHistory(address)
        self._handles: weakref.WeakSet[PushHandle] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def model(self) -> str:
        """Name of the model; asks the server once if none was given."""
        if self._model is None:
            self._model = calls.single_model(self.status())
        return self._model

    def _send(self, call: calls.Call[T]) -> T:
        try:
            reply = self._begin(call)
        except grpc.RpcError as error:
            raise from_rpc(error, method=call.method, address=self._link.address) from None
        return call.read(reply)

    def _read(self, call: calls.Call[T]) -> Generator[T, None, None]:
        """Send a call that is answered by a stream, and read that."""
        return read_stream(self._begin(call), call, self._link.address)

    def _begin(self, call: calls.Call[Any]) -> Any:
        self._check_open()
        stub = call.stub(self._channel) if call.stub else self._stub
        method = getattr(stub, call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._link.metadata)

    def _invoke(self, call: calls.Call[T]) -> T:
        """Send a call; ask again for about a second where the link breaks."""
        return call_again(self._send, call, None)

    def _insist(self, call: calls.Call[T]) -> T:
        """Send a call with a key; ask again while nobody answers."""
        return call_again(self._invoke, call, self._retry)

    def _check_open(self) -> None:
        if self._closed:
            raise invalid("this client was closed; make a new one")

    # Pushing.

    def push(self, source: PushSource, **options: Unpack[PushOptions]) -> types.PushResult:
        """Push a version: when this returns it is committed, verified and, in a store, durable.

        The source is not in use any more then. Nothing exists of a push that fails.

        From the second push on, only what changed since this client's last version is sent, where
        that is less; the result says what was done. Pushes that may be deltas wait for each other,
        in the order in which they were called.

        Args:
            source: A PyTorch module, which is pushed as its checkpoint has it, whatever wraps it; a
                state dict (name to tensor) or a list of name and tensor pairs, a safetensors file
                or a folder of them, with the parts that ranks saved by PyTorch's distributed
                checkpoint too, or any other iterable of such pairs. That is read once and
                never collected: each tensor is copied to the host before the next is asked for, so
                all may be in the same memory, and at most `streams` + 1 shards of them are held.
                One whose names, dtypes and shapes are known before is pushed as `Declared`, which
                takes the way of a state dict into the memory of a server on this host.
                The tensors of a module, a state dict or a list are not copied (but experts that
                transformers has fused), and must not change before the push is over. The adapters
                of a PEFT model are merged for the push and exactly as they were after it, however
                it ends; it must not be trained meanwhile, and the layers that have adapters take
                their memory a second time for so long.
            **options: See `PushOptions`.

        Raises:
            ClientError: With the reason and the remedy.
            TypeError: There is no such option; nothing was sent. So it is with every method.
        """
        check_options("push", options, PushOptions)
        return self._prepare(source, options).run()

    def push_async(self, source: PushSource, **options: Unpack[PushOptions]) -> PushHandle:
        """Begin a push in the background; see `push` and `PushHandle`.

        What can be checked before a byte is sent is checked before this returns. An iterable is
        read by another thread.
        """
        check_options("push_async", options, PushOptions)
        handle = PushHandle()
        push = self._prepare(source, options, lambda: handle.source_free.set_result(None))
        try:
            handle.start(push.run, push.cancel)
        except RuntimeError:
            # There is no thread to be had; others must not wait for this push's turn.
            push.drop()
            raise
        with self._lock:
            self._handles.add(handle)
        return handle

    def _prepare(
        self,
        source: PushSource,
        options: PushOptions,
        on_source_free: Callable[[], None] | None = None,
    ) -> PushPolicy:
        shard_bytes = options.get("shard_bytes", SHARD_BYTES)
        collective = bool(options.get("collective"))
        made = make_source(
            source,
            shard_bytes,
            self._history.layouts,
            collective=collective,
            writer=lambda: source_writer(options),
            together=options.get("writers", 1) not in (0, 1) or "step" in options,
            casting=self._history.casting(options, None, ""),
        )
        facts = options, self._retry, self._history, on_source_free
        try:
            return PushPolicy(self._link, self._invoke, self.model, made, *facts)
        except BaseException:
            made.release()
            raise

    def hold(self, source: PushSource) -> types.Version:
        """Take a copy of a version's tensors, so that the next push already is a delta.

        A trainer that starts from the checkpoint that the engine serves may hold that.

        Args:
            source: A state dict or a path with the content of a version that the server holds,
                cast as a push casts it.

        Raises:
            ClientError: VERSION_UNKNOWN where no version has that content.
        """
        made = make_source(source, SHARD_BYTES, self._history.layouts)
        calls = RetryingCalls(self._link, self._invoke, self._retry, threading.Event())
        try:
            cast = made.cast(self._history.casting({}, calls, self.model))
            return self._history.hold(cast, self.versions)
        finally:
            made.release()

    def acquire_epoch(self, holder: str = "") -> int:
        """Become the writer: pushes under older epochs are refused from then on.

        Those of other runs that give none are from the first push under the new one on.
        """
        return self._invoke(
            calls.acquire_epoch(self.model, holder or default_holder(), self._link.timeouts)
        )

    def abort(self, push_id: str) -> None:
        """Drop an open push of anyone; ids are in `status`."""
        self._invoke(calls.abort_push(push_id, self._link.timeouts))

    # Serving.

    def apply(self, version: int = 0, **options: Unpack[ApplyOptions]) -> types.ApplyReport:
        """Make a version live on every rank, proved from live parameters, or change nothing.

        Args:
            version: 0: the newest committed one that is not rejected.
            **options: See `ApplyOptions`, `PauseChoices` and `EngineChoices`.
        """
        check_options("apply", options, ApplyOptions)
        return self._insist(calls.apply_version(self.model, version, options, self._link.timeouts))

    def rollback(
        self, reason: str = "", **options: Unpack[RollbackOptions]
    ) -> types.RollbackReport:
        """Go back to the previous verified version and mark the one that is left rejected.

        Args:
            reason: Why, for logs and status.
            **options: See `PauseChoices` and `EngineChoices`.
        """
        check_options("rollback", options, RollbackOptions)
        return self._insist(calls.rollback(self.model, reason, options, self._link.timeouts))

    def fleet_apply(self, version: int, **options: Unpack[FleetApplyOptions]) -> types.FleetReport:
        """Make a version live on every member of the server's fleet, by one decision, or on none.

        Args:
            version: Its number.
            **options: See `FleetApplyOptions`.
        """
        check_options("fleet_apply", options, FleetApplyOptions)
        timeouts = self._link.timeouts
        return self._insist(calls.fleet_apply(self.model, version, options, timeouts))

    def fleet_rollback(
        self, reason: str = "", **options: Unpack[FleetChoices]
    ) -> types.FleetReport:
        """Go back to the fleet's commit before, and reject the content that is left everywhere."""
        check_options("fleet_rollback", options, FleetChoices)
        timeouts = self._link.timeouts
        return self._insist(calls.fleet_rollback(self.model, reason, options, timeouts))

    def fleet_abort(self, reason: str = "") -> types.FleetReport | None:
        """End the apply or rollback of the fleet that runs; None: none does.

        What was decided first stays decided, so that the report may say COMMIT.

        Args:
            reason: Why, for logs and status.
        """
        return self._invoke(calls.fleet_abort(self.model, reason, self._link.timeouts))

    def fleet_status(self) -> types.FleetStatus:
        """Tell what the server's fleet has decided, and where its members are."""
        return self._invoke(calls.fleet_status(self.model, self._link.timeouts))

    def verify(
        self, version: int = 0, *, engine: str = "", score: bool = False
    ) -> types.Verification:
        """Prove what every rank serves, from its live parameters.

        Args:
            version: What should be live; 0: what the server believes to be live.
            engine: Name of one engine; empty: all that serve.
            score: Whether each engine scores the probes of its version too, beside generation; see
                `EngineProof.gate`.
        """
        timeouts = self._link.timeouts
        return self._invoke(
            calls.verify_version(self.model, version, timeouts, engine, score=score)
        )

    def report_logprobs(
        self,
        versions: Versions | Sequence[Versions],
        served: Any,
        own: Any,
        *,
        trained_version: int = 0,
    ) -> int:
        """Report how far log probabilities of generated tokens are from the trainer's own.

        They are summed here and shown as the metric `weightsync_logprob_gap`. Tokens that may have
        been computed with keys of an older version are left out. Return how many were counted.

        Args:
            versions: What made the tokens: a version, or what `versions_of` says of the answer; for
                several sequences a list, or one version, or a `Spans` with as many choices.
            served: The log probability of each token as it came with the answer: a list or a
                tensor, or for several sequences a list of them.
            own: The trainer's own, of the same tokens, at the temperature of the answer.
            trained_version: The version whose weights they were computed with; 0: the newest
                committed one.

        Raises:
            InvalidError: Lengths differ, or a log probability is no finite number.
        """
        gaps = logprob_gaps(versions, served, own)
        for call in calls.report_logprobs(self.model, trained_version, gaps, self._link.timeouts):
            self._invoke(call)
        return sum(gap.tokens for gap in gaps)

    def applies(self, last: int = 20, *, version: int = 0) -> list[types.ApplyRecord]:
        """List the last applies of the server's engines, newest first, with who asked for them.

        Args:
            last: At most this many; 0: all that the server remembers.
            version: Only applies to this version or from it; 0: all.
        """
        applies: list[types.ApplyRecord] = []
        token, more = "", True
        while more:
            left = last - len(applies) if last else 0
            call = calls.list_applies(self.model, left, version, token, self._link.timeouts)
            page, token = self._invoke(call)
            applies += page
            more = bool(token) and len(applies) != last
        return applies

    # Versions.

    def versions(self) -> list[types.Version]:
        """List all versions, newest first."""
        versions: list[types.Version] = []
        token, more = "", True
        while more:
            page, token = self._invoke(calls.list_versions(self.model, token, self._link.timeouts))
            versions += page
            more = bool(token)
        return versions

    def get_version(self, version: int = 0) -> types.Version:
        """Tell one version; 0: the live one."""
        return self._invoke(calls.get_version(self.model, version, self._link.timeouts))[0]

    def probes(self, version: int = 0) -> Probes | None:
        """Return the probes that a version (0: the live one) came with; None: it has none."""
        found = self._invoke(calls.get_probes(self.model, version, self._link.timeouts))
        return Probes.from_message(found) if found.probes else None

    def watch(self) -> Generator[types.VersionChange, None, None]:
        """Yield the present state of every version, then each change, until it is closed.

        A broken link is taken up again; the state is then sent once more, marked `initial`.
        """
        call = calls.watch_versions(self.model, self._link.timeouts)
        backoff = RetryState(self._retry)
        while not self._closed:
            try:
                for change in self._read(call):
                    backoff.reset()
                    yield change
            except DeadlineError:
                continue  # Renewed, so that a half-open link is not watched for ever.
            except (UnavailableError, AbortedError) as error:
                if backoff.next_delay_s(error) is None and not self._closed:
                    raise
            time.sleep(backoff.delay_s())

    def pin(self, version: int, *, pinned: bool = True) -> types.Version:
        """Keep a version from being collected, or let it go."""
        return self._invoke(
            calls.pin_version(self.model, version, pinned=pinned, timeouts=self._link.timeouts)
        )

    def delete(self, version: int, *, force: bool = False) -> None:
        """Delete a version that is neither live, staged for an apply, pinned nor a base.

        Args:
            version: The version.
            force: Also the one that a rollback would go back to, and what the fleet needs.
        """
        self._invoke(
            calls.delete_version(self.model, version, force=force, timeouts=self._link.timeouts)
        )

    def pull(
        self,
        path: str | os.PathLike[str],
        version: int = 0,
        *,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> types.PullResult:
        """Write a version as safetensors; the folder appears whole and proved, or not at all.

        Args:
            path: A folder that does not exist yet, or an empty one.
            version: 0: the live one.
            on_progress: Called with bytes written and bytes in all.
        """
        return self._puller(version).to_folder(Path(path), on_progress)

    def tensors(self, version: int = 0) -> Generator[PulledTensor, None, None]:
        """Yield the tensors of a version (0: the live one), each proved; one is held at a time."""
        yield from self._puller(version).tensors()

    def _puller(self, version: int) -> Puller:
        def open_pull(request: pb.PullWeightsRequest) -> Iterator[pb.PullWeightsResponse]:
            return self._read(calls.pull_weights(request, self._link.timeouts))

        return Puller(self._link, self._invoke, open_pull, self.model, version, self._retry)

    # Training.

    def train(
        self, request: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Generator[TrainProgress, None, None]:
        """Give the trainer a job, and yield its events until it has ended well.

        What it has not committed leaves nothing behind. The job has been sent when this returns;
        `close` of what it returns, or leaving it in any other way, cancels the job. It is never
        sent twice.

        Args:
            request: What the trainer's class is given: what JSON can hold.
            timeout_s: Longest time until it has ended, in the queue included; default
                `Timeouts.train_s`. Then the job is cancelled.

        Raises:
            ClientError: While it is read: with the traceback of the trainer's class where that
                failed; AbortedError where another caller cancelled it; ExhaustedError: too many
                jobs wait.
        """
        return self._read(train_call(self.model, request, timeout_s, self._link.timeouts))

    def checkpoint(
        self, folder: str | None = None, *, timeout_s: float | None = None
    ) -> CheckpointResult:
        """Return when the live version is durable, with the trainer's state.

        Waits for the job that runs.

        Args:
            folder: Name of a new folder below the server's --checkpoint-dir, which vLLM can load;
                None: the version store alone.
            timeout_s: Longest wait; default `Timeouts.train_s`.
        """
        call = checkpoint_call(self.model, folder, timeout_s, self._link.timeouts)
        return self._invoke(call)

    def train_status(self) -> TrainStatus:
        """Tell what the trainer does."""
        return self._invoke(train_status_call(self.model, self._link.timeouts))

    def cancel_train(self, job_id: str) -> None:
        """End a job of anyone, that waits or runs; what it has committed stays.

        Args:
            job_id: Of its progress, or of `train_status`.
        """
        self._invoke(cancel_train_call(self.model, job_id, self._link.timeouts))

    # The engine's own memory.

    def attach(self, engine: str = "") -> Attached:
        """Have the live parameters of an engine on this host as tensors of this process.

        Takes the role train, and the user of the server. See `Attached`.

        Args:
            engine: Its name; empty: the server's only one.

        Raises:
            ClientError: RefusedError with what stands in the way; DeniedError.
        """
        # Imports PyTorch, of which nothing else here has need.
        with typed_errors(), needing("attach()"):
            from weightsync_client.attach import Writing, attach, trainer_job

        timeouts = self._link.timeouts
        found = self._invoke(calls.attach(self.model, engine, trainer_job(), timeouts))
        writing = Writing(self.model, self._link, self._channel, self.push)
        return attach(found.engine, found.socket, found.secret, writing)

    # The server and this client.

    def status(self) -> types.Status:
        """Tell the state of the server: engine, ranks, slots, pushes, invariants."""
        return self._invoke(calls.get_status("", self._link.timeouts))

    def health(self, service: str = "") -> bool:
        """Tell whether a service of the server is serving, by the standard health protocol.

        Args:
            service: "push", "serving", or empty for the server as a whole.
        """
        return self._invoke(calls.health(service, self._link.timeouts))

    def cancel_pushes(self) -> None:
        """End every push that runs in the background."""
        for handle in self._running():
            handle.cancel()

    def close(self) -> None:
        """Wait for background pushes, then close the connection; ends every `watch`."""
        for handle in self._running():
            handle.join()
        self._closed = True
        self._channel.close()

    def _running(self) -> list[PushHandle]:
        with self._lock:
            return list(self._handles)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.cancel_pushes()
        self.close()
