"""The client for asyncio. Calls are asyncio's own; bytes are moved by threads.

Reading, digesting and sending weights keeps a processor busy for seconds, so pushes and pulls run
as in `weightsync_client.client`, off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import grpc

from weightsync.v1 import weightsync_pb2_grpc as pb_grpc
from weightsync_client import types
from weightsync_client.access import Access
from weightsync_client.client import Client, default_holder
from weightsync_client.errors import (
    AbortedError,
    DeadlineError,
    UnavailableError,
    from_rpc,
)
from weightsync_client.logprob_gap import Versions, logprob_gaps
from weightsync_client.options import (
    DEFAULT_ADDRESS,
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
from weightsync_client.pull import PulledTensor
from weightsync_client.push.session import PushHandle
from weightsync_client.rpc import calls
from weightsync_client.rpc.calls import read_stream_async
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.retry import RetryState, call_again_async
from weightsync_client.source.modules import is_module
from weightsync_client.source.peft_models import has_adapters
from weightsync_client.source.source import PushSource
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
    import torch

    from weightsync_client.attach import Attached


T = TypeVar("T")
_END = object()

#: What `Client.push` takes, and asynchronous iterables of name and tensor pairs.
AsyncPushSource = PushSource | AsyncIterable[tuple[str, Any]]


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class AsyncPushHandle:
    """A push that runs in the background; see `PushHandle`.

    Attributes:
        source_free: Done when the source may be changed; see `PushHandle`.
        committed: Done when the version is committed, with its PushResult, or with the error.
    """

    def __init__(self, handle: PushHandle) -> None:
        self._handle = handle
        self.source_free = asyncio.wrap_future(handle.source_free)
        self.committed = asyncio.wrap_future(handle.committed)
        # A failure is told by `committed`; nobody need ask twice.
        self.source_free.add_done_callback(_retrieve)

    def cancel(self) -> None:
        """End the push; `committed` then fails with AbortedError, unless the commit came first."""
        # Nor need who knows: asyncio would log it.
        self.committed.add_done_callback(_retrieve)
        self._handle.cancel()


class AsyncClient:
    """Speaks with one server about one model; belongs to one event loop.

    Takes the arguments of `Client`, and its methods do what those of `Client` do.
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
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._arguments: dict[str, Any] = {
            "access": self._link.access, "timeouts": timeouts, "retry": retry
        }  # fmt: skip
        self._bulk_client: Client | None = None
        self._handles: weakref.WeakSet[AsyncPushHandle] = weakref.WeakSet()

    def _stub(self) -> pb_grpc.WeightSyncAsyncStub:
        if self._channel is None:
            self._channel = self._link.aio_channel()
        return pb_grpc.WeightSyncStub(self._channel)

    async def _send(self, call: calls.Call[T]) -> T:
        try:
            reply = await self._begin(call)
        except grpc.RpcError as error:
            raise from_rpc(error, method=call.method, address=self._link.address) from None
        return call.read(reply)

    def _read(self, call: calls.Call[T]) -> AsyncGenerator[T, None]:
        """Send a call that is answered by a stream, and read that."""
        return read_stream_async(self._begin(call), call, self._link.address)

    def _begin(self, call: calls.Call[Any]) -> Any:
        stub = self._stub()
        method = getattr(call.stub(self._channel) if call.stub else stub, call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._link.metadata)

    async def _invoke(self, call: calls.Call[T]) -> T:
        """Send a call; ask again for about a second where the link breaks."""
        return await call_again_async(self._send, call, None)

    async def _insist(self, call: calls.Call[T]) -> T:
        """Send a call with a key; ask again while nobody answers."""
        return await call_again_async(self._invoke, call, self._retry)

    async def model(self) -> str:
        """Name of the model; asks the server once if none was given."""
        if self._model is None:
            self._model = calls.single_model(await self.status())
        return self._model

    async def _bulk(self) -> Client:
        """Return the client whose threads move bytes."""
        model = await self.model()
        if self._bulk_client is None:
            self._bulk_client = Client(self._link.address, model=model, **self._arguments)
        return self._bulk_client

    # Pushing.

    async def push(
        self, source: AsyncPushSource, **options: Unpack[PushOptions]
    ) -> types.PushResult:
        """Push a version as `Client.push` does; cancelling it ends the push.

        The adapters of a PEFT model are merged on the event loop, and are unmerged when a push that
        was cancelled raises.
        """
        check_options("push", options, PushOptions)
        handle = await self.push_async(source, **options)
        try:
            await asyncio.wait([handle.committed])
        except asyncio.CancelledError:
            handle.cancel()
            if is_module(source) and has_adapters(cast("torch.nn.Module", source)):
                # They are merged until the push has ended, and the caller may train on.
                await asyncio.wait([handle.committed])
            raise
        return handle.committed.result()

    async def push_async(
        self, source: AsyncPushSource, **options: Unpack[PushOptions]
    ) -> AsyncPushHandle:
        """Begin a push in the background; see `Client.push_async`."""
        check_options("push_async", options, PushOptions)
        client = await self._bulk()
        if isinstance(source, (str, os.PathLike)):
            begun = await asyncio.to_thread(client.push_async, source, **options)
            return self._kept(begun)
        if isinstance(source, AsyncIterable):
            source = _in_step(source, asyncio.get_running_loop())
        return self._kept(client.push_async(source, **options))

    def _kept(self, begun: PushHandle) -> AsyncPushHandle:
        handle = AsyncPushHandle(begun)
        self._handles.add(handle)
        return handle

    async def hold(self, source: PushSource) -> types.Version:
        """Take a copy of a version's tensors, so that the next push already is a delta."""
        return await asyncio.to_thread((await self._bulk()).hold, source)

    async def acquire_epoch(self, holder: str = "") -> int:
        """Become the writer: pushes under older epochs are refused from then on.

        Those of other runs that give none are from the first push under the new one on.
        """
        return await self._invoke(
            calls.acquire_epoch(await self.model(), holder or default_holder(), self._link.timeouts)
        )

    async def abort(self, push_id: str) -> None:
        """Drop an open push of anyone; ids are in `status`."""
        await self._invoke(calls.abort_push(push_id, self._link.timeouts))

    # Serving.

    async def apply(self, version: int = 0, **options: Unpack[ApplyOptions]) -> types.ApplyReport:
        """Make a version live on every rank, proved from live parameters, or change nothing."""
        check_options("apply", options, ApplyOptions)
        return await self._insist(
            calls.apply_version(await self.model(), version, options, self._link.timeouts)
        )

    async def rollback(
        self, reason: str = "", **options: Unpack[RollbackOptions]
    ) -> types.RollbackReport:
        """Go back to the previous verified version and mark the one that is left rejected."""
        check_options("rollback", options, RollbackOptions)
        return await self._insist(
            calls.rollback(await self.model(), reason, options, self._link.timeouts)
        )

    async def fleet_apply(
        self, version: int, **options: Unpack[FleetApplyOptions]
    ) -> types.FleetReport:
        """Make a version live on every member of the server's fleet, or on none."""
        check_options("fleet_apply", options, FleetApplyOptions)
        timeouts = self._link.timeouts
        return await self._insist(calls.fleet_apply(await self.model(), version, options, timeouts))

    async def fleet_rollback(
        self, reason: str = "", **options: Unpack[FleetChoices]
    ) -> types.FleetReport:
        """Go back to the fleet's commit before, and reject the content that is left everywhere."""
        check_options("fleet_rollback", options, FleetChoices)
        timeouts = self._link.timeouts
        return await self._insist(
            calls.fleet_rollback(await self.model(), reason, options, timeouts)
        )

    async def fleet_abort(self, reason: str = "") -> types.FleetReport | None:
        """End the apply or rollback of the fleet that runs; None: none does."""
        timeouts = self._link.timeouts
        return await self._invoke(calls.fleet_abort(await self.model(), reason, timeouts))

    async def fleet_status(self) -> types.FleetStatus:
        """Tell what the server's fleet has decided, and where its members are."""
        return await self._invoke(calls.fleet_status(await self.model(), self._link.timeouts))

    async def verify(
        self, version: int = 0, *, engine: str = "", score: bool = False
    ) -> types.Verification:
        """Prove what every rank serves, from its live parameters; see `Client.verify`."""
        model, timeouts = await self.model(), self._link.timeouts
        return await self._invoke(
            calls.verify_version(model, version, timeouts, engine, score=score)
        )

    async def report_logprobs(
        self,
        versions: Versions | Sequence[Versions],
        served: Any,
        own: Any,
        *,
        trained_version: int = 0,
    ) -> int:
        """Report how far log probabilities are from the trainer's; see `Client.report_logprobs`."""
        gaps = logprob_gaps(versions, served, own)
        model, timeouts = await self.model(), self._link.timeouts
        for call in calls.report_logprobs(model, trained_version, gaps, timeouts):
            await self._invoke(call)
        return sum(gap.tokens for gap in gaps)

    async def applies(self, last: int = 20, *, version: int = 0) -> list[types.ApplyRecord]:
        """List the last applies, newest first; as `Client.applies`."""
        applies: list[types.ApplyRecord] = []
        token, more = "", True
        while more:
            left, model = last - len(applies) if last else 0, await self.model()
            call = calls.list_applies(model, left, version, token, self._link.timeouts)
            page, token = await self._invoke(call)
            applies += page
            more = bool(token) and len(applies) != last
        return applies

    # Versions.

    async def versions(self) -> list[types.Version]:
        """List all versions, newest first."""
        versions: list[types.Version] = []
        token, more = "", True
        while more:
            call = calls.list_versions(await self.model(), token, self._link.timeouts)
            page, token = await self._invoke(call)
            versions += page
            more = bool(token)
        return versions

    async def get_version(self, version: int = 0) -> types.Version:
        """Tell one version; 0: the live one."""
        call = calls.get_version(await self.model(), version, self._link.timeouts)
        return (await self._invoke(call))[0]

    async def probes(self, version: int = 0) -> Probes | None:
        """Return the probes that a version (0: the live one) came with; None: it has none."""
        call = calls.get_probes(await self.model(), version, self._link.timeouts)
        found = await self._invoke(call)
        return Probes.from_message(found) if found.probes else None

    async def watch(self) -> AsyncGenerator[types.VersionChange, None]:
        """Yield the present state of every version, then each change; see `Client.watch`."""
        call = calls.watch_versions(await self.model(), self._link.timeouts)
        backoff = RetryState(self._retry)
        while not self._closed:
            try:
                async with contextlib.aclosing(self._read(call)) as changes:
                    async for change in changes:
                        backoff.reset()
                        yield change
            except DeadlineError:
                continue
            except (UnavailableError, AbortedError) as error:
                if backoff.next_delay_s(error) is None:
                    raise
            await asyncio.sleep(backoff.delay_s())

    async def pin(self, version: int, *, pinned: bool = True) -> types.Version:
        """Keep a version from being collected, or let it go."""
        return await self._invoke(
            calls.pin_version(
                await self.model(), version, pinned=pinned, timeouts=self._link.timeouts
            )
        )

    async def delete(self, version: int, *, force: bool = False) -> None:
        """Delete a version that is neither live, staged for an apply, pinned nor a base.

        Args:
            version: The version.
            force: Also the one that a rollback would go back to, which is refused otherwise.
        """
        model = await self.model()
        await self._invoke(
            calls.delete_version(model, version, force=force, timeouts=self._link.timeouts)
        )

    async def pull(
        self,
        path: str | os.PathLike[str],
        version: int = 0,
        *,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> types.PullResult:
        """Write a version as safetensors; the folder appears whole and proved, or not at all."""
        client = await self._bulk()
        return await asyncio.to_thread(client.pull, path, version, on_progress=on_progress)

    async def tensors(self, version: int = 0) -> AsyncGenerator[PulledTensor, None]:
        """Yield the tensors of a version (0: the live one), each proved; one is held at a time."""
        iterator = (await self._bulk()).tensors(version)
        while (tensor := await asyncio.to_thread(next, iterator, None)) is not None:
            yield tensor

    # Training.

    async def train(
        self, request: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> AsyncGenerator[TrainProgress, None]:
        """Give the trainer a job and yield its events; see `Client.train`.

        It is sent with the first step. Who leaves it early closes it: contextlib.aclosing.
        """
        call = train_call(await self.model(), request, timeout_s, self._link.timeouts)
        messages = self._read(call)
        try:
            async for progress in messages:
                yield progress
        finally:
            await messages.aclose()

    async def checkpoint(
        self, folder: str | None = None, *, timeout_s: float | None = None
    ) -> CheckpointResult:
        """Return when the live version is durable; see `Client.checkpoint`."""
        call = checkpoint_call(await self.model(), folder, timeout_s, self._link.timeouts)
        return await self._invoke(call)

    async def train_status(self) -> TrainStatus:
        """Tell what the trainer does."""
        return await self._invoke(train_status_call(await self.model(), self._link.timeouts))

    async def cancel_train(self, job_id: str) -> None:
        """End a job of anyone, that waits or runs; what it has committed stays."""
        call = cancel_train_call(await self.model(), job_id, self._link.timeouts)
        await self._invoke(call)

    # The engine's own memory.

    async def attach(self, engine: str = "") -> Attached:
        """Have the live parameters of an engine as tensors; see `Client.attach`."""
        return await asyncio.to_thread((await self._bulk()).attach, engine)

    # The server and this client.

    async def status(self) -> types.Status:
        """Tell the state of the server: engine, ranks, slots, pushes, invariants."""
        return await self._invoke(calls.get_status("", self._link.timeouts))

    async def health(self, service: str = "") -> bool:
        """Tell whether a service of the server is serving, by the standard health protocol."""
        return await self._invoke(calls.health(service, self._link.timeouts))

    async def close(self) -> None:
        """Wait for background pushes, then close the connections."""
        self._closed = True
        if self._bulk_client is not None:
            await asyncio.to_thread(self._bulk_client.close)
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._bulk_client is not None:
            for handle in list(self._handles):
                handle.cancel()
            # Also those that nobody holds any more.
            self._bulk_client.cancel_pushes()
        await self.close()


def _in_step(
    source: AsyncIterable[tuple[str, Any]], loop: asyncio.AbstractEventLoop
) -> Iterator[tuple[str, Any]]:
    """Read an asynchronous iterable from a thread; each step runs on its event loop."""
    iterator = aiter(source)

    async def step() -> object:
        return await anext(iterator, _END)

    while (pair := asyncio.run_coroutine_threadsafe(step(), loop).result()) is not _END:
        yield cast("tuple[str, Any]", pair)
