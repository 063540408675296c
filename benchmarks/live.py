"""Methods that the apply benchmark adds to vLLM's workers, through --worker-extension-cls."""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["LiveParameters"]


class LiveParameters:
    """Looks at live parameters with code that shares nothing with ours.

    Attributes:
        model_runner: Of the worker that this becomes part of.
    """

    model_runner: Any

    def bench_repacked(self) -> bool:
        """Return whether vLLM has repacked weights: it then leaves empty parameters behind."""
        model = self.model_runner.get_model()
        return any(parameter.numel() == 0 for parameter in model.parameters())

    def bench_live_digest(self) -> str:
        """Return the SHA-256 of all live parameters: names, shapes and bytes."""
        import torch

        digest = hashlib.sha256()
        for name, parameter in sorted(self.model_runner.get_model().named_parameters()):
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            data = parameter.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(memoryview(data.numpy()))
        return digest.hexdigest()
