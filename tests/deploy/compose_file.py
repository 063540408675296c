"""Reads docker-compose.yml as docker-compose itself understands it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ROOT", "Mount", "Service", "folders_of_images", "load", "seconds", "size_bytes"]

ROOT = Path(__file__).resolve().parents[2]
_FACTORS = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """Return a duration such as `1m30s` in seconds."""
    return sum(float(n) * _UNITS[unit] for n, unit in re.findall(r"([\d.]+)([smh])", text))


def size_bytes(text: str | int) -> int:
    """Return a size such as `1gb` in bytes."""
    found = re.fullmatch(r"(\d+)([kmg]?b)", str(text).lower())
    return int(found[1]) * _FACTORS[found[2]] if found else int(text)


@dataclass(frozen=True)
class Mount:
    """One volume of a service: `source` is a path, or the name of a volume."""

    source: str
    target: str
    read_only: bool

    @property
    def named(self) -> bool:
        """Whether it is a volume that compose manages."""
        return not self.source.startswith("/")


@dataclass(frozen=True)
class Service:
    """What the compose file says about one service, defaults filled in."""

    name: str
    argv: list[str]
    environment: dict[str, str]
    uid: int
    gid: int
    mounts: list[Mount]
    tmpfs: list[str]
    read_only: bool
    shm_bytes: int
    healthcheck: list[str]
    stop_grace_s: float
    raw: dict[str, Any] = field(repr=False)


def load(
    docker_compose: str, *files: str, variables: Mapping[str, str] | None = None
) -> dict[str, Service]:
    """Return the services of compose files, merged and interpolated."""
    named = [part for file in files for part in ("-f", str(ROOT / file))]
    ran = subprocess.run(
        [docker_compose, *named, "config"],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    document = yaml.safe_load(ran.stdout)
    return {name: _service(name, raw) for name, raw in document["services"].items()}


def _service(name: str, raw: dict[str, Any]) -> Service:
    uid, _, gid = str(raw.get("user", "0:0")).partition(":")
    test = raw.get("healthcheck", {}).get("test", ["CMD"])
    assert test[0] == "CMD", test
    environment = {key: str(value) for key, value in raw.get("environment", {}).items()}
    return Service(
        name=name,
        argv=[*raw.get("entrypoint", []), *raw.get("command", [])],
        environment=environment,
        uid=int(uid),
        gid=int(gid or 0),
        mounts=[_mount(volume) for volume in raw.get("volumes", [])],
        tmpfs=list(raw.get("tmpfs", [])),
        read_only=bool(raw.get("read_only", False)),
        shm_bytes=size_bytes(raw.get("shm_size", "64mb")),
        healthcheck=test[1:],
        stop_grace_s=seconds(str(raw.get("stop_grace_period", "10s"))),
        raw=raw,
    )


def _mount(volume: str | dict[str, Any]) -> Mount:
    if isinstance(volume, dict):
        return Mount(volume["source"], volume["target"], bool(volume.get("read_only", False)))
    source, target, *mode = volume.split(":")
    return Mount(source, target, mode == ["ro"])


def folders_of_images() -> dict[str, tuple[int, int, int]]:
    """Return mode, owner and group of the folders that our images make.

    A new named volume gets them from the folder that it covers. Both images must agree.
    """
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    found: dict[str, tuple[int, int, int]] = {}
    for mode, owner, group, path in re.findall(
        r"install -d -m (\d+) -o (\d+) -g (\d+) (\S+)", text
    ):
        entry = (int(mode, 8), int(owner), int(group))
        assert found.setdefault(path, entry) == entry, path
    return found
