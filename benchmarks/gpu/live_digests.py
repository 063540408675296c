"""Digests of all that a model computes from, found and read by code that our product does not use.

What a fresh engine of a content holds, and what an engine holds that was brought to it, must agree
in every one of them.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

__all__ = ["live_digests", "live_tensors"]

#: Grow with what is generated.
_NOT_WEIGHTS = frozenset({"kv_cache"})
_TABLES = ("_parameters", "_buffers")
_DEPTH = 6


def live_digests(model: Any) -> dict[str, str]:
    """Return the digest of each tensor's dtype, shape and bytes, by a path to it."""
    import xxhash

    known: dict[tuple[Any, ...], str] = {}
    found = {}
    for path, tensor in live_tensors(model):
        if tensor.device.type == "meta":
            continue
        place = (tensor.data_ptr(), tensor.dtype, *tensor.shape, *tensor.stride())
        if place not in known:
            state = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(_bytes(tensor))
            known[place] = state.hexdigest()
        found[path] = known[place]
    return found


def _bytes(tensor: Any) -> Any:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().data


def live_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters, buffers, bare tensors of modules, and what their helper objects hold."""
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        for key, value in list(vars(module).items()):
            if key in _TABLES:
                yield from _below(name, value, seen, 0)
            elif key != "_modules" and key not in _NOT_WEIGHTS:
                yield from _below(f"{name}.{key}", value, seen, 1)


def _below(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth <= _DEPTH and id(value) not in seen and not isinstance(value, torch.nn.Module):
        seen.add(id(value))
        for key, child in _children(value):
            if key not in _NOT_WEIGHTS:
                yield from _below(f"{path}.{key}", child, seen, depth + 1)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, _content(cell)) for name, cell in cells]
    kind = type(value)
    ours = kind.__module__.partition(".")[0] == "vllm" and not kind.__name__.endswith("Config")
    return list(vars(value).items()) if ours and hasattr(value, "__dict__") else []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Not bound yet.
        return None
