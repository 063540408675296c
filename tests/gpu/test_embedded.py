"""The embedded engine through the command, with vLLM on a GPU."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.embedded_command import EmbeddedSite

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_it_is_pushed_to_restarted_and_leaves_nothing() -> None:
    root = Path(tempfile.mkdtemp(prefix="ws-"))
    # A fixed cache: vLLM measures the device otherwise, and fails while other engines start there.
    flags = ("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(1 << 30))
    site = EmbeddedSite(root, "bfloat16", flags=flags, sizes={"hidden": 1024, "layers": 4})
    try:
        site.walk()
    finally:
        site.server.kill()
        shutil.rmtree(root)
