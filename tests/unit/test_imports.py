"""What an import loads; which room may import which is checked by import-linter (`make lint`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _loaded(module: str, heavy: set[str]) -> list[str]:
    """Return which of `heavy` are loaded by an import of `module`, and nothing else before it."""
    program = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    "module",
    ["weightsync", "weightsync_client", "weightsync_client.cli", "weightsync_server.cli"],
)
def test_importing_it_loads_neither_torch_nor_vllm(module: str) -> None:
    assert _loaded(module, {"torch", "vllm"}) == []


@pytest.mark.parametrize("module", ["weightsync_client", "weightsync_server.app"])
def test_importing_it_loads_no_opentelemetry(module: str) -> None:
    assert _loaded(module, {"opentelemetry"}) == []


def test_a_loader_can_end_with_its_rank_before_it_loads_anything_heavy() -> None:
    # Until its `main` runs, a rank that is killed would leave it behind.
    heavy = {"numpy", "torch", "vllm", "xxhash"}
    assert _loaded("weightsync.vllm.shadow.loader_main", heavy) == []


def test_the_codec_loads_neither_engines_nor_grpc() -> None:
    assert _loaded("weightsync.delta", {"grpc", "torch", "vllm"}) == []


def test_what_is_loaded_is_found() -> None:
    assert _loaded("grpc", {"grpc", "torch"}) == ["grpc"]


def test_the_house_and_the_contracts_hold() -> None:
    # As `make lint` runs them.
    contracts = str(Path(sys.executable).with_name("lint-imports"))
    for command in ([sys.executable, "scripts/house.py"], [contracts, "--no-cache"]):
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert ran.returncode == 0, ran.stdout
