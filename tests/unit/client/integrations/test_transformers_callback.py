"""The callback in transformers' own Trainer, against a real gRPC server."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from safetensors.torch import load
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    Access,
    Client,
    ClientError,
    Gate,
    InvalidError,
    Probes,
    Retry,
    Timeouts,
    UnavailableError,
)
from weightsync_client.integrations import WeightSyncCallback
from weightsync_client.integrations.step_push import StepOptions
from weightsync_client.source.modules import module_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.client.servicer import Running, Servicer, StatusError

Tensors = dict[str, torch.Tensor]


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes, **heads))


def _rows(count: int = 32) -> list[Tensors]:
    rows = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class _Recorder(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Keeps the weights of every step, and what a reporter that is called first would see."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensors] = {}
        self.logs: list[dict[str, Any]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        tensors = module_tensors(model)
        self.weights[state.global_step] = {n: t.detach().clone() for n, t in tensors.items()}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


class _At(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Does something at a step."""

    def __init__(self, step: int, action: Callable[[Any, Any], None]) -> None:
        self._step, self._action = step, action

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == self._step:
            self._action(control, model)


def _trainer(folder: Path, *callbacks: TrainerCallback, steps: int = 5, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
    settings |= {"lr_scheduler_type": "constant"}  # The same for trainings of any length.
    arguments = TrainingArguments(str(folder), max_steps=steps, **settings | options)
    rows = _rows()
    return Trainer(
        _model(), arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=list(callbacks)
    )


def _pushed(servicer: Servicer) -> list[tuple[str, int]]:
    """Return step and version of every commit."""
    uploads = [upload for upload in servicer.uploads.values() if upload.commit]
    return [(upload.request.metadata["step"], upload.version) for upload in uploads]


def _tensors(servicer: Servicer, step: int) -> Tensors:
    """Return what the last push of a step brought."""
    uploads = [u for u in servicer.uploads.values() if u.request.metadata["step"] == str(step)]
    shards = uploads[-1].shards.values()
    return {name: t for s in shards for name, t in load(bytes(s.data)).items()}


def _equal(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


@pytest.fixture
def make(running: Running, retry: Retry) -> Callable[..., WeightSyncCallback]:
    """Make a callback that gives up soon."""

    def make(**options: Any) -> WeightSyncCallback:
        return WeightSyncCallback(running.address, **{"retry": retry, **options})

    return make


def test_each_version_brings_what_its_model_computes_for_the_probes(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, make(every=1, probes=[[1, 2, 3]], apply={"gate": Gate("off")}))
    expected: list[Probes] = []
    trainer.add_callback(_At(4, lambda _, model: expected.append(Probes.of(model, [[1, 2, 3]]))))
    trainer.train()
    commits = [one.probes for one in servicer.requests if isinstance(one, pb.CommitPushRequest)]
    found = [Probes.from_message(one) for one in commits]
    assert len(found) == 5
    assert found[3] == expected[0]
    assert found[3] != found[4]


def test_steps_refuse_probes_that_belong_to_one() -> None:
    assert StepOptions({"probes": Probes([[1, 2]])}).probes is None
    assert StepOptions(probes=iter([[1, 2]])).probes == ((1, 2),)
    with pytest.raises(InvalidError, match="the logprobs of probes are those of one step"):
        StepOptions({"probes": Probes([[1, 2]], [[-0.5]])})
    with pytest.raises(InvalidError, match="give 1 to 64 sequences, not 0"):
        StepOptions(probes=[])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_every_second_step_and_the_last_one_are_pushed_to_the_bit(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path, accumulated: int
) -> None:
    recorder = _Recorder()
    trainer = _trainer(tmp_path, make(every=2), recorder, gradient_accumulation_steps=accumulated)
    trainer.train()
    assert [step for step, _ in _pushed(servicer)] == ["2", "4", "5"]
    assert not _equal(recorder.weights[2], recorder.weights[4])
    for step in (2, 4, 5):
        assert _equal(_tensors(servicer, step), recorder.weights[step])
    assert "ApplyVersion" not in servicer.calls
    run_ids = {upload.request.metadata["run_id"] for upload in servicer.uploads.values()}
    assert len(run_ids) == 1


def test_a_training_that_ends_early_pushes_what_it_leaves(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    def stop(control: Any, _model: Any) -> None:
        control.should_training_stop = True

    _trainer(tmp_path, make(every=2), _At(3, stop)).train()
    assert [step for step, _ in _pushed(servicer)] == ["2", "3"]


def test_the_last_step_is_not_pushed_twice(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    _trainer(tmp_path, make(every=2), steps=4).train()
    assert _pushed(servicer) == [("2", 1), ("4", 2)]


def test_the_best_model_is_the_one_at_the_end(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    recorder = _Recorder()
    trainer = _trainer(
        tmp_path,
        make(every=2, apply=True),
        recorder,
        steps=4,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        # The last step is evaluated as well. As the loss falls, the one before is the best by this.
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert [step for step, _ in _pushed(servicer)] == ["2", "4", "3"]
    assert _equal(_tensors(servicer, 3), recorder.weights[3])
    assert servicer.live == 3


def test_apply_makes_each_version_live_with_the_given_options(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    _trainer(tmp_path, make(every=2, apply={"pause": "abort"}), steps=4).train()
    assert [call for call in servicer.calls if call in ("CommitPush", "ApplyVersion")] == [
        "CommitPush",
        "ApplyVersion",
    ] * 2
    applies = [r for r in servicer.requests if type(r).__name__ == "ApplyVersionRequest"]
    assert [request.version for request in applies] == [1, 2]
    assert len({request.idempotency_key for request in applies}) == 2
    assert applies[0].pause.mode == 3
    assert servicer.live == 2


def test_an_older_step_than_the_live_one_becomes_a_new_version(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    _trainer(tmp_path, make(run_id="run", apply=True), steps=2).train()
    assert servicer.live == 2
    _only_up(servicer)
    _trainer(tmp_path, make(run_id="run", apply=True), steps=2).train()
    assert _pushed(servicer) == [("1", 1), ("2", 2), ("1", 3), ("2", 4)]
    assert servicer.live == 4


def _only_up(servicer: Servicer) -> None:
    """Have applies refused as the server does it."""

    def before(method: str, request: Any) -> None:
        if method == "ApplyVersion" and request.version < servicer.live:
            raise WeightSyncError(Reason.VERSION_BELOW_LIVE, "it is below the live version")

    servicer.before = before


def test_the_options_of_a_push_and_of_the_client_are_passed_on(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    callback = make(
        push={"metadata": {"team": "red"}, "delta": "never"},
        run_id="mine",
        model="policy",
        access=Access(token="secret"),
        timeouts=Timeouts(call_s=10),
    )
    _trainer(tmp_path, callback, steps=2).train()
    uploads = list(servicer.uploads.values())
    assert [dict(upload.request.metadata) for upload in uploads] == [
        {"team": "red", "run_id": "mine", "step": step} for step in ("1", "2")
    ]
    assert [upload.request.idempotency_key for upload in uploads] == ["mine/1", "mine/2"]
    assert all(sent["authorization"] == "Bearer secret" for sent in servicer.metadata)


def test_a_client_that_is_given_stays_open(
    client: Client, servicer: Servicer, tmp_path: Path
) -> None:
    _trainer(tmp_path, WeightSyncCallback(client), steps=1).train()
    assert _pushed(servicer) == [("1", 1)]
    assert client.status().models[0].model == "policy"


def test_a_client_of_its_own_is_closed(
    make: Callable[..., WeightSyncCallback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Client] = []
    close = Client.close

    def note(client: Client) -> None:
        closed.append(client)
        close(client)

    monkeypatch.setattr(Client, "close", note)
    callback = make()
    trainer = _trainer(tmp_path, callback, steps=1)
    trainer.train()
    assert len(closed) == 1
    trainer.train()
    assert len(set(closed)) == 2


@pytest.mark.parametrize("call", ["CommitPush", "ApplyVersion"])
def test_an_error_ends_the_training(
    make: Callable[..., WeightSyncCallback],
    servicer: Servicer,
    status_error: type[StatusError],
    tmp_path: Path,
    call: str,
) -> None:
    _refuse(servicer, status_error, call, times=1)
    trainer = _trainer(tmp_path, make(every=2, apply=True))
    with pytest.raises(ClientError, match="the store is full") as caught:
        trainer.train()
    assert trainer.state.global_step == 2
    notes = getattr(caught.value, "__notes__", [])
    applied = ["step 2 is version 1, which was not applied"]
    assert notes == (applied if call == "ApplyVersion" else [])


def _refuse(servicer: Servicer, status_error: type[StatusError], call: str, times: int) -> None:
    left = [times]

    def before(method: str, _request: Any) -> None:
        if method == call and left[0]:
            left[0] -= 1
            raise status_error(grpc.StatusCode.FAILED_PRECONDITION, "the store is full")

    servicer.before = before


@pytest.mark.parametrize("call", ["CommitPush", "ApplyVersion"])
def test_an_error_is_logged_and_the_training_goes_on(
    make: Callable[..., WeightSyncCallback],
    servicer: Servicer,
    status_error: type[StatusError],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    _refuse(servicer, status_error, call, times=1)
    trainer = _trainer(tmp_path, make(every=2, apply=True, on_error="log"))
    with caplog.at_level(logging.WARNING, "weightsync_client"):
        trainer.train()
    (record,) = caplog.records
    beginning = "training continues after an error at step 2: the store is full"
    assert record.getMessage().startswith(beginning)
    assert record.getMessage().endswith("which was not applied") == (call == "ApplyVersion")
    assert _pushed(servicer)[-1][0] == "5"
    entries = trainer.state.log_history
    assert [e["step"] for e in entries if e.get("weightsync/failed_steps") == 1] == [2]


def test_the_last_step_gets_a_second_try(
    make: Callable[..., WeightSyncCallback],
    servicer: Servicer,
    status_error: type[StatusError],
    tmp_path: Path,
) -> None:
    _refuse(servicer, status_error, "ApplyVersion", times=1)
    _trainer(tmp_path, make(every=9, apply=True, on_error="log"), steps=2).train()
    assert _pushed(servicer) == [("2", 1)]
    assert servicer.live == 1


def test_a_server_that_is_away_is_found_before_the_first_step(
    tmp_path: Path, retry: Retry, running: Running
) -> None:
    running.stop()
    trainer = _trainer(tmp_path, WeightSyncCallback(running.address, retry=retry))
    with pytest.raises(UnavailableError, match="check that weightsync-server runs there"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_server_that_stays_away_ends_no_training_that_logs_errors(
    tmp_path: Path, retry: Retry, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.stop()
    callback = WeightSyncCallback(running.address, retry=retry, every=2, on_error="log")
    trainer = _trainer(tmp_path, callback, steps=3)
    with caplog.at_level(logging.WARNING, "weightsync_client"):
        trainer.train()
    assert trainer.state.global_step == 3
    beginnings = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert beginnings == [
        "training continues after an error as it begins",
        "training continues after an error at step 2",
        # The last one is tried again at the end.
        *["training continues after an error at step 3"] * 2,
    ]


def test_a_model_in_parts_is_refused_in_the_words_of_the_client(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    def partition(_control: Any, model: Any) -> None:
        for parameter in model.parameters():
            # As DeepSpeed ZeRO-3 marks them, here with the bytes on a disk.
            away = SimpleNamespace(status=SimpleNamespace(name="NOT_AVAILABLE"))
            parameter.ds_id, parameter.ds_tensor = 1, away

    trainer = _trainer(tmp_path, _At(1, partition), make())
    with pytest.raises(InvalidError, match=r"is offloaded to a disk by ZeRO-3"):
        trainer.train()
    assert _pushed(servicer) == []


def test_an_open_push_that_a_crash_has_left_is_dropped(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    left = ["push-9"]

    def before(method: str, request: Any) -> None:
        if method == "AbortPush":
            assert request.push_id == left.pop()
            raise WeightSyncError(Reason.PUSH_UNKNOWN, "it has just run out")
        if method == "BeginPush" and left:
            metadata = {"push_id": left[0]}
            raise WeightSyncError(Reason.VERSION_CONFLICT, "of another kind", metadata=metadata)

    servicer.before = before
    _trainer(tmp_path, make(run_id="run"), steps=1).train()
    (upload,) = servicer.uploads.values()
    assert upload.request.idempotency_key == "run/1"
    assert _pushed(servicer) == [("1", 1)]


def test_a_resumed_run_makes_no_second_version(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _trainer(tmp_path, make(), steps=4, **saving).train()
    resumed = _trainer(tmp_path, make(), steps=6, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert _pushed(servicer) == [(str(step), step) for step in range(1, 7)]


def test_a_run_that_starts_anew_is_another_run(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    for _ in range(2):
        _trainer(tmp_path, make(), steps=2).train()
    assert _pushed(servicer) == [("1", 1), ("2", 2), ("1", 3), ("2", 4)]


def test_a_resumed_run_with_the_callbacks_restored_keeps_its_own(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _trainer(tmp_path, make(), steps=3, **saving).train()
    resumed = _trainer(
        tmp_path, make(), steps=4, restore_callback_states_from_checkpoint=True, **saving
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert _pushed(servicer) == [(str(step), step) for step in range(1, 5)]


def test_a_step_that_comes_out_otherwise_is_a_new_version(
    make: Callable[..., WeightSyncCallback], servicer: Servicer, tmp_path: Path
) -> None:
    _trainer(tmp_path, make(run_id="run"), steps=2).train()
    recorder = _Recorder()
    _trainer(tmp_path, make(run_id="run"), recorder, steps=2, learning_rate=1e-3).train()
    assert _pushed(servicer) == [("1", 1), ("2", 2), ("1", 3), ("2", 4)]
    assert _equal(_tensors(servicer, 2), recorder.weights[2])


def test_other_processes_than_the_main_one_do_nothing(
    make: Callable[..., WeightSyncCallback], running: Running, tmp_path: Path
) -> None:
    callback, arguments = make(), TrainingArguments(str(tmp_path), use_cpu=True)
    state = TrainerState(global_step=4, max_steps=4, is_world_process_zero=False)
    logs: dict[str, Any] = {"loss": 1.0}
    callback.on_train_begin(arguments, state, None)
    callback.on_step_end(arguments, state, None, model=_model())
    callback.on_log(arguments, state, None, logs=logs)
    callback.on_train_end(arguments, state, None, model=_model())
    assert running.servicer.calls == []
    assert logs == {"loss": 1.0}
    assert state.stateful_callbacks == {}


def test_versions_and_seconds_are_in_the_next_log(
    make: Callable[..., WeightSyncCallback], tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, make(apply=True), steps=5, logging_steps=2)
    trainer.train()
    entries = [e for e in trainer.state.log_history if "weightsync/version" in e]
    assert [(e["step"], e["weightsync/version"]) for e in entries] == [(2, 2), (4, 4), (5, 5)]
    assert "loss" in entries[0]
    # The servicer says 12.5 ms for each of two applies.
    assert entries[0]["weightsync/paused_seconds"] == pytest.approx(0.025)
    assert entries[0]["weightsync/push_seconds"] > 0
    assert entries[0]["weightsync/apply_seconds"] > 0
    assert entries[0]["weightsync/sent_bytes"] > 0


def test_a_reporter_sees_them_where_the_callback_comes_first(
    make: Callable[..., WeightSyncCallback], tmp_path: Path
) -> None:
    recorder = _Recorder()
    trainer = _trainer(tmp_path, recorder, steps=2)
    callback = make()
    callback.add_to(trainer)
    callback.add_to(trainer)
    assert trainer.callback_handler.callbacks.count(callback) == 1
    trainer.train()
    assert [log["weightsync/version"] for log in recorder.logs[:2]] == [1, 2]
