"""Runs of a user's class, without a server."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import Reason
from weightsync_client import ClientError
from weightsync_client.trainer import Progress
from weightsync_client.trainer.job_runner import JobRunner, TrainOrder, UserClassError


class _Class:
    """Commits a version at each step, and writes down what is done with it."""

    made = 0
    unsaved: tuple[int, ...] = ()

    def setup(self, attached: Any) -> None:
        type(self).made += 1
        self.attached, self.count, self.closed = attached, 0, False

    def train(self, request: dict[str, Any], cancelled: threading.Event) -> Iterator[Any]:
        try:
            for step in range(request["steps"]):
                if request.get("fail") == step:
                    raise ZeroDivisionError
                if not request.get("quiet"):
                    self.attached.version += 1
                self.count += 1
                if request.get("cancel") == step:
                    cancelled.set()
                yield request.get("yield", Progress(step, 0.5))
        finally:
            self.closed = True

    def save_state(self, folder: Path) -> None:
        if self.attached.version in self.unsaved:
            return
        folder.joinpath("count").write_text(str(self.count))

    def load_state(self, folder: Path) -> None:
        self.count = int(folder.joinpath("count").read_text())


class _Plain:
    def setup(self, attached: Any) -> None:
        self.attached = attached

    def train(self, request: dict[str, Any], cancelled: threading.Event) -> list[Progress]:
        del request, cancelled
        self.attached.version += 1
        return [Progress(0)]


class _Run:
    def __init__(self, folder: Path, kind: Any = _Class) -> None:
        kind.made = 0
        self.kind = kind
        self.notices: list[dict[str, Any]] = []
        self.attached = SimpleNamespace(
            version=1, content_digest="aa", settle_transaction=lambda: None
        )
        self.runner = JobRunner(kind, self.attached, self.notices.append)  # type: ignore[arg-type]  # as much of it as is used
        self.order = TrainOrder("job", 4, "dd", "keep", "", f"{folder}/new-")
        self.cancelled = threading.Event()
        self.runner.reset()

    def train(self, order: TrainOrder | None = None, **request: Any) -> dict[str, Any]:
        return self.runner.train(order or self.order, request, self.cancelled)

    def told(self, op: str) -> list[dict[str, Any]]:
        return [notice for notice in self.notices if notice["op"] == op]

    @property
    def trainer(self) -> Any:
        return self.runner._trainer


@pytest.fixture
def run(tmp_path: Path) -> _Run:
    return _Run(tmp_path)


def test_a_job_begins_on_what_is_live_and_saves_what_it_commits(run: _Run, tmp_path: Path) -> None:
    answer = run.train(steps=2)
    assert run.notices[0] == {"op": "started", "version": 4}
    assert [notice["version"] for notice in run.told("step")] == [5, 6]
    assert (answer["version"], answer["committed"]) == (6, 6)
    assert "error" not in answer
    # Saved before it is told that the step is done.
    assert [notice["op"] for notice in run.notices[1:]] == ["saved", "step"] * 2
    assert {path.name: (path / "count").read_text() for path in tmp_path.iterdir()} == {
        "new-5": "1",
        "new-6": "2",
    }
    assert run.attached.content_digest == "dd"


def test_what_commits_nothing_saves_nothing(run: _Run, tmp_path: Path) -> None:
    answer = run.train(steps=3, quiet=True)
    assert [notice["version"] for notice in run.told("step")] == [0, 0, 0]
    assert (answer["version"], answer["committed"]) == (4, 0)
    assert not [*tmp_path.iterdir()]


def test_a_version_may_be_without_a_state(
    run: _Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Class, "unsaved", (5, 7))
    answer = run.train(steps=3)
    assert [notice["version"] for notice in run.told("saved")] == [6]
    assert [notice["version"] for notice in run.told("step")] == [5, 6, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["new-6"]
    assert answer["committed"] == 7


def test_state_is_kept_loaded_or_begun_anew(run: _Run, tmp_path: Path) -> None:
    run.train(steps=2)
    run.train(replace(run.order, version=6), steps=1)
    assert (run.trainer.count, run.kind.made) == (3, 1)
    load = replace(run.order, version=5, state="load", folder=f"{tmp_path}/new-5")
    run.train(load, steps=1, quiet=True)
    assert (run.trainer.count, run.kind.made) == (2, 1)
    run.train(replace(run.order, state="reset"), steps=1)
    assert (run.trainer.count, run.kind.made) == (1, 2)


def test_a_failed_job_tells_what_it_had_committed(run: _Run) -> None:
    answer = run.train(steps=3, fail=1)
    assert answer["reason"] == "TRAINER_FAILED"
    assert "ZeroDivisionError" in answer["error"]
    assert (answer["version"], answer["committed"]) == (5, 5)
    assert run.trainer.closed


def test_a_job_that_is_cancelled_ends_at_a_yield(run: _Run) -> None:
    answer = run.train(steps=10, cancel=1)
    assert (answer["reason"], answer["committed"]) == ("CANCELLED", 6)
    assert len(run.told("saved")) == 2
    assert run.trainer.closed


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("text", "train yields str; it must yield weightsync_client.trainer.Progress after each"),
        (None, "train yields NoneType; it must yield weightsync_client.trainer.Progress"),
        (Progress(-1), "step of a Progress is -1"),
        (Progress(0, tokens=-5), "tokens of a Progress is -5"),
        (Progress(0, loss="high"), "ValueError"),  # type: ignore[arg-type]  # as users do
    ],
)
def test_a_step_that_is_none_is_told(run: _Run, step: Any, sentence: str) -> None:
    answer = run.train(steps=1, **{"yield": step})
    assert answer["reason"] == "TRAINER_FAILED"
    assert sentence in answer["error"]


async def _asynchronous(self: Any, request: Any, cancelled: Any) -> Any:
    yield Progress(0)


@pytest.mark.parametrize(
    ("train", "what"),
    [(lambda *_: None, "NoneType"), (lambda *_: 3, "int"), (_asynchronous, "async_generator")],
    ids=["nothing", "a number", "asynchronous"],
)
def test_a_class_that_yields_nothing_is_told_what_to_yield(
    run: _Run, monkeypatch: pytest.MonkeyPatch, train: Any, what: str
) -> None:
    monkeypatch.setattr(_Class, "train", train)
    sentence = f"train returned {what}; it must yield weightsync_client.trainer.Progress after"
    assert sentence in run.train()["error"]


def _forked() -> int:
    with warnings.catch_warnings():
        # There may be threads; the child needs nothing that they might hold locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@pytest.mark.parametrize("place", ["before a step", "at the end"])
def test_a_process_that_train_forks_is_no_second_trainer(
    run: _Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    here = os.getpid()
    children = []

    def train(self: _Class, request: Any, cancelled: Any) -> Iterator[Progress]:
        if place == "at the end":
            yield Progress(0)
        self.attached.version += 1
        children.append(_forked())
        if place == "before a step":
            yield Progress(0)

    monkeypatch.setattr(_Class, "train", train)
    monkeypatch.setattr(_Class, "save_state", lambda _, folder: (folder / str(os.getpid())).touch())
    answer = run.train()
    if os.getpid() != here:
        os._exit(42)
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert answer["committed"] == 5
    assert [path.name for path in (tmp_path / "new-5").iterdir()] == [str(here)]


def test_a_class_may_keep_nothing(tmp_path: Path) -> None:
    run = _Run(tmp_path, _Plain)
    assert not run.runner.loads
    answer = run.train()
    assert answer["committed"] == 5
    assert [notice["version"] for notice in run.told("step")] == [5]
    assert not [*tmp_path.iterdir()]


def test_a_state_that_cannot_be_loaded_is_told_and_nothing_begins(run: _Run) -> None:
    answer = run.train(replace(run.order, state="load", folder="/nowhere"), steps=1)
    assert "load_state of the trainer's class raised FileNotFoundError" in answer["error"]
    assert not run.told("started")


def test_a_class_that_cannot_be_set_up_is_told_at_each_try(
    run: _Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, attached: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(_Class, "setup", fail)
        with pytest.raises(UserClassError):
            run.runner.reset()
        assert "setup of the trainer's class raised MemoryError" in run.train(steps=1)["error"]
    assert "error" not in run.train(steps=1)


class _Background:
    """What a transaction in the background does to `attached`, once somebody waits for it."""

    def __init__(self, attached: Any) -> None:
        self.attached, self.fails, self.open = attached, False, False

    def settle(self) -> None:
        if self.open:
            self.open = False
            if self.fails:
                raise ClientError(Reason.APPLY_RESTORED, "was put back")
            self.attached.version += 1


class _InBackground(_Class):
    def train(self, request: dict[str, Any], cancelled: threading.Event) -> Iterator[Any]:
        for step in range(request["steps"]):
            self.count += 1
            self.attached.background.fails = request.get("fail") == step
            self.attached.background.open = True
            if request.get("raise") == step:
                raise ZeroDivisionError
            if request.get("cancel") == step:
                cancelled.set()
            yield Progress(step)


@pytest.fixture
def background(tmp_path: Path) -> _Run:
    run = _Run(tmp_path, _InBackground)
    run.attached.background = _Background(run.attached)
    run.attached.settle_transaction = run.attached.background.settle
    return run


def test_a_state_is_that_of_the_version_that_comes_of_it(background: _Run, tmp_path: Path) -> None:
    answer = background.train(steps=2)
    assert [notice["version"] for notice in background.told("step")] == [5, 6]
    assert (answer["version"], answer["committed"]) == (6, 6)
    assert {path.name: (path / "count").read_text() for path in tmp_path.iterdir()} == {
        "new-5": "1",
        "new-6": "2",
    }


@pytest.mark.parametrize("last", [1, 2])
def test_a_version_that_was_put_back_is_the_end_of_its_own_job(background: _Run, last: int) -> None:
    answer = background.train(steps=last, fail=last - 1)
    assert answer["reason"] == Reason.TRAINER_FAILED.value
    assert "was put back" in answer["error"]
    assert (answer["version"], answer["committed"]) == (3 + last, 5 * (last == 2))
    assert "error" not in background.train(steps=1)


@pytest.mark.parametrize("how", ["raise", "cancel"])
def test_a_job_that_ends_early_names_what_its_transaction_came_to(
    background: _Run, how: str
) -> None:
    answer = background.train(None, steps=2, **{how: 0})
    assert (answer["version"], answer["committed"]) == (5, 5)
    assert not background.attached.background.open
    background.cancelled.clear()
    # What fails when all is over is still this job's.
    answer = background.train(replace(background.order, version=5), steps=2, fail=0, **{how: 0})
    assert answer["reason"] in {Reason.TRAINER_FAILED.value, Reason.CANCELLED.value}
    assert answer["committed"] == 0
    background.cancelled.clear()
    assert "error" not in background.train(steps=1)


class _MuteError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    "kind", [_MuteError, type("_Silent", (_MuteError,), {"__repr__": _MuteError.__str__})]
)
def test_an_error_that_cannot_say_what_it_is_fails_its_job(
    run: _Run, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def train(*_: object) -> None:
        raise kind

    monkeypatch.setattr(_Class, "train", train)
    answer = run.train(steps=1)
    assert answer["reason"] == Reason.TRAINER_FAILED.value
    assert f"{kind.__name__}: its text raised SystemExit" in answer["error"]
    assert "in train" in answer["metadata"]["traceback"]
