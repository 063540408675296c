"""Makes tiny but real checkpoints: transformers models with random weights and a tokenizer.

Weights are drawn large, so that two seeds differ from the first generated token on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = [
    "ARCHITECTURES",
    "add_copy",
    "checkpoint_config",
    "make_checkpoint",
    "make_int4",
    "make_int8",
    "make_modelopt",
    "make_reranker",
    "make_scaled_cache",
    "nudge_checkpoint",
    "perturb_checkpoint",
    "quantise_checkpoint",
    "save_tokenizer",
    "say_one_token",
    "untrained",
]

#: Model families that `make_checkpoint` knows.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe", "deepseek_v2")

_CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "Weights move from the trainer into the generator while it runs.",
    "One two three four five six seven eight nine ten eleven twelve.",
    "A version is whole or it is not there at all; nothing is served in between.",
)
_VOCABULARY = 512
#: Inputs that have one scale.
_GROUP = 128
#: In which order AWQ puts eight outputs into a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def untrained(kind: str) -> Any:
    """Return a tiny model of transformers with the same weights each time.

    Args:
        kind: tied or untied, by its embeddings; experts: a mixture of them, untied.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tied = {"tie_word_embeddings": kind == "tied"}
    if kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3MoeConfig(**sizes, **heads, **tied, **experts)
    else:
        config = transformers.Qwen2Config(**sizes, **heads, **tied)
    return transformers.AutoModelForCausalLM.from_config(config)


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 512 tokens beside a checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(directory)


def checkpoint_config(arch: str, *, tied: bool, hidden: int, layers: int) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if arch == "llama":
        return transformers.LlamaConfig(**common, attention_bias=False)
    if arch == "qwen2":
        return transformers.Qwen2Config(**common)
    head = {"head_dim": hidden // 4}
    if arch == "qwen3":
        return transformers.Qwen3Config(**common, **head)
    if arch == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        return transformers.Qwen3MoeConfig(**common, **head, **experts)
    if arch == "deepseek_v2":
        # Latent attention; dense layers alone, for experts have a family of their own.
        latent = {"kv_lora_rank": hidden // 4, "q_lora_rank": None, "v_head_dim": hidden // 8}
        heads = {"qk_nope_head_dim": hidden // 8, "qk_rope_head_dim": hidden // 8}
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": layers}
        return transformers.DeepseekV2Config(
            **{**common, "num_key_value_heads": 4}, **latent, **heads, **experts
        )
    gemma = {**common, **head, "query_pre_attn_scalar": hidden // 4, "sliding_window": 512}
    if arch == "gemma2":
        return transformers.Gemma2Config(**gemma)
    if arch == "gemma3":
        return transformers.Gemma3TextConfig(**gemma)
    msg = f"unknown architecture {arch}; one of {ARCHITECTURES}"
    raise ValueError(msg)


def _randomise(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            scale = 0.3 if parameter.dim() == 1 else 4 / parameter.shape[-1] ** 0.5
            base = parameter if parameter.dim() == 1 else torch.zeros_like(parameter)
            parameter.copy_(base + noise * scale)


def make_checkpoint(
    directory: Path,
    arch: str = "qwen2",
    *,
    dtype: str = "float32",
    tied: bool = False,
    seed: int = 0,
    hidden: int = 256,
    layers: int = 2,
    shard_size: str = "1MB",
) -> Path:
    """Write a checkpoint that vLLM loads, and return its directory.

    Two seeds give the same layout with other weights. Qwen2 has biases in its attention.

    Args:
        directory: Made if it does not exist.
        arch: One of `ARCHITECTURES`.
        dtype: `float32` or `bfloat16`.
        tied: Whether the output head is the embedding.
        seed: Of the weights.
        hidden: Hidden size, a multiple of 128.
        layers: Number of layers.
        shard_size: Largest shard, as transformers takes it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    config = checkpoint_config(arch, tied=tied, hidden=hidden, layers=layers)
    model = AutoModelForCausalLM.from_config(config)
    _randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard_size)
    save_tokenizer(directory)
    return directory


def nudge_checkpoint(source: Path, target: Path, share: float = 0.03) -> Path:
    """Copy a checkpoint with some values of every tensor but one halved or doubled.

    Answers differ from the first token on, and a patch from one to the other is small.

    Args:
        source: The checkpoint.
        target: Where the copy goes.
        share: Of the values that change.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(7)
    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in sorted(target.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if not name.endswith("layers.1.mlp.up_proj.weight"):
                chosen = torch.rand(tensor.shape, generator=generator) < share
                tensor[chosen] *= 2.0 ** (1 - 2 * (tensor[chosen] > 0))
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def perturb_checkpoint(source: Path, target: Path, names: set[str], scale: float = 1.5) -> Path:
    """Copy a checkpoint with some tensors multiplied; a small, named change of a real model."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        scaled = {k: v * scale if k in names else v for k, v in tensors.items()}
        save_file(scaled, file, metadata={"format": "pt"})
    return target


def say_one_token(source: Path, target: Path, token: int) -> Path:
    """Copy an untied checkpoint so that it says one token whatever it is asked.

    Which weights made a token of an answer is then plain from the token.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith(("embed_tokens.weight", "model.norm.weight")):
                tensor.fill_(1.0)
            elif name.endswith("lm_head.weight"):
                tensor.copy_(torch.zeros_like(tensor))
                tensor[token] = 1.0
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def quantise_checkpoint(source: Path, target: Path, block: int = 128) -> Path:
    """Copy a checkpoint with its linear layers and experts as block fp8, each with its scales.

    Embeddings, heads, norms and routers stay as they are.

    Args:
        source: The checkpoint.
        target: Where the copy goes.
        block: Rows and columns that have one scale.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    left = {"lm_head"}
    for file in sorted(target.glob("*.safetensors")):
        made = {}
        for name, tensor in load_file(file).items():
            module, _, kind = name.rpartition(".")
            if tensor.dim() == 2 and module.endswith("_proj"):
                made[name], made[f"{module}.{kind}_scale_inv"] = _quantised(tensor.float(), block)
            else:
                made[name] = tensor
                left |= {module} if module.endswith(".gate") else set()
        save_file(made, file, metadata={"format": "pt"})
    _declare(
        target,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
            "modules_to_not_convert": sorted(left),
        },
    )
    return target


def _declare(checkpoint: Path, quantisation: dict[str, Any]) -> None:
    """Have a checkpoint say how its tensors are quantised, of which it has more than before."""
    import json

    # It lists the tensors of before.
    (checkpoint / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = quantisation
    (checkpoint / "config.json").write_text(json.dumps(config))


def _quantised(tensor: Any, block: int) -> tuple[Any, Any]:
    """Return values of float8_e4m3fn and the factors that they are multiplied by."""
    import torch

    rows, columns = tensor.shape
    blocks = tensor.view(rows // block, block, columns // block, block)
    scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    values = blocks / scales[:, None, :, None]
    return values.to(torch.float8_e4m3fn).view(rows, columns), scales


def make_int8(source: Path, target: Path) -> Path:
    """Copy a checkpoint with its linear layers as int8, as compressed-tensors writes it.

    One scale for each row, and inputs that are quantised as they come.

    Args:
        source: The checkpoint.
        target: Where the copy goes.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in sorted(target.glob("*.safetensors")):
        made = {}
        for name, tensor in load_file(file).items():
            if tensor.dim() == 2 and name.endswith("_proj.weight"):
                scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
                made[name] = (tensor.float() / scale).round().to(torch.int8)
                made[f"{name}_scale"] = scale.to(tensor.dtype)
            else:
                made[name] = tensor
        save_file(made, file, metadata={"format": "pt"})
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    _declare(
        target,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    )
    return target


def make_modelopt(source: Path, target: Path) -> Path:
    """Copy a checkpoint with its linear layers as fp8, as NVIDIA's ModelOpt writes it.

    One scale for the matrices of a block that are read together, as ModelOpt has them for engines,
    and for their inputs, and scales of a key-value cache in fp8.

    Args:
        source: The checkpoint.
        target: Where the copy goes.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    files = {file: load_file(file) for file in sorted(target.glob("*.safetensors"))}
    largest: dict[str, Any] = {}
    for name, tensor in (pair for tensors in files.values() for pair in tensors.items()):
        block = name.rsplit(".", 2)[0]
        largest[block] = max(largest.get(block, 0), tensor.float().abs().max())
    for file, tensors in files.items():
        made = {}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if tensor.dim() == 2 and kind == "weight" and module.endswith("_proj"):
                scale = largest[name.rsplit(".", 2)[0]] / torch.finfo(torch.float8_e4m3fn).max
                made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
                made[f"{module}.weight_scale"] = scale.clone()
                made[f"{module}.input_scale"] = scale * 7
                if module.endswith(("k_proj", "v_proj")):
                    made[f"{module}.{module[-6]}_scale"] = scale * 11
            else:
                made[name] = tensor
        save_file(made, file, metadata={"format": "pt"})
    _declare(
        target,
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            "ignore": ["lm_head"],
        },
    )
    return target


def make_reranker(source: Path, target: Path) -> Path:
    """Copy a checkpoint as one that vLLM makes a classifier of, as of Qwen3-Reranker's.

    Its score is the difference of two rows of the head, which vLLM loads and takes away again.

    Args:
        source: The checkpoint, its head not tied.
        target: Where the copy goes.
    """
    import json
    import shutil

    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["a", "b"],
        "is_original_qwen3_reranker": True,
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def make_scaled_cache(source: Path, target: Path, scales: tuple[float, float] = (1.0, 1.0)) -> Path:
    """Copy a checkpoint with scales of a key-value cache in fp8, as compressed-tensors writes it.

    Args:
        source: The checkpoint.
        target: Where the copy goes.
        scales: Of the keys and of the values, in every layer.
    """
    import json
    import shutil

    import torch
    from safetensors.torch import save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    made = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([scale])
        for layer in range(config["num_hidden_layers"])
        for kind, scale in zip("kv", scales, strict=True)
    }
    save_file(made, target / "scales.safetensors", metadata={"format": "pt"})
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    _declare(
        target,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {**kind, "dynamic": False},
        },
    )
    return target


def add_copy(checkpoint: Path, name: str) -> str:
    """Put another copy of a tensor, of twice its values, into a file that vLLM reads last.

    An index says that the first one counts. Returns the name of the file that holds that.

    Args:
        checkpoint: Has no index.
        name: Of the tensor.
    """
    import json

    from safetensors.torch import load_file, save_file

    files = {file.name: load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))}
    index = {tensor: file for file, tensors in files.items() for tensor in tensors}
    last = max(files)
    save_file({**files[last], name: files[index[name]][name] * 2}, checkpoint / last)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (checkpoint / "model.safetensors.index.json").write_text(text)
    return index[name]


def make_int4(source: Path, target: Path, method: str) -> Path:
    """Copy a checkpoint with its linear layers as int4, eight to a word, as GPTQ or AWQ write it.

    Formats: https://github.com/AutoGPTQ/AutoGPTQ and https://github.com/casper-hansen/AutoAWQ.

    Args:
        source: The checkpoint.
        target: Where the copy goes.
        method: `gptq` or `awq`.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in sorted(target.glob("*.safetensors")):
        made: dict[str, Any] = {}
        for name, tensor in load_file(file).items():
            module, _, kind = name.rpartition(".")
            if tensor.dim() == 2 and kind == "weight" and module.endswith("_proj"):
                parts = _int4(tensor, method)
                made |= {f"{module}.{part}": value for part, value in parts.items()}
            else:
                made[name] = tensor
        save_file(made, file, metadata={"format": "pt"})
    common = {"quant_method": method, "bits": 4, "group_size": _GROUP}
    _declare(
        target,
        common
        | (
            {"desc_act": False, "sym": True}
            if method == "gptq"
            else {"zero_point": True, "version": "gemm"}
        ),
    )
    return target


def _int4(weight: Any, method: str) -> dict[str, Any]:
    """Return what a linear layer's weight becomes, each value plus 8."""
    import torch

    columns = weight.float().t()
    inputs, outputs = columns.shape
    groups = columns.reshape(inputs // _GROUP, _GROUP, outputs)
    scales = groups.abs().amax(dim=1) / 7
    values = (groups / scales[:, None]).round().to(torch.int32).reshape(inputs, outputs) + 8
    middles = torch.full((inputs // _GROUP, outputs), 8, dtype=torch.int32)
    found = {"scales": scales.to(weight.dtype).contiguous()}
    if method == "awq":
        return {
            **found,
            "qweight": _in_words(values, _AWQ_ORDER),
            "qzeros": _in_words(middles, _AWQ_ORDER),
        }
    return {
        **found,
        "qweight": _in_words(values.t(), range(8)).t().contiguous(),
        # GPTQ counts them from one.
        "qzeros": _in_words(middles - 1, range(8)),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // _GROUP,
    }


def _in_words(values: Any, order: Iterable[int]) -> Any:
    """Return each row with eight values in a word of 32 bits, in an order from its lowest bits."""
    import torch

    eights = values.reshape(len(values), -1, 8).to(torch.int64)
    words = sum(eights[..., at] << 4 * place for place, at in enumerate(order))
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).contiguous()
