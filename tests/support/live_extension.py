"""A worker extension for tests: tells what a model computes from, by code of its own."""

from __future__ import annotations

from typing import Any

import torch

from weightsync.vllm.plan.int_views import tensor_digest_of

__all__ = ["LiveExtension"]

#: Scales of the key-value cache, in tensors and numbers.
_SCALES = ("_k_scale", "_v_scale", "_q_scale")
_BESIDE = ("w_", "_w_", *_SCALES)


class LiveExtension:
    """Mixed into vLLM's workers."""

    model_runner: Any

    def live_digests(self) -> dict[str, str]:
        """Return the digest of every parameter, and of what attention keeps beside them."""
        model = self.model_runner.get_model()
        found = dict(model.named_parameters())
        for path, module in model.named_modules():
            for holder in (module, getattr(module, "impl", None)):
                for name, value in vars(holder or object).items():
                    if isinstance(value, torch.Tensor) and name.lower().startswith(_BESIDE):
                        found[f"{path}.{name}"] = value
                    elif isinstance(value, float) and name.startswith(_SCALES):
                        found[f"{path}.{name}"] = torch.tensor(value)
            buffers = module.named_buffers(recurse=False)
            found.update((f"{path}.{n}", value) for n, value in buffers if n.startswith(_SCALES))
        return {name: tensor_digest_of(value.detach()).hex() for name, value in found.items()}
