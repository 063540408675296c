"""vLLM's sleep mode on a GPU: no loader and no arena while it sleeps, and an update after it.

Needs a GPU, and a vLLM of 0.26 or newer built for it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu.kinds import KINDS
from benchmarks.gpu.loading import arena_bytes
from tests.support.kind_site import Fresh, KindSite
from tests.support.loader_processes import loaders_of, wait_gone
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

_CHANGE_S = 60.0


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.xdist_group(f"sleep-{name}"))
        for name in ("qwen3_fp8_online", "qwen3_moe_bf16")
    ],
)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[KindSite, Fresh]]:
    """Start a site of a kind whose vLLM can sleep: one is loaded, one is copied."""
    root = Path(tempfile.mkdtemp(prefix="ws-"))
    site = KindSite(KINDS[request.param], root, "--enable-sleep-mode")
    try:
        yield site, site.start()
    finally:
        site.stop()
        shutil.rmtree(root)


def test_an_update_after_a_sleep_answers_like_a_fresh_engine(
    started: tuple[KindSite, Fresh],
) -> None:
    site, fresh = started
    before = site.answers()
    version = site.push("b")
    time.sleep(1)
    loaders, arena = loaders_of(site.vllm), arena_bytes(site.client)
    assert bool(loaders) == bool(arena)
    awake, _ = site.memory()
    assert site.vllm.request("/sleep?level=1", {}, _CHANGE_S)[0] == 200
    wait_gone(loaders, 1.0)
    asleep, _ = site.memory()
    # The loader's context as well.
    assert awake - asleep > arena
    assert site.refused(version).reason is Reason.ENGINE_ASLEEP
    assert site.vllm.request("/wake_up", {}, _CHANGE_S)[0] == 200
    assert site.answers() == before
    site.apply(version)
    assert site.answers() == fresh.answers
    assert site.digests() == fresh.digests
    assert site.verified()
    site.rollback()
    assert site.answers() == before
