"""A trainer in the memory of one real vLLM: views by name, what they show and what they change."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, LiveCheck, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync_client.attach import Attached

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]

_PROMPT = "The quick brown"


@dataclass
class _Site:
    vllm: VllmServer
    server: WeightSyncServer
    first: Path
    second: Path

    def client(self) -> Client:
        return Client(self.server.address)


@contextlib.contextmanager
def _site(first: Path, second: Path, tp: int, dtype: str = "float32") -> Iterator[_Site]:
    folder = Path(tempfile.mkdtemp(prefix="va"))
    run = folder / "run"
    vllm = VllmServer(first, run, tp=tp, dtype=dtype, variables={"WEIGHTSYNC_ATTACH": "1"})
    server = WeightSyncServer(run, folder / "state", flags=["--slots", "3"])
    try:
        vllm.start()
        server.start()
        server.wait_serving()
        yield _Site(vllm, server, first, second)
    finally:
        server.stop()
        vllm.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.battery)], ids=["tp1", "tp2"]
)
def site(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[_Site]:
    tied = request.param == 1
    first, second = (checkpoint(seed=seed, tied=tied) for seed in (1, 2))
    with _site(first, second, request.param) as made:
        yield made


def _content(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _passed(client: Client, version: int) -> bool:
    return client.get_version(version).live_check is LiveCheck.PASSED


def _fail_in(attached: Attached, content: dict[str, torch.Tensor]) -> None:
    with attached.transaction():
        for name, tensor in content.items():
            attached.write(name, tensor)
        _ = 1 / 0


def test_every_tensor_of_the_checkpoint_is_there(site: _Site) -> None:
    with site.client() as client, client.attach() as attached:
        assert attached.checkpoint == str(site.first)
        assert attached.config["num_hidden_layers"] == 2
        assert attached.version == 1
        content = _content(site.first)
        assert content.keys() <= attached.boxes.keys()
        for name, tensor in content.items():
            assert torch.equal(attached.read(name), tensor.float()), name
        if site.vllm.tp == 1:
            assert content.keys() <= attached.keys()
        else:
            halves = [box.offsets for box in attached.boxes["model.layers.0.mlp.down_proj.weight"]]
            columns = attached.shape("model.layers.0.mlp.down_proj.weight")[1]
            assert halves == [(0, 0), (0, columns // 2)]
            assert len(attached.boxes["model.norm.weight"]) == 2


def test_an_apply_is_seen_through_the_views(site: _Site) -> None:
    with site.client() as client, client.attach() as attached:
        version = client.push(site.second).version
        client.apply(version)
        for name, tensor in _content(site.second).items():
            assert torch.equal(attached.read(name), tensor.float()), name
        client.rollback()
        attached.check()


def test_what_is_written_is_served_until_it_is_found(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a trainer of an older release, whose memory can be written outside of blocks."""
    monkeypatch.setattr("weightsync_client.attach.trainer_job", str)
    with site.client() as client:
        before = site.vllm.complete(_PROMPT)
        (model,) = client.status().models
        version = model.live_version
        attached = client.attach()
        _until(lambda: _passed(client, version))
        for name, tensor in _content(site.second).items():
            attached.write(name, tensor)
        assert site.vllm.complete(_PROMPT) != before
        with client.attach():
            _until(lambda: "outside a transaction; version" in site.server.log)
            with pytest.raises(RefusedError, match="outside a transaction"):
                attached.check()
            _until(lambda: client.health("serving") and _passed(client, version))
        assert site.vllm.complete(_PROMPT) == before
        for name, tensor in _content(site.first).items():
            assert torch.equal(attached.read(name), tensor.float()), name
        attached.close()
        assert client.verify().verified


def test_what_is_written_in_a_transaction_is_a_version(site: _Site) -> None:
    with site.client() as client, client.attach() as attached:
        before = site.vllm.complete(_PROMPT)
        with attached.transaction():
            for name, tensor in _content(site.second).items():
                attached.write(name, tensor)
        after = site.vllm.complete(_PROMPT)
        assert after != before
        assert client.verify().verified
        for pulled in client.tensors():
            assert torch.equal(pulled.torch(), attached.read(pulled.name)), pulled.name
        client.rollback()
        assert site.vllm.complete(_PROMPT) == before


def test_what_is_taken_back_was_never_served(site: _Site) -> None:
    with site.client() as client, client.attach() as attached:
        before = site.vllm.complete(_PROMPT)
        with pytest.raises(ZeroDivisionError):
            _fail_in(attached, _content(site.second))
        assert site.vllm.complete(_PROMPT) == before
        for name, tensor in _content(site.first).items():
            assert torch.equal(attached.read(name), tensor.float()), name
        assert client.verify().verified


def test_a_model_of_transformers_computes_with_the_engine_s_memory(site: _Site) -> None:
    import transformers

    with site.client() as client, client.attach() as attached:
        config = transformers.AutoConfig.from_pretrained(site.first)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if site.vllm.tp > 1:
            with pytest.raises(RefusedError, match="are not contiguous"):
                attached.load_into(model)
            return
        attached.load_into(model)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        name = "model.layers.1.self_attn.k_proj.weight"
        assert model.get_parameter(name).data_ptr() == attached[name].data_ptr()
        fresh = transformers.AutoModelForCausalLM.from_pretrained(site.first, dtype=torch.float32)
        tokens = torch.arange(1, 20)[None]
        out = model(tokens, labels=tokens)
        assert torch.equal(out.logits, fresh(tokens).logits)
        out.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        before = site.vllm.complete(_PROMPT)
        step = torch.optim.SGD(model.parameters(), lr=0.5)
        with attached.transaction() as transaction:
            step.step()
        assert transaction.report is not None
        assert site.vllm.complete(_PROMPT) != before
        trained = dict(model.named_parameters())
        for pulled in client.tensors():
            assert torch.equal(pulled.torch(), trained[pulled.name]), pulled.name
        client.rollback()
        assert site.vllm.complete(_PROMPT) == before


def test_a_trainer_has_its_own_tensors_served(site: _Site) -> None:
    """Every rank gets its parts, in its dtype; what is pushed are the trainer's own."""
    with site.client() as client, client.attach() as attached:
        before = site.vllm.complete(_PROMPT)
        tensors = _content(site.second)
        done = attached.update(tensors, background=True)
        assert done.paused_s > 0
        after = site.vllm.complete(_PROMPT)
        assert after != before
        report = done.result()
        assert report is not None
        for pulled in client.tensors(report.version):
            assert torch.equal(pulled.torch(), tensors[pulled.name]), pulled.name
        client.apply(report.version)
        assert site.vllm.complete(_PROMPT) == after
        client.rollback()
        assert site.vllm.complete(_PROMPT) == before


@pytest.mark.battery
def test_what_is_served_in_another_dtype_is_written_in_that(
    checkpoint: Callable[..., Path],
) -> None:
    """What is pushed has a layout that no rank has a plan of: it is captured beside generation."""
    first, second = (checkpoint(seed=seed) for seed in (1, 2))
    with _site(first, second, 1, "bfloat16") as site, site.client() as client:
        before = site.vllm.complete(_PROMPT)
        with client.attach() as attached:
            content = {name: tensor.bfloat16() for name, tensor in _content(second).items()}
            for _ in range(2):
                with attached.transaction():
                    for name, tensor in content.items():
                        attached.write(name, tensor)
            after = site.vllm.complete(_PROMPT)
            assert after != before
            for pulled in client.tensors():
                assert torch.equal(pulled.torch(), content[pulled.name]), pulled.name
            assert attached.version == 3
        assert client.verify().verified
        client.rollback()
        assert site.vllm.complete(_PROMPT) == after
        assert "is being restored" not in site.server.log


@pytest.mark.battery
def test_experts_are_trained_where_they_lie(checkpoint: Callable[..., Path]) -> None:
    """transformers has those of a layer in one parameter, the checkpoint one by one."""
    import transformers

    first, second = (checkpoint("qwen3_moe", seed=seed) for seed in (1, 2))
    with _site(first, second, 1) as site, site.client() as client, client.attach() as attached:
        config = transformers.AutoConfig.from_pretrained(first)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        attached.load_into(model)
        fresh = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
        tokens = torch.arange(1, 20)[None]
        out = model(tokens, labels=tokens)
        assert torch.equal(out.logits, fresh(tokens).logits)
        out.loss.backward()
        before = site.vllm.complete(_PROMPT)
        step = torch.optim.SGD(model.parameters(), lr=0.5)
        with attached.transaction():
            step.step()
        assert site.vllm.complete(_PROMPT) != before
        fused = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
        whole = {tensor.name: tensor.torch() for tensor in client.tensors()}
        half = whole["model.layers.0.mlp.experts.3.up_proj.weight"]
        assert torch.equal(fused[3, fused.shape[1] // 2 :], half)
        client.rollback()
        assert site.vllm.complete(_PROMPT) == before
