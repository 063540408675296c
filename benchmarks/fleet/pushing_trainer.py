"""A trainer on a host of its own, which changes every value and pushes when it is asked to.

Run as a program it takes a line of JSON for each push on standard input: the addresses to push to,
one after the other. It answers with a line: when it began and ended, by the machine's monotonic
clock, and the versions.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from benchmarks.fleet.linked_servers import Trust
from benchmarks.fleet.shaped_links import LinkedHost
from benchmarks.servers import process
from weightsync_client import Client

__all__ = ["Pushed", "PushingTrainer", "change", "make_tensors", "pushing_trainer", "save_model"]

_TENSORS = 64
#: Of the stored objects: small, so that the store of tests, which copies whole ones, keeps up.
_SHARD_BYTES = 16 << 20


class Pushed(NamedTuple):
    """One push, or several one after the other.

    Attributes:
        begun: When the first was called, monotonic seconds.
        ended: When the last had returned.
        versions: One for each address.
    """

    begun: float
    ended: float
    versions: Sequence[int]

    @property
    def seconds(self) -> float:
        """How long all took together."""
        return self.ended - self.begun


Tensors = dict[str, npt.NDArray[np.float32]]


def make_tensors(size: int) -> Tensors:
    """Return a model of so many bytes."""
    each = max(1, size // _TENSORS // 4)
    return {f"t{number:02}": np.full(each, number, np.float32) for number in range(_TENSORS)}


def change(tensors: Tensors) -> None:
    """Change every value."""
    for tensor in tensors.values():
        np.add(tensor, 1, out=tensor)


def save_model(path: Path, size: int) -> None:
    """Write the checkpoint that engines start on, with tensors as the trainer's."""
    save_file(make_tensors(size), path)


class PushingTrainer:
    """The process, as seen by who asks."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers = requests, answers

    def push(self, addresses: Sequence[str]) -> Pushed:
        """Have it change all values and push them to each address in turn."""
        self._requests.write(json.dumps(addresses).encode() + b"\n")
        self._requests.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the trainer ended; its log says why")
        return Pushed(*json.loads(line))


@contextlib.contextmanager
def pushing_trainer(
    host: LinkedHost, folder: Path, trust: Trust, size: int
) -> Iterator[PushingTrainer]:
    """Run it until the block ends.

    Args:
        host: Where.
        folder: For its log.
        trust: By which servers know it.
        size: Bytes of its model.
    """
    words = ("-m", "benchmarks.fleet.pushing_trainer", str(size))
    files = {
        "WEIGHTSYNC_TOKEN_FILE": str(trust.token_file),
        "WEIGHTSYNC_TLS_CA": str(trust.authority),
    }
    log = folder / "trainer.log"
    with process(*words, log=log, piped=True, environment=files, wrapper=host.on()) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        yield PushingTrainer(running.stdin, running.stdout)


def _serve(size: int, requests: IO[str], answers: IO[str]) -> None:
    tensors, clients = make_tensors(size), dict[str, Client]()
    with contextlib.ExitStack() as stack:
        for line in requests:
            addresses = json.loads(line)
            for address in addresses:
                if address not in clients:
                    clients[address] = stack.enter_context(Client(address))
            change(tensors)
            answers.write(json.dumps(_push(tensors, [clients[one] for one in addresses])) + "\n")
            answers.flush()


def _push(tensors: Tensors, clients: Sequence[Client]) -> tuple[float, float, list[int]]:
    begun = time.monotonic()
    versions = [
        client.push(tensors, delta="never", shard_bytes=_SHARD_BYTES).version for client in clients
    ]
    return begun, time.monotonic(), versions


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.stdin, sys.stdout)
