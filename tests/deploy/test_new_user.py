"""A new user types README's first blocks as they stand: no root, no compiler, an empty home.

Into an environment that holds vLLM the checkout is installed in each run. `make demo`, which first
installs PyTorch and vLLM from where pip takes them on this machine, is with the long tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.deploy.compose_file import Mount, Service
from tests.deploy.conftest import require_namespaces
from tests.deploy.containers import Container, Stack
from tests.support.models import make_checkpoint
from tests.support.pip_options import pip_options
from tests.support.snippets import ROOT, blocks
from tests.support.vllm_server import own_core
from tests.support.wheels import export_tree, run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: A user that no system has.
_UID = 54321
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_HOME = "/home/user"
#: Longer than a vLLM takes to start on two busy cores.
_READY_S = 400
#: What clients of package indexes read beside their own configuration.
_OF_CLIENTS = re.compile(
    r"SSL_CERT_\w+|NODE_EXTRA_CA_CERTS|npm_config_\w+|\w+_proxy", re.IGNORECASE
)


def _compilers() -> list[str]:
    """Return the compilers of the system, which a new user does not have."""
    names = ("cc", "c++", "gcc", "g++", "clang", "clang++")
    found = (shutil.which(name, path=_SYSTEM_PATH) for name in names)
    return sorted({os.path.realpath(path) for path in found if path})


def _readme(number: int) -> str:
    """Return one of README's blocks for a shell, counted from 0."""
    shell = [one.text for one in blocks() if (one.page, one.language) == ("README.md", "sh")]
    return shell[number]


def _repository(folder: Path) -> None:
    """Make a repository of this tree in `folder`, which a new user clones."""
    export_tree(folder)
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.fsync=none")
    run_command(*git, "init", "-q", "-b", "main", cwd=folder)
    run_command(*git, "add", "-A", cwd=folder)
    run_command(*git, "commit", "-q", "-m", "tree", cwd=folder)


def _own(folder: Path) -> None:
    """Give a folder to the new user; without root it belongs to that user already."""
    if os.geteuid() == 0:
        run_command("chown", "-R", f"{_UID}:{_UID}", str(folder), cwd=folder)


# Into an environment that holds vLLM.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a repository to clone, two checkpoints, and what a build of ours needs."""
    home = tmp_path_factory.mktemp("new") / "home"
    _repository(home / "repository")
    make_checkpoint(home / "model", dtype="bfloat16", seed=1)
    make_checkpoint(home / "later", dtype="bfloat16", seed=2)
    built_by = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = (sys.executable, "-m", "pip", "download", "-q", "-d", "index")
    run_command(*pip, *built_by, cwd=home)
    _own(home)
    return home


@pytest.fixture(scope="module")
def user(home: Path) -> Iterator[Container]:
    """A shell of that user, whose system holds a Python and the packages of a vLLM, read-only.

    It reaches no network: what pip would replace or add beside the checkout, it could not get.
    """
    require_namespaces()
    environment = {
        "PATH": f"{_HOME}/env/bin:{_SYSTEM_PATH}",
        "HOME": _HOME,
        "USER": "user",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{_HOME}/index",
        # Else every vLLM of these tests takes the same core.
        "VLLM_CPU_OMP_THREADS_BIND": own_core(),
    }
    shell = Service(
        name="user",
        argv=["sh", "-c", "echo logged in; exec sleep infinity"],
        environment=environment,
        uid=_UID,
        gid=_UID,
        mounts=[
            Mount(str(home), _HOME, read_only=False),
            *(Mount(os.devnull, path, read_only=True) for path in _compilers()),
        ],
        tmpfs=[],
        read_only=False,
        shm_bytes=1 << 30,
        healthcheck=[],
        stop_grace_s=10,
        raw={},
    )
    with Stack({"user": shell}) as stack:
        container = stack.start("user")
        container.wait_log("logged in", 60)
        yield container


def _type(user: Container, text: str) -> str:
    """Type a block into a shell in the clone, and return what was printed."""
    own = text.replace("MODEL", f"{_HOME}/model").replace("FOLDER", f"{_HOME}/later")
    ran = user.run("bash", "-euc", f"cd; cd weightsync 2>/dev/null || true\n{own}", timeout_s=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _existing_environment() -> str:
    """Return what makes an environment that holds this one's vLLM, but not its weightsync."""
    # A folder named in a .pth file is put on the path without reading the .pth files inside it.
    return f"""{Path(sys.executable).resolve()} -m venv env
        cd env/lib/python3*/site-packages
        echo {sysconfig.get_path("purelib")} > vllm.pth"""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_from_a_clone_to_tokens_of_a_pushed_version(
    user: Container, home: Path, program: Callable[[str, str], str]
) -> None:
    program("curl", "curl")
    _type(user, _existing_environment())
    _type(user, "git clone -q repository weightsync")
    install, start = _readme(1).splitlines()
    _type(user, install)
    # The other terminal stays in the foreground.
    _type(user, f"{start} > ../up.log 2>&1 < /dev/null &")
    said, end = home / "up.log", time.monotonic() + _READY_S
    while "Ctrl-C ends both" not in said.read_text():
        assert "weightsync: " not in said.read_text(), said.read_text()
        assert time.monotonic() < end, said.read_text()
        # It loads a model, which takes half a minute.
        time.sleep(0.2)
    commands, curl, asked = _readme(2).partition("curl")
    before = _type(user, curl + asked)
    _type(user, commands)
    after = _type(user, curl + asked)
    assert "x-weightsync-version: 1" in before
    assert "x-weightsync-version: 2" in after
    assert _text(before) != _text(after)
    # Nothing but weightsync was installed: vLLM and PyTorch are those that were there.
    (packages,) = (home / "env/lib").glob("python3*/site-packages")
    installed = {one.name.partition("-")[0] for one in packages.glob("*.dist-info")}
    assert installed - {"pip", "setuptools"} == {"weightsync"}


def _text(answer: str) -> str:
    """Return what vLLM generated, of an answer with its headers."""
    text = json.loads(answer[answer.index("{") :])["choices"][0]["text"]
    assert isinstance(text, str)
    assert text
    return text


# With nothing but a Python and make.


@pytest.fixture
def empty_home() -> Iterator[Path]:
    """An empty home of a new user that the user can reach; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="wsn", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.vllm
@pytest.mark.battery
# On two busy cores the installation alone has taken 14 minutes, and the demo may take 12.
@pytest.mark.timeout(3000)
def test_from_a_clone_to_the_demo(empty_home: Path) -> None:
    _repository(empty_home / "repository")
    _own(empty_home)
    kept = {name: text for name, text in os.environ.items() if _OF_CLIENTS.fullmatch(name)}
    pip = {f"PIP_{name.upper().replace('-', '_')}": text for name, text in pip_options().items()}
    environment = kept | pip | {"PATH": _SYSTEM_PATH, "HOME": str(empty_home)}
    demo = _readme(0).splitlines()[0]
    typed = f"cd; git clone -q repository weightsync; cd weightsync\n{demo}"
    ran = subprocess.run(
        [*_as_new_user(), "bash", "-euc", typed],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # A version with its loss and what the model says; then the last one.
    assert re.search(r"^ +2 +\d+\.\d+ .* \S+", ran.stdout, re.MULTILINE), ran.stdout
    assert "proved from the live parameters" in ran.stdout


def _as_new_user() -> list[str]:
    """Return the words before a command that have that user run it; without root: oneself."""
    if os.geteuid() != 0:
        return []
    hidden = "".join(f"mount --bind {os.devnull} {path}; " for path in _compilers())
    as_user = f"setpriv --reuid {_UID} --regid {_UID} --clear-groups --no-new-privs"
    return ["unshare", "--mount", "bash", "-euc", f'{hidden}exec {as_user} "$@"', "bash"]
