"""Which tests a stage runs, and what it says at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages import STAGES
from tests.support.bounds import within

ROOT = Path(__file__).parents[2]
#: Run by targets of their own.
_OTHERS = ("tests/gpu",)


def _stages_of(module: Path) -> list[str]:
    return [
        stage
        for stage, parts in STAGES.items()
        for part in parts
        if any(module.is_relative_to(path) for path in part.paths)
        and not any(module.is_relative_to(path) for path in part.but)
    ]


def test_every_module_is_in_one_stage() -> None:
    modules = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(modules) > 300
    wrong = {
        str(module): found
        for module in modules
        if not any(module.is_relative_to(folder) for folder in _OTHERS)
        and len(found := _stages_of(module)) != 1
    }
    assert wrong == {}


def test_every_path_of_a_stage_exists() -> None:
    paths = [path for parts in STAGES.values() for part in parts for path in part.paths + part.but]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def _copy(tmp_path: Path, files: dict[str, str]) -> Path:
    """Lay a tree beside this one that has the programs of the stages and these files."""
    for name in ("tests/stages.py", "tests/support/durations.py"):
        files[name] = (ROOT / name).read_text()
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def _run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.stages", *arguments],
        cwd=tree,
        env={**os.environ, "JOBS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_part_runs_after_one_that_failed_and_the_failure_stands_last(tmp_path: Path) -> None:
    tree = _copy(
        tmp_path,
        {
            "Makefile": "lint:\n\t@echo lint was run\n",
            "tests/unit/test_wrong.py": "def test_wrong():\n    assert 'this' == 'that'\n",
            "tests/planted/test_none.py": "",
            "tests/main/test_right.py": (
                "import pytest\n\ndef test_right():\n    pass\n\n"
                "def test_needs():\n    pytest.skip('no moon tonight')\n"
            ),
        },
    )
    done = _run(tree, "test")
    assert done.returncode == 1
    assert "lint was run" in done.stdout
    counts, end = done.stdout.split("\ntest: 1 passed, 1 failed, 1 skipped in ")[1].split("\n", 1)
    assert counts.endswith("minutes")
    could_not, _, failure = end.partition("\n\nFAILED tests/unit/test_wrong.py::test_wrong\n")
    assert could_not == "This machine could not run 1 tests (1: no moon tonight)"
    assert "'this' == 'that'" in failure


def test_a_module_that_cannot_be_read_fails_its_stage(tmp_path: Path) -> None:
    tree = _copy(tmp_path, {"tests/vllm/test_broken.py": "import no_such_module\n"})
    done = _run(tree, "test-vllm")
    assert done.returncode == 1
    assert "FAILED tests/vllm/test_broken.py" in done.stdout
    assert "no_such_module" in done.stdout


@pytest.mark.battery
def test_paths_choose_what_lies_in_the_stage(tmp_path: Path) -> None:
    text = "def test_it():\n    pass\n"
    tree = _copy(tmp_path, {f"tests/{name}": text for name in ("unit/test_a.py", "main/test_b.py")})
    done = _run(tree, "test", "tests/main/test_b.py", "-q")
    assert done.returncode == 0, done.stdout
    assert "test: 1 passed, 0 failed, 0 skipped" in done.stdout


def test_a_stage_that_runs_nothing_fails(tmp_path: Path) -> None:
    empty = _run(_copy(tmp_path, {"tests/vllm/test_none.py": ""}), "test-vllm")
    assert (empty.returncode, empty.stdout.splitlines()[-1]) == (1, "no test was run")
    gone = _run(tmp_path, "test-faults")
    assert gone.returncode == 1
    assert "there is no tests/faults and no tests/fuzz" in gone.stdout


@pytest.mark.battery
def test_a_run_on_a_gpu_tells_what_computed_attention(tmp_path: Path) -> None:
    (tmp_path / "test_engine.py").write_text(
        "from tests.support import vllm_server\n\n"
        "def test_it(tmp_path):\n"
        "    vllm = vllm_server.VllmServer(tmp_path, tmp_path)\n"
        "    lines = ['Using AttentionBackendEnum.FLASH_ATTN backend.',\n"
        "             'Using FLASHINFER attention backend out of potential backends: [].']\n"
        "    vllm.log_path.write_text('\\n'.join(lines))\n"
        "    vllm_server._up.append(vllm)\n\n"
        "def test_nothing():\n"
        "    vllm_server._up[0].stop()\n"
    )
    told = tmp_path / "told.json"
    command = ["-q", "-p", "tests.gpu.conftest", "-p", "tests.support.durations"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command, "--durations-json", str(told), "test_engine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "attention by FLASHINFER, FLASH_ATTN: 1 tests" in done.stdout
    tests = json.loads(told.read_text())["tests"]
    assert tests["test_engine.py::test_it"]["properties"] == {"attention": "FLASHINFER, FLASH_ATTN"}
    assert "properties" not in tests["test_engine.py::test_nothing"]


_PASSES = "def test_it():\n    pass\n"
_KILLED = "import os, signal\n\ndef test_it():\n    os.kill(os.getppid(), signal.SIGKILL)\n"
_LOSES = (
    "from pathlib import Path\n\n"
    "def pytest_unconfigure():\n"
    "    Path('build/stages/test-vllm.part.json').unlink(missing_ok=True)\n"
)
_ENDS = "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"test_a.py": _KILLED}, "pytest ended with -9 in tests/vllm"),
        ({"test_a.py": _PASSES, "conftest.py": _LOSES}, "wrote down 0 tests"),
        (
            {"test_a.py": "def test_it():\n    assert False\n"} | {"conftest.py": _ENDS},
            "pytest ended with 0 in",
        ),
    ],
    ids=["killed", "record", "nought"],
)
def test_what_ends_otherwise_than_its_tests_fails(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    tree = _copy(tmp_path, {f"tests/vllm/{name}": text for name, text in files.items()})
    done = _run(tree, "test-vllm")
    assert done.returncode == 1, done.stdout
    assert said in done.stdout


@pytest.mark.parametrize("arguments", [["tests/faults/test_b.py"], ["-k", "nothing"]])
@pytest.mark.battery
def test_a_choice_that_is_of_nothing_fails(tmp_path: Path, arguments: list[str]) -> None:
    tree = _copy(tmp_path, {f"tests/{n}/test_b.py": _PASSES for n in ("vllm", "faults")})
    done = _run(tree, "test-vllm", *arguments)
    assert done.returncode == 1
    assert f"no test of {' '.join(arguments)} was run: is it in this stage?" in done.stdout


def test_a_stage_that_is_ended_ends_pytest(tmp_path: Path) -> None:
    waits = (
        "import os, pathlib, time\n\n"
        "def test_it():\n    pathlib.Path('pid').write_text(str(os.getpid()))\n    time.sleep(60)\n"
    )
    tree = _copy(tmp_path, {"tests/vllm/test_a.py": waits})
    command = [sys.executable, "-m", "tests.stages", "test-vllm"]
    with subprocess.Popen(command, cwd=tree, env={**os.environ, "JOBS": "1"}) as stage:
        within(60, lambda: (tree / "pid").exists() and (tree / "pid").read_text() != "")
        stage.terminate()
        assert stage.wait(20) == 143
    worker = Path("/proc", (tree / "pid").read_text())
    within(20, lambda: not worker.exists())


def test_an_unknown_stage_is_refused_with_the_names() -> None:
    done = _run(ROOT, "test-everything")
    assert done.returncode == 1
    assert "STAGE is one of test, test-extensions" in done.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_ci_and_make_run_every_stage(stage: str) -> None:
    assert stage in (ROOT / ".ci/run").read_text().split("for stage in ")[1].split(";")[0].split()
    assert f"\n{stage}: setup ## " in (ROOT / "Makefile").read_text()
