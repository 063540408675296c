"""A vLLM with one of our backends of transfers, a server beside it, and a trainer's model."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["TransferSite", "transfer_site"]

_PROMPTS = ("hello world", "the quick brown fox", "a")


class TransferSite:
    """Two models of one kind, of which vLLM has loaded the first.

    Args:
        root: Folder of everything; a short path.
        backend: Of vLLM's weight transfer.
        flags: More of vLLM's.
        variables: More environment variables of vLLM.
    """

    def __init__(
        self, root: Path, backend: str, *flags: str, variables: Mapping[str, str] | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        folders = [make_checkpoint(root / f"{n}", dtype="bfloat16", seed=n) for n in range(2)]
        self.root = root
        self.vllm = VllmServer(
            folders[0],
            root / "run",
            # What one rank of several refuses must leave nothing in vLLM's queues.
            tp=2,
            dtype="bfloat16",
            flags=("--weight-transfer-config", f'{{"backend": "{backend}"}}', *flags),
            variables={"VLLM_SERVER_DEV_MODE": "1", **(variables or {})},
        )
        self.server = WeightSyncServer(root / "run", root / "state", flags=("--same-host",))
        self.model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
        other = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
        self.trained = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.served = {name: p.detach().clone() for name, p in other.named_parameters()}

    def set(self, weights: dict[str, torch.Tensor]) -> None:
        """Have the trainer's model hold these."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def answers(self) -> list[Any]:
        """Return greedy tokens with their logprobs."""
        return [self.vllm.complete(prompt) for prompt in _PROMPTS]

    def live(self) -> int:
        """Return the version that the server serves."""
        return self.server.wait_serving().live_version


@contextmanager
def transfer_site(
    backend: str, *flags: str, variables: Mapping[str, str] | None = None
) -> Iterator[TransferSite]:
    """Start one, serving; it is gone after the block. See `TransferSite`."""
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="wt-"))
        stack.callback(shutil.rmtree, root)
        site = TransferSite(root, backend, *flags, variables=variables)
        stack.callback(site.vllm.stop)
        stack.callback(site.server.stop)
        site.server.start()
        site.vllm.start()
        site.server.wait_serving()
        yield site
