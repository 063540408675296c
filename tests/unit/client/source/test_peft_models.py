"""A PEFT model is pushed merged and is afterwards as it was, shown against PEFT itself."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from weightsync.errors import Reason
from weightsync_client import AbortedError, AsyncClient, Client, ClientError, InvalidError
from weightsync_client.source.source import Source, make_source

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

peft = pytest.importorskip("peft")

Bits = dict[str, tuple[int, torch.Tensor]]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]  # as PyTorch types it


NAMES = {
    *(f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")),
    "embed.weight",
    "head.weight",
    "scale",
}
LAYERS = ["layers.0", "layers.1"]
#: Of a model of transformers.
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _trained(model: Any) -> Any:
    """Give every parameter of the adapters a value, as training does."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and "original_module" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def _adapted(**options: Any) -> Any:
    options.setdefault("target_modules", LAYERS)
    return _trained(peft.get_peft_model(_Model(), peft.LoraConfig(r=2, **options)))


def _bits(model: torch.nn.Module) -> Bits:
    """Where every tensor lies and what it holds."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: (t.data_ptr(), t.detach().clone()) for name, t in tensors.items()}


def _assert_same(model: torch.nn.Module, before: Bits) -> None:
    now = _bits(model)
    assert now.keys() == before.keys()
    for name, (where, tensor) in before.items():
        assert now[name][0] == where, name
        assert torch.equal(now[name][1], tensor), name


def _read(source: Source) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in source.tensors:
        assert tensor.flat is not None
        found[tensor.name] = tensor.flat().clone()
    return found


def _merged_by_peft(model: Any) -> Mapping[str, torch.Tensor]:
    state: Mapping[str, torch.Tensor] = copy.deepcopy(model).merge_and_unload().state_dict()
    return state


def _assert_pushed(model: Any, wanted: Mapping[str, torch.Tensor]) -> None:
    before = _bits(model)
    merged = [getattr(m, "merged_adapters", None) for m in model.modules()]
    merged = [list(names) if names is not None else None for names in merged]
    source = make_source(model, 1 << 20)
    found = _read(source)
    source.release()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].contiguous().reshape(-1).view(torch.uint8)), name
    _assert_same(model, before)
    assert [getattr(m, "merged_adapters", None) for m in model.modules()] == merged


def _with_lora_everywhere() -> Any:
    return _adapted(target_modules=["embed", "head", *LAYERS])


def _with_dora() -> Any:
    return _adapted(use_dora=True)


def _with_bias() -> Any:
    return _adapted(lora_bias=True, bias="lora_only")


def _with_saved_modules() -> Any:
    return _adapted(modules_to_save=["head"])


def _with_tokens() -> Any:
    return _adapted(trainable_token_indices={"embed": [1, 3]})


def _with_ia3() -> Any:
    config = peft.IA3Config(target_modules=LAYERS, feedforward_modules=[])
    return _trained(peft.get_peft_model(_Model(), config))


def _with_trained_norm() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    config = peft.LNTuningConfig(target_modules=["1"])
    return _trained(peft.get_peft_model(model, config))


def _with_parameters() -> Any:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["layers.0.weight"])
    return _trained(peft.get_peft_model(_Model(), config))


def _with_two_active() -> Any:
    model = _adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["layers.1", "layers.2"]))
    model.base_model.set_adapter(["default", "other"])
    return _trained(model)


def _with_one_of_two_active() -> Any:
    model = _adapted(modules_to_save=["head"])
    config = peft.LoraConfig(r=2, target_modules=["layers.2"], modules_to_save=["head"])
    model.add_adapter("other", config)
    model.set_adapter("other")
    return _trained(model)


def _in_half() -> Any:
    model = peft.get_peft_model(_Model().bfloat16(), peft.LoraConfig(r=2, target_modules=LAYERS))
    return _trained(model)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        _adapted,
        _with_lora_everywhere,
        _with_dora,
        _with_bias,
        _with_saved_modules,
        _with_tokens,
        _with_ia3,
        _with_trained_norm,
        _with_parameters,
        _with_two_active,
        _with_one_of_two_active,
        _in_half,
    ],
)
def test_a_peft_model_is_pushed_merged_and_is_then_as_it_was(make: Any) -> None:
    model = make()
    wanted = _merged_by_peft(model)
    assert make is _with_trained_norm or wanted.keys() == NAMES
    _assert_pushed(model, wanted)


def test_unmerging_by_subtraction_would_not_do() -> None:
    model = _in_half()
    before = _bits(model)
    model.merge_adapter()
    model.unmerge_adapter()
    with pytest.raises(AssertionError):
        _assert_same(model, before)


def test_wrappers_around_and_inside_leave_no_trace() -> None:
    model = _adapted()
    wanted = _merged_by_peft(model)
    for wrapped in (
        torch.compile(model),
        torch.nn.DataParallel(model),
        model.base_model,
        model.get_base_model(),
    ):
        source = make_source(wrapped, 1 << 20)
        assert _read(source).keys() == wanted.keys()
        source.release()


def test_a_user_who_has_merged_keeps_that() -> None:
    model = _with_two_active()
    wanted = _merged_by_peft(model)
    model.merge_adapter()
    _assert_pushed(model, wanted)
    assert model.base_model.model.layers[1].merged_adapters == ["default", "other"]
    model.unmerge_adapter()


def test_what_a_user_has_merged_in_part_is_pushed_as_the_model_computes() -> None:
    model = _adapted()
    wanted = _merged_by_peft(model)
    model.base_model.model.layers[0].merge()
    _assert_pushed(model, wanted)
    assert model.base_model.model.layers[0].merged
    assert not model.base_model.model.layers[1].merged


def test_the_gradients_and_the_optimizer_go_on() -> None:
    model = _adapted()
    tokens = torch.arange(4)
    before = model(tokens)
    source = make_source(model, 1 << 20)
    assert torch.allclose(model(tokens), before, atol=1e-5)
    source.release()
    source.release()
    assert torch.equal(model(tokens), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(tokens).sum().backward()
    optimizer.step()
    assert not torch.equal(model(tokens), before)
    _assert_pushed(model, _merged_by_peft(model))


@pytest.mark.parametrize("kind", ["tied", "untied", "saved"])
def test_a_model_of_transformers_has_the_names_that_it_is_saved_with(
    kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=kind == "tied")
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    saved_modules = ["lm_head"] if kind == "saved" else None
    lora = peft.LoraConfig(
        r=2, target_modules="all-linear", modules_to_save=saved_modules, task_type="CAUSAL_LM"
    )
    model = _trained(peft.get_peft_model(base, lora))
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path / "merged")
    wanted = load_file(tmp_path / "merged" / "model.safetensors")
    assert wanted.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    _assert_pushed(model, wanted)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_adapters_on_tied_weights_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    for options, sentence in (
        ({"target_modules": ["embed_tokens"]}, r"adapter on a tied weight.*untie the weights"),
        ({"modules_to_save": ["lm_head"]}, r"trained 'lm_head\.weight' and .* separately"),
    ):
        base = transformers.AutoModelForCausalLM.from_config(config)
        lora = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
        _assert_refused(_trained(peft.get_peft_model(base, lora)), sentence)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
    ],
)
def test_tied_weights_that_are_trained_as_one_are_pushed_once(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    base = transformers.AutoModelForCausalLM.from_config(config)
    # Tokens are tied by themselves, and PEFT warns of a wish that it need not grant.
    tying = "modules_to_save" in options
    lora = peft.LoraConfig(r=2, ensure_weight_tying=tying, **options)
    model = _trained(peft.get_peft_model(base, lora))
    wanted = dict(_merged_by_peft(model))
    assert torch.equal(wanted.pop("lm_head.weight"), wanted["model.embed_tokens.weight"])
    _assert_pushed(model, wanted)


def test_adapters_of_experts_are_pushed_as_experts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(**TINY, **experts)
    base = transformers.AutoModelForCausalLM.from_config(config)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    model = _trained(peft.get_peft_model(base, lora))
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    _assert_pushed(model, load_file(tmp_path / "model.safetensors"))


def test_adapters_that_transformers_added_are_merged_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    base.save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    base.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    source = make_source(_trained(base), 1 << 20)
    assert {tensor.name for tensor in source.tensors} == before.keys()
    assert base.model.layers[0].self_attn.q_proj.merged
    source.release()
    assert not base.model.layers[0].self_attn.q_proj.merged


def _assert_refused(model: Any, sentence: str) -> None:
    before = _bits(model)
    with pytest.raises(InvalidError, match=sentence) as caught:
        make_source(model, 1 << 20)
    assert caught.value.reason is Reason.REQUEST_INVALID
    _assert_same(model, before)
    assert not any(getattr(m, "merged", False) for m in model.modules())


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_adapters_of_another_dtype_than_what_they_replace_are_refused() -> None:
    model = _with_trained_norm()
    model.base_model.model[1].base_layer.bfloat16()
    _assert_refused(model, r"weights of another dtype; cast them to torch\.bfloat16")


def test_prompt_tuning_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    _assert_refused(peft.get_peft_model(base, config), r"prompt tuning.*train a LoRA adapter")


def test_quantised_weights_are_refused() -> None:
    model = _adapted()
    base = model.base_model.model.layers[1].base_layer
    base.weight = torch.nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    _assert_refused(model, r"quantised weights.*in the dtype of its checkpoint.*merge_and_unload")


def test_disabled_adapters_are_refused() -> None:
    model = _adapted()
    with model.disable_adapter():
        _assert_refused(model, r"disabled; enable them, or push a state dict of the base model")
    _assert_pushed(model, _merged_by_peft(model))


def test_offloaded_weights_are_refused() -> None:
    model = _adapted()
    model.base_model.model.layers[1].base_layer.to("meta")
    with pytest.raises(InvalidError, match=r"offloaded; load the model whole"):
        make_source(model, 1 << 20)


def test_attention_whose_weights_are_replaced_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    _assert_refused(peft.get_peft_model(model, config), r"MultiheadAttention.*merge_and_unload")


def test_what_peft_refuses_is_refused_and_half_of_it_undone() -> None:
    model = _with_bias()
    # PEFT notices only at this layer, when the one before it is merged.
    model.base_model.model.layers[1].base_layer.bias = None
    _assert_refused(model, r"PEFT cannot merge \(RuntimeError: .*no bias")


def test_no_memory_for_the_copy_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _adapted()
    before = _bits(model)

    def merge(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(model.base_model.model.layers[1], "merge", merge)
    with pytest.raises(ClientError, match=r"no memory for a second copy") as caught:
        make_source(model, 1 << 20)
    assert caught.value.reason is Reason.MEMORY_EXHAUSTED
    _assert_same(model, before)


def test_a_failing_unmerge_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _adapted()
    before = _bits(model)
    source = make_source(model, 1 << 20)

    def unmerge() -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(model.base_model.model.layers[1], "unmerge", unmerge)
        with pytest.raises(RuntimeError, match="broken"):
            source.release()
    _assert_same(model, before)
    _assert_pushed(model, _merged_by_peft(model))


def test_a_model_that_is_being_pushed_is_not_pushed_again() -> None:
    model = _adapted()
    source = make_source(model, 1 << 20)
    with pytest.raises(InvalidError, match=r"being pushed already; wait until"):
        make_source(model, 1 << 20)
    assert model.base_model.model.layers[0].merged
    source.release()
    make_source(model, 1 << 20).release()


def test_a_layout_that_is_refused_leaves_the_model_as_it_was() -> None:
    model = _adapted()
    model.base_model.model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(InvalidError, match=r"to_dense"):
        make_source(model, 1 << 20)
    assert not model.base_model.model.layers[0].merged


# Through a client.


def _other_bytes(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1)


def test_a_client_pushes_it_in_full_and_as_a_delta(client: Client) -> None:
    model = _with_saved_modules()
    for _ in range(3):
        before = _bits(model)
        pushed = client.push(model)
        _assert_same(model, before)
        again = client.push(_merged_by_peft(model))
        assert again.content_digest == pushed.content_digest
        _other_bytes(model)


def test_a_client_that_refuses_its_options_leaves_the_model_as_it_was(client: Client) -> None:
    model = _adapted()
    before = _bits(model)
    with pytest.raises(InvalidError, match="streams"):
        client.push(model, streams=0)
    _assert_same(model, before)


def test_a_push_that_breaks_in_the_middle_leaves_the_model_as_it_was(client: Client) -> None:
    model = _adapted()
    before = _bits(model)

    def stop(_done: int, _total: int) -> None:
        raise KeyError("stopped by the caller")

    for push in (client.push, lambda *a, **o: client.push_async(*a, **o).committed.result(10)):
        with pytest.raises(KeyError):
            push(model, on_progress=stop)
        _assert_same(model, before)


def test_it_is_unmerged_when_the_source_is_free(client: Client, servicer: Any) -> None:
    model = _adapted()
    before = _bits(model)
    gate, free = threading.Event(), threading.Event()
    merged: list[bool] = []
    servicer.chunk = lambda _chunk: gate.wait(10)
    servicer.before = lambda method, _request: method != "CommitPush" or free.wait(10)
    handle = client.push_async(model)
    merged.append(model.base_model.model.layers[0].merged)
    gate.set()
    handle.source_free.result(10)
    _assert_same(model, before)
    assert not handle.committed.done()
    wanted = _merged_by_peft(model)
    # As training would.
    _other_bytes(model)
    free.set()
    pushed = handle.committed.result(10)
    assert merged == [True]
    assert client.push(wanted).content_digest == pushed.content_digest


def _gated(servicer: Any) -> tuple[threading.Event, threading.Event]:
    """Have the server wait at every chunk: for the first of these, once it has set the second."""
    gate, reached = threading.Event(), threading.Event()

    def wait(_chunk: Any) -> None:
        reached.set()
        gate.wait(10)

    servicer.chunk = wait
    return gate, reached


def test_a_cancelled_push_leaves_the_model_as_it_was(client: Client, servicer: Any) -> None:
    model = _adapted()
    before = _bits(model)
    gate, reached = _gated(servicer)
    handle = client.push_async(model)
    assert reached.wait(10)
    handle.cancel()
    with pytest.raises(AbortedError):
        handle.committed.result(10)
    gate.set()
    _assert_same(model, before)


async def test_a_push_cancelled_in_asyncio_leaves_the_model_as_it_was(
    running: Any, servicer: Any
) -> None:
    model = _adapted()
    before = _bits(model)
    gate, reached = _gated(servicer)
    async with AsyncClient(running.address) as client:
        task = asyncio.create_task(client.push(model))
        assert await asyncio.to_thread(reached.wait, 10)
        assert model.base_model.model.layers[0].merged
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        _assert_same(model, before)
        gate.set()


def test_the_handle_of_a_push_that_is_over_keeps_no_copy(client: Client, servicer: Any) -> None:
    gate = threading.Event()
    servicer.chunk = lambda _chunk: gate.wait(10)
    handle = client.push_async(_adapted())
    push: weakref.ref[Any] = weakref.ref(handle._cancel.__self__)  # type: ignore[attr-defined]  # a method
    assert push() is not None
    gate.set()
    handle.committed.result(10)
    handle.join()
    gc.collect()
    assert push() is None


def test_what_is_held_leaves_the_model_as_it_was(client: Client) -> None:
    model = _adapted()
    before = _bits(model)
    with pytest.raises(ClientError) as caught:
        client.hold(model)
    assert caught.value.reason is Reason.VERSION_UNKNOWN
    _assert_same(model, before)
