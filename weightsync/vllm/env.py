"""The environment variables of the parts that run inside vLLM, all read here.

vLLM starts our plugins without arguments, and its workers inherit the environment of the server.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weightsync.wire.addresses import is_private

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Amount", "EngineSettings", "socket_path"]

_DEFAULT_SOCKET = "unix:/run/weightsync/engine.sock"
#: Whether linear layers are plain, and whether experts are.
_PLAIN_VALUES = {
    "": (False, False),
    "0": (False, False),
    "1": (True, True),
    "linear": (True, False),
}
_UPDATE_TIMEOUT_S = 60.0
_MAX_UPDATE_TIMEOUT_S = 3600.0
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kKMGT]i?B|B|)")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Amount:
    """So much memory, or such a part of all of it.

    Attributes:
        number: Bytes, or per cent.
        relative: Whether it is per cent.
    """

    number: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Amount:
        """Read `16GiB`, `16GB`, `1000` or `12.5%`.

        Raises:
            ValueError: It is none of those.
        """
        match = _AMOUNT.fullmatch(text.strip())
        if match is None or (match[2] == "%" and float(match[1]) > 100):
            msg = f"{text!r} is no amount of memory; write bytes such as 16GiB, or a share as 10%"
            raise ValueError(msg)
        number, unit = float(match[1]), match[2]
        if unit == "%":
            return cls(number, relative=True)
        base = 1024 if "i" in unit else 1000
        return cls(number * base ** _POWERS[unit.rstrip("iB")])

    def of(self, total: int) -> int:
        """Return it in bytes where there are so many in all."""
        return int(total * self.number / 100) if self.relative else int(self.number)


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
        cpu_plain_linear: Have vLLM's linear layers on a CPU compute from their parameters, not from
            packed copies, so that they can be written.
        cpu_plain_experts: The same for experts.
        device_room: Memory of its CUDA device that each rank may take to stage versions; None: what
            vLLM leaves, less a reserve.
        update_timeout_s: How long a rank waits for a trainer that sends over a transfer of vLLM's
            own and sends nothing, seconds.
        answer_versions: Whether answers of vLLM's HTTP API name the versions that made them.
        attachable: Whether parameters on a CPU lie in shared memory, for trainers that attach.
        update_partial: Whether what such a trainer leaves out stays what it is.
        server_url: Where weightsync-server's HTTP API is; empty: not known.
        server_ca: PEM file of the authorities of its certificate; empty: those of this host.
    """

    engine_socket: str
    segment_socket: str
    cpu_plain_linear: bool = False
    cpu_plain_experts: bool = False
    device_room: Amount | None = None
    update_timeout_s: float = _UPDATE_TIMEOUT_S
    answer_versions: bool = True
    attachable: bool = False
    update_partial: bool = False
    server_url: str = ""
    server_ca: str = ""

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None) -> EngineSettings:
        """Read the settings from the environment.

        Raises:
            ValueError: A variable holds something that it cannot mean; the message names it.
        """
        env = os.environ if environment is None else environment
        engine = socket_path(env.get("WEIGHTSYNC_ENGINE_SOCKET") or _DEFAULT_SOCKET)
        sibling = str(os.path.join(os.path.dirname(engine), "segments.sock"))  # noqa: PTH118, PTH120
        segments = socket_path(env.get("WEIGHTSYNC_SEGMENT_SOCKET") or sibling)
        switch = env.get("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", "").strip()
        if switch not in _PLAIN_VALUES:
            msg = f"WEIGHTSYNC_CPU_PLAIN_WEIGHTS is {switch!r}; set it to 0, 1 or linear"
            raise ValueError(msg)
        return cls(
            engine,
            segments,
            *_PLAIN_VALUES[switch],
            _room(env),
            _update_timeout(env),
            _switch(env, "WEIGHTSYNC_ANSWER_VERSIONS", default="1"),
            _switch(env, "WEIGHTSYNC_ATTACH", default="0"),
            _switch(env, "WEIGHTSYNC_UPDATE_PARTIAL", default="0"),
            _server_url(env),
            env.get("WEIGHTSYNC_TLS_CA", "").strip(),
        )


def _switch(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, "").strip() or default
    if text not in ("0", "1"):
        others = {"0": "1 or 0, the default", "1": "1, the default, or 0"}
        msg = f"{name} is {text!r}; set it to {others[default]}"
        raise ValueError(msg)
    return text == "1"


def _server_url(env: Mapping[str, str]) -> str:
    text = env.get("WEIGHTSYNC_HTTP", "").strip().rstrip("/")
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        plain = parts.scheme in ("http", "https") and parts.netloc == text.partition("://")[2]
        known = plain and parts.hostname and parts.port and not parts.username
    except ValueError:
        known = False
    if not known:
        msg = f"WEIGHTSYNC_HTTP is {text!r}; set it to http://127.0.0.1:PORT or https://HOST:PORT"
        raise ValueError(msg)
    if parts.scheme == "http" and not is_private(parts.netloc):
        msg = (
            f"WEIGHTSYNC_HTTP is {text!r}, to which tokens would go in plain text; use https://, "
            "or http://127.0.0.1:PORT"
        )
        raise ValueError(msg)
    return text


def _room(env: Mapping[str, str]) -> Amount | None:
    text = env.get("WEIGHTSYNC_DEVICE_ROOM", "").strip()
    if not text:
        return None
    try:
        return Amount.parse(text)
    except ValueError as error:
        msg = f"WEIGHTSYNC_DEVICE_ROOM: {error}"
        raise ValueError(msg) from None


def _update_timeout(env: Mapping[str, str]) -> float:
    text = env.get("WEIGHTSYNC_UPDATE_TIMEOUT", "").strip()
    try:
        seconds = float(text or _UPDATE_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    # Not a number compares as False.
    if not 0 < seconds <= _MAX_UPDATE_TIMEOUT_S:
        msg = (
            f"WEIGHTSYNC_UPDATE_TIMEOUT is {text!r}; set it to seconds, more than 0 and at most "
            f"{_MAX_UPDATE_TIMEOUT_S:g}"
        )
        raise ValueError(msg)
    return seconds
