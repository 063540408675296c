"""Live tensors as the parameters of models that were made on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightsync_client import RefusedError
from weightsync_client.attach.live_tensors import put_into


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4, bias=False)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("scale", torch.zeros(2))


class _Rotary(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.zeros(2), persistent=False)


def _live() -> dict[str, torch.Tensor]:
    return {
        "body.weight": torch.arange(16.0).reshape(4, 4),
        "frozen": torch.ones(3),
        "scale": torch.full((2,), 5.0),
    }


def _on_meta(kind: Any) -> Any:
    with torch.device("meta"):
        return kind()


def test_the_model_computes_with_the_live_tensors_and_stays_tied() -> None:
    model, live = _on_meta(_Model), _live()
    put_into(model, live)
    assert model.head.weight is model.body.weight
    assert model.body.weight.data_ptr() == live["body.weight"].data_ptr()
    assert [p.requires_grad for p in (model.body.weight, model.frozen)] == [True, False]
    assert model.scale.tolist() == [5.0, 5.0]
    model.body(torch.ones(4)).sum().backward()
    with torch.no_grad():
        model.body.weight -= model.body.weight.grad
    assert live["body.weight"][0, 0] == -1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"frozen": None}, r"not contiguous .*\(frozen\)"),
        ({"scale": torch.zeros(3)}, r"shape differs .*\(scale\)"),
    ],
)
def test_a_model_that_does_not_fit_is_left_as_it_was(
    change: dict[str, torch.Tensor | None], names: str
) -> None:
    model = _on_meta(_Model)
    live = {name: value for name, value in (_live() | change).items() if value is not None}
    with pytest.raises(RefusedError, match=names):
        put_into(model, live)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_a_buffer_that_nobody_computes_is_refused() -> None:
    model: Any = torch.nn.Module()
    model.rotary = _on_meta(_Rotary)
    with pytest.raises(RefusedError, match=r"rotary\.waves.*build them outside of"):
        put_into(model, {})
    assert model.rotary.waves.is_meta


def test_the_model_s_own_code_computes_its_buffers() -> None:
    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = _Rotary()

        def _init_weights(self, module: Any) -> None:
            with torch.no_grad():
                module.waves.copy_(torch.tensor([1.0, 2.0]))

    model = _on_meta(Root)
    put_into(model, {})
    assert model.rotary.waves.tolist() == [1.0, 2.0]
