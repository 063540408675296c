"""The trainer side of vLLM's backend "weightsync": a WeightSource is a version, and served then.

vLLM's classes are interfaces to it, and none is a base class: what is imported of vLLM is where its
trainers are registered, when this module is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from weightsync_client.client import Client
from weightsync_client.errors import invalid
from weightsync_client.integrations.step_push import (
    AdapterClient,
    ClientOptions,
    PushedStep,
    SyncPush,
)
from weightsync_client.options import DEFAULT_ADDRESS, ApplyOptions, PushOptions
from weightsync_client.rpc.validate import whole_number
from weightsync_client.source.tensor_stream import check_owned, check_whole, full_pairs

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

_NAME = "WeightSyncTrainerEngine"


class _Verbs(Protocol):
    """vLLM's `VLLMWeightSyncClient`, as far as it is called."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


@dataclass(frozen=True)
class WeightSyncTrainerInitInfo:
    """What vLLM's `WeightTransferTrainerFactory.trainer_init` makes our trainer side of.

    Attributes:
        server: Address of weightsync-server, for a client that is closed by `shutdown`; or a
            client, which stays open.
        apply: True (default): apply each version; or with which options; False: only push it.
        push: Options of every push; its metadata is kept in addition.
        run_id: Name of the training run; default: a new one.
        client: Options of a client that is made here: `model`, `timeouts`, `retry` and `access`.
        rank: Of this process among the trainer's; rank 0 pushes.
    """

    backend: ClassVar[str] = "weightsync"

    server: Client | str = DEFAULT_ADDRESS
    apply: bool | ApplyOptions = True
    push: PushOptions | None = None
    run_id: str = ""
    client: ClientOptions = field(default_factory=ClientOptions)
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        """Whether this process pushes."""
        return self.rank == 0


class WeightSyncTrainerEngine:
    """Has the engine serve what vLLM's trainers send: `send_weights` is a push and an apply.

    When `send_weights` returns, its version is committed and, with `apply`, served and proved on
    every rank; when it raises, the engine serves what it served, unless a note on the error says
    otherwise. Generation goes on while the weights are sent and pauses for the exchange only. A
    pause of vLLM's own may be in force meanwhile; the apply ends it.

    vLLM itself receives no tensor, and needs no development endpoints: without a `client` its verbs
    are not called. With one they are, after the apply, and where vLLM says which weights it serves
    (from 0.32 on) that proves that it is the one that the server drives.

    Every rank of the trainer makes one and calls `send_weights`; all but rank 0 only read the
    source, each to its end, whatever fails on rank 0.

    The metadata of a version is `run_id`, but for a partial one, and `sync`, the number of the call
    from 1. Every call is a new version.

    Make it by vLLM's factory, or by `trainer_init` where vLLM's release has none.
    """

    init_info_cls = WeightSyncTrainerInitInfo
    #: vLLM 0.26 names a class for what it gives as `config`, which is not used.
    config_cls = object

    def __init__(
        self,
        init_info: WeightSyncTrainerInitInfo,
        *,
        client: _Verbs | None,
        source: Any,
    ) -> None:
        self.is_sender = whole_number("rank", init_info.rank, 0) == 0
        self.client, self.source = client, source
        self._weightsync = AdapterClient(_NAME, init_info.server, init_info.client, "raise", logger)
        facts = init_info.apply, init_info.push, init_info.run_id
        self._syncs = SyncPush(self._weightsync, *facts, logger)

    @property
    def last(self) -> PushedStep | None:
        """Return the last `send_weights` that succeeded here; None: none, or another rank's."""
        return self._syncs.last

    @classmethod
    def trainer_init(
        cls,
        init_info: WeightSyncTrainerInitInfo,
        *,
        client: _Verbs | None = None,
        source: Any = None,
        config: object = None,
    ) -> Self:
        """Return a trainer side that is ready to send, once server and vLLM have answered rank 0.

        Args:
            init_info: How to push and apply.
            client: To vLLM's verbs; None: they are not called.
            source: vLLM's `WeightSource`, of which rank 0 has all tensors of the model, or pairs of
                name and tensor that can be iterated again each time.
            config: Of vLLM 0.26, and not used.

        Raises:
            ClientError: REQUEST_INVALID; an argument cannot be. Otherwise, if no server answers.
            Exception: Of `client`: vLLM has another backend, or is away.
        """
        del config
        _check_source(source)
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            try:
                engine._weightsync.open().status()
                if client is not None:
                    client.init_weight_transfer_engine({})
            except BaseException:
                engine.shutdown()
                raise
        return engine

    def send_weights(self) -> None:
        """Push the source as the next version and apply it; on every rank.

        Raises:
            ClientError: Of the push or the apply; a note says so if the version exists.
            Exception: Of the source, or of `client`, with a note that the version is served.
        """
        tensors = full_pairs(self.source)
        try:
            if self.is_sender:
                self._send(tensors)
        finally:
            # Also where a push ends before it begins: other ranks wait in a gather.
            for _ in tensors:
                pass

    def shutdown(self) -> None:
        """Close the client to weightsync-server, unless it was given; `send_weights` opens it."""
        self._weightsync.close()

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # Its base may be of another run, and the server takes no change of such a version.
        partial = self._syncs.options.push.get("partial")
        pushed = self._syncs.push(tensors, of_run=not partial)
        if self.client is not None and pushed.apply is not None:
            try:
                _call_verbs(self.client, pushed.push.version)
            except Exception as error:
                version = pushed.push.version
                error.add_note(f"{self._syncs.name} is version {version}, which is served")
                raise


def _check_source(source: Any) -> None:
    """Refuse on every rank alike what cannot be sent again and again, and whole, by rank 0."""
    gives = getattr(source, "implements_iter_full", lambda: isinstance(source, Iterable))()
    if not gives or isinstance(source, Iterator):
        raise invalid(
            "source must give all weights, in full, each time it is read; give a WeightSource, "
            "such as vLLM's ModuleSource(model)",
        )
    check_whole(source)
    check_owned(source, 0)


def _call_verbs(client: _Verbs, version: int) -> None:
    client.start_weight_update()
    client.update_weights({"version": version})
    client.finish_weight_update()


def _register() -> None:
    """Let vLLM's factory find the trainer side by the backend of its init info."""
    package = "vllm.distributed.weight_transfer"
    factory = importlib.import_module(f"{package}.factory")
    # The factory refuses a name that it knows, as where this module is imported again.
    with contextlib.suppress(ValueError):
        factory.WeightTransferTrainerFactory.register_engine(
            WeightSyncTrainerInitInfo.backend, WeightSyncTrainerEngine
        )
    base = importlib.import_module(f"{package}.base")
    base.TrainerWeightTransferEngine.register(WeightSyncTrainerEngine)


_register()
