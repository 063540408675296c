"""Hosts on links of a rate: network namespaces on a bridge of this machine, shaped by tc(8)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GATEWAY", "LinkedHost", "shaped_links"]

#: Of this process alone, so that two do not meet.
_NET = f"10.213.{8 + os.getpid() % 240}"
#: Of this process, which the hosts reach and whose own traffic is not shaped.
GATEWAY = f"{_NET}.254"
#: What a link may send at once after a pause, and how long it queues, as a switch's port does.
_BURST, _QUEUE = "256kb", "25ms"
_LINK = "eth0"


@dataclass(frozen=True)
class LinkedHost:
    """One namespace.

    Attributes:
        name: Under which the other hosts find it.
        address: IPv4.
        namespace: Name of the namespace.
        hosts_file: Names of all hosts.
    """

    name: str
    address: str
    namespace: str
    hosts_file: Path

    def on(self) -> list[str]:
        """Return what a command line begins with that runs on this host."""
        named = f'mount --bind {self.hosts_file} /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", named, "sh"]

    def sent_bytes(self) -> int:
        """Return what has left over its link since it was made, headers included."""
        return int(self._link()["stats64"]["tx"]["bytes"])

    def _link(self) -> dict[str, dict[str, dict[str, int]]]:
        shown = _run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", _LINK)
        return dict(json.loads(shown)[0])


@contextlib.contextmanager
def shaped_links(
    folder: Path, names: Sequence[str], bytes_per_s: int
) -> Iterator[dict[str, LinkedHost]]:
    """Make hosts, each with a link that carries so much each way; yield them by name.

    Args:
        folder: For the file of their names.
        names: They.
        bytes_per_s: Of each link, each way; 0: not limited.

    Raises:
        SystemExit: This machine or user cannot; in one sentence.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--hosts makes network namespaces: run as root, with iproute2 installed")
    names_file = folder / "hosts"
    addresses = {name: f"{_NET}.{number}" for number, name in enumerate(names, 1)}
    lines = ["127.0.0.1 localhost", *(f"{where} {name}" for name, where in addresses.items())]
    names_file.write_text("\n".join(lines) + "\n")
    bridge = f"wsb{os.getpid()}"
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "addr", "add", f"{GATEWAY}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        found = {}
        for number, name in enumerate(names):
            host = LinkedHost(name, addresses[name], f"{bridge}-{name}", names_file)
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
            _plug(host, bridge, f"{bridge}p{number}", bytes_per_s)
            found[name] = host
        yield found


def _plug(host: LinkedHost, bridge: str, port: str, bytes_per_s: int) -> None:
    inside = ("ip", "-n", host.namespace)
    peer = ("peer", "name", _LINK, "netns", host.namespace)
    _run("ip", "link", "add", port, "type", "veth", *peer)
    _run("ip", "link", "set", port, "master", bridge, "up")
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", _LINK)
    _run(*inside, "link", "set", _LINK, "up")
    _run(*inside, "link", "set", "lo", "up")
    if bytes_per_s:
        rate = ("root", "tbf", "rate", f"{bytes_per_s}bps", "burst", _BURST, "latency", _QUEUE)
        _run("tc", "qdisc", "add", "dev", port, *rate)
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", _LINK, *rate)


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
