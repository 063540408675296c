"""The environment variables of the parts that run inside vLLM, all read here.

vLLM starts our plugins without arguments, and its workers inherit the environment of the server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineSettings", "socket_path"]

_DEFAULT_SOCKET = "unix:/run/weightsync/engine.sock"
_SWITCH_VALUES = {"": False, "0": False, "1": True}


def socket_path(address: str) -> str:
    """Return the file of a `unix:` address; a bare absolute path is taken as it is.

    Raises:
        ValueError: The address is not one of a unix socket.
    """
    path = address.removeprefix("unix://").removeprefix("unix:")
    if not path.startswith("/"):
        msg = f"{address!r} is not unix:/absolute/path"
        raise ValueError(msg)
    return path


@dataclass(frozen=True)
class EngineSettings:
    """How the parts inside vLLM are set up.

    Attributes:
        engine_socket: File of the unix socket on which the bridge serves.
        segment_socket: File of the server's segment socket as vLLM's processes see it.
        cpu_plain_weights: Turn vLLM's CPU weight repacking off, so that parameters can be written.
    """

    engine_socket: str
    segment_socket: str
    cpu_plain_weights: bool

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None) -> EngineSettings:
        """Read the settings from the environment.

        Raises:
            ValueError: A variable holds something that it cannot mean; the message names it.
        """
        env = os.environ if environment is None else environment
        engine = socket_path(env.get("WEIGHTSYNC_ENGINE_SOCKET") or _DEFAULT_SOCKET)
        beside = str(os.path.join(os.path.dirname(engine), "segments.sock"))  # noqa: PTH118, PTH120
        segments = socket_path(env.get("WEIGHTSYNC_SEGMENT_SOCKET") or beside)
        switch = env.get("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", "").strip()
        if switch not in _SWITCH_VALUES:
            msg = f"WEIGHTSYNC_CPU_PLAIN_WEIGHTS is {switch!r}; set it to 0 or 1"
            raise ValueError(msg)
        return cls(engine, segments, _SWITCH_VALUES[switch])
