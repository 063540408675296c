"""TRL's rollout worker, with samples that know which version made them."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import Any

# Its types are Any here: TRL's own worker takes what it likes.
import aiohttp
from trl.experimental.async_grpo.async_rollout_worker import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    AsyncRolloutWorker,
    _AsyncRolloutLoop,
)

from weightsync_client.client import Client
from weightsync_client.errors import invalid
from weightsync_client.integrations.answer_fields import VersionLabels
from weightsync_client.options import DEFAULT_ADDRESS
from weightsync_client.spans import versions_of

__all__ = ["WeightSyncRollouts"]

#: In the metadata of what `WeightSyncTransfer` pushes: the number of the sync.
_SYNC = "sync"
#: The group for which the running task generates.
_group: ContextVar[int | None] = ContextVar("weightsync_group", default=None)


class _Loop(_AsyncRolloutLoop):  # type: ignore[misc,unused-ignore]
    """TRL's loop in the process of its own; notes the versions of each group's answers.

    `weightsync` is the server's address, the version that was live when it was started, and TRL's
    counter then less the number of that version's sync.
    """

    def __init__(self, *, weightsync: tuple[str, int, int], **options: Any) -> None:
        super().__init__(**options)
        address, self._first, self._ahead = weightsync
        self._syncs = VersionLabels(Client(address), _SYNC)
        #: TRL's count of the oldest version that answered, for each group under way.
        self._oldest: dict[int, int] = {}

    async def _generate_one(self, *args: Any, group_id: int = 0, **options: Any) -> Any:
        _group.set(group_id)
        return await super()._generate_one(*args, group_id=group_id, **options)

    async def _post(
        self,
        path: str,
        payload: dict[str, Any],
        timeout: float,  # noqa: ASYNC109 - as TRL has it
        max_retries: int = 3,
    ) -> Any:
        async def post() -> Any:
            limit = aiohttp.ClientTimeout(total=timeout)
            url = f"{self.vllm_server_url}{path}"
            async with self.session.post(url, json=payload, timeout=limit) as answer:
                answer.raise_for_status()
                content = await answer.json()
                await self._note(versions_of(answer).oldest)
                return content or {}

        return await self._retry(post, label=f"POST {path}", max_attempts=max_retries)

    async def _note(self, version: int) -> None:
        group = _group.get()
        if group is not None:
            # At once, while the version is sure to be kept; the server is asked once for each.
            sync = await asyncio.to_thread(self._syncs, max(version, self._first))
            count = self._ahead + sync - (version < self._first)
            self._oldest[group] = min(count, self._oldest.get(group, count))

    async def _score_group(self, group: Any) -> Any:
        group.model_version = self._oldest.pop(group.group_id, group.model_version)
        return await super()._score_group(group)


class WeightSyncRollouts(AsyncRolloutWorker):  # type: ignore[misc,unused-ignore]
    """A rollout worker whose samples carry the oldest version that made a token of their group.

    TRL's own one stamps each sample with the version that its counter had when the group began,
    whichever weights then answered. Give this one as the `rollout_worker` of AsyncGRPOTrainer,
    beside a `WeightSyncTransfer` as its `weight_transfer`: TRL drops what is too stale, and weighs
    the rest, by this number.

    Args:
        weightsync_server: Address of weightsync-server. Token and TLS are as the environment says,
            which the worker's process inherits.
        **options: Of TRL's AsyncRolloutWorker.

    Raises:
        ClientError: When it is started: no server answers, or it serves nothing of
            `WeightSyncTransfer`.
    """

    _loop_cls = _Loop

    def __init__(self, *, weightsync_server: str = DEFAULT_ADDRESS, **options: Any) -> None:
        super().__init__(**options)
        self._server = weightsync_server

    def start(self) -> None:
        """Begin to generate; TRL has sent its weights before, and calls this between two syncs."""
        with contextlib.closing(Client(self._server)) as client:
            live = client.get_version()
        sync = live.metadata.get(_SYNC, "")
        if not sync.isdigit():
            raise invalid(
                "give WeightSyncTransfer as the trainer's weight_transfer: version "
                f"{live.version}, which is live, has no sync in its metadata"
            )
        ahead = self.model_version - int(sync)
        self._loop_kwargs["weightsync"] = (self._server, live.version, ahead)
        super().start()
