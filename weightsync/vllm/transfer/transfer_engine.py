"""What a worker of vLLM has for our backends of weight transfers.

vLLM's factory imports this module where `--weight-transfer-config '{"backend": "weightsync"}'` asks
for it, or one of `weightsync_nccl` and `weightsync_ipc`. The verbs of a transfer are answered in
the API process; see `transfer_verbs`.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

# Its types are Any here: they are those of one release.
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.vllm.transfer.ipc_handles import HANDLES, from_plain
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

__all__ = [
    "ReceivingTransferEngine",
    "WeightSyncInitInfo",
    "WeightSyncTransferEngine",
    "WeightSyncUpdateInfo",
]

logger = logging.getLogger(__name__)

_ELSEWHERE = (
    "weightsync-server writes the weights of this vLLM, which its bridge serves; send the verbs of "
    "a weight transfer to `vllm serve`, and weights to the server"
)


@dataclass
class WeightSyncInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # Any, see the import
    """Nothing: there is no connection to make."""


@dataclass
class WeightSyncUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # Any, see the import
    """What a trainer has made live.

    Attributes:
        version: Its number.
    """

    version: int


class WeightSyncTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # Any, see the import
    """Never writes a weight and never calls vLLM's layerwise reload: the rank's commit writes.

    It gets a verb only where no API process stands before the workers, as in vLLM's offline `LLM`,
    which WeightSync does not serve. The first verb of any trainer is refused then, by the last rank
    alone: vLLM leaves in its queues what ranks reply after one that fails. The others change
    nothing and never raise, because ranks that disagree about a session cannot end it.
    """

    init_info_cls = WeightSyncInitInfo
    update_info_cls = WeightSyncUpdateInfo
    # A draft that is trained is part of the version.
    supports_draft_weight_update = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> WeightSyncInitInfo:
        """Return what there is to know, which is nothing; never raises."""
        del init_dict
        return WeightSyncInitInfo()

    def init_transfer_engine(self, init_info: WeightSyncInitInfo) -> None:
        """Refuse.

        Raises:
            RuntimeError: On the last rank, naming where the verbs belong.
        """
        del init_info
        if self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise RuntimeError(_ELSEWHERE)

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: Any) -> None:
        """Write nothing, and say so in the log.

        The base class waits for an accelerator here, which raises on a CPU.
        """
        del update_info
        logger.error("weightsync: no weight was written: %s", _ELSEWHERE)

    def receive_weights(self, update_info: Any) -> None:
        """Write nothing, and say so in the log."""
        self.update_weights(update_info)

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Refuse; vLLM 0.26 asks every backend for it, and calls it nowhere.

        Raises:
            RuntimeError: Naming the trainer side.
        """
        del iterator, trainer_args
        msg = (
            "the trainer side is weightsync_client.integrations.WeightSyncTrainerEngine; make it "
            "by WeightTransferTrainerFactory.trainer_init"
        )
        raise RuntimeError(msg)


class ReceivingTransferEngine(WeightSyncTransferEngine):
    """Leaves the wire to vLLM's own engine of a transfer, and the model to the rank's commit.

    vLLM's verbs on workers are refused as those of "weightsync" are: ours reach the wire by
    `weightsync_update`, which never raises.
    """

    def make_wire(self, sink: Any) -> Any:
        """Return vLLM's own engine of the transfer, which hands tensors to `sink`.

        Args:
            sink: Stands where it expects a model, of which it calls `load_weights` alone.
        """
        factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
        own = _own_config(self.config, RECEIVING_BACKENDS[self.config.backend])
        engines = factory.WeightTransferEngineFactory
        return engines.create_engine(own, self.vllm_config, self.device, sink)

    def close_wire(self, wire: Any) -> None:
        """End the connection, and what a device waits for on it; takes seconds where it waits.

        Args:
            wire: From `make_wire`; nothing is begun on it any more.
        """
        group = getattr(wire, "model_update_group", None)
        if group is not None:
            # Before its release 0.32 vLLM's engine only forgets it. A broadcast without a sender
            # then stays on the device for ever: only an abort, by any thread, takes it from there.
            group.destroy()
        wire.shutdown()

    def end_update(self, wire: Any) -> None:
        """Let go of what belongs to the trainer; the connection stays."""
        if RECEIVING_BACKENDS[self.config.backend] == "ipc":
            # Where there is no connection, all that it ends is the mapping of a packed buffer.
            wire.shutdown()

    def own_update(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return an update info as vLLM's engine knows it.

        Raises:
            ValueError: Its handles are none.
        """
        own = dict(info)
        if own.get(HANDLES) is not None:
            own[HANDLES] = from_plain(own[HANDLES])
        return own


def _own_config(config: Any, wire: str) -> Any:
    """Return the configuration of vLLM's own backend, where another one was asked for."""
    kinds = importlib.import_module("vllm.config.weight_transfer")
    # Some releases after 0.26 have a class for each, with what trainers now send at the start; its
    # values are those that their trainers have unless they are told others.
    kind = getattr(kinds, f"{wire.upper()}WeightTransferConfig", None)
    return kind() if kind is not None else dataclasses.replace(config, backend=wire)
