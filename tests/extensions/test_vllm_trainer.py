"""VLLM's trainer side on two real ranks with FSDP2, and a server with the engine for tests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.torch import save_file
from torch.multiprocessing.spawn import spawn

from tests.extensions.vllm_trainer_ranks import RANKS, make_model, run
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server() -> Iterator[WeightSyncServer]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    with tempfile.TemporaryDirectory(prefix="wvt") as name:
        folder = Path(name)
        weights = {name: p.detach() for name, p in make_model(9).named_parameters()}
        save_file(weights, folder / "model.safetensors")
        flags = ("--engine=memory", f"--model={folder}", "--ranks=2", "--store=memory://")
        server = WeightSyncServer(folder / "run", folder / "state", flags=flags).start()
        server.wait_serving()
        yield server
        assert server.stop() == 0


def test_every_rank_sends_and_what_is_served_is_the_whole(
    server: WeightSyncServer, tmp_path: Path
) -> None:
    spawn(run, (str(tmp_path), server.address), nprocs=RANKS)  # type: ignore[no-untyped-call] # torch's
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    assert first[1] == "ENGINE_REFUSED"
    assert first[0] < first[2] == server.wait_serving().live_version
    # The other rank is never at fault, and waits for nothing: it came to its end.
    assert other == [None, None, None]
    with Client(server.address) as client:
        for version, step in ((first[0], 0), (first[2], 2)):
            found = {tensor.name: tensor.numpy() for tensor in client.tensors(version)}
            expected = dict(make_model(step).named_parameters())
            assert found.keys() == expected.keys()
            for name, parameter in expected.items():
                assert np.array_equal(found[name], parameter.detach().numpy())
