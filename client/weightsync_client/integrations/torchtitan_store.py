"""The store of torchtitan's RL: what its trainer puts is a version, which its generators get.

torchtitan's `WeightSyncManager` has the trainer push and the generators pull; both do so through a
module that they call `ts`, and this takes its place. Of torchtitan it imports nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch

from weightsync.errors import Reason
from weightsync_client.client import Client
from weightsync_client.errors import invalid, refuse
from weightsync_client.integrations.step_push import AdapterClient, ClientOptions
from weightsync_client.options import DEFAULT_ADDRESS, PushOptions, check_options
from weightsync_client.pull import PulledTensor
from weightsync_client.source.sharded_tensors import box_source, is_sharded
from weightsync_client.types import Durability

logger = logging.getLogger(__name__)

#: In the metadata of a version.
_KEY = "store_key"


class WeightSyncStore:
    """Keeps state dicts as versions of a weightsync-server; stands where `torchstore` does.

    Generators get what all ranks of the trainer have put and the server has committed, each tensor
    proved by its digest, or an error. Each rank pushes what it holds; nothing is gathered on
    one. Every rank of a generator reads all of a version, and keeps its part.

    Give a run a model of the server for itself: a generator gets the newest version of its key.
    A vLLM that the server has beside it serves none of them by itself, as torchtitan's names are
    not those of a checkpoint.

    Args:
        server: Address of weightsync-server, or a client.
        push: Options of every push; its metadata is kept in addition.
        **options: `model`, `timeouts`, `retry` and `access` (token and TLS), as of `Client`.

    Raises:
        ClientError: REQUEST_INVALID; an argument cannot be.
        TypeError: There is no such option.
    """

    def __init__(
        self,
        server: Client | str = DEFAULT_ADDRESS,
        *,
        push: PushOptions | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._client = AdapterClient("WeightSyncStore", server, options, "raise", logger)
        check_options("push", push or {}, PushOptions)
        self._push: dict[str, Any] = {**(push or {})}
        self._puts = 0

    def close(self) -> None:
        """Close the client, unless it was given."""
        self._client.close()

    # Called by torchtitan.

    async def put_state_dict(
        self, state_dict: Mapping[str, Any], key: str, *, direct_rdma: bool = False
    ) -> None:
        """Push what this rank holds; every rank of the trainer calls it, and all end alike.

        The tensors must not change before it returns; gradients may be computed meanwhile.

        Args:
            state_dict: DTensors, and tensors that every rank has.
            key: Which state dict it is.
            direct_rdma: Of torchstore; True is refused: generators read what the server has.

        Raises:
            ClientError: Of the push; see `Client.push`.
        """
        _check_staged(direct_rdma)
        self._puts += 1
        options = {**self._push, "step": self._puts}
        options["metadata"] = {**options.get("metadata", {}), _KEY: key}
        # Begun here, where what this thread has queued on a device is known.
        push = self._client.open().push_async(state_dict, **options)
        await asyncio.wrap_future(push.committed)

    async def get_state_dict(
        self,
        key: str,
        user_state_dict: dict[str, Any],
        *,
        strict: bool = True,
        direct_rdma: bool = False,
    ) -> dict[str, Any]:
        """Copy the newest version into the tensors of a state dict, and return that.

        After an error some may hold the new version and some what they held before.

        Args:
            key: Which state dict it is.
            user_state_dict: Tensors of the dtypes and shapes that were put; of a DTensor the part
                of this rank is copied.
            strict: False: those with names that the version lacks stay as they are, with a
                warning, and names that the state dict lacks are passed over.
            direct_rdma: Of torchstore; True is refused.

        Raises:
            ClientError: VERSION_UNKNOWN; nothing was put. LAYOUT_INVALID; the tensors are others.
        """
        _check_staged(direct_rdma)
        await asyncio.to_thread(self._fill, key, user_state_dict, strict)
        return user_state_dict

    # Inside.

    def _fill(self, key: str, targets: dict[str, Any], strict: bool) -> None:  # noqa: FBT001 - passed on
        client = self._client.open()
        version = _newest(client, key)
        left = set(targets)
        unknown = set()
        with contextlib.closing(client.tensors(version)) as tensors, torch.no_grad():
            for tensor in tensors:
                if tensor.name in left:
                    left.remove(tensor.name)
                    _copy(version, tensor, targets[tensor.name])
                else:
                    unknown.add(tensor.name)
        if strict and (left or unknown):
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"version {version} lacks {_names(left)}, and the state dict lacks "
                f"{_names(unknown)}; build both models alike, or give strict=False",
            )
        if left:
            logger.warning("version %s lacks %s, which keep their values", version, _names(left))


def _check_staged(direct_rdma: bool) -> None:  # noqa: FBT001 - as the methods have it
    if direct_rdma:
        raise invalid(
            "leave direct_rdma out: it has generators read the trainer's memory directly",
        )


def _newest(client: Client, key: str) -> int:
    for version in client.versions():
        committed = version.durability is Durability.COMMITTED
        if committed and version.metadata.get(_KEY) == key:
            return version.version
    raise refuse(
        Reason.VERSION_UNKNOWN,
        f"put the state dict {key!r} from the trainer first: the server has no version of it",
    )


def _names(names: Iterable[str]) -> str:
    return reprlib.repr(sorted(names))


def _copy(version: int, tensor: PulledTensor, target: torch.Tensor) -> None:
    source = tensor.torch()
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise refuse(
            Reason.LAYOUT_INVALID,
            f"tensor {tensor.name!r} of version {version} is {source.dtype} {list(source.shape)}, "
            f"that of the state dict {target.dtype} {list(target.shape)}; build both models alike",
        )
    if not is_sharded(target):
        target.copy_(source)
        return
    local: torch.Tensor = target.to_local()  # type: ignore[attr-defined] # a DTensor
    for box, _ in box_source(tensor.name, target, 0).boxes:
        local.copy_(source[box.slices])
