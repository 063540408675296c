"""Kinds of models over two GPUs: halves of each tensor, and replicas that share experts.

Needs two GPUs, and a vLLM of 0.26 or newer built for them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from benchmarks.gpu.kinds import KINDS
from benchmarks.gpu.loading import ranks, transform
from tests.support.kind_site import Fresh, KindSite
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs"),
]

_EXPERTS = "--enable-expert-parallel"
_ONLINE = ("--quantization", "fp8")


class _Case(NamedTuple):
    """A kind of model over two GPUs, and what leads from a version's bytes to the live ones."""

    kind: str
    sizes: dict[str, int]
    flags: tuple[str, ...]
    transform: str

    @property
    def ranks(self) -> tuple[str, ...]:
        """As they are named."""
        return ("0/0/0", "1/0/0") if "dp" in self.sizes else ("0/0/0", "0/0/1")


_SITES = {
    "halves": _Case("qwen3_fp8_online", {"tp": 2}, (), "twin"),
    "experts": _Case("qwen3_moe_bf16", {"tp": 2}, (_EXPERTS, *_ONLINE), "twin"),
    "latent": _Case("deepseek_fp8", {"tp": 2}, (), "twin"),
    "replicas": _Case("qwen3_fp8_online", {"dp": 2}, (), "twin"),
    "replicas_share_experts": _Case("deepseek_fp8", {"dp": 2}, (_EXPERTS,), "twin"),
    "replicas_copy_experts": _Case("qwen3_moe_fp8", {"dp": 2}, (_EXPERTS,), "plan"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(f"two-{name}")) for name in _SITES],
)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[KindSite, Fresh, _Case]]:
    """Start a site over two GPUs."""
    case = _SITES[request.param]
    root = Path(tempfile.mkdtemp(prefix="w2-"))
    site = KindSite(KINDS[case.kind], root, *case.flags, **case.sizes)
    try:
        yield site, site.start(), case
    finally:
        site.stop()
        shutil.rmtree(root)


def test_all_ranks_take_a_version_and_go_back_as_one(
    started: tuple[KindSite, Fresh, _Case], request: pytest.FixtureRequest
) -> None:
    site, fresh, case = started
    before, first = site.answers(), site.digests()
    assert before != fresh.answers
    report = site.apply(site.push("b"))
    assert transform(site.client) == case.transform
    assert tuple(rank.rank for rank in ranks(site.client)) == case.ranks
    assert site.answers() == fresh.answers
    assert site.digests() == fresh.digests
    assert site.verified()
    site.rollback()
    assert site.answers() == before
    assert site.digests() == first
    assert site.verified()
    print(request.node.name, report.phases.paused_total.ToMilliseconds(), "ms")  # noqa: T201


def test_one_rank_that_fails_keeps_all_from_a_version(
    started: tuple[KindSite, Fresh, _Case],
) -> None:
    site, _, _ = started
    before, digests = site.answers(), site.digests()
    refusal = site.refused(site.push("b"), "worker.written=1*error(ENOMEM)")
    assert refusal.reason is Reason.APPLY_RESTORED, refusal.message
    assert site.answers() == before
    assert site.digests() == digests
    assert site.verified()


def test_replicas_and_halves_are_updated_in_a_row(
    started: tuple[KindSite, Fresh, _Case],
) -> None:
    site, fresh, _ = started
    for content in "abab":
        site.apply(site.push(content))
    assert site.answers() == fresh.answers
    assert site.verified()


def test_a_loader_is_on_the_gpu_that_its_engine_was_given() -> None:
    root = Path(tempfile.mkdtemp(prefix="w2-"))
    # Its only rank is the first one, and on the second GPU.
    site = KindSite(KINDS["qwen3_fp8_online"], root, "--device-ids", "1")
    try:
        fresh = site.start()
        site.apply(site.push("b"))
        assert transform(site.client) == "twin"
        assert site.answers() == fresh.answers
        assert site.verified()
        # Of the first one; on which neither the rank nor its loader has anything.
        assert site.memory()[0] == 0
    finally:
        site.stop()
        shutil.rmtree(root)
