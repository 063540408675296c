"""What a worker of vLLM has for our backends of weight transfers.

vLLM's factory imports this where `--weight-transfer-config` asks for the backend `weightsync`,
`weightsync_nccl` or `weightsync_ipc`. The verbs are answered in the API process; see `verbs`.
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

from weightsync.vllm.extensions.received.ipc_handles import HANDLES, from_plain
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

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
    version: int


class WeightSyncTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # Any, see the import
    """Never writes a weight and never calls vLLM's layerwise reload: the rank's commit writes.

    It gets a verb only where no API process stands before the workers, as in vLLM's offline `LLM`.
    The last rank alone refuses the first verb, because vLLM leaves in its queues what ranks reply
    after one that fails. Other verbs change nothing and never raise: ranks that disagree about a
    session cannot end it.
    """

    init_info_cls = WeightSyncInitInfo
    update_info_cls = WeightSyncUpdateInfo
    # A draft that is trained is part of the version.
    supports_draft_weight_update = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> WeightSyncInitInfo:
        del init_dict
        return WeightSyncInitInfo()

    def init_transfer_engine(self, init_info: WeightSyncInitInfo) -> None:
        """Refuse, on the last rank, naming where the verbs belong."""
        del init_info
        if self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise RuntimeError(_ELSEWHERE)

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: Any) -> None:
        """The base class waits for an accelerator here, which raises on a CPU."""
        del update_info
        logger.error("weightsync: no weight was written: %s", _ELSEWHERE)

    def receive_weights(self, update_info: Any) -> None:
        self.update_weights(update_info)

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """Refuse; vLLM 0.26 asks every backend for it, and calls it nowhere."""
        del iterator, trainer_args
        raise RuntimeError(
            "the trainer side is weightsync_client.integrations.WeightSyncTrainerEngine; make it "
            "by WeightTransferTrainerFactory.trainer_init"
        )


class ReceivingTransferEngine(WeightSyncTransferEngine):
    """Leaves the wire to vLLM's own engine of a transfer, and the model to the rank's commit."""

    def make_wire(self, sink: Any) -> Any:
        """Return vLLM's own engine of the transfer, which calls `load_weights` of `sink` alone."""
        factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
        own = _own_config(self.config, RECEIVING_BACKENDS[self.config.backend])
        engines = factory.WeightTransferEngineFactory
        return engines.create_engine(own, self.vllm_config, self.device, sink)

    def close_wire(self, wire: Any) -> None:
        group = getattr(wire, "model_update_group", None)
        if group is not None:
            # Before its release 0.32 vLLM's engine only forgets it. A broadcast without a sender
            # then stays on the device for ever: only an abort, by any thread, takes it from there.
            group.destroy()
        wire.shutdown()

    def end_update(self, wire: Any) -> None:
        if RECEIVING_BACKENDS[self.config.backend] == "ipc":
            # Where there is no connection, all that it ends is the mapping of a packed buffer.
            wire.shutdown()

    def own_update(self, info: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(info)
        if own.get(HANDLES) is not None:
            own[HANDLES] = from_plain(own[HANDLES])
        return own


def _own_config(config: Any, wire: str) -> Any:
    kinds = importlib.import_module("vllm.config.weight_transfer")
    # Some releases after 0.26 have a class for each, with what trainers now send at the start; its
    # values are those that their trainers have unless they are told others.
    kind = getattr(kinds, f"{wire.upper()}WeightTransferConfig", None)
    return kind() if kind is not None else dataclasses.replace(config, backend=wire)
