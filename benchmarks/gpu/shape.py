"""The model that is measured: a Qwen2 of 7.6 billion parameters in bfloat16, or a tiny one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.spec import ModelSpec, TensorSpec

__all__ = ["FULL", "SMALL", "Shape"]

_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 with an output head of its own.

    Attributes:
        layers: How many.
        hidden: Hidden size.
        intermediate: Size inside a feed-forward block.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        vocabulary: Tokens.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the order of a checkpoint."""
        hidden, wide = self.hidden, self.intermediate
        narrow = hidden // self.heads * self.kv_heads
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.mlp.down_proj.weight": (hidden, wide),
                f"{prefix}.mlp.gate_proj.weight": (wide, hidden),
                f"{prefix}.mlp.up_proj.weight": (wide, hidden),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.k_proj.bias": (narrow,),
                f"{prefix}.self_attn.k_proj.weight": (narrow, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
                f"{prefix}.self_attn.q_proj.bias": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
                f"{prefix}.self_attn.v_proj.bias": (narrow,),
                f"{prefix}.self_attn.v_proj.weight": (narrow, hidden),
            }
        return found | {
            "model.norm.weight": (hidden,),
            "lm_head.weight": (self.vocabulary, hidden),
        }

    @property
    def elements(self) -> int:
        """Parameters."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.elements * _BYTES

    @property
    def spec(self) -> ModelSpec:
        """The checkpoint of it."""
        tensors = {name: TensorSpec("BF16", shape) for name, shape in self.tensors.items()}
        return ModelSpec(self.config, tensors)

    @property
    def config(self) -> dict[str, Any]:
        """What a checkpoint's config.json holds."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


FULL = Shape(28, 3584, 18944, 28, 4, 152_064)
SMALL = Shape(2, 256, 512, 4, 2, 4096)
