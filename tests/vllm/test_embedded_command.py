"""The embedded engine through the command, with vLLM on this machine's CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.embedded_command import EmbeddedSite
from tests.support.vllm_server import cpu_environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_it_is_pushed_to_restarted_and_leaves_nothing(run_dir: Path) -> None:
    site = EmbeddedSite(run_dir, "float32", variables=cpu_environment())
    try:
        site.walk()
    finally:
        site.server.kill()
