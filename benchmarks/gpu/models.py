"""Models of the kinds that users serve, from their configurations alone: nothing is downloaded.

Names, dtypes and quantization_config are those of the published checkpoints: Qwen3, Qwen3-MoE and
DeepSeek-V3, in bfloat16 and in fp8 with a scale for each block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.spec import ModelSpec, TensorSpec

__all__ = ["DeepSeek", "Qwen3", "block_fp8"]

_BLOCK = 128
#: Matrices that the published fp8 checkpoints keep as they are.
_KEPT = (
    "embed_tokens.weight",
    "lm_head.weight",
    "mlp.gate.weight",
    "eh_proj.weight",
    "shared_head.head.weight",
)

Named = Iterator[tuple[str, TensorSpec]]


@dataclass(frozen=True)
class Qwen3:
    """Sizes of a Qwen3, dense or a mixture of experts.

    Attributes:
        layers: How many.
        hidden: Hidden size.
        intermediate: Size inside a feed-forward block, or inside each expert.
        heads: Attention heads of 128 values.
        kv_heads: Heads of keys and values.
        vocabulary: Tokens.
        experts: Of each layer; 0: dense.
        active: Experts of each token.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 0
    active: int = 0

    @property
    def spec(self) -> ModelSpec:
        """In bfloat16."""
        found = {"model.embed_tokens.weight": _matrix(self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            found |= self._layer(f"model.layers.{layer}")
        found |= {"model.norm.weight": _vector(self.hidden)}
        found |= {"lm_head.weight": _matrix(self.vocabulary, self.hidden)}
        return ModelSpec(self._config(), found)

    def _layer(self, prefix: str) -> dict[str, TensorSpec]:
        attention, hidden = f"{prefix}.self_attn", self.hidden
        wide, narrow = self.heads * _BLOCK, self.kv_heads * _BLOCK
        found = {
            f"{prefix}.input_layernorm.weight": _vector(hidden),
            f"{attention}.k_norm.weight": _vector(_BLOCK),
            f"{attention}.k_proj.weight": _matrix(narrow, hidden),
            f"{attention}.o_proj.weight": _matrix(hidden, wide),
            f"{attention}.q_norm.weight": _vector(_BLOCK),
            f"{attention}.q_proj.weight": _matrix(wide, hidden),
            f"{attention}.v_proj.weight": _matrix(narrow, hidden),
            f"{prefix}.post_attention_layernorm.weight": _vector(hidden),
        }
        if not self.experts:
            return found | dict(_feed_forward(f"{prefix}.mlp", hidden, self.intermediate))
        return found | dict(_experts(f"{prefix}.mlp", hidden, self.intermediate, self.experts))

    def _config(self) -> dict[str, Any]:
        common = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "attention_bias": False,
            "head_dim": _BLOCK,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            **_common(self.vocabulary, rope_theta=1_000_000.0),
        }
        if not self.experts:
            return common
        return common | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
        }


@dataclass(frozen=True)
class DeepSeek:
    """Sizes of a DeepSeek-V3: latent attention (MLA), a dense layer, then mixtures of experts.

    Attributes:
        layers: How many; the first is dense.
        hidden: Hidden size.
        intermediate: Size inside each expert; the dense layer's is twice that.
        heads: Attention heads.
        vocabulary: Tokens.
        experts: Of each layer, in four groups; one more is shared.
        active: Experts of each token.
        draft_layers: Layers after the others that predict more tokens (MTP).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    experts: int
    active: int
    draft_layers: int = 0

    #: Of keys and values, and of queries, as attention keeps them.
    LATENT, LATENT_Q = 512, 512
    #: Of each head: without and with rotary positions, and of values.
    PLAIN, ROTARY, VALUE = 128, 64, 128

    @property
    def spec(self) -> ModelSpec:
        """In bfloat16."""
        found = {"model.embed_tokens.weight": _matrix(self.vocabulary, self.hidden)}
        for layer in range(self.layers + self.draft_layers):
            found |= self._layer(layer)
        for layer in range(self.layers, self.layers + self.draft_layers):
            found |= self._draft(f"model.layers.{layer}")
        found |= {"model.norm.weight": _vector(self.hidden)}
        found |= {"lm_head.weight": _matrix(self.vocabulary, self.hidden)}
        return ModelSpec(self._config(), found)

    def _layer(self, layer: int) -> dict[str, TensorSpec]:
        prefix, hidden = f"model.layers.{layer}", self.hidden
        found = {
            f"{prefix}.input_layernorm.weight": _vector(hidden),
            **self._attention(f"{prefix}.self_attn"),
            f"{prefix}.post_attention_layernorm.weight": _vector(hidden),
        }
        mlp, inner = f"{prefix}.mlp", self.intermediate
        if not layer:
            return found | dict(_feed_forward(mlp, hidden, 2 * inner))
        bias = {f"{mlp}.gate.e_score_correction_bias": TensorSpec("F32", (self.experts,))}
        shared = dict(_feed_forward(f"{mlp}.shared_experts", hidden, inner))
        return found | dict(_experts(mlp, hidden, inner, self.experts)) | bias | shared

    def _attention(self, prefix: str) -> dict[str, TensorSpec]:
        query = self.heads * (self.PLAIN + self.ROTARY)
        return {
            f"{prefix}.kv_a_layernorm.weight": _vector(self.LATENT),
            f"{prefix}.kv_a_proj_with_mqa.weight": _matrix(self.LATENT + self.ROTARY, self.hidden),
            f"{prefix}.kv_b_proj.weight": _matrix(
                self.heads * (self.PLAIN + self.VALUE), self.LATENT
            ),
            f"{prefix}.o_proj.weight": _matrix(self.hidden, self.heads * self.VALUE),
            f"{prefix}.q_a_layernorm.weight": _vector(self.LATENT_Q),
            f"{prefix}.q_a_proj.weight": _matrix(self.LATENT_Q, self.hidden),
            f"{prefix}.q_b_proj.weight": _matrix(query, self.LATENT_Q),
        }

    def _draft(self, prefix: str) -> dict[str, TensorSpec]:
        return {
            f"{prefix}.eh_proj.weight": _matrix(self.hidden, 2 * self.hidden),
            f"{prefix}.embed_tokens.weight": _matrix(self.vocabulary, self.hidden),
            f"{prefix}.enorm.weight": _vector(self.hidden),
            f"{prefix}.hnorm.weight": _vector(self.hidden),
            f"{prefix}.shared_head.head.weight": _matrix(self.vocabulary, self.hidden),
            f"{prefix}.shared_head.norm.weight": _vector(self.hidden),
        }

    def _config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.intermediate,
            "kv_lora_rank": self.LATENT,
            "moe_intermediate_size": self.intermediate,
            "moe_layer_freq": 1,
            "n_group": 4,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.active,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads,
            "num_nextn_predict_layers": self.draft_layers,
            "q_lora_rank": self.LATENT_Q,
            "qk_nope_head_dim": self.PLAIN,
            "qk_rope_head_dim": self.ROTARY,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "v_head_dim": self.VALUE,
            **_common(self.vocabulary, rope_theta=10_000.0),
        }


def block_fp8(spec: ModelSpec, scales: str) -> ModelSpec:
    """Return the same model with its projections in fp8, each with the inverse scales of blocks.

    Args:
        spec: In bfloat16.
        scales: Their dtype: BF16 as Qwen writes them, F32 as DeepSeek does.
    """
    tensors: dict[str, TensorSpec] = {}
    kept = []
    for name, tensor in spec.tensors.items():
        if len(tensor.shape) != 2 or name.endswith(_KEPT):
            tensors[name] = tensor
            kept.append(name.removesuffix(".weight"))
            continue
        rows, columns = (-(-size // _BLOCK) for size in tensor.shape)
        tensors[name] = TensorSpec("F8_E4M3", tensor.shape)
        tensors[f"{name}_scale_inv"] = TensorSpec(scales, (rows, columns))
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": kept,
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
    return ModelSpec({**spec.config, "quantization_config": quantization}, tensors)


def _common(vocabulary: int, rope_theta: float) -> dict[str, Any]:
    return {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
    }


def _experts(prefix: str, hidden: int, inner: int, count: int) -> Named:
    for expert in range(count):
        yield from _feed_forward(f"{prefix}.experts.{expert}", hidden, inner)
    yield f"{prefix}.gate.weight", _matrix(count, hidden)


def _feed_forward(prefix: str, hidden: int, inner: int) -> Named:
    yield f"{prefix}.down_proj.weight", _matrix(hidden, inner)
    yield f"{prefix}.gate_proj.weight", _matrix(inner, hidden)
    yield f"{prefix}.up_proj.weight", _matrix(inner, hidden)


def _matrix(rows: int, columns: int) -> TensorSpec:
    return TensorSpec("BF16", (rows, columns))


def _vector(size: int) -> TensorSpec:
    return TensorSpec("BF16", (size,))
