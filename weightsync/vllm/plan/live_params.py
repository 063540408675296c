"""The live parameters of a model, found again at every use, and digests of their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.vllm.plan.int_views import memory_of, tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from weightsync.vllm.plan.load_plan import Slice, Strides

__all__ = ["LiveParameters", "ParameterChangedError", "Targets", "view_of"]


class ParameterChangedError(Exception):
    """A parameter is no longer what it was when the load plan was captured."""


def view_of(tensor: torch.Tensor, part: Strides) -> torch.Tensor:
    """Return a part of a tensor without a copy."""
    return tensor.as_strided(part.shape, part.stride, tensor.storage_offset() + part.offset)


class LiveParameters:
    """Looks parameters and buffers up where the model's forward pass will look.

    Args:
        model: The rank's model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers):  # noqa: SLF001
                for key, tensor in table.items():
                    # A tied parameter goes by its first name, as in torch's named_parameters.
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    name = f"{prefix}.{key}" if prefix else key
                    self._places[name] = (table, key)

    def names(self) -> Iterable[str]:
        """Return the names of all parameters and buffers."""
        return self._places.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the present tensor of that name, detached.

        Raises:
            ParameterChangedError: The model has no such parameter any more.
        """
        table, key = self._places[name]
        found = table.get(key)
        if found is None:
            msg = f"parameter {name} is gone; restart vLLM"
            raise ParameterChangedError(msg)
        return found.detach()

    def addresses(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return where parameters lie; 0: the model has it no more. Cheap enough for a pause."""
        found = (table.get(key) for table, key in map(self._places.__getitem__, names))
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)

    def geometry(self, name: str) -> tuple[object, ...]:
        """Return what must not change between the capture of a plan and its use.

        On devices that includes the address: captured graphs go on reading the old one.
        """
        tensor = self.tensor(name)
        address = 0 if tensor.device.type == "cpu" else tensor.data_ptr()
        return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, address)

    def digests(self) -> dict[str, bytes]:
        """Return the digest of every parameter and buffer."""
        return {name: tensor_digest_of(self.tensor(name)) for name in self._places}


class Targets:
    """The live destinations of a plan's slices, rebuilt whenever a parameter was replaced.

    Args:
        live: Where to look the parameters up.
        slices: The slices, in order.

    Attributes:
        names: Of the parameters.
        geometry: Of each parameter, what must not change.
    """

    def __init__(self, live: LiveParameters, slices: Sequence[Slice]) -> None:
        self._live = live
        self._slices = slices
        self.names = sorted({item.param for item in slices})
        self.geometry = {name: live.geometry(name) for name in self.names}
        self._addresses: tuple[int, ...] = ()
        self._views: list[torch.Tensor] = []

    def views(self) -> list[torch.Tensor]:
        """Return one live view per slice.

        Raises:
            ParameterChangedError: A parameter has another shape, stride, dtype or device than at
                the capture, or on a device another address.
        """
        addresses = self._live.addresses(self.names)
        if addresses != self._addresses or not self._views:
            for name in self.names:
                if self._live.geometry(name) != self.geometry[name]:
                    msg = (
                        f"parameter {name} was replaced since its load plan was made; restart vLLM"
                    )
                    raise ParameterChangedError(msg)
            now: Mapping[str, torch.Tensor] = {n: self._live.tensor(n) for n in self.names}
            self._views = [view_of(now[item.param], item.target) for item in self._slices]
            self._addresses = addresses
        return self._views

    def param(self, name: str) -> torch.Tensor:
        """Return a parameter; `views` checks that it is still that of the plan."""
        return self._live.tensor(name)

    def memory(self, name: str) -> torch.Tensor:
        """Return the integers in a parameter's memory, from its first element on, as one row.

        Call `views` first, which checks that it is still the parameter of the plan.
        """
        return memory_of(self._live.tensor(name))
