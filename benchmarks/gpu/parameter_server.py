"""The trainer's end of checkpoint-engine: its parameter server, with one process on one GPU.

https://github.com/MoonshotAI/checkpoint-engine
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["ParameterServerLink"]

_NAME = "bench"
_WAIT_S = 60.0


class ParameterServerLink:
    """Holds a parameter server and what it is doing.

    Args:
        port: A free one.
    """

    def __init__(self, port: int) -> None:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        from checkpoint_engine import ParameterServer

        # Its buffers lie on the GPU, beside vLLM and the trainer.
        self._server = ParameterServer(master_port=port, mem_fraction=0.5)
        self._registered = False
        self._sending: threading.Thread | None = None
        self._error: BaseException | None = None

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Copy tensors into its pinned memory, which is made once."""
        if self._registered:
            self._server.unregister_checkpoint(_NAME)
        self._server.register_checkpoint(
            _NAME, named_tensors=dict(tensors), use_shared_memory_pool=True
        )
        self._registered = True
        self._server.gather_metas(_NAME)

    def begin(self) -> dict[str, str]:
        """Begin an update; returns the sockets by the UUID of a GPU."""
        told: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._error = None

        def send() -> None:
            try:
                self._server.update(_NAME, lambda paths: told.put(dict(paths)))
            except BaseException as error:  # noqa: BLE001 - raised again by `end`
                self._error = error
                told.put({})

        self._sending = threading.Thread(target=send, name="checkpoint-engine")
        self._sending.start()
        return told.get(timeout=_WAIT_S)

    def end(self) -> None:
        """Return when the update is done."""
        assert self._sending is not None
        self._sending.join(_WAIT_S)
        if self._error is not None:
            raise self._error
