"""Has vLLM's layers on a CPU compute from their parameters, not from packed copies.

It is called before any layer is made, and changes vLLM for good.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers"


def leave_linear_plain() -> None:
    """Have linear layers, convolutions and heads compute from their parameters."""
    ops: Any = importlib.import_module("vllm._custom_ops")
    layer_utils: Any = importlib.import_module(f"{_LAYERS}.utils")
    # The dispatcher takes the first of: sgl kernel, oneDNN, torch. Torch's reads the parameter.
    ops._supports_onednn = False  # noqa: SLF001
    check = layer_utils.check_cpu_sgl_kernel

    def check_quantised(n: int, k: int, dtype: torch.dtype) -> bool:
        # int8's kernels ask, too. With AMX they leave tensors, else what nobody can copy; which
        # of the two must not depend on whether they were imported before this.
        return dtype == torch.int8 and bool(check(n, k, dtype))

    layer_utils.check_cpu_sgl_kernel = check_quantised


def leave_experts_plain() -> None:
    """Have unquantised experts compute from their parameters, whichever kernel would be taken.

    Slower than packed ones: one matrix product for each expert that a batch asks for. In releases
    without such a way nothing changes, and the proof at start refuses what they pack.
    """
    try:
        experts = importlib.import_module(f"{_LAYERS}.fused_moe.experts.cpu_moe")
    except ImportError:
        _leave_older_experts_plain()
        return
    _define_operator()
    for kind in _family(experts.CPUUnquantizedExperts):
        # Those of other processors inherit both, or have their own.
        if "process_weights_after_loading" in vars(kind):
            kind.process_weights_after_loading = _leave_weights
        if "apply" in vars(kind):
            kind.apply = _apply


def packs_experts(module: torch.nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    # The instruction set that they are packed for; zentorch's kernel takes them as they are.
    for_one_kind = isinstance(getattr(type(experts), "isa", None), str)
    return for_one_kind and not getattr(experts, "_use_zentorch", False) and not _is_plain(experts)


def _leave_older_experts_plain() -> None:
    try:
        older = importlib.import_module(f"{_LAYERS}.fused_moe.cpu_fused_moe")
    except ImportError:
        return
    # Its other way reads each expert from the parameter.
    older.CPUFusedMOE.check_grouped_gemm = lambda *_, **__: (False, "none")


def _family(kind: Any) -> Iterator[Any]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _is_plain(experts: object) -> bool:
    return getattr(type(experts), "process_weights_after_loading", None) is _leave_weights


def _leave_weights(self: Any, layer: torch.nn.Module) -> None:
    del layer
    self._use_zentorch = False


def _apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *,
    apply_router_weight_on_input: bool,
    **scales_and_workspaces: Any,
) -> None:
    """Stand for `CPUUnquantizedExperts.apply`, which multiplies by what it has packed."""
    del global_num_experts, scales_and_workspaces
    # -1: the expert of another rank, which adds what is left out here.
    local = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    # Else they were applied to `hidden_states`.
    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    torch.ops.weightsync.plain_experts(
        output, hidden_states, w1, w2, self.w1_bias, self.w2_bias, weights, local, activation.value
    )


@functools.cache
def _define_operator() -> None:
    # An operator of its own: which expert has how many rows is no matter of a compiled graph.
    torch.library.custom_op(
        "weightsync::plain_experts",
        _compute,
        mutates_args=("output",),
        device_types="cpu",
        schema="(Tensor(a!) output, Tensor hidden, Tensor w13, Tensor w2, Tensor? w13_bias, "
        "Tensor? w2_bias, Tensor weights, Tensor ids, str activation) -> ()",
    )


def _compute(
    output: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
) -> None:
    """Fill `output` with the weighted sum of what each row's experts make of it.

    Sums are formed in float32, as in the kernels, expert by expert: the same rows give the same
    bits. `w13` has the gate and up projection of each expert, one below the other. A negative id is
    of an expert that is not here.
    """
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        if expert < 0:
            continue
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        gate_up = torch.nn.functional.linear(hidden[rows], w13[expert], _of(w13_bias, expert))
        inner = _activate(activation, gate_up)
        result = torch.nn.functional.linear(inner, w2[expert], _of(w2_bias, expert))
        total.index_add_(0, rows, result.float() * weights[rows, choice, None].float())
    output.copy_(total)


def _of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


def _activate(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe import activation as activations

    kind = activations.MoEActivation.from_str(name)
    if kind is activations.MoEActivation.SWIGLUOAI:
        # vLLM has no kernel of CPUs for it alone.
        return _swigluoai(gate_up)
    width = gate_up.shape[-1] // 2 if kind.is_gated else gate_up.shape[-1]
    inner = gate_up.new_empty(gate_up.shape[0], width)
    activations.apply_moe_activation(kind, inner, gate_up)
    return inner


def _swigluoai(gate_up: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers.activation import SwigluOAIAndMul

    # Its constructor wants the configuration of an engine, its function only what that sets.
    settings = SimpleNamespace(alpha=1.702, limit=7.0)
    result: torch.Tensor = SwigluOAIAndMul.forward_native(settings, gate_up)
    return result
