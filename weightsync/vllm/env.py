"""The environment variables of the parts that run inside vLLM, all read here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from weightsync.host_dirs import run_dir
from weightsync.vllm.lineage.cache_key import Lineage
from weightsync.wire.grpc_channels import is_private

#: Whether linear layers are plain, and whether experts are.
_PLAIN_VALUES = {
    "": (False, False),
    "0": (False, False),
    "1": (True, True),
    "linear": (True, False),
}
_LINEAGES = {
    "": Lineage.CORE,
    "1": Lineage.CORE,
    "admission": Lineage.ADMISSION,
    "0": Lineage.NONE,
}
_UPDATE_TIMEOUT_S = 60.0
_MAX_UPDATE_TIMEOUT_S = 3600.0
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kKMGT]i?B|B|)")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Amount:
    """So many bytes of memory or, if `relative`, so many per cent of all of it."""

    number: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Amount:
        """Read `16GiB`, `16GB`, `1000` or `12.5%`; anything else is a ValueError."""
        match = _AMOUNT.fullmatch(text.strip())
        if match is None or (match[2] == "%" and float(match[1]) > 100):
            msg = (
                f"{text!r} is not an amount of memory; write bytes such as 16GiB, or a share as 10%"
            )
            raise ValueError(msg)
        number, unit = float(match[1]), match[2]
        if unit == "%":
            return cls(number, relative=True)
        base = 1024 if "i" in unit else 1000
        return cls(number * base ** _POWERS[unit.rstrip("iB")])

    def of(self, total: int) -> int:
        return int(total * self.number / 100) if self.relative else int(self.number)


def socket_path(address: str) -> str:
    """Return the file of a `unix:` address, or a bare absolute path; else raise ValueError."""
    path = address.removeprefix("unix://").removeprefix("unix:")
    if not path.startswith("/"):
        raise ValueError(f"{address!r} is not unix:/absolute/path")
    return path


@dataclass(frozen=True)
class EngineSettings:
    """How the parts inside vLLM are set up.

    Attributes:
        engine_socket: File of the bridge's unix socket.
        segment_socket: File of the server's segment socket as vLLM's processes see it.
        cpu_plain_linear: Have vLLM's linear layers on a CPU compute from their parameters, which
            can be written, and not from packed copies.
        cpu_plain_experts: The same for experts.
        device_room: Memory that each rank may take on its device to stage versions; None: what vLLM
            leaves, less a reserve.
        update_timeout_s: How long a rank waits for a silent trainer in a transfer of vLLM's own.
        answer_versions: Whether answers of vLLM's HTTP API name the versions that made them.
        attachable: Whether parameters on a CPU are in shared memory, for trainers that attach.
        update_partial: Whether tensors that such a transfer leaves out stay as they are.
        server_url: weightsync-server's HTTP API; empty: not known.
        server_ca: PEM file of its certificate's authorities; empty: those of this host.
        cache_lineage: Where cached keys are kept apart by version.
        accept_caches: Whether caches outside of the engine are accepted, such as KV connectors.
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
    cache_lineage: Lineage = Lineage.CORE
    accept_caches: bool = False

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None) -> EngineSettings:
        """Read the environment; ValueError names a variable that holds what it cannot mean."""
        env = os.environ if environment is None else environment
        engine = socket_path(
            env.get("WEIGHTSYNC_ENGINE_SOCKET") or str(run_dir(env) / "engine.sock")
        )
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
            _lineage(env),
            _switch(env, "WEIGHTSYNC_ACCEPT_CACHES", default="0"),
        )


def _switch(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, "").strip() or default
    if text not in ("0", "1"):
        others = {"0": "1 or 0, the default", "1": "1, the default, or 0"}
        raise ValueError(f"{name} is {text!r}; set it to {others[default]}")
    return text == "1"


def _lineage(env: Mapping[str, str]) -> Lineage:
    text = env.get("WEIGHTSYNC_CACHE_LINEAGE", "").strip()
    if text not in _LINEAGES:
        raise ValueError(
            f"WEIGHTSYNC_CACHE_LINEAGE is {text!r}; set it to 1, the default, admission or 0"
        )
    return _LINEAGES[text]


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
        raise ValueError(
            f"WEIGHTSYNC_HTTP is {text!r}, to which tokens would go in plain text; use https://, "
            "or http://127.0.0.1:PORT"
        )
    return text


def _room(env: Mapping[str, str]) -> Amount | None:
    text = env.get("WEIGHTSYNC_DEVICE_ROOM", "").strip()
    if not text:
        return None
    try:
        return Amount.parse(text)
    except ValueError as error:
        raise ValueError(f"WEIGHTSYNC_DEVICE_ROOM: {error}") from None


def _update_timeout(env: Mapping[str, str]) -> float:
    text = env.get("WEIGHTSYNC_UPDATE_TIMEOUT", "").strip()
    try:
        seconds = float(text or _UPDATE_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    # Not a number compares as False.
    if not 0 < seconds <= _MAX_UPDATE_TIMEOUT_S:
        raise ValueError(
            f"WEIGHTSYNC_UPDATE_TIMEOUT is {text!r}; set it to seconds, more than 0 and at most "
            f"{_MAX_UPDATE_TIMEOUT_S:g}"
        )
    return seconds
