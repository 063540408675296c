"""A trainer that the server supervises: its jobs, and what becomes of them when something ends."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.memory_bridge import memory_bridge
from tests.support.processes import state
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.testing import MemoryEngine
from weightsync_client import (
    Client,
    ClientError,
    LiveCheck,
    TrainerState,
    TrainEvent,
    TrainProgress,
    TrainStatus,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
_SECRET = "ws_of-nobody"
_ADDING = "tests.support.adding_trainer:AddingTrainer"


def _tensors(seed: float) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(32.0).reshape(8, 4) + seed, "b": torch.zeros(3) + seed}


def _until(true: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


class _Site:
    """A server with an engine of two ranks for tests, and a trainer.

    Attributes:
        first: The version that a test begins with, the newest; its content is `_tensors(0)`.
        before: What the trainer has done when a test begins.
    """

    first = 1
    before: TrainStatus
    _logged = 0

    def __init__(self, folder: Path, trainer: str, *flags: str, memory: bool = True) -> None:
        (folder / "model").mkdir()
        save_file(_tensors(0), folder / "model/model.safetensors")
        (folder / "model/tokenizer.json").write_text("{}")
        self.folder = folder
        self.plan = folder / "plan"
        self.plan.write_text("")
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[
                *(("--engine=memory", f"--model={folder}/model", "--ranks=2") if memory else ()),
                *("--slots", "3"),
                *("--trainer", trainer, "--checkpoint-dir", f"{folder}/checkpoints"),
                *flags,
            ],
            variables={
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (os.environ.get("PYTHONPATH"), str(ROOT), f"{folder}/modules"))
                ),
                "WEIGHTSYNC_TOKEN": _SECRET,
                "MY_API_KEY": _SECRET,
                "WEIGHTSYNC_FAILPOINTS": f"@{self.plan}",
            },
        )
        self.client = Client(self.server.address)

    def start(self) -> None:
        self.server.start()
        self.server.wait_serving(_START_S)

    def prepare(self) -> None:
        """Have a version live as it was at first, a trainer without a job, and nothing fail."""
        self.plan.write_text("")
        process = self.server.process
        if process is None or process.poll() is not None:
            self.server.kill()
            self.start()
        status = self.client.train_status()
        for job in filter(None, (*status.queued_job_ids, status.running_job_id)):
            self.client.cancel_train(job)
        self.ready()
        self.first = self.client.push(_tensors(0)).version
        self.client.apply(self.first)
        self.before = self.client.train_status()
        self._logged = len(self.server.log)

    @property
    def log(self) -> str:
        """What the server has printed since the test began."""
        return self.server.log[self._logged :]

    def done(self) -> TrainStatus:
        """Return the status, with what the trainer has done since the test began."""
        status = self.client.train_status()
        counts = ("finished", "failed", "cancelled", "restarts")
        since = {name: getattr(status, name) - getattr(self.before, name) for name in counts}
        return replace(status, **since)

    def wait(self, *states: TrainerState) -> None:
        """Wait until the trainer stands so."""
        _until(lambda: self.client.train_status().state in states, _START_S)

    def ready(self) -> int:
        """Return the process of the trainer once it waits for jobs."""
        self.wait(TrainerState.READY)
        return self.client.train_status().pid

    def train(self, **request: Any) -> list[TrainProgress]:
        """Return what becomes of a job that ends well."""
        return list(self.client.train(request))

    def begin(self, **request: Any) -> tuple[str, Generator[TrainProgress, None, None]]:
        """Return the id of a job that has begun, and what becomes of it."""
        events = self.client.train(request)
        for event in events:
            if event.event is TrainEvent.STARTED:
                break
        return event.job_id, events

    def refused(self, reason: Reason, **request: Any) -> ClientError:
        """Return why a job did not end well."""
        with pytest.raises(ClientError) as caught:
            self.train(**request)
        assert caught.value.reason is reason, caught.value
        return caught.value

    def holds(self, after: int, number: float) -> None:
        """Check what is served.

        Args:
            after: By how much its version is above the first.
            number: What its content has more than the checkpoint.
        """
        assert self.server.wait_serving(_START_S).live_version == self.first + after
        assert self.client.verify().verified
        assert not any(self.client.status().invariant_violations.values())
        content = {tensor.name: tensor.torch() for tensor in self.client.tensors()}
        for name, tensor in _tensors(number).items():
            assert torch.equal(content[name], tensor)

    def close(self) -> None:
        self.client.close()
        self.server.kill()


@contextlib.contextmanager
def _site(trainer: str, *flags: str) -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wst") as name:
        site = _Site(Path(name), trainer, *flags)
        try:
            site.start()
            yield site
        finally:
            site.close()


@pytest.fixture(scope="module")
def shared_site() -> Iterator[_Site]:
    flags = ("--trainer-queue=1", "--trainer-grace-s=2", "--trainer-silence-s=3")
    with _site(_ADDING, *flags, "--checkpoint-folders=2") as site:
        yield site


@pytest.fixture
def site(shared_site: _Site) -> _Site:
    shared_site.prepare()
    return shared_site


def test_a_job_changes_what_is_live(site: _Site) -> None:
    queued, started, *steps, finished = site.train(steps=2)
    assert (queued.event, queued.ahead) == (TrainEvent.QUEUED, 0)
    assert (started.event, started.version) == (TrainEvent.STARTED, site.first)
    assert [(s.step, s.version - site.first) for s in steps] == [(0, 1), (1, 2)]
    assert [(s.loss, s.tokens) for s in steps] == [(1.0, 4), (2.0, 4)]
    last = site.first + 2
    assert (finished.event, finished.version, finished.step) == (TrainEvent.FINISHED, last, 2)
    site.holds(2, 20)
    # One that commits nothing goes on from there; what it forks has no voice.
    _, started, step, finished = site.train(quiet=0, fork="after")
    assert (started.version, step.version, step.loss, finished.version) == (last, 0, 3.0, last)
    _until(lambda: "returned from the trainer's class" in site.log)
    *_, finished = site.train(fork="inside")
    assert finished.version == last + 1
    site.holds(3, 30)
    _until(lambda: site.log.count("returned from the trainer's class") == 2)
    status = site.done()
    assert (status.state, status.finished, status.failed) == (TrainerState.READY, 3, 0)
    assert (status.state_version, status.reason, status.restarts) == (last + 1, "", 0)
    socket = site.folder / "run/trainer.sock"
    assert socket.stat().st_mode & 0o777 == 0o600
    environment = Path(f"/proc/{status.pid}/environ").read_bytes()
    assert _SECRET.encode() not in environment
    assert b"PYTHONPATH" in environment


def test_jobs_wait_for_their_turn_up_to_a_bound(site: _Site) -> None:
    running, events = site.begin(wait_s=60)
    waiting = site.client.train({})
    first = next(waiting)
    assert (first.event, first.ahead) == (TrainEvent.QUEUED, 1)
    error = site.refused(Reason.LIMIT_EXCEEDED)
    assert error.retry_after_s
    assert "trainer_queue" in error.message
    status = site.client.train_status()
    assert (status.state, status.running_job_id) == (TrainerState.TRAINING, running)
    assert status.queued_job_ids == (first.job_id,)
    site.client.cancel_train(first.job_id)
    with pytest.raises(ClientError) as caught:
        next(waiting)
    assert caught.value.reason is Reason.CANCELLED
    site.client.cancel_train(running)
    with pytest.raises(ClientError) as caught:
        list(events)
    assert caught.value.reason is Reason.CANCELLED
    with pytest.raises(ClientError) as caught:
        site.client.cancel_train(running)
    assert caught.value.reason is Reason.JOB_UNKNOWN
    # It has looked at its event: nothing was to be started anew.
    status = site.done()
    assert (status.cancelled, status.restarts) == (2, 0)
    site.holds(0, 0)


def test_a_caller_that_leaves_has_cancelled_its_job(site: _Site) -> None:
    _, events = site.begin(steps=1000, wait_s=0.05)
    next(events)
    events.close()
    _until(lambda: site.done().cancelled == 1)
    site.wait(TrainerState.READY)
    steps = site.client.get_version().version - site.first
    assert steps >= 1
    site.holds(steps, 10 * steps)


def test_one_that_does_not_end_when_it_is_cancelled_is_ended(site: _Site) -> None:
    job, events = site.begin(hang="inside")
    _until(lambda: "it hangs inside" in site.log)
    site.client.cancel_train(job)
    with pytest.raises(ClientError) as caught:
        list(events)
    assert caught.value.reason is Reason.CANCELLED
    site.holds(0, 0)
    site.ready()
    assert "did not end a job within" in site.client.train_status().reason
    assert site.train()[-1].version == site.first + 1
    status = site.done()
    assert (status.restarts, status.reason) == (1, "")
    assert "did not end a job within" in site.log
    site.holds(1, 10)


@pytest.mark.parametrize(("place", "steps"), [("before", 0), ("inside", 0), ("after", 1)])
def test_what_the_class_raises_is_told_and_changes_nothing(
    site: _Site, place: str, steps: int
) -> None:
    error = site.refused(Reason.TRAINER_FAILED, **{"raise": place})
    assert f"raised ArithmeticError: diverged {place} the transaction" in error.message
    assert "adding_trainer.py" in error.metadata["traceback"]
    live = site.first + steps
    assert error.metadata.get("version") == (str(live) if steps else None)
    site.holds(steps, 10 * steps)
    _, started, step, finished = site.train()
    # The state that it raised in is of no use any more.
    assert (started.version, step.loss, finished.version) == (live, 1.0, live + 1)
    assert site.done().restarts == 0


def test_what_is_refused_in_a_transaction_is_told_with_its_cause(site: _Site) -> None:
    error = site.refused(Reason.TRAINER_FAILED, lease_s=0.01)
    assert error.metadata["cause"] == "REQUEST_INVALID"
    assert "lease must be" in error.message
    wrong = site.refused(Reason.TRAINER_FAILED, **{"yield": "text"})
    assert "train yields str; it must yield weightsync_client.trainer.Progress" in wrong.message


def test_a_trainer_that_dies_in_a_transaction_is_started_again(site: _Site) -> None:
    pid = site.ready()
    _, events = site.begin(hang="inside")
    _until(lambda: "it hangs inside" in site.log)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ClientError) as caught:
        list(events)
    assert caught.value.reason is Reason.TRAINER_AWAY
    assert f"trainer {pid} was ended by SIGKILL" in caught.value.message
    site.holds(0, 0)
    assert site.ready() != pid
    assert site.done().restarts == 1
    # What it had committed, and told nobody of.
    error = site.refused(Reason.TRAINER_AWAY, leave="after")
    assert f"ended with status 7; version {site.first + 1} is live" in error.message
    site.holds(1, 10)


def test_a_trainer_that_is_frozen_past_its_lease_is_ended(site: _Site) -> None:
    pid = site.ready()
    _, events = site.begin(hang="inside", lease_s=1.0)
    _until(lambda: "it hangs inside" in site.log)
    os.kill(pid, signal.SIGSTOP)
    _until(lambda: "the trainer sent no heartbeat for 1 s" in site.log)
    with pytest.raises(ClientError) as caught:
        list(events)
    assert caught.value.reason is Reason.TRAINER_AWAY
    assert "did not answer for" in caught.value.message
    assert state(pid) == ""
    site.holds(0, 0)
    site.train()
    site.holds(1, 10)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_trainer_outlives_the_server(site: _Site, end: str) -> None:
    pid = site.ready()
    job, events = site.begin(hang="before")
    failed: list[ClientError] = []

    def read() -> None:
        with contextlib.suppress(ClientError):
            try:
                list(events)
            except ClientError as error:
                failed.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    if end == "stop":
        assert site.server.stop() == 0
    else:
        site.server.kill()
    reading.join()
    assert failed
    if end == "stop":
        assert failed[0].reason is Reason.SHUTTING_DOWN
        assert f"job {job} cancelled" in site.log
    _until(lambda: state(pid) in ("", "Z"), 5)


@pytest.mark.parametrize(
    ("trainer", "start_s", "sentence"),
    [
        (
            _ADDING,
            0.2,
            (
                "was not ready within 0.2 s; shorten the setup of the class, or start the "
                "server with a higher"
            ),
        ),
        (
            "tests.support.adding_trainer:BrokenTrainer",
            60,
            "setup of the trainer's class raised LookupError: no optimizer for ",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_told_in_a_sentence(
    trainer: str, start_s: float, sentence: str
) -> None:
    with _site(trainer, f"--trainer-start-timeout-s={start_s}") as site:
        site.wait(TrainerState.AWAY)
        status = site.client.train_status()
        assert sentence in status.reason
        assert "\n" not in status.reason
        assert status.pid == 0
        site.holds(0, 0)


def test_jobs_do_not_wait_for_a_class_that_cannot_be_used_until_it_can() -> None:
    with _site("late:AddingTrainer") as site:
        # Where the start has failed a few times, and at once afterwards.
        for _ in range(2):
            error = site.refused(Reason.TRAINER_AWAY)
            assert error.message.startswith("no trainer can be started; the server tries again")
            assert "No module named 'late'; correct it, or" in error.message
            assert "send it again" not in error.message
            assert "Traceback" in error.metadata["traceback"]
        assert site.server.log.count("no trainer could be started") in (3, 4)
        (site.folder / "modules").mkdir()
        module = "from tests.support.adding_trainer import AddingTrainer"
        (site.folder / "modules/late.py").write_text(module)
        site.ready()
        assert site.client.train_status().reason == ""
        site.train()


def _began(events: list[TrainProgress]) -> tuple[int, float | None]:
    """Return the version that a job has begun on, and what its optimizer counts after a step."""
    started, step = events[1:3]
    return started.version, step.loss


def test_the_state_of_the_optimizer_goes_with_the_version(site: _Site) -> None:
    first = site.first
    for count in (1, 2, 3):
        assert _began(site.train()) == (first + count - 1, float(count))
    # Gone back: what it had counted by then.
    site.client.rollback()
    assert _began(site.train()) == (first + 2, 3.0)
    assert f"with the state of version {first + 2}" in site.log
    assert site.client.train_status().state_version == first + 4
    # Another one's version: from the beginning.
    site.client.apply(site.client.push(_tensors(100)).version)
    assert _began(site.train()) == (first + 5, 1.0)
    assert site.log.count("with an optimizer that starts over") == 2
    # A new process has it still.
    os.kill(site.ready(), signal.SIGKILL)
    _until(lambda: site.done().restarts == 1)
    assert _began(site.train()) == (first + 6, 2.0)
    # And a new server.
    site.server.kill()
    site.start()
    assert _began(site.train()) == (first + 7, 3.0)
    folders = (site.folder / "state/trainer").iterdir()
    kept = {int(path.name.partition("-")[0]) - first for path in folders}
    assert {number for number in kept if number >= 0} == {1, 2, 3, 4, 6, 7, 8}


def test_what_a_job_pushes_in_the_background_counts_before_anything_is_said_of_it(
    site: _Site,
) -> None:
    # Whoever did not wait for it would name the version before, and save a state for that.
    site.plan.write_text("in_place.copied=sleep(1)")
    _, started, *steps, finished = site.train(steps=2, background=True)
    assert started.version == site.first
    assert [(step.version - site.first, step.loss) for step in steps] == [(1, 1.0), (2, 2.0)]
    assert finished.version == site.first + 2
    assert site.client.train_status().state_version == site.first + 2
    site.plan.write_text("")
    site.holds(2, 20)
    # Of each version it has what the optimizer had counted by then.
    site.client.rollback()
    assert _began(site.train(background=True)) == (site.first + 1, 2.0)
    os.kill(site.ready(), signal.SIGKILL)
    _until(lambda: site.done().restarts == 1)
    assert _began(site.train()) == (site.first + 3, 3.0)
    site.holds(4, 30)


@pytest.mark.parametrize(
    ("request_", "reason", "sentence"),
    [
        ({}, Reason.TRAINER_FAILED, "the transaction was undone, and version"),
        ({"raise": "after"}, Reason.TRAINER_FAILED, "ArithmeticError: diverged after the trans"),
        ({"cancel": True}, Reason.CANCELLED, "was cancelled"),
    ],
    ids=["step", "raise", "cancel"],
)
def test_what_is_put_back_in_the_background_is_its_own_job_s_failure(
    site: _Site, request_: dict[str, Any], reason: Reason, sentence: str
) -> None:
    # Long after the class has gone on.
    site.plan.write_text("receive.begin=1*sleep(1)\nin_place.copied=1*error(EIO)")
    job, events = site.begin(background=True, **request_)
    _until(lambda: f"version {site.first + 1} is live, and not pushed" in site.log)
    if "cancel" in request_:
        site.client.cancel_train(job)
    with pytest.raises(ClientError, match=sentence) as caught:
        list(events)
    assert caught.value.reason is reason
    assert f"version {site.first} is being restored" in site.log
    # No version that was undone is named, and no state has its number.
    assert "version" not in caught.value.metadata
    site.holds(0, 0)
    folders = (site.folder / "state/trainer").iterdir()
    assert site.first + 1 not in {int(path.name.partition("-")[0]) for path in folders}
    # The next job pays for nothing; the number was served under, and is no other content's.
    _, started, step, finished = site.train()
    assert (started.version, step.loss, finished.version) == (site.first, 1.0, site.first + 2)
    assert site.done().restarts == 0
    site.holds(2, 10)


def test_a_checkpoint_is_what_is_live(site: _Site) -> None:
    _, events = site.begin(steps=3, wait_s=0.3)
    done = site.client.checkpoint("first")
    # It has waited for the job.
    assert [event.event for event in events][-1] is TrainEvent.FINISHED
    folder = site.folder / "checkpoints/first"
    assert (done.version, done.path) == (site.first + 3, str(folder))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == _tensors(0).keys()
    for name, tensor in _tensors(30).items():
        assert torch.equal(found[name], tensor)
    assert [path.name for path in folder.parent.iterdir()] == ["first"]
    # What lies beside the engine's checkpoint, and what does not.
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert done.missing.startswith(
        "copy config.json into the folder before a vLLM loads it: none was found"
    )
    assert site.client.checkpoint().path == ""
    for name in ("first", "../first", ".first", "a/b", "x" * 200):
        with pytest.raises(ClientError) as caught:
            site.client.checkpoint(name)
        assert caught.value.reason is Reason.REQUEST_INVALID
    assert [path.name for path in folder.parent.iterdir()] == ["first"]
    # As many stay as the setting says, and those that somebody has changed.
    (folder / "note").write_text("mine")
    for name in ("second", "third", "fourth"):
        site.client.checkpoint(name)
    assert {path.name for path in folder.parent.iterdir()} == {"first", "third", "fourth"}


def _damage(pid: int, view: torch.Tensor) -> None:
    """Write live memory as nobody can who is attached: by a descriptor of the server itself."""
    address = view.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            _, _, offset, _, inode, *_ = line.split()
            break
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if fd.stat().st_ino == int(inode):
                with fd.open("r+b", buffering=0) as memory:
                    memory.seek(int(offset, 16) + address - begin)
                    memory.write(b"\xff" * 4)
                return
    raise AssertionError(inode)


def test_what_was_written_outside_a_transaction_has_the_trainer_begin_anew(site: _Site) -> None:
    pid = site.ready()
    with site.client.attach() as attached:
        _until(lambda: site.client.get_version().live_check is LiveCheck.PASSED)
        assert site.server.process is not None
        _damage(site.server.process.pid, attached.boxes["b"][0].view)
        # Whoever attaches has everything compared at once.
        with site.client.attach():
            _until(lambda: site.done().restarts == 1)
    assert "outside a transaction" in site.client.train_status().reason
    assert site.ready() != pid


def test_an_engine_that_starts_anew_has_a_new_trainer() -> None:
    with tempfile.TemporaryDirectory(prefix="wst") as name:
        folder = Path(name)
        (folder / "run").mkdir()
        site = _Site(folder, _ADDING, memory=False)
        checkpoint = {
            name: ("F32", tuple(tensor.shape), tensor.numpy().tobytes())
            for name, tensor in _tensors(0).items()
        }
        made = partial(MemoryEngine, ranks=2, attachable=True)
        try:
            with memory_bridge(folder / "run", checkpoint, made):
                site.start()
                site.train()
                site.holds(1, 10)
            # Without waiting for an engine: whoever has the memory of one that is gone lets it go.
            _until(lambda: site.client.train_status().state is TrainerState.STARTING)
            assert "does not serve a version" in site.client.train_status().reason
            waiting = site.client.train({})
            with memory_bridge(folder / "run", checkpoint, made):
                assert [event.event for event in waiting][-1] is TrainEvent.FINISHED
                site.holds(2, 20)
        finally:
            site.close()


def test_a_server_without_a_trainer_says_so() -> None:
    with tempfile.TemporaryDirectory(prefix="wst") as name:
        server = WeightSyncServer(Path(name) / "run", Path(name) / "state", flags=["--engine=none"])
        try:
            server.start()
            with Client(server.address) as client, pytest.raises(ClientError) as caught:
                client.train_status()
            assert caught.value.reason is Reason.NOT_SUPPORTED
            assert "start it with --trainer" in caught.value.message
        finally:
            server.kill()
