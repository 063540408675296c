"""A checkpoint engine for verl 0.9: the actor's weights are a version, and the rollout serves it.

verl imports this module where it is its `custom_backend_module`; the backend is "weightsync".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import torch

# Its types are Any here: verl needs Ray to be imported.
from verl.checkpoint_engine.base import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    CheckpointEngine,
    CheckpointEngineRegistry,
)

from weightsync.errors import Reason
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, DeadlineError, UnavailableError, refuse
from weightsync_client.integrations.step_push import PushedStep, StepOptions
from weightsync_client.options import DEFAULT_ADDRESS, ApplyOptions, PushOptions
from weightsync_client.rpc.validate import seconds, text
from weightsync_client.types import ModelStatus, PushResult

__all__ = ["WeightSyncCheckpointEngine"]

Pair = tuple[str, torch.Tensor]

#: In the metadata of a version. A step does not name one weight sync: a resumed run repeats it.
_SYNC_ID = "sync_id"

#: Every rank of the rollout asks so often, seconds.
_POLL_S = 0.2

#: What the rollout's loader is given.
_NO_PAIRS: tuple[Pair, ...] = ()


@CheckpointEngineRegistry.register("weightsync")  # type: ignore[untyped-decorator,unused-ignore]
class WeightSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc,unused-ignore]
    """Puts the actor's weights into the rollout's vLLM through the weightsync-server next to it.

    When a weight sync returns, its version is live and proved on every rank of the rollout. When
    it raises, the rollout has the weights that it had before, unless the error says otherwise, and
    verl leaves it stopped. verl's own loader gets no tensor.

    Rank 0 of the actor pushes and applies. All its ranks take part to the end, whatever fails.
    verl makes one of these in every process of actor and rollout, with its `engine_kwargs`.

    Args:
        bucket_size: Of verl, and not used.
        is_master: Of verl: whether this is rank 0 of the actor.
        address: Of the server, as both actor and rollout reach it. Token and TLS are as the
            environment says.
        model: Name of the model; None: the server's only one.
        push: Options of every push.
        apply: Options of every apply.
        timeout_s: How long the rollout waits for the version to be live: push and apply together.

    Raises:
        ClientError: REQUEST_INVALID; an argument cannot be.
        TypeError: There is no such option.
    """

    # With "named_tensors" verl calls its loader in vLLM's engine core first, which then does
    # nothing else, an apply included, until the last tensor came. With "delta_flush" it waits for
    # a first one, and where none comes it leaves the engine alone.
    wire_format = "delta_flush"

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,  # noqa: FBT001, FBT002 - as verl's engines have it
        *,
        address: str = DEFAULT_ADDRESS,
        model: str | None = None,
        push: PushOptions | None = None,
        apply: ApplyOptions | None = None,
        timeout_s: float = 1800,
    ) -> None:
        del bucket_size
        self._is_master = is_master
        self._address, self._model = text("address", address), model
        # They are mappings of OmegaConf.
        self._options = StepOptions(PushOptions(**(push or {})), ApplyOptions(**(apply or {})))
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._opened: Client | None = None
        self._sync_id = ""
        self._rollout_ranks = 0
        #: Live, and of another weight sync.
        self._old_version = 0

    # Called by verl before and after each weight sync.

    def prepare(self) -> dict[str, Any]:
        """Name a weight sync on rank 0 of the actor, and find a wrong address before it begins.

        Raises:
            RuntimeError: No server answers, or it has no such model.
        """
        if not self._is_master:
            return {}
        with _as_runtime_error():
            ranks = self._status().engine.ranks
        return {_SYNC_ID: uuid.uuid4().hex, "ranks": len([r for r in ranks if r.version])}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return what `init_process_group` gets on every rank: the name of the weight sync.

        Raises:
            RuntimeError: The rollout has ranks that the server's engine does not have, and which
                would go on with old weights.
        """
        master = next(entry for entry in metadata if _SYNC_ID in entry)
        # No ranks: it serves no version yet, or is away. The apply tells them all.
        with _as_runtime_error():
            _check_ranks(master["ranks"] or rollout_world_size, rollout_world_size)
        everyone = {_SYNC_ID: master[_SYNC_ID], "rollout_ranks": rollout_world_size}
        return (
            {name: [value] * actor_wg_world_size for name, value in everyone.items()},
            {name: [value] * rollout_world_size for name, value in everyone.items()},
        )

    def init_process_group(self, sync_id: str, rollout_ranks: int) -> None:
        """Begin a weight sync; there is no group to make."""
        self._sync_id, self._rollout_ranks, self._old_version = sync_id, rollout_ranks, 0

    def finalize(self) -> None:
        """End a weight sync; the client stays, with its copy for the next delta."""
        self._sync_id = ""

    # The weight sync.

    async def send_weights(
        self, weights: Iterable[Pair], global_steps: int | None = None
    ) -> dict[str, float]:
        """Push the weights and make them live, from rank 0; the others only take part.

        Every rank reads its weights to the end, also where the push fails.

        Args:
            weights: All of the model; to get the next one may be a collective.
            global_steps: Of the trainer; kept with the version as `step`.

        Returns:
            What verl logs, from rank 0.

        Raises:
            RuntimeError: Of push or apply, with its reason and its sentence. An error of `weights`
                itself is raised as it is.
        """
        pairs = _on_callers_stream(weights)
        if not self._is_master:
            await asyncio.to_thread(_read_to_end, pairs)
            return {}
        with _as_runtime_error():
            started = time.monotonic()
            pushed = await asyncio.to_thread(self._push, pairs, global_steps)
            push_s = time.monotonic() - started
            # Apart from the push: a weight sync that was cancelled makes nothing live.
            return await asyncio.to_thread(self._apply, pushed, push_s)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Pair, None]:
        """Yield nothing, and end when the version of this weight sync is live.

        Args:
            global_steps: Of the trainer, for the error.

        Raises:
            RuntimeError: It is not live within `timeout_s`, or the server refuses to tell.
        """
        with _as_runtime_error():
            await self._wait_until_live(global_steps)
        for pair in _NO_PAIRS:
            yield pair

    # Inside.

    def _client(self) -> Client:
        # In the process where it is used: verl makes this object before it knows its role.
        if self._opened is None:
            self._opened = Client(self._address, model=self._model)
        return self._opened

    def _status(self) -> ModelStatus:
        client = self._client()
        models = {model.model: model for model in client.status().models}
        if client.model not in models:
            raise refuse(
                Reason.MODEL_UNKNOWN,
                f"the server has no model {client.model!r}, but {', '.join(models)}; correct model",
            )
        return models[client.model]

    def _push(self, pairs: Iterator[Pair], step: int | None) -> PushResult:
        try:
            self._check_begun()
            options: dict[str, Any] = {**self._options.push, "collective": True}
            ours = {_SYNC_ID: self._sync_id} | ({} if step is None else {"step": str(step)})
            options["metadata"] = {**options.get("metadata", {}), **ours}
            return self._client().push(pairs, **options)
        except BaseException:
            # Also where the push did not come to reading. Its error is the one to raise.
            with contextlib.suppress(Exception):
                _read_to_end(pairs)
            raise

    def _apply(self, pushed: PushResult, push_s: float) -> dict[str, float]:
        started = time.monotonic()
        try:
            report = self._client().apply(pushed.version, **(self._options.apply or {}))
        except ClientError as error:
            error.add_note(f"the weights are version {pushed.version}, which was not applied")
            if error.reason is Reason.ENGINE_ASLEEP:
                error.add_note("set rollout.free_cache_engine to False")
            raise
        _check_ranks(len(report.ranks), self._rollout_ranks)
        return PushedStep(pushed, report, push_s, time.monotonic() - started).metrics()

    async def _wait_until_live(self, step: int | None) -> None:
        self._check_begun()
        until = time.monotonic() + self._timeout_s
        last: ClientError | None = None
        while True:
            try:
                if await asyncio.to_thread(self._is_live):
                    return
                last = None
            except (UnavailableError, DeadlineError) as error:
                last = error  # A server that restarts goes on with the apply.
            if time.monotonic() >= until:
                raise last or refuse(
                    Reason.DEADLINE_EXCEEDED,
                    f"the version of step {step} was not live within {self._timeout_s:g} s; see "
                    "the error of the actor, or raise timeout_s",
                )
            await asyncio.sleep(_POLL_S)

    def _is_live(self) -> bool:
        live = self._status().live_version
        if live in (0, self._old_version):
            return False
        # Once per version: the answer has all of its tensors.
        if self._client().get_version(live).metadata.get(_SYNC_ID) == self._sync_id:
            return True
        self._old_version = live
        return False

    def _check_begun(self) -> None:
        if not self._sync_id:
            raise refuse(
                Reason.REQUEST_INVALID,
                "no weight sync has begun; call prepare, build_topology and init_process_group",
            )


def _check_ranks(engine: int, rollout: int) -> None:
    if engine != rollout:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"the rollout has {rollout} ranks, but the engine of the server has {engine}, and the "
            "others would go on with old weights; let one replica have all ranks of the rollout",
        )


def _on_callers_stream(weights: Iterable[Pair]) -> Iterator[Pair]:
    """Return the weights, to be read by any thread as the calling thread would.

    A thread starts on device 0 and with gradients: the collectives of a rank would be on the wrong
    device, and what they return would be part of a graph.
    """
    stream = torch.cuda.current_stream() if _uses_cuda() else None
    return _read_on(iter(weights), stream)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _read_on(pairs: Iterator[Pair], stream: torch.cuda.Stream | None) -> Iterator[Pair]:
    while True:
        with torch.no_grad(), torch.cuda.stream(stream):
            try:
                pair = next(pairs)
            except StopIteration:
                return
        if stream is not None:
            stream.synchronize()  # The push copies on another one.
        yield pair


def _read_to_end(pairs: Iterator[Pair]) -> None:
    for _ in pairs:
        pass


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Raise errors of the client as ones that Ray can bring to the driver, which pickles them."""
    try:
        yield
    except ClientError as error:
        notes = getattr(error, "__notes__", ())
        sentence = "; ".join([error.message, *notes])
        raise RuntimeError(f"{error.reason}: {sentence}") from error
