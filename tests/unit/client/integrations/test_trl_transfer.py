"""The hook of TRL's AsyncGRPOTrainer, against a real gRPC server.

The calls and their order are those of huggingface/trl 1.16.0, file
trl/experimental/async_grpo/async_grpo_trainer.py: `_TrainBeginCallback.on_train_begin`,
`_sync_weight_merged` and `_inner_training_loop`. That trainer itself runs in one test here, and in
tests/matrix/examples with its own rollouts.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import queue
import re
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load

from weightsync.errors import Reason, WeightSyncError
from weightsync_client import (
    Access,
    Client,
    ClientError,
    InvalidError,
    Retry,
    Timeouts,
    UnavailableError,
)
from weightsync_client.integrations import WeightSyncTransfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.client.servicer import Running, Servicer, StatusError

Tensors = dict[str, torch.Tensor]


def _weights(step: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return {name: torch.randn(64, generator=generator).bfloat16() for name in names}


def _gathered(weights: Tensors, read: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield tensors as TRL does: each in a buffer of its own time, some with a gradient."""
    for name, tensor in weights.items():
        # As `full_tensor()` of a sharded parameter, which is a step of the autograd graph.
        gathered = tensor.clone().requires_grad_() * 1
        yield name, gathered
        with torch.no_grad():
            gathered.zero_()
        if read is not None:
            read.append(name)


def _sync(transfer: WeightSyncTransfer, iterator: Iterator[tuple[str, Any]]) -> None:
    """Do what `_sync_weight_merged` does on the main process."""
    transfer.pause()
    transfer.send_weights(iterator)
    transfer.resume()


def _train(transfer: WeightSyncTransfer, *steps: Tensors) -> None:
    """Do what the trainer does on the main process: a transfer as it begins, and after steps."""
    try:
        transfer.init_weight_transfer()
        for weights in steps:
            _sync(transfer, _gathered(weights))
    finally:
        transfer.destroy()


def _committed(servicer: Servicer) -> list[Any]:
    return [upload for upload in servicer.uploads.values() if upload.commit]


def _tensors(upload: Any) -> Tensors:
    shards = upload.shards.values()
    return {name: t for s in shards for name, t in load(bytes(s.data)).items()}


def _equal(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def _refuse(servicer: Servicer, status_error: type[StatusError], call: str, times: int) -> None:
    left = [times]

    def before(method: str, _request: Any) -> None:
        if method == call and left[0]:
            left[0] -= 1
            raise status_error(grpc.StatusCode.FAILED_PRECONDITION, "the store is full")

    servicer.before = before


@pytest.fixture
def make(running: Running, retry: Retry) -> Callable[..., WeightSyncTransfer]:
    """Make a transfer that gives up soon."""

    def make(**options: Any) -> WeightSyncTransfer:
        return WeightSyncTransfer(running.address, **{"retry": retry, **options})

    return make


# What TRL asks for.


@pytest.fixture(scope="module")
def trl() -> Any:
    """The module of TRL's trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of TRL's, about what else is installed.
        return importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")


def _methods(kind: type[Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def test_every_method_of_the_protocol_is_there_with_its_arguments(trl: Any) -> None:
    asked, ours = _methods(trl.WeightTransferProtocol), _methods(WeightSyncTransfer)
    assert asked.keys() == ours.keys()
    for name, method in asked.items():
        theirs = inspect.signature(method, eval_str=True).parameters.values()
        own = inspect.signature(ours[name]).parameters.values()
        assert [(p.name, p.kind, p.default) for p in theirs] == [
            (p.name, p.kind, p.default) for p in own
        ]


def test_the_trainer_calls_nothing_else(trl: Any) -> None:
    called = re.findall(r"\bweight_transfer\.(\w+)", inspect.getsource(trl))
    assert set(called) - {"WeightTransferClient"} == set(_methods(WeightSyncTransfer))


class _Rollouts:
    """A rollout worker that has all samples ready."""

    def __init__(self, servicer: Servicer) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.live_at: list[tuple[int, int]] = []
        self._servicer = servicer

    def start(self) -> None:
        module = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
        for group in range(32):
            ids, mask = np.array([3, 4, 5, 6]), np.array([0, 0, 1, 1])
            scores = np.array([0, 0, -1, -1], np.float32)
            sample = module.RolloutSample([], [], ids, mask, scores, 1.0, 1, group, {})
            self.rollout_buffer.put(sample)

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.live_at.append((model_version, self._servicer.live))

    def check_health(self, stale_after_s: float) -> None:
        pass


def test_a_training_of_trl_itself(
    trl: Any,
    make: Callable[..., WeightSyncTransfer],
    servicer: Servicer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts, tokenizer = _Rollouts(servicer), _tiny_policy(tmp_path)
    trained = _trl_train(trl, tmp_path, tokenizer, rollouts, make(run_id="run"), monkeypatch)
    # Its count of transfers is ours, and each is live when it counts it.
    assert rollouts.live_at == [(1, 1), (2, 2), (3, 3)]
    pushed = _committed(servicer)
    assert [upload.request.metadata["sync"] for upload in pushed] == ["1", "2", "3"]
    assert _equal(_tensors(pushed[-1]), trained)
    assert not _equal(_tensors(pushed[0]), trained)


def test_a_training_of_trl_itself_leaves_a_tied_head_as_it_is(
    trl: Any,
    make: Callable[..., WeightSyncTransfer],
    servicer: Servicer,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts, tokenizer = _Rollouts(servicer), _tiny_policy(tmp_path, tied=True)
    served = load((tmp_path / "model.safetensors").read_bytes())
    served["lm_head.weight"] = served["model.embed_tokens.weight"].clone()
    client.apply(client.push(served, metadata={"run_id": "earlier"}).version)
    transfer = make(push={"partial": True}, run_id="run")
    trained = _trl_train(trl, tmp_path, tokenizer, rollouts, transfer, monkeypatch)
    assert "lm_head.weight" not in trained
    assert rollouts.live_at == [(1, 2), (2, 3), (3, 4)]
    newest = _tensors(_committed(servicer)[-1])
    assert _equal(newest, served | trained)


def _trl_train(
    trl: Any,
    folder: Path,
    tokenizer: Any,
    rollouts: _Rollouts,
    transfer: WeightSyncTransfer,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Train two steps with TRL's own trainer; return the parameters that it ends with."""
    # Both need a GPU: the name of one, and attention over packed samples.
    monkeypatch.setattr(trl, "get_peak_flops_per_device", lambda *_: 1.0)
    monkeypatch.setattr(trl, "TREE_ATTENTION", "eager")
    settings: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    settings |= {"per_device_train_batch_size": 1, "token_budget": 8, "learning_rate": 1e-2}
    settings |= {"disable_tqdm": True, "save_strategy": "no", "report_to": []}
    trainer = trl.AsyncGRPOTrainer(
        str(folder),
        args=trl.AsyncGRPOConfig(str(folder / "out"), max_steps=2, **settings),
        train_dataset=[{"prompt": [{"role": "user", "content": "t3"}]}] * 4,
        processing_class=tokenizer,
        rollout_worker=rollouts,
        weight_transfer=transfer,
    )
    trainer.train()
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def _tiny_policy(folder: Path, *, tied: bool = False) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=tied)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({f"t{i}": i for i in range(32)}, unk_token="t0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="t1", pad_token="t2", unk_token="t0"
    )


# What it does.


def test_each_transfer_is_a_version_that_is_served_when_it_returns(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    steps = [_weights(step) for step in range(3)]
    _train(make(apply={"pause": "abort"}, run_id="mine"), *steps)
    pushed = _committed(servicer)
    assert all(_equal(_tensors(u), weights) for u, weights in zip(pushed, steps, strict=True))
    assert [dict(upload.request.metadata) for upload in pushed] == [
        {"run_id": "mine", "sync": sync} for sync in ("1", "2", "3")
    ]
    calls = [call for call in servicer.calls if call in ("CommitPush", "ApplyVersion")]
    assert calls == ["CommitPush", "ApplyVersion"] * 3
    applies = [r for r in servicer.requests if type(r).__name__ == "ApplyVersionRequest"]
    assert [request.version for request in applies] == [1, 2, 3]
    assert applies[0].pause.mode == 3
    assert servicer.live == 3


def test_without_apply_versions_are_only_pushed(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    transfer = make(apply=False)
    _train(transfer, _weights(1))
    assert len(_committed(servicer)) == 1
    assert "ApplyVersion" not in servicer.calls
    assert transfer.last is not None
    assert transfer.last.push.version == 1
    assert transfer.last.apply is None


def test_a_run_that_is_repeated_pushes_new_versions(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    for _ in range(2):
        _train(make(run_id="run"), _weights(1), _weights(2))
    assert [upload.version for upload in _committed(servicer)] == [1, 2, 3, 4]
    assert servicer.live == 4


def test_what_trl_leaves_out_stays_what_it_is(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer, client: Client
) -> None:
    served = _weights(0)
    client.apply(client.push(served, metadata={"run_id": "earlier"}).version)
    steps = [_weights(step) for step in (1, 2)]
    for weights in steps:
        del weights["lm_head.weight"]
    transfer = make(push={"partial": True}, run_id="run")
    _train(transfer, *steps)
    pushed = _committed(servicer)[1:]
    for upload, weights in zip(pushed, steps, strict=True):
        assert _equal(_tensors(upload), served | weights)
    # The first is based on a version of another run.
    assert [upload.request.metadata.get("run_id") for upload in pushed] == [None, "run"]
    assert transfer.last is not None
    assert transfer.last.push.base_version == 2


def test_what_trl_leaves_out_is_taken_from_the_base_that_is_named(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer, client: Client
) -> None:
    began, live = _weights(0), _weights(9)
    for weights in (began, live):
        client.apply(client.push(weights, metadata={"run_id": "earlier"}).version)
    steps = [_weights(step) for step in (1, 2)]
    for weights in steps:
        del weights["lm_head.weight"]
    _train(make(push={"partial": True, "base": 1}, run_id="run"), *steps)
    for upload, weights in zip(_committed(servicer)[2:], steps, strict=True):
        assert _equal(_tensors(upload), began | weights)
        assert "run_id" not in upload.request.metadata


@pytest.mark.parametrize("call", ["BeginPush", "CommitPush", "ApplyVersion"])
def test_no_rank_waits_for_one_whose_push_fails(
    make: Callable[..., WeightSyncTransfer],
    servicer: Servicer,
    status_error: type[StatusError],
    call: str,
) -> None:
    _refuse(servicer, status_error, call, times=1)
    ranks = threading.Barrier(2, timeout=10)
    ended: list[int] = []

    def gathered() -> Iterator[tuple[str, Any]]:
        for pair in _weights(1).items():
            ranks.wait()
            yield pair

    def other_rank() -> None:
        ended.append(len(list(gathered())))

    thread = threading.Thread(target=other_rank)
    thread.start()
    with pytest.raises(ClientError, match="the store is full") as caught:
        _train_with(make(), gathered())
    thread.join(10)
    assert ended == [3]
    notes = getattr(caught.value, "__notes__", [])
    applied = ["sync 1 is version 1, which was not applied"]
    assert notes == (applied if call == "ApplyVersion" else [])


def _train_with(transfer: WeightSyncTransfer, iterator: Iterator[tuple[str, Any]]) -> None:
    try:
        transfer.init_weight_transfer()
        _sync(transfer, iterator)
    finally:
        transfer.destroy()


@pytest.mark.parametrize("wrong", [{"shard_bytes": 0}, {"streams": 0}, {"base": 3}])
def test_no_rank_waits_for_one_whose_options_are_refused(
    make: Callable[..., WeightSyncTransfer], wrong: Any
) -> None:
    read: list[str] = []
    with pytest.raises(InvalidError):
        _train_with(make(push=wrong), _gathered(_weights(1), read))
    assert read == list(_weights(1))


def test_an_error_of_the_gather_is_the_trainers(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield from _weights(1).items()
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        _train_with(make(on_error="log"), broken())
    assert _committed(servicer) == []


@pytest.mark.parametrize("call", ["CommitPush", "ApplyVersion"])
def test_an_error_is_logged_and_the_training_goes_on(
    make: Callable[..., WeightSyncTransfer],
    servicer: Servicer,
    status_error: type[StatusError],
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    _refuse(servicer, status_error, call, times=1)
    with caplog.at_level(logging.WARNING, "weightsync_client"):
        _train(make(on_error="log"), _weights(1), _weights(2))
    (record,) = caplog.records
    beginning = "training continues after an error at sync 1: the store is full"
    assert record.getMessage().startswith(beginning)
    assert record.getMessage().endswith("which was not applied") == (call == "ApplyVersion")
    assert _equal(_tensors(_committed(servicer)[-1]), _weights(2))
    # TRL has counted the first one as well.
    assert _committed(servicer)[-1].request.metadata["sync"] == "2"
    assert servicer.live == _committed(servicer)[-1].version


def test_a_live_version_above_it_is_an_error(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    def before(method: str, _request: Any) -> None:
        if method == "ApplyVersion":
            raise WeightSyncError(Reason.VERSION_BELOW_LIVE, "it is below the live version")

    servicer.before = before
    with pytest.raises(ClientError, match="below the live version"):
        _train(make(), _weights(1))
    assert len(_committed(servicer)) == 1


def test_a_server_that_is_away_is_found_before_the_first_transfer(
    running: Running, retry: Retry
) -> None:
    running.stop()
    transfer = WeightSyncTransfer(running.address, retry=retry)
    with pytest.raises(UnavailableError, match="check that weightsync-server runs there"):
        transfer.init_weight_transfer()
    transfer.destroy()


def test_a_server_that_stays_away_ends_no_training_that_logs_errors(
    running: Running, retry: Retry, caplog: pytest.LogCaptureFixture
) -> None:
    running.stop()
    transfer = WeightSyncTransfer(running.address, retry=retry, on_error="log")
    read: list[str] = []
    with caplog.at_level(logging.WARNING, "weightsync_client"):
        _train_with(transfer, _gathered(_weights(1), read))
    assert read == list(_weights(1))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "training continues after an error as it begins",
        "training continues after an error at sync 1",
    ]
    assert transfer.last is None


def test_versions_and_seconds_are_logged(
    make: Callable[..., WeightSyncTransfer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "weightsync_client"):
        _train(make(), _weights(1))
    (message,) = [m for m in caplog.messages if m.startswith("sync ")]
    assert message.startswith("sync 1: weightsync/version 1, weightsync/sent_bytes ")
    assert "weightsync/paused_seconds 0.0125" in message


def test_the_options_of_a_push_and_of_the_client_are_passed_on(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    transfer = make(
        push={"metadata": {"team": "red"}, "delta": "never", "collective": False},
        run_id="mine",
        model="policy",
        access=Access(token="secret"),
        timeouts=Timeouts(call_s=10),
    )
    _train(transfer, _weights(1), _weights(2))
    assert [dict(upload.request.metadata) for upload in _committed(servicer)] == [
        {"team": "red", "run_id": "mine", "sync": sync} for sync in ("1", "2")
    ]
    assert all(sent["authorization"] == "Bearer secret" for sent in servicer.metadata)


def test_a_client_that_is_given_stays_open(client: Client, servicer: Servicer) -> None:
    _train(WeightSyncTransfer(client), _weights(1))
    assert len(_committed(servicer)) == 1
    assert client.status().models[0].model == "policy"


def test_a_second_training_opens_a_client_again(
    make: Callable[..., WeightSyncTransfer], servicer: Servicer
) -> None:
    transfer = make()
    _train(transfer, _weights(1))
    transfer.destroy()
    # TRL prepares for the first training only: `_TrainBeginCallback._fired`.
    _sync(transfer, _gathered(_weights(2)))
    transfer.destroy()
    assert [upload.request.metadata["sync"] for upload in _committed(servicer)] == ["1", "2"]
