"""One rank over real segments: prepare, commit, verify, and every refusal with its names."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors, watched_load
from weightsync.model.name_sets import unpack
from weightsync.shm.status_page import PageWriter
from weightsync.vllm.apply import host_ops
from weightsync.vllm.cuda.cuda_ops import CudaOps
from weightsync.vllm.plan.int_views import joined_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.worker import live_digests, live_memory, plan_transform, worker_methods
from weightsync.vllm.worker_protocol import rank_name

if TYPE_CHECKING:
    from tests.support.staging import Staging, Version
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.env import Amount


class _Base:
    """Where the worker methods are installed in these tests."""


worker_methods.install(_Base)


class Worker(_Base):
    """As much of a vLLM worker as our methods use."""

    def __init__(self, model: Any, staging: Staging, rank: int = 0) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.device = torch.device("cpu")
        self.rank = rank
        self.parallel_config = SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
        )
        self.staging = staging
        self.model = model

    def call(self, word: str, **args: Any) -> dict[str, Any]:
        args = {"socket": self.staging.socket, **args}
        if word in ("capture", "check"):
            # Without vLLM there is no config to set.
            try:
                return {"ok": True, **getattr(worker_methods._rank_of(self), word)(args)}
            except PlanRefusedError as error:
                return {"ok": False, "error": str(error), "names": error.names}
        return getattr(self, f"weightsync_{word}")(args)  # type: ignore[no-any-return]

    def job(self, word: str, apply_id: str, version: Version | None = None, **more: Any) -> Any:
        page, (reader,) = self.staging.pages([rank_name(self.parallel_config, self.rank)])
        if version is not None:
            more["document"] = version.document.id
        reply = self.call(word, apply_id=apply_id, page=page, **more)
        assert reply["ok"], reply
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            report = reader.read()
            if report is not None and report["phase"] != "running":
                return report
            time.sleep(0.001)
        raise TimeoutError

    def adopt(self, version: Version, apply_id: str = "base") -> Any:
        assert self.job("prepare", apply_id, version)["phase"] == "needs_capture"
        reply = self.call("capture", document=version.document.id)
        assert reply["ok"], reply
        report = self.job("prepare", apply_id, version, compare_live=True)
        assert report["proved"] is True, report
        return report


def adopted(
    staging: Staging, files: list[bytes], *, rank: int = 0, dtype: Any = torch.float32
) -> Worker:
    """Return a worker that holds the first toy checkpoint, which lies in these files."""
    found = Worker(load_for_real(ToyModel(rank=rank, dtype=dtype), toy_tensors(1)), staging)
    found.rank = rank
    found.adopt(staging.stage_files(files))
    return found


def give_device(monkeypatch: pytest.MonkeyPatch, amount: Amount | None) -> None:
    """Let workers have a device whose memory is the host's; None: no device."""
    if amount is not None:
        cpu = torch.device("cpu")
        monkeypatch.setattr(worker_methods, "_device_ops", lambda *_: CudaOps(cpu, amount, 1.0))


@pytest.fixture
def first(staging: Staging) -> Version:
    return staging.stage_files([save(toy_tensors(1))])


@pytest.fixture
def rank(staging: Staging, first: Version) -> Worker:
    made = Worker(load_for_real(ToyModel(), toy_tensors(1)), staging)
    made.adopt(first)
    return made


def test_apply_and_restore_are_exact(rank: Worker, staging: Staging, first: Version) -> None:
    second = staging.stage_files([save(toy_tensors(2))])
    report = rank.job("prepare", "two", second)
    assert (report["phase"], report["proved"], report["slices"]) == ("ready", None, 8)
    reply = rank.call("commit", apply_id="two")
    assert reply["content_digest"] == second.content_digest
    assert reply["written_bytes"] == report["bytes"]
    wanted = load_for_real(ToyModel(), toy_tensors(2))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(rank.model.get_parameter(name), parameter)
    assert rank.call("commit", apply_id="base")["content_digest"] == first.content_digest
    state = rank.call("state")
    assert (state["apply_id"], state["content_digest"]) == ("base", first.content_digest)


def test_adoption_of_other_weights_is_not_proved(rank: Worker, staging: Staging) -> None:
    report = rank.job("prepare", "two", staging.stage_files([save(toy_tensors(2))]), compare_live=1)
    assert report["proved"] is False
    assert "down" in report["mismatched"]
    assert rank.call("state")["apply_id"] == "base"


def test_a_proof_of_the_checkpoint_claims_nothing(staging: Staging, first: Version) -> None:
    rank = Worker(load_for_real(ToyModel(), toy_tensors(1)), staging)
    assert rank.job("prepare", "proof", first)["phase"] == "needs_capture"
    assert rank.call("capture", document=first.document.id)["ok"]
    how = {"compare_live": True, "proof_only": True}
    assert rank.job("prepare", "proof", first, **how)["proved"] is True
    state = rank.call("state")
    assert (state["apply_id"], state["content_digest"], state["dirty"]) == ("", "", False)
    other = staging.stage_files([save(toy_tensors(2))])
    assert rank.job("prepare", "other", other, **how)["proved"] is False
    assert rank.call("state")["content_digest"] == ""
    assert rank.call("state")["dirty"] is False


def test_what_is_made_of_the_weights_and_not_written_must_be_loaded(staging: Staging) -> None:
    model = load_for_real(ToyModel(), toy_tensors(1))
    model.absorbed = model.qk.detach().T.contiguous()
    rank = Worker(model, staging)
    version = staging.stage_files([save(toy_tensors(1))])
    reply = rank.call("capture", document=version.document.id)
    assert reply["ok"]
    assert reply["transform"] == "twin"
    assert "absorbed" in reply["why"]
    # What only shows a parameter in another form follows what is written there.
    model.absorbed = model.qk.detach().T
    # Another one: a refusal is remembered.
    rank = Worker(model, staging)
    assert rank.call("capture", document=version.document.id)["ok"]


def test_what_nobody_is_known_to_have_left_unread_stays_as_it_was(staging: Staging) -> None:
    class Scaled(ToyModel):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if name != "k_scale":
                super().load_one(name, tensor)

    def scaled(seed: int, scale: float) -> bytes:
        return save({**toy_tensors(seed), "k_scale": torch.tensor([scale])})

    model = Scaled()
    load_for_real(model, toy_tensors(1))
    rank = Worker(model, staging)
    rank.adopt(staging.stage_files([scaled(1, 1.0)]))
    assert rank.job("prepare", "same", staging.stage_files([scaled(2, 1.0)]))["phase"] == "ready"
    report = rank.job("prepare", "other", staging.stage_files([scaled(3, 0.02)]))
    assert (report["phase"], report["names"]) == ("failed", ["k_scale"])
    assert "leave these tensors out" in report["error"]


@pytest.mark.parametrize("form", ["a tensor", "a number"])
def test_what_loading_read_is_never_left_to_a_plan(staging: Staging, form: str) -> None:
    class Scaled(ToyModel):
        """Makes something of a scale that it has as a parameter only while it is loaded."""

        def __init__(self) -> None:
            super().__init__()
            self.k_scale: Any = torch.nn.Parameter(torch.ones(1), requires_grad=False)
            self.made: torch.Tensor
            self.register_buffer("made", torch.ones(1))
            self.made_float = 1.0

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if name != "k_scale":
                super().load_one(name, tensor)
            elif self.k_scale is not None:
                self.k_scale.data.copy_(tensor)

        def process(self) -> None:
            if form == "a number":
                # The parameter stays, and a plan writes it.
                self.made_float = self.k_scale.item()
                return
            self.made.copy_(self.k_scale)
            self.k_scale = None

    # What a scale is where a checkpoint has none.
    tensors = {**toy_tensors(1), "k_scale": torch.ones(1)}
    rank = Worker(watched_load(Scaled, tensors), staging)
    version = staging.stage_files([save(tensors)])
    reply = rank.call("capture", document=version.document.id)
    assert (reply["ok"], reply.get("transform")) == (True, "twin")
    assert ("k_scale" if form == "a tensor" else "made_float") in reply["why"]


def test_a_tied_head_that_was_written_twice_is_left_to_a_plan(staging: Staging) -> None:
    class Tied(ToyModel):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one("down" if name == "copy" else name, tensor)

    tensors = toy_tensors(1)
    tensors["copy"] = tensors["down"].clone()
    rank = Worker(watched_load(Tied, tensors), staging)
    version = staging.stage_files([save(tensors)])
    reply = rank.call("capture", document=version.document.id)
    assert (reply["ok"], reply.get("transform", "plan")) == (True, "plan"), reply


def test_an_ignored_norm_that_was_all_ones_is_no_tie(staging: Staging) -> None:
    # As the norms of layers that only a draft model reads, before anything was trained.
    class WithDraft(ToyModel):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if not name.startswith("mtp."):
                super().load_one(name, tensor)

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        drawn = toy_tensors(seed)
        extra = {"mtp.bias": drawn["q_bias"] * 3, "mtp.scale": drawn["scale"] * 3}
        return {**drawn, **extra, "mtp.tied": drawn["down"].clone()}

    ones = {"q_bias", "mtp.bias", "scale", "mtp.scale"}
    start = {n: torch.ones_like(t) if n in ones else t for n, t in tensors(1).items()}
    model = watched_load(WithDraft, start)
    rank = Worker(model, staging)
    rank.adopt(staging.stage_files([save(start)]))
    assert rank.job("prepare", "trained", staging.stage_files([save(tensors(2))]))["phase"] == (
        "ready"
    )
    # A real tie still counts.
    untied = tensors(3) | {"mtp.tied": torch.randn(4, 6)}
    report = rank.job("prepare", "untied", staging.stage_files([save(untied)]))
    assert (report["phase"], report["names"]) == ("failed", ["mtp.tied"])


def test_tensors_at_odd_addresses_and_of_several_shards(rank: Worker, staging: Staging) -> None:
    tensors = toy_tensors(2)
    raw = save({name: tensors[name] for name in ("q", "k", "down", "scale", "q_bias")})
    size = int.from_bytes(raw[:8], "little")
    odd = (size + 3).to_bytes(8, "little") + raw[8 : 8 + size] + b"   " + raw[8 + size :]
    rest = save({name: tensors[name] for name in ("embed", "head", "k_bias")})
    version = staging.stage_files([odd, rest])
    assert rank.job("prepare", "odd", version)["phase"] == "ready"
    assert rank.call("commit", apply_id="odd")["content_digest"] == version.content_digest
    wanted = load_for_real(ToyModel(), tensors)
    assert torch.equal(rank.model.qk, wanted.qk)


def _changed(change: dict[str, Any]) -> bytes:
    tensors = {**toy_tensors(2), **change}
    return save({name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize(
    ("change", "sentence", "names"),
    [
        ({"q": None}, "lacks these tensors", ["q"]),
        ({f"more{i:02}": torch.zeros(9) for i in range(12)}, "does not have these", None),
        (
            {"q": torch.zeros(4, 5)},
            "F32 [4, 5], the engine has F32 [4, 4]; a different shape",
            ["q"],
        ),
        ({"down": torch.zeros(4, 6, dtype=torch.int32)}, "neither the dtype", ["down"]),
        ({"more": torch.zeros(9)}, "does not have these", ["more"]),
    ],
)
def test_what_does_not_fit_is_refused_in_prepare_without_a_pause(
    rank: Worker, staging: Staging, change: Any, sentence: str, names: list[str] | None
) -> None:
    report = rank.job("prepare", "bad", staging.stage_files([_changed(change)]))
    assert report["phase"] == "failed"
    assert sentence in report["error"]
    assert report["names"] == (names or sorted(change)[:10])
    assert report["names_total"] == len(change)
    assert not rank.call("commit", apply_id="bad")["ok"]


def test_untied_head_is_refused_by_a_tied_model(staging: Staging) -> None:
    tied = staging.stage_files([save(toy_tensors(1, tied=True))])
    rank = Worker(load_for_real(ToyModel(tied=True), toy_tensors(1, tied=True)), staging)
    rank.adopt(tied)
    report = rank.job("prepare", "untied", staging.stage_files([save(toy_tensors(2))]))
    assert report["names"] == ["head"]
    assert "in no other one" in report["error"]
    good = staging.stage_files([save(toy_tensors(2, tied=True))])
    assert rank.job("prepare", "tied", good)["phase"] == "ready"
    without = toy_tensors(3, tied=True)
    del without["head"]
    version = staging.stage_files([save(without)])
    assert rank.job("prepare", "none", version)["phase"] == "needs_capture"
    assert rank.call("capture", document=version.document.id)["ok"]
    assert rank.job("prepare", "none", version)["phase"] == "ready"
    assert rank.call("commit", apply_id="none")["content_digest"] == version.content_digest


def test_a_whole_version_is_checked_for_what_the_model_needs(
    rank: Worker, staging: Staging
) -> None:
    tensors = toy_tensors(2)
    del tensors["q"], tensors["down"]
    version = staging.stage_files([save(tensors)])
    assert rank.call("check", document=version.document.id)["ok"]
    reply = rank.call("check", document=version.document.id, whole=True)
    assert not reply["ok"]
    assert reply["names"] == ["down", "q"]
    assert "lacks these tensors" in reply["error"]
    # Another name may stand for one that is absent: the capture decides.
    tensors["unheard"] = torch.zeros(4, 6)
    version = staging.stage_files([save(tensors)])
    assert "lacks" not in rank.call("check", document=version.document.id, whole=True)["error"]


def test_a_tied_head_may_be_absent_of_a_whole_version(staging: Staging) -> None:
    rank = Worker(load_for_real(ToyModel(tied=True), toy_tensors(1, tied=True)), staging)
    rank.adopt(staging.stage_files([save(toy_tensors(1, tied=True))]))
    tensors = toy_tensors(2, tied=True)
    del tensors["head"]
    version = staging.stage_files([save(tensors)])
    assert rank.call("check", document=version.document.id, whole=True)["ok"]


def test_useless_tensor_of_the_adopted_checkpoint_stays_accepted(staging: Staging) -> None:
    # Nothing of it was read.
    tied = watched_load(lambda: ToyModel(tied=True), toy_tensors(1))
    rank = Worker(tied, staging)
    rank.adopt(staging.stage_files([save(toy_tensors(1))]))
    report = rank.job("prepare", "two", staging.stage_files([save(toy_tensors(2))]))
    assert report["phase"] == "ready"


def test_renamed_tensors_that_leave_a_hole_are_refused_by_the_capture(
    rank: Worker, staging: Staging
) -> None:
    tensors = toy_tensors(2)
    del tensors["down"], tensors["k"]
    tensors["unheard"] = torch.zeros(2)
    version = staging.stage_files([save(tensors)])
    assert rank.job("prepare", "hole", version)["phase"] == "needs_capture"
    reply = rank.call("capture", document=version.document.id)
    assert not reply["ok"]
    assert "unheard" in reply["error"]


def _driven(rank: Worker, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what the model's loaders are shown from now on, call by call."""
    shown: list[list[str]] = []
    load = rank.model.load_weights

    def load_weights(weights: Any) -> Any:
        shown.append([])

        def noted() -> Any:
            for name, tensor in weights:
                shown[-1].append(name)
                yield name, tensor

        return load(noted())

    monkeypatch.setattr(rank.model, "load_weights", load_weights)
    return shown


def test_a_layout_that_was_refused_pauses_nothing_again(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _driven(rank, monkeypatch)
    tensors = toy_tensors(2)
    del tensors["down"]
    tensors["unheard"] = torch.zeros(2)
    first, again = (staging.stage_files([save(tensors)]) for _ in range(2))
    refusal = rank.call("capture", document=first.document.id)
    assert not refusal["ok"]
    assert len(shown) == 1
    # Nor does it ask for a capture, whatever the bytes are.
    report = rank.job("prepare", "again", again)
    assert (report["phase"], report["refused"]) == ("failed", True)
    assert report["error"] == refusal["error"]
    assert rank.call("capture", document=again.document.id) == refusal
    assert len(shown) == 1


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"unheard": torch.zeros(2)}, "refused tensor unheard"),
        ({"q": torch.zeros(4, 5)}, "a different shape"),
        ({"down": torch.zeros(4, 6, dtype=torch.int32)}, "neither the dtype"),
    ],
)
def test_tensors_that_the_model_does_not_take_are_told_by_name(
    rank: Worker, staging: Staging, tensors: Any, sentence: str
) -> None:
    reply = rank.call("check", document=staging.stage_files([save(tensors)]).document.id)
    assert not reply["ok"]
    assert sentence in reply["error"]
    assert reply["names"] == list(tensors)


def test_tensors_that_this_rank_has_no_place_for_are_told(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = rank.model.load_one
    monkeypatch.setattr(
        rank.model, "load_one", lambda name, t: None if name in ("odd", "tied") else load(name, t)
    )
    some = {"odd": torch.zeros(9), "tied": torch.zeros(6, 4), "k": toy_tensors(2)["k"]}
    reply = rank.call("check", document=staging.stage_files([save(some)]).document.id)
    assert reply["ok"]
    # What has the shape of a loaded one may repeat it.
    assert unpack(reply["unplaced"], some) == {"odd"}


def test_a_tied_head_is_shown_to_loaders_that_want_its_embedding_beside_it(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, one = rank.model.load_weights, rank.model.load_one
    monkeypatch.setattr(
        rank.model, "load_one", lambda name, t: None if name == "tied" else one(name, t)
    )

    def load_weights(weights: Any) -> Any:
        loaded = load(weights)
        # As vLLM 0.32 does for a head that it skips.
        if "tied" in loaded and "embed" not in loaded:
            raise ValueError("tied was skipped, but embed was not found")
        return loaded

    monkeypatch.setattr(rank.model, "load_weights", load_weights)
    some = {"tied": torch.zeros(6, 4)}
    reply = rank.call("check", document=staging.stage_files([save(some)]).document.id)
    assert reply["ok"], reply
    assert not unpack(reply["unplaced"], some)


def test_names_of_the_checkpoint_are_taken_without_asking_the_loaders(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _driven(rank, monkeypatch)
    some = {name: toy_tensors(2)[name] for name in ("k", "down")}
    reply = rank.call("check", document=staging.stage_files([save(some)]).document.id)
    assert reply["ok"]
    assert not unpack(reply["unplaced"], some)
    assert not shown
    # Another spelling that the loaders know, and one that may repeat a tensor.
    load = rank.model.load_one
    monkeypatch.setattr(
        rank.model,
        "load_one",
        lambda name, t: None if name == "tied" else load(name.removeprefix("model."), t),
    )
    some = {"model.q": toy_tensors(2)["q"], "tied": toy_tensors(2)["down"], "k": some["k"]}
    assert rank.call("check", document=staging.stage_files([save(some)]).document.id)["ok"]
    assert [sorted(names) for names in shown] == [["model.q", "tied"]]


@pytest.mark.parametrize("word", ["capture", "check"])
def test_a_loader_that_writes_behind_torchs_back_is_found(
    rank: Worker, staging: Staging, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_of_head = rank.model.head.data.numpy()
    load = rank.model.load_one

    def writes(name: str, tensor: torch.Tensor) -> None:
        bytes_of_head[0, 0] += 1
        if name != "behind":
            load(name, tensor)

    monkeypatch.setattr(rank.model, "load_one", writes)
    version = staging.stage_files([save({"behind": torch.zeros(8, 4)})])
    reply = rank.call(word, document=version.document.id)
    assert not reply["ok"]
    assert "changed parameters; restart vLLM" in reply["error"]
    assert reply["names"] == ["head"]


def test_cast_from_the_adopted_dtype_is_proved(staging: Staging) -> None:
    model = ToyModel(dtype=torch.bfloat16)
    rank = Worker(load_for_real(model, toy_tensors(1)), staging)
    rank.adopt(staging.stage_files([save(toy_tensors(1))]))
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)
    assert rank.call("commit", apply_id="two")["content_digest"] == second.content_digest
    third = staging.stage_files([save(toy_tensors(3, dtype=torch.bfloat16))])
    assert rank.job("prepare", "three", third)["phase"] == "needs_capture"
    assert rank.call("capture", document=third.document.id)["ok"]
    rank.job("prepare", "three", third)
    assert rank.call("commit", apply_id="three")["content_digest"] == third.content_digest


def test_flipped_live_bit_changed_segment_and_skipped_slice_are_caught(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)
    raw = second.tensor_bytes("k")
    raw[3] ^= 1
    assert rank.call("commit", apply_id="two")["mismatched"] == ["qk"]
    assert rank.call("state")["dirty"] is True
    raw[3] ^= 1
    assert rank.call("commit", apply_id="two")["content_digest"] == second.content_digest
    rank.model.head.data.view(torch.uint8)[0, 0] ^= 1
    report = rank.job("verify", "two")
    assert (report["proved"], report["mismatched"]) == (False, ["head"])
    assert rank.call("state")["content_digest"] == ""

    def skip(self: host_ops.HostWriter, threads: SliceThreads) -> None:
        del threads
        pairs = list(zip(self.target.targets.views(), self.target.sources, strict=True))
        for target, source in pairs[:-1]:
            target.copy_(source)

    monkeypatch.setattr(host_ops.HostWriter, "write", skip)
    assert len(rank.call("commit", apply_id="base")["mismatched"]) == 1


def test_a_quick_look_at_memory_that_others_can_write_compares_digests_of_the_last_proof(
    rank: Worker, staging: Staging, first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = live_memory.LIVE_WRITERS.state()
    monkeypatch.setattr(live_memory.LIVE_WRITERS, "state", lambda: state | {"unguarded": True})
    compared: list[str] = []
    compare = plan_transform.PlanTransform.compare

    def counted(self: Any, target: Any, stop: Any) -> list[str]:
        compared.append(target.apply_id)
        return compare(self, target, stop)

    monkeypatch.setattr(plan_transform.PlanTransform, "compare", counted)
    # Nothing was taken yet: the first look compares everything.
    assert rank.job("verify", "base", quick=True)["proved"] is True
    assert rank.job("verify", "base", quick=True)["proved"] is True
    assert compared == ["base"]
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)
    rank.call("commit", apply_id="two")
    # What was taken of the version before says nothing of this one.
    assert rank.job("verify", "two", quick=True)["proved"] is True
    assert compared == ["base", "two"]
    assert rank.job("verify", "base", quick=True)["proved"] is False
    assert compared.pop() == "base"
    rank.model.head.data.view(torch.uint8)[0, 0] ^= 1
    report = rank.job("verify", "two", quick=True)
    assert (report["proved"], report["mismatched"], compared) == (False, ["head"], ["base", "two"])
    assert rank.call("state")["content_digest"] == ""
    # Nor is what was taken believed when nothing is proved any more.
    assert rank.job("verify", "two", quick=True)["proved"] is False
    assert compared == ["base", "two", "two"]


def test_a_quick_look_leaves_no_room_for_an_engine_that_stands_still(
    rank: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = live_memory.LIVE_WRITERS.state()
    monkeypatch.setattr(live_memory.LIVE_WRITERS, "state", lambda: state | {"unguarded": True})
    stops: list[Any] = []
    digests = host_ops.HostOps.digests

    def seen(self: Any, tensors: Any, stop: Any = None) -> Any:
        stops.append(stop)
        return digests(self, tensors, stop)

    monkeypatch.setattr(host_ops.HostOps, "digests", seen)
    for _ in range(2):
        assert rank.job("verify", "base", quick=True)["proved"] is True
    assert stops == [None] * 3, "before and after the comparison of all, then alone"
    stops.clear()
    assert rank.job("verify", "base")["proved"] is True
    assert len(stops) == 2
    assert all(stop is not None for stop in stops), "it generates meanwhile"


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_written_while_all_is_compared_is_no_proof(
    rank: Worker, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    state = live_memory.LIVE_WRITERS.state()
    monkeypatch.setattr(live_memory.LIVE_WRITERS, "state", lambda: state | {"unguarded": True})
    if quick:
        assert rank.job("verify", "base")["proved"] is True
    look = live_digests.digest_live

    def commits(*args: Any) -> Any:
        found = look(*args)
        # As a commit does that the server began when this took too long.
        worker_methods._rank_of(rank)._live.writes += 2
        return found

    monkeypatch.setattr(live_digests, "digest_live", commits)
    report = rank.job("verify", "base", quick=quick)
    assert report["phase"] == "failed"
    assert "written while they were compared" in report["error"]
    monkeypatch.setattr(live_digests, "digest_live", look)
    compare = plan_transform.PlanTransform.compare

    def writes(self: Any, target: Any, stop: Any) -> list[str]:
        wrong = compare(self, target, stop)
        rank.model.head.data.view(torch.uint8)[0, 0] ^= 1
        return wrong

    monkeypatch.setattr(plan_transform.PlanTransform, "compare", writes)
    report = rank.job("verify", "base")
    assert (report["proved"], report["mismatched"]) == (False, ["head"])
    assert rank.call("state")["content_digest"] == ""


def test_write_that_fails_in_the_middle_leaves_the_rank_dirty(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)

    def fail(self: host_ops.HostWriter, threads: SliceThreads) -> None:
        del threads
        self.target.targets.views()[0].fill_(1)
        raise OSError("torn")

    monkeypatch.setattr(host_ops.HostWriter, "write", fail)
    reply = rank.call("commit", apply_id="two")
    assert (reply["ok"], reply["error"]) == (False, "OSError: torn")
    assert rank.call("state")["dirty"] is True
    monkeypatch.undo()
    assert rank.call("commit", apply_id="base")["ok"]
    assert rank.job("verify", "base")["proved"] is True


def test_replaced_parameters_are_followed_or_refused(rank: Worker, staging: Staging) -> None:
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)
    rank.model.down = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    assert rank.call("commit", apply_id="two")["ok"]
    assert torch.equal(rank.model.down, toy_tensors(2)["down"][:, :3])
    rank.model.down = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    reply = rank.call("commit", apply_id="base")
    assert "down was replaced" in reply["error"]


def test_emptied_parameter_under_the_switch_has_another_remedy(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", "1")
    rank.model.qk = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    report = rank.job("prepare", "two", staging.stage_files([save(toy_tensors(2))]))
    assert report["phase"] == "failed"
    assert "serve the model on a GPU" in report["error"]
    # What it was started with already; where the processor has AMX, 0 is a remedy.
    assert "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1" not in report["error"]


def test_versions_of_an_emptied_parameter_must_be_loaded(staging: Staging, first: Version) -> None:
    rank = Worker(load_for_real(ToyModel(), toy_tensors(1)), staging)
    rank.model.qk = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    hello = rank.call("hello")
    assert (hello["plain"], hello["pid"]) == (False, os.getpid())
    assert rank.job("prepare", "x", first)["phase"] == "needs_capture"
    reply = rank.call("capture", document=first.document.id)
    assert reply["transform"] == "twin"
    # What would prevent it matters only where it cannot be loaded either.
    assert "WEIGHTSYNC" not in reply["why"]
    assert "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1" in reply["remedy"]


def test_one_job_at_a_time_and_release_ends_it(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any) -> bytes:
        time.sleep(0.2)
        return joined_digest_of(*args)

    monkeypatch.setattr(host_ops, "joined_digest_of", slow)
    second = staging.stage_files([save(toy_tensors(2))])
    page, (reader,) = staging.pages(["0/0/0"])
    args = {"document": second.document.id, "page": page}
    assert rank.call("prepare", apply_id="slow", **args)["ok"]
    refused = rank.call("prepare", apply_id="other", **args)
    assert "slow is still at work" in refused["error"]
    assert rank.call("state")["busy"] == "slow"
    assert rank.call("release", keep=["base"])["prepared"] == ["base"]
    assert rank.job("prepare", "again", second)["phase"] == "ready"
    report = reader.read()
    assert report is not None
    assert "gave this version up" in report["error"]
    assert rank.call("state")["prepared"] == ["again", "base"]


def test_who_is_told_of_the_end_of_a_job_may_ask_for_the_next_one_at_once(
    rank: Worker, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PageWriter.write

    def slow_to_end(self: PageWriter, report: dict[str, Any]) -> None:
        write(self, report)
        time.sleep(0.2)

    monkeypatch.setattr(PageWriter, "write", slow_to_end)
    second = staging.stage_files([save(toy_tensors(2))])
    for apply_id in ("two", "three"):
        assert rank.job("prepare", apply_id, second)["phase"] == "ready"
        assert rank.call("state")["busy"] == ""


def test_release_unmaps_only_what_is_gone(rank: Worker, staging: Staging, first: Version) -> None:
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)
    assert rank.call("release", keep=["base"])["segments"] == 2
    ids = list(first.staged.segments)
    assert rank.call("release", keep=["base"], segments=ids)["segments"] == 1
    assert rank.call("commit", apply_id="base")["ok"]
    assert rank.call("release", keep=[], segments=[])["segments"] == 0


def test_nothing_raises(rank: Worker, staging: Staging) -> None:
    for word in ("commit", "verify", "prepare", "release"):
        reply = getattr(rank, f"weightsync_{word}")({})
        assert (reply["ok"], reply["rank"]) == (False, "0/0/0")
        assert reply["error"]
    page, (reader,) = staging.pages(["0/0/0"])
    assert rank.call("prepare", apply_id="x", page=page, document="none")["ok"]
    deadline = time.monotonic() + 10
    while (report := reader.read()) is None or report["phase"] == "running":
        assert time.monotonic() < deadline
    assert "no segment none" in report["error"]


def test_second_rank_takes_its_own_part(staging: Staging, first: Version) -> None:
    other = Worker(load_for_real(ToyModel(rank=1), toy_tensors(1)), staging, rank=1)
    other.adopt(first)
    second = staging.stage_files([save(toy_tensors(2))])
    other.job("prepare", "two", second)
    reply = other.call("commit", apply_id="two")
    assert (reply["rank"], reply["content_digest"]) == ("0/0/1", second.content_digest)
    assert torch.equal(other.model.down, toy_tensors(2)["down"][:, 3:])
