"""The verbs of vLLM's AsyncLLM where our backend receives: what they reach and what they refuse."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.hostile_pickle import pickled_handles
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.extensions.received import verbs
from weightsync.vllm.extensions.received.verbs import ANSWERS, answer_verbs
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

if TYPE_CHECKING:
    from pathlib import Path


class _Updates:
    """What the bridge has for the verbs; notes what they ask."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refusal: WeightSyncError | None = None

    def __getattr__(self, name: str) -> Any:
        async def ask(*args: Any) -> None:
            self.asked.append((name, *args))
            if self.refusal is not None:
                raise self.refusal

        return ask


def _llm(backend: str, *, bridge: bool = True) -> Any:
    class Llm(AsyncLLM):  # type: ignore[misc]  # Any here
        def __init__(self) -> None:
            config = SimpleNamespace(backend=backend)
            self.vllm_config = SimpleNamespace(weight_transfer_config=config)
            self.label = ""
            if bridge:
                self.weightsync_updates = _Updates()

        async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
            raise AssertionError(method)

        async def update_weight_version(self, new_version: str) -> None:
            self.label = new_version

        def shutdown(self, *_: Any) -> None:
            pass

    answer_verbs(Llm)
    return Llm()


def _update(info: Any) -> WeightTransferUpdateRequest:
    return WeightTransferUpdateRequest(update_info=info)


@pytest.mark.parametrize("backend", RECEIVING_BACKENDS)
async def test_no_worker_is_asked_by_vllms_own_methods(backend: str) -> None:
    llm = _llm(backend)
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": True}))
    await llm.start_weight_update()
    await llm.update_weights(_update({"names": ["a"]}))
    await llm.update_weights({"update_info": {"names": ["b"]}})
    await llm.finish_weight_update()
    await llm.finish_weight_update("step 3")
    await llm.shutdown_weight_transfer_engine()
    assert llm.weightsync_updates.asked == [
        ("open", {"packed": True}),
        ("start",),
        ("receive", {"names": ["a"]}),
        ("receive", {"names": ["b"]}),
        ("finish", ""),
        ("finish", "step 3"),
        ("leave",),
    ]
    assert llm.label == "step 3"


def test_each_verb_takes_what_vllm_calls_it_with() -> None:
    assert ANSWERS.keys() == verbs._ANSWERS.keys()
    for name, answer in ANSWERS.items():
        (_, *theirs) = inspect.signature(getattr(AsyncLLM, name)).parameters.values()
        (_, *ours) = inspect.signature(answer).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


async def test_a_refusal_is_one_that_vllm_answers_with_400() -> None:
    llm = _llm("weightsync_nccl")
    llm.weightsync_updates.refusal = WeightSyncError(Reason.ENGINE_REFUSED, "rank 3 is ill")
    for verb in (llm.start_weight_update, llm.finish_weight_update):
        with pytest.raises(ValueError, match=r"^rank 3 is ill$"):
            await verb()
    # What failed gets no label.
    with pytest.raises(ValueError, match="ill"):
        await llm.finish_weight_update("step 3")
    assert llm.label == ""


async def test_without_a_bridge_the_remedy_is_told() -> None:
    llm = _llm("weightsync_ipc", bridge=False)
    for verb in (llm.start_weight_update, llm.start_draft_weight_update):
        with pytest.raises(ValueError, match="start vLLM with VLLM_PLUGINS=weightsync"):
            await verb()


async def test_a_draft_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="send them with the rest"):
        await _llm("weightsync_nccl").start_draft_weight_update()


async def test_a_pickle_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    made = tmp_path / "made"
    info = pickled_handles(made)
    llm = _llm("weightsync_ipc")
    with pytest.raises(ValueError, match=r"what is unpickled runs code.*weightsync_nccl"):
        await llm.update_weights(_update(info))
    assert not made.exists()
    assert llm.weightsync_updates.asked == []


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ([{"names": []}], "is a list for each rank"),
        ({"ipc_handles": [{"GPU": (os.system,)}]}, "not part of a CUDA IPC handle"),
    ],
)
async def test_what_no_rank_could_use_reaches_none(info: Any, sentence: str) -> None:
    llm = _llm("weightsync_ipc")
    with pytest.raises(ValueError, match=sentence):
        await llm.update_weights(_update(info))
    assert llm.weightsync_updates.asked == []


async def test_handles_become_plain_data() -> None:
    llm = _llm("weightsync_ipc")
    handle: tuple[Any, ...] = (
        torch.Tensor,
        (1,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.int8,
        0,
        b"h",
        1,
        0,
        False,
    )
    handle += (b"c", 0, b"e", True)
    await llm.update_weights(_update({"ipc_handles": [{"GPU": handle}], "names": ["a"]}))
    ((_, info),) = llm.weightsync_updates.asked
    plain = info["ipc_handles"][0]["GPU"]
    assert plain[0] == {"class": "Tensor"}
    assert plain[7] == {"bytes": "68"}
