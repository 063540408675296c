from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from weightsync.model.manifest import Layout, Manifest, ShardEntry, TensorEntry
from weightsync_server.usecases.version_calls import tensor_page

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNT = 1000


class Indexed(tuple[Any, ...]):
    """A tuple that nobody may walk through, once it is made."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        pytest.fail("a page looked at every tensor")


def _manifest() -> Manifest:
    tensors = tuple(
        TensorEntry(f"t{(at * 7) % _COUNT:04}", "U8", (1,), 0, at, at + 1) for at in range(_COUNT)
    )
    layout = Layout((ShardEntry("s", _COUNT + 8, 0),), tensors)
    digests = tuple(at.to_bytes(16, "big") for at in range(_COUNT))
    # As every manifest that the registry has, whose digests are computed off the event loop.
    assert Manifest(layout, digests).manifest_digest
    vars(layout)["tensors"] = Indexed(tensors)
    return Manifest(layout, Indexed(digests))


@pytest.mark.parametrize(("first", "size"), [(0, 10), (990, 10), (995, 10), (1000, 10), (0, 5000)])
def test_a_page_is_sorted_and_looks_at_no_other_tensor(first: int, size: int) -> None:
    page = tensor_page(_manifest(), first, size)
    assert [info.spec.name for info in page] == [
        f"t{at:04}" for at in range(first, min(first + size, _COUNT))
    ]
    for info in page:
        at = info.spec.begin
        assert (info.spec.name, info.spec.end) == (f"t{(at * 7) % _COUNT:04}", at + 1)
        assert info.digest == at.to_bytes(16, "big").hex()
