"""The calls of both clients about the trainer that a server supervises."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from weightsync_client.rpc import train_calls

if TYPE_CHECKING:
    from weightsync_client import train_types as types
    from weightsync_client.rpc.calls import Call
    from weightsync_client.rpc.channels import Link

__all__ = ["AsyncTrainMethods", "TrainMethods"]

T = TypeVar("T")


class _Sender(Protocol):
    """What `Client` has for its calls."""

    _link: Link

    @property
    def model(self) -> str: ...

    def _invoke(self, call: Call[T], /) -> T: ...

    def _read(self, call: Call[T], /) -> Generator[T, None, None]: ...


class _AsyncSender(Protocol):
    """What `AsyncClient` has for its calls."""

    _link: Link

    async def model(self) -> str: ...

    async def _invoke(self, call: Call[T], /) -> T: ...

    def _read(self, call: Call[T], /) -> AsyncGenerator[T, None]: ...


class TrainMethods:
    """Methods of `Client`."""

    def train(
        self: _Sender, request: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Generator[types.TrainProgress, None, None]:
        """Give the trainer a job, and yield what it comes to, until it has ended well.

        What it has not committed leaves nothing behind. The job has been sent when this returns;
        `close` of what it returns, or leaving it in any other way, cancels the job. It is never
        sent twice.

        Args:
            request: What the trainer's class is given: what JSON can hold.
            timeout_s: Longest time until it has ended, in the queue included; default
                `Timeouts.train_s`. Then the job is cancelled.

        Raises:
            ClientError: While it is read: with the traceback of the trainer's class where that
                failed; AbortedError where somebody else cancelled it; ExhaustedError: too many
                jobs wait.
        """
        return self._read(train_calls.train(self.model, request, timeout_s, self._link.timeouts))

    def checkpoint(
        self: _Sender, folder: str | None = None, *, timeout_s: float | None = None
    ) -> types.CheckpointResult:
        """Return when the live version is durable, with the trainer's state.

        Waits for the job that runs.

        Args:
            folder: Name of a new folder below the server's --checkpoint-dir, which vLLM can load;
                None: the version store alone.
            timeout_s: Longest wait; default `Timeouts.train_s`.
        """
        call = train_calls.checkpoint(self.model, folder, timeout_s, self._link.timeouts)
        return self._invoke(call)

    def train_status(self: _Sender) -> types.TrainStatus:
        """Tell what the trainer does."""
        return self._invoke(train_calls.train_status(self.model, self._link.timeouts))

    def cancel_train(self: _Sender, job_id: str) -> None:
        """End a job of anyone, that waits or runs; what it has committed stays.

        Args:
            job_id: Of its progress, or of `train_status`.
        """
        self._invoke(train_calls.cancel_train(self.model, job_id, self._link.timeouts))


class AsyncTrainMethods:
    """Methods of `AsyncClient`."""

    async def train(
        self: _AsyncSender, request: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> AsyncGenerator[types.TrainProgress, None]:
        """Give the trainer a job and yield what it comes to; see `Client.train`.

        It is sent with the first step. Who leaves it early closes it: contextlib.aclosing.
        """
        call = train_calls.train(await self.model(), request, timeout_s, self._link.timeouts)
        messages = self._read(call)
        try:
            async for progress in messages:
                yield progress
        finally:
            await messages.aclose()

    async def checkpoint(
        self: _AsyncSender, folder: str | None = None, *, timeout_s: float | None = None
    ) -> types.CheckpointResult:
        """Return when the live version is durable; see `Client.checkpoint`."""
        call = train_calls.checkpoint(await self.model(), folder, timeout_s, self._link.timeouts)
        return await self._invoke(call)

    async def train_status(self: _AsyncSender) -> types.TrainStatus:
        """Tell what the trainer does."""
        return await self._invoke(train_calls.train_status(await self.model(), self._link.timeouts))

    async def cancel_train(self: _AsyncSender, job_id: str) -> None:
        """End a job of anyone, that waits or runs; what it has committed stays."""
        call = train_calls.cancel_train(await self.model(), job_id, self._link.timeouts)
        await self._invoke(call)
