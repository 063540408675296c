"""The version that a rollback would go back to is not deleted by mistake."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.bounds import FIRST, serving
from tests.support.memory_bridge import memory_bridge
from weightsync.errors import Reason
from weightsync_client import Client, NotFoundError, RefusedError

SIZE = 1000


def weight(seed: int) -> dict[str, np.ndarray]:
    return {"weight": np.full(SIZE, seed, np.uint8)}


def test_the_way_back_goes_only_by_force() -> None:
    checkpoint = {"weight": ("U8", (SIZE,), bytes(SIZE))}
    with serving(store="") as server, memory_bridge(server.run_dir, checkpoint):
        server.wait_serving()
        with Client(server.address) as client:
            for seed in (1, 2, 3):
                client.apply(client.push(weight(seed)).version)
            back = FIRST + 1
            with pytest.raises(RefusedError, match="rollback would go back to") as caught:
                client.delete(back)
            assert caught.value.reason is Reason.VERSION_IN_USE
            assert client.get_version(back).version == back
            # One before that is nobody's way back.
            client.delete(FIRST)
            done = command(server.address, "delete", str(back))
            assert (done.returncode, "force" in done.stderr) == (4, True)
            assert client.rollback("worse").report.version == back
            # Now the engine's checkpoint is.
            done = command(server.address, "delete", "--force", "1")
            assert (done.returncode, done.stdout) == (0, "version 1 deleted\n")
            with pytest.raises(NotFoundError):
                client.get_version(1)
            with pytest.raises(RefusedError) as caught:
                client.rollback("nowhere")
            assert caught.value.reason is Reason.NO_ROLLBACK


def command(address: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", *words],
        env=os.environ | {"WEIGHTSYNC_ADDRESS": address},
        capture_output=True,
        text=True,
        check=False,
    )
