"""A checkpoint engine for NeMo-RL: what the policy sends is a version, which the rollout gets.

It is chosen by the name of its class, as `refit_transport`. Of NeMo-RL it imports nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from weightsync_client.errors import invalid
from weightsync_client.integrations.actor_push import (
    ActorPush,
    Pair,
    check_ranks,
    on_callers_stream,
    take_part,
    wait_for,
)
from weightsync_client.options import DEFAULT_ADDRESS, ApplyOptions, PushOptions
from weightsync_client.pull import PulledTensor
from weightsync_client.rpc.validate import seconds
from weightsync_client.types import Durability

logger = logging.getLogger(__name__)

#: In the metadata of a version, and in what NeMo-RL tells all ranks.
_RUN_ID = "run_id"


class WeightSyncRefitEngine:
    """Brings the policy's weights into the rollout's vLLM by way of a weightsync-server.

    Rank 0 of the policy pushes; all its ranks take part to the end, whatever fails. Each sync is a
    new version; NeMo-RL gives no step. Its metadata is `run_id` and `sync`, which counts from 1.

    Without `apply` every rank of the rollout pulls that version when it is committed, each tensor
    proved by its digest, and NeMo-RL's own loader takes it, as of any transport of NeMo-RL. The
    rollout may have any number of replicas.

    With `apply` the server has the rollout's vLLM serve it: when NeMo-RL's `sync_weights` returns,
    the version is live and proved on every rank; when it raises, the rollout has the weights that
    it had before, unless the error says otherwise. NeMo-RL's loader gets no tensor. For this the
    rollout's vLLM has to have our bridge, which NeMo-RL does not start by itself: it makes vLLM's
    engine without vLLM's API server, which loads it.

    NeMo-RL makes one of these in every process of policy and rollout, with its `refit_cfg`.

    Args:
        bucket_size: Of NeMo-RL: bytes that its loader gets at a time.
        address: Of the server, as policy and rollout reach it. Token and TLS are as the environment
            says.
        model: Name of the model; None: the server's only one.
        push: Options of every push.
        apply: Options of every apply, {} for none; None: the rollout pulls.
        timeout_s: How long the rollout waits for the version of a sync.
        release_after_refit: Of NeMo-RL, which then prepares before each sync; the client stays,
            with its copy for the next delta.

    Raises:
        ClientError: REQUEST_INVALID; an argument cannot be.
        TypeError: There is no such option.
    """

    #: Of NeMo-RL: all ranks of the policy give whole tensors.
    shard_expert_weights = False

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        address: str = DEFAULT_ADDRESS,
        model: str | None = None,
        push: PushOptions | None = None,
        apply: ApplyOptions | None = None,
        timeout_s: float = 1800,
        release_after_refit: bool = False,
    ) -> None:
        del release_after_refit
        self._actor = ActorPush(address, model, push, apply)
        self._applies = apply is not None
        self._batch_bytes = bucket_size
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._run_id = uuid.uuid4().hex
        self._sync = 0
        self._rank = 0
        self._rollout_ranks = 0

    # Called by NeMo-RL before the first sync, and after the last one.

    def prepare(self) -> dict[str, Any]:
        """Return the name of the run, should this be rank 0 of the policy."""
        return {_RUN_ID: self._run_id}

    def get_target_weight_layout(self) -> None:
        """Return None: the server takes whole tensors."""

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Note the rank, and find a wrong address or a rollout in parts before the first sync.

        Raises:
            ClientError: No server answers, it has no such model, or the rollout has ranks that the
                server's engine does not have, and which would go on with old weights.
        """
        del train_world_size, metadata
        if worker_rank == 0:
            ranks = self._actor.engine_ranks()
            # None: it serves no version yet, or is away. The apply tells them all.
            if self._applies and ranks:
                check_ranks(ranks, rollout_world_size)
        self._rank, self._rollout_ranks = worker_rank, rollout_world_size

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Note the name of the run, which rank 0 of the policy has told, first of all."""
        del rollout_rank, train_world_size
        self._run_id, self._rollout_ranks = metadata[0][_RUN_ID], rollout_world_size

    def finalize(self) -> None:
        """Forget the ranks; what was synced is counted on."""
        self._rank, self._rollout_ranks = 0, 0

    # A sync.

    async def send_weights(self, weights: Iterable[Pair]) -> None:
        """Push the weights from rank 0, and make them live with `apply`; the others take part.

        Every rank reads its weights to the end, also where the push fails.

        Args:
            weights: All of the model; to get the next one may be a collective.

        Raises:
            ClientError: Of push or apply. An error of `weights` itself is raised as it is.
        """
        pairs = on_callers_stream(weights)
        if self._rank > 0:
            await take_part(pairs)
            return
        if self._applies:
            pushed = await self._actor.make_live(pairs, self._labels, self._rollout_ranks)
        else:
            pushed = await self._actor.push_only(pairs, self._labels)
        values = ", ".join(f"{key} {value:g}" for key, value in pushed.metrics().items())
        logger.info("sync %s: %s", self._sync, values)

    async def receive_weight_batches(self) -> AsyncGenerator[list[Pair], None]:
        """Yield the tensors of this sync, proved; with `apply` none, and at once.

        A worker of vLLM waits for this, and its engine answers no apply before that has returned.

        Raises:
            ClientError: The version has not arrived within `timeout_s`, or cannot be pulled.
        """
        if self._applies:
            return
        labels = self._labels()
        version = await wait_for(
            functools.partial(self._pushed, labels),
            self._timeout_s,
            f"the version of sync {self._sync} did not arrive within {self._timeout_s:g} s; see "
            "the error of the policy, or raise timeout_s",
        )
        with contextlib.closing(self._actor.client().tensors(version)) as tensors:
            while batch := await asyncio.to_thread(_batch, tensors, self._batch_bytes):
                yield batch

    # Inside.

    def _labels(self) -> dict[str, str]:
        if not self._rollout_ranks:
            raise invalid(
                "no sync has been prepared; call init_policy_process_group or "
                "init_rollout_process_group",
            )
        self._sync += 1
        return {_RUN_ID: self._run_id, "sync": str(self._sync)}

    def _pushed(self, labels: dict[str, str]) -> int | None:
        """Return the committed version with these labels, if there is one."""
        for version in self._actor.client().versions():
            committed = version.durability is Durability.COMMITTED
            if committed and labels.items() <= version.metadata.items():
                return version.version
        return None


def _batch(tensors: Iterator[PulledTensor], size: int) -> list[Pair]:
    """Return the next tensors, until they have so many bytes; none: there are no more."""
    batch: list[Pair] = []
    left = size
    for tensor in tensors:
        batch.append((tensor.name, tensor.torch()))
        left -= len(tensor.data)
        if left <= 0:
            break
    return batch
