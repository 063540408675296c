"""One tensor of a version of which this client has no copy: the server alone holds its bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from weightsync.delta import Later, WholeTensor
from weightsync_client.snapshot.host_tensor import all_bytes, own_scratch

if TYPE_CHECKING:
    from weightsync.delta import TensorChange
    from weightsync_client.source.tensors import Scratch, SourceTensor
    from weightsync_client.types import TensorInfo

__all__ = ["RemoteTensor"]


class RemoteTensor:
    """See `BaseTensor`: what is known of a tensor without its bytes.

    Attributes:
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        digest: xxh3-128 of its bytes.
    """

    __slots__ = ("digest", "dtype", "shape")

    device = None

    def __init__(self, info: TensorInfo) -> None:
        self.dtype, self.shape = info.dtype, info.shape
        self.digest = bytes.fromhex(info.digest)

    def item(self, tensor: SourceTensor, scratch: Scratch) -> Later:
        """Return the tensor for the encoder: all of it is sent, unless its digest is the same."""
        del scratch
        return Later(tensor.name, self.dtype, self.shape, partial(self._read, tensor))

    def _read(self, tensor: SourceTensor) -> WholeTensor:
        new = all_bytes(tensor, own_scratch())
        return WholeTensor(tensor.name, self.dtype, self.shape, new, self.digest)

    def advance(self, change: TensorChange) -> None:
        """Become what the delta says."""
        self.digest = change.digest

    def forget(self) -> None:
        """Do nothing: a delta leaves nothing here."""
