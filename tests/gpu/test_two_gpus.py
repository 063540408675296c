"""Kinds that must be loaded, over two GPUs: halves of each tensor, and replicas that share experts.

Needs two GPUs, and a vLLM of 0.26 or newer built for them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import torch

from benchmarks.gpu.kinds import KINDS
from benchmarks.gpu.loading import ranks, transform
from tests.support.kind_site import Fresh, KindSite
from weightsync.errors import Reason
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs"),
]

#: Of each: kind, sizes, more flags, ranks.
_SITES: dict[str, tuple[str, dict[str, int], tuple[str, ...], tuple[str, ...]]] = {
    "tp2": ("qwen3_moe_fp8", {"tp": 2}, (), ("0/0/0", "0/0/1")),
    "ep2": ("qwen3_moe_fp8", {"tp": 2}, ("--enable-expert-parallel",), ("0/0/0", "0/0/1")),
    "latent": ("deepseek_fp8", {"tp": 2}, (), ("0/0/0", "0/0/1")),
    "replicas": ("qwen3_fp8_online", {"dp": 2}, (), ("0/0/0", "1/0/0")),
    "shared": ("qwen3_moe_fp8", {"dp": 2}, ("--enable-expert-parallel",), ("0/0/0", "1/0/0")),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(f"two-{name}")) for name in _SITES],
)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[KindSite, Fresh, tuple[str, ...]]]:
    """Start a site over two GPUs."""
    kind, sizes, flags, names = _SITES[request.param]
    root = Path(tempfile.mkdtemp(prefix="w2-"))
    site = KindSite(KINDS[kind], root, *flags, **sizes)
    try:
        yield site, site.start(), names
    finally:
        site.stop()
        shutil.rmtree(root)


def test_all_ranks_take_a_version_and_go_back_as_one(
    started: tuple[KindSite, Fresh, tuple[str, ...]],
) -> None:
    site, fresh, names = started
    before, first = site.answers(), site.digests()
    assert before != fresh.answers
    site.apply(site.push("b"))
    assert transform(site.client) == "twin"
    assert tuple(rank.rank for rank in ranks(site.client)) == names
    assert site.answers() == fresh.answers
    assert site.digests() == fresh.digests
    assert site.verified()
    site.rollback()
    assert site.answers() == before
    assert site.digests() == first
    assert site.verified()


def test_one_rank_that_fails_keeps_all_from_a_version(
    started: tuple[KindSite, Fresh, tuple[str, ...]],
) -> None:
    site, _, _ = started
    before, digests = site.answers(), site.digests()
    version = site.push("b")
    site.arm("worker.written=1*error(ENOMEM)")
    try:
        with pytest.raises(grpc.RpcError) as caught:
            site.apply(version)
    finally:
        site.arm("")
    refusal = from_call(caught.value)
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED, refusal.message
    assert site.answers() == before
    assert site.digests() == digests
    assert site.verified()


def test_replicas_and_halves_are_updated_in_a_row(
    started: tuple[KindSite, Fresh, tuple[str, ...]],
) -> None:
    site, fresh, _ = started
    for content in "abab":
        site.apply(site.push(content))
    assert site.answers() == fresh.answers
    assert site.verified()
