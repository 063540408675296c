"""A checkpoint engine for verl 0.9: the actor's weights are a version, and the rollout serves it.

verl imports this module where it is its `custom_backend_module`; the backend is "weightsync".
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

# Its types are Any here: verl needs Ray to be imported.
from verl.checkpoint_engine.base import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    CheckpointEngine,
    CheckpointEngineRegistry,
)

from weightsync.errors import Reason
from weightsync_client.errors import ClientError, invalid
from weightsync_client.integrations.actor_push import (
    ActorPush,
    Pair,
    check_ranks,
    on_callers_stream,
    take_part,
    wait_for,
)
from weightsync_client.options import DEFAULT_ADDRESS, ApplyOptions, PushOptions
from weightsync_client.rpc.validate import seconds

#: In the metadata of a version. A step does not name one weight sync: a resumed run repeats it.
_SYNC_ID = "sync_id"

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
        self._actor = ActorPush(address, model, push, apply)
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._sync_id = ""
        self._rollout_ranks = 0
        #: Live, and of another weight sync.
        self._old_version = 0

    # Called by verl before and after each weight sync.

    def prepare(self) -> dict[str, Any]:
        """Name a weight sync on rank 0 of the actor, and find a wrong address before it begins.

        Raises:
            ClientError: No server answers, or it has no such model.
        """
        if not self._is_master:
            return {}
        return {_SYNC_ID: uuid.uuid4().hex, "ranks": self._actor.engine_ranks()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return what `init_process_group` gets on every rank: the name of the weight sync.

        Raises:
            ClientError: The rollout has ranks that the server's engine does not have, and which
                would go on with old weights.
        """
        master = next(entry for entry in metadata if _SYNC_ID in entry)
        # No ranks: it serves no version yet, or is away. The apply tells them all.
        check_ranks(master["ranks"] or rollout_world_size, rollout_world_size)
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
            ClientError: Of push or apply. An error of `weights` itself is raised as it is.
        """
        pairs = on_callers_stream(weights)
        if not self._is_master:
            await take_part(pairs)
            return {}
        with _with_remedy():
            labels = functools.partial(self._labels, global_steps)
            live = await self._actor.make_live(pairs, labels, self._rollout_ranks)
        return live.metrics()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Pair, None]:
        """Yield nothing, and end when the version of this weight sync is live.

        Args:
            global_steps: Of the trainer, for the error.

        Raises:
            ClientError: It is not live within `timeout_s`, or the server refuses to say.
        """
        self._check_begun()
        await wait_for(
            self._live,
            self._timeout_s,
            f"the version of step {global_steps} was not live within {self._timeout_s:g} s; "
            "see the error of the actor, or raise timeout_s",
        )
        for pair in _NO_PAIRS:
            yield pair

    # Inside.

    def _labels(self, step: int | None) -> dict[str, str]:
        self._check_begun()
        return {_SYNC_ID: self._sync_id} | ({} if step is None else {"step": str(step)})

    def _live(self) -> int | None:
        """Return the live version, if it is that of this weight sync."""
        live = self._actor.status().live_version
        if live in (0, self._old_version):
            return None
        # Once per version: the answer has all of its tensors.
        if self._actor.client().get_version(live).metadata.get(_SYNC_ID) == self._sync_id:
            return live
        self._old_version = live
        return None

    def _check_begun(self) -> None:
        if not self._sync_id:
            raise invalid(
                "no weight sync has begun; call prepare, build_topology and init_process_group",
            )


@contextlib.contextmanager
def _with_remedy() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if error.reason is Reason.ENGINE_ASLEEP:
            error.add_note("set rollout.free_cache_engine to False")
        raise
