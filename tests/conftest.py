"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from weightsync.delta.kernels import VARIABLE, native

if TYPE_CHECKING:
    from collections.abc import Callable


# Workers of pytest-xdist have a core each; more threads of PyTorch only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has what it starts in the background ignore interrupts, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine any example may take long.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

_ROOT = Path(__file__).parents[1]

#: Fixtures of the tests that start servers and engines, whichever stage they are in.
pytest_plugins = ("tests.support.server_fixtures", "tests.support.vllm_fixtures")


class _ByModule(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Gives a worker a module at a time, or all of a folder that is a package: they share more."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        folder = Path(module).parent
        return str(folder) if (_ROOT / folder / "__init__.py").exists() else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Schedule what `--dist loadfile` asks for."""
    return _ByModule(config, log) if config.getvalue("dist") == "loadfile" else None


def _limit_kernels(best: str) -> None:
    """Take this machine for one without better delta kernels, as another processor is."""
    levels = native.levels

    def limited() -> tuple[str, ...]:
        found = levels()
        return found[: ("plain", *found).index(best)]

    native.levels = limited


# Before modules of tests ask what there is. Processes that tests start choose by the same variable.
if os.environ.get(VARIABLE):
    _limit_kernels(os.environ[VARIABLE])


@pytest.fixture(scope="session")
def program() -> Callable[[str, str], str]:
    """Return a function that finds a program outside Python, given its name and Debian package.

    A test that needs one is skipped where it is absent, but fails in CI, which installs them all.
    """

    def find(name: str, package: str) -> str:
        if found := shutil.which(name):
            return found
        reason = f"{name} is not installed (Debian package {package})"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)

    return find


@pytest.fixture(scope="session")
def etcd(program: Callable[[str, str], str]) -> str:
    """Return the path of etcd."""
    return program("etcd", "etcd-server")
