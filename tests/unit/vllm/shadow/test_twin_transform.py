"""A twin makes ready only what its rank knows that it has loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, toy_tensors
from weightsync.shm.staged_version import read_document
from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.apply.transform import NeedsLoadError, TransformRequest
from weightsync.vllm.plan import load_watch
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.shadow.loader_process import LoaderError
from weightsync.vllm.shadow.model_state import ModelState, StateForm, check_numbers
from weightsync.vllm.shadow.shadow_transform import ShadowTransform
from weightsync.vllm.worker.rank_job import caught

if TYPE_CHECKING:
    from tests.support.staging import Staging
    from weightsync.vllm.shadow.loader_process import LoaderStart


def _start(group: str) -> LoaderStart:
    raise AssertionError(group)


def _unbounded() -> None:
    return None


def test_what_is_not_loaded_must_be(staging: Staging) -> None:
    cpu = torch.device("cpu")
    twin = ShadowTransform(ToyModel(), cpu, HostOps(cpu), _start, 1, _unbounded)
    version = staging.stage_files([save(toy_tensors(1))])
    path = str(staging.socket)
    staged = read_document(path, version.document.id)
    request = TransformRequest("a", staged, path, None, stage=False, ticket="", progress=print)
    with pytest.raises(NeedsLoadError):
        twin.prepare(request, bool)


def test_what_another_loader_knew_is_compared_all_the_same(staging: Staging) -> None:
    cpu = torch.device("cpu")
    twin = ShadowTransform(ToyModel(), cpu, HostOps(cpu), _start, 1, _unbounded)
    path = str(staging.socket)
    first = staging.stage_files([save(toy_tensors(1))])
    twin._layout = read_document(path, first.document.id).manifest.layout
    less = toy_tensors(2)
    del less["down"]
    document = staging.stage_files([save(less)]).document.id
    with pytest.raises(PlanRefusedError) as refused:
        twin.load(read_document(path, document).manifest, path, document, bool, print)
    assert refused.value.names == ["down"]


class _Watched(torch.nn.Module):
    """Its weights were seen being loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(100), requires_grad=False)


#: Of a model of which loading made nothing.
NOTHING = load_watch._Loaded(frozenset(), frozenset(), frozenset(), frozenset(), frozenset())


def test_a_load_without_room_is_refused_before_it_begins(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    model = _Watched()
    monkeypatch.setitem(load_watch._made, model, NOTHING)
    room = 799
    twin = ShadowTransform(model, cpu, HostOps(cpu), _start, 1, lambda: room)
    with pytest.raises(PlanRefusedError, match=r"at least 800 bytes .* 799; set WEIGHTSYNC_DEVICE"):
        twin.begin({"group": "0" * 32})
    room = 800
    with pytest.raises(AssertionError, match="0" * 32):
        twin.begin({"group": "0" * 32})


def test_loaders_do_not_meet_where_others_were_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, model = torch.device("cpu"), _Watched()
    monkeypatch.setitem(load_watch._made, model, NOTHING)
    twin = ShadowTransform(model, cpu, HostOps(cpu), _start, 1, _unbounded)
    twin._starts.note("0" * 32)
    twin.unload()
    with pytest.raises(LoaderError, match="started in another one"):
        twin.begin({"group": "0" * 32})
    with pytest.raises(AssertionError, match="1" * 32):
        twin.begin({"group": "1" * 32})
    assert twin.status()["loader_restarts"] == 0


def test_a_report_tells_that_it_must_be_loaded() -> None:
    def prepare() -> NoReturn:
        raise NeedsLoadError

    assert caught(prepare)["phase"] == "needs_load"


@pytest.mark.parametrize(
    ("fixed", "later", "why"),
    [
        ("", (), ""),
        ("captured; start vLLM with --enforce-eager", (), "--enforce-eager"),
        ("", ("impl.bmm1_scale",), "kernels have made impl.bmm1_scale"),
    ],
)
def test_other_numbers_are_taken_where_what_runs_notices_them(
    fixed: str, later: tuple[str, ...], why: str
) -> None:
    form = StateForm({}, (), {})
    live = ModelState(form, (), {}, numbers={"a": "1", "b": "2"}, later=later)
    check_numbers({"a": "1", "b": "2"}, live, fixed)
    if not why:
        check_numbers({"a": "1", "b": "3"}, live, fixed)
        return
    with pytest.raises(PlanRefusedError, match=why) as refused:
        check_numbers({"a": "1", "b": "3"}, live, fixed)
    assert refused.value.names == ["b"]
