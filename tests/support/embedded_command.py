"""The embedded engine as users start it, by the command: pushed to, applied, restarted, ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from safetensors.torch import save_file

from tests.support.leftovers import Mark
from tests.support.models import make_checkpoint
from tests.support.stock import push_folder
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["EmbeddedSite"]


@dataclass
class EmbeddedSite:
    """One `weightsync-server --engine embedded` and two checkpoints of one layout.

    Attributes:
        root: For all of it; a short path, because unix sockets allow 107 bytes.
        dtype: Of the checkpoints and of vLLM.
        flags: More flags of vLLM.
        variables: Environment variables of vLLM.
        sizes: Of the model.
    """

    root: Path
    dtype: str
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the checkpoints."""
        self.first, self.second = (
            make_checkpoint(self.root / name, seed=seed, dtype=self.dtype, **self.sizes)
            for seed, name in enumerate("ab")
        )
        #: Never started: it has the flags of vLLM, and asks its API.
        self.vllm = VllmServer(self.first, self.root, dtype=self.dtype, flags=self.flags)
        self.mark = Mark()
        _, _, _, model, folder, *flags = self.vllm.command()
        self.server = WeightSyncServer(
            self.root / "run",
            self.root / "state",
            flags=("--engine=embedded", f"{model}={folder}", "--", *flags),
            variables={"VLLM_PLUGINS": "weightsync", **self.variables, **self.mark.variables},
            start_s=240,
        )

    def walk(self) -> None:
        """Push, apply, restart and end it; it must serve what was applied, and leave nothing."""
        self.server.start()
        assert self.server.wait_serving().live_version == 1
        before = self.vllm.complete("hello world")
        self._refused_by_name()
        commit = push_folder(self.server.stub, self.second)
        request = pb.ApplyVersionRequest(model="default", version=commit.version)
        report = self.server.stub.ApplyVersion(request, timeout=60).report
        assert {rank.content_digest for rank in report.ranks} == {commit.content_digest}
        after = self.vllm.complete("hello world")
        assert after != before
        self._end()
        self.server.start()
        status = self.server.wait_serving()
        assert (status.live_version, status.apply_id) == (commit.version, "")
        assert self.vllm.complete("hello world") == after
        verify = pb.VerifyVersionRequest(model="default")
        assert self.server.stub.VerifyVersion(verify, timeout=60).verified
        self._end()

    def _refused_by_name(self) -> None:
        """A model that the engine does not know is refused when its layout comes."""
        wrong = self.root / "wrong"
        wrong.mkdir()
        save_file({"nobody.knows.weight": torch.ones(7, 5)}, wrong / "model.safetensors")
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                push_folder(self.server.stub, wrong)
            error = from_call(caught.value)
            assert error is not None
            assert error.reason is Reason.ENGINE_REFUSED, error.message
            assert "nobody.knows.weight" in error.message
        assert self.server.wait_serving().live_version == 1

    def _end(self) -> None:
        assert self.server.stop() == 0, self.server.log[-4000:]
        assert self.mark.left_after(10) == []
