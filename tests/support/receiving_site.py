"""A vLLM of two ranks that receives over `weightsync_nccl`, its trainer's side in this process.

Only the communicator is another one (`tests.support.gloo_wire`), because a CPU has no NCCL.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from benchmarks.servers import free_port
from tests.support.gloo_wire import use_gloo
from tests.support.transfer_site import transfer_site
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.transfer_site import TransferSite

__all__ = ["RANKS", "ReceivingSite", "receiving_site", "refusal"]

RANKS = 2


class ReceivingSite:
    """A vLLM that receives, and vLLM's trainer of NCCL in this process."""

    def __init__(self, site: TransferSite) -> None:
        self.site = site

    def trainer(self, source: Any = None) -> Any:
        """Return one that has met the ranks."""
        from vllm.distributed.weight_transfer import (
            HTTPVLLMWeightSyncClient,
            ModuleSource,
            WeightTransferTrainerFactory,
        )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo("127.0.0.1", free_port(), 1 + RANKS, packed=False, rank=0),
            client=HTTPVLLMWeightSyncClient(self.site.vllm.url),
            source=source or ModuleSource(self.site.model),
        )

    def refused(self, send: Callable[[], object]) -> str:
        """Return the sentence of the refusal; what is served stays, and is proved."""
        live, answers, known = self.site.live(), self.site.answers(), self.versions()
        said = refusal(send)
        assert (self.site.live(), self.site.answers()) == (live, answers)
        assert self.versions() == known
        # A stale reply in vLLM's queues would be taken for that of this call.
        with Client(self.site.server.address) as client:
            assert client.verify().verified
        return said

    def versions(self) -> list[int]:
        """Return which versions are committed."""
        with Client(self.site.server.address) as client:
            return [about.version for about in client.versions()]


def refusal(send: Callable[[], object]) -> str:
    """Return the sentence with which vLLM answers 400."""
    with pytest.raises(requests.HTTPError) as caught:
        send()
    answer = caught.value.response
    assert answer is not None
    assert answer.status_code == 400
    return str(answer.json()["error"]["message"])


@contextmanager
def receiving_site(variables: Mapping[str, str], faults: Path) -> Iterator[ReceivingSite]:
    """Start one, serving; it is gone after the block.

    Args:
        variables: More environment variables of vLLM.
        faults: The file that says how the ranks' communicator fails; it need not exist.
    """
    flags = ("--worker-extension-cls", "tests.support.gloo_wire.GlooWire")
    variables = {"WEIGHTSYNC_TEST_WIRE": str(faults), **variables}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", None)
        use_gloo()
        with transfer_site("weightsync_nccl", *flags, variables=variables) as site:
            yield ReceivingSite(site)
