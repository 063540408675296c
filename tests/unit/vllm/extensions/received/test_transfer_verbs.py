"""The verbs of a weight transfer on vLLM's own AsyncLLM: who answers, and what is refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.hostile_pickle import pickled_handles
from weightsync.vllm.extensions.received.verbs import _ANSWERS, answer_verbs

if TYPE_CHECKING:
    from pathlib import Path

_VERBS = (
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)


def _llm(backend: str | None, label: str = "7") -> Any:
    """Return an AsyncLLM of vLLM that notes what its workers are asked."""

    class Llm(AsyncLLM):  # type: ignore[misc]  # Any here
        def __init__(self) -> None:
            config = None if backend is None else SimpleNamespace(backend=backend)
            self.vllm_config = SimpleNamespace(weight_transfer_config=config)
            self.asked: list[str] = []
            self.label = label

        async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
            self.asked.append(method)
            return []

        async def get_weight_version(self) -> str:
            return self.label

        async def update_weight_version(self, new_version: str) -> None:
            self.label = new_version

        def shutdown(self, *_: Any) -> None:
            pass

    for _ in range(2):
        answer_verbs(Llm)
    return Llm()


def _update(info: Any) -> WeightTransferUpdateRequest:
    return WeightTransferUpdateRequest(update_info=info)


async def _all(llm: Any) -> None:
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    await llm.start_weight_update()
    await llm.update_weights(_update({"version": 7}))
    await llm.finish_weight_update()
    await llm.shutdown_weight_transfer_engine()


async def test_no_worker_is_asked() -> None:
    llm = _llm("weightsync")
    await _all(llm)
    assert llm.asked == []
    assert llm.label == "7"


@pytest.mark.parametrize("backend", ["nccl", "ipc", None])
async def test_other_backends_notice_nothing(backend: str | None) -> None:
    llm = _llm(backend)
    await _all(llm)
    await llm.start_draft_weight_update()
    assert sorted(llm.asked) == sorted(_VERBS)


def test_each_verb_takes_what_vllm_calls_it_with() -> None:
    assert sorted(_ANSWERS) == sorted(_VERBS)
    for name, answer in _ANSWERS.items():
        (_, *theirs) = inspect.signature(getattr(AsyncLLM, name)).parameters.values()
        (_, *ours) = inspect.signature(answer).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


async def test_a_label_that_is_asked_for_is_set() -> None:
    llm = _llm("weightsync")
    await llm.finish_weight_update("step 3")
    assert llm.label == "step 3"


async def test_a_release_without_labels_is_believed() -> None:
    class Llm:
        vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="weightsync"))

        async def update_weights(self, request: Any) -> None:
            raise AssertionError

    answer_verbs(Llm)
    await Llm().update_weights(_update({"version": 3}))
    assert not hasattr(Llm, "shutdown_weight_transfer_engine")


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({"version": 8}, "serves weight version '7', not 8"),
        ({"version": True}, "update_info has version, but"),
        ({"version": "7"}, "update_info has version, but"),
        ({"version": 7, "names": []}, "update_info has names, version, but"),
        ({}, "update_info has nothing, but"),
        ([{"version": 7}], "update_info has a list, but"),
        ({"names": [], "dtype_names": [], "shapes": []}, "has dtype_names, names, shapes, but"),
    ],
)
async def test_an_update_that_is_none_of_ours_is_refused(info: Any, sentence: str) -> None:
    llm = _llm("weightsync")
    with pytest.raises(ValueError, match=sentence):
        await llm.update_weights(_update(info))
    assert llm.asked == []


async def test_a_connection_and_a_draft_are_refused() -> None:
    llm = _llm("weightsync")
    with pytest.raises(ValueError, match="init_info has master_address, but this vLLM"):
        await llm.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info={"master_address": "x"})
        )
    with pytest.raises(ValueError, match="leave this verb out"):
        await llm.start_draft_weight_update()
    assert llm.asked == []


async def test_a_pickle_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    made = tmp_path / "made"
    info = pickled_handles(made)
    with pytest.raises(ValueError, match="accepts no tensor or handle here"):
        await _llm("weightsync").update_weights(_update(info))
    assert not made.exists()
