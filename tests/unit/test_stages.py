"""Which tests a stage runs, and what it says at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages import STAGES

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


def test_an_unknown_stage_is_refused_with_the_names() -> None:
    done = _run(ROOT, "test-everything")
    assert done.returncode == 1
    assert "STAGE is one of test, test-extensions" in done.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_ci_and_make_run_every_stage(stage: str) -> None:
    assert stage in (ROOT / ".ci/run").read_text().split("for stage in ")[1].split(";")[0].split()
    assert f"\n{stage}: setup ## " in (ROOT / "Makefile").read_text()
