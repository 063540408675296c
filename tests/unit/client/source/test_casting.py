"""Tensors of every library are cast as they are read, in whatever ranges, and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from weightsync.errors import Reason
from weightsync.model import layout
from weightsync.model.tensor_slices import Box
from weightsync_client import Declared, InvalidError
from weightsync_client.rpc.tensor_pages import EngineLayout, EngineTensor
from weightsync_client.source.casting import Casting
from weightsync_client.source.sharded_tensors import ShardedTensor, box_source
from weightsync_client.source.source import Source, SourceWriter, make_source
from weightsync_client.source.tensors import Scratch, SourceTensor, wrap


def casting(dtype: str = "BF16", *names: str, **options: bool) -> Casting:
    kinds = dict.fromkeys(names or ("w",), EngineTensor(dtype, ()))
    return Casting(EngineLayout("s", kinds), **options)


def read(tensor: SourceTensor, *, views: bool = False) -> bytes:
    return bytes(tensor.reader(Scratch(views=views))(0, tensor.size))


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def values(rows: int = 7, columns: int = 5) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


def forms(tensor: torch.Tensor) -> dict[str, object]:
    array = tensor.contiguous().numpy()
    plain = {"dtype": "F32", "shape": array.shape, "data": array.tobytes()}
    return {
        "torch": tensor,
        "parameter": torch.nn.Parameter(tensor),
        "numpy": array,
        "big-endian": array.astype(">f4"),
        "plain": plain,
    }


@pytest.mark.parametrize("form", forms(values()))
@pytest.mark.parametrize("shape", [(7, 5), (), (0, 3), (1,)])
def test_each_form_of_a_tensor_is_cast(form: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    cast = casting()
    sent = cast.tensor(wrap("w", forms(tensor)[form]))
    assert (sent.dtype, sent.shape) == ("BF16", shape)
    assert sent.size == 2 * tensor.numel()
    assert read(sent) == bytes_of(tensor.bfloat16())
    assert cast.cast == (1, "tensor 'w' from F32 to BF16")


@pytest.mark.parametrize("given", [values(6, 4).t(), values(8, 4)[::2, 1:], values().double()])
def test_what_does_not_lie_in_a_row_is_cast(given: torch.Tensor) -> None:
    sent = casting("F16").tensor(wrap("w", given))
    assert read(sent) == bytes_of(given.half())
    assert not sent.in_place
    assert sent.flat is not None
    assert bytes(sent.flat().numpy().tobytes()) == bytes_of(given.half())


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_every_range_of_bytes_is_the_same(form: str) -> None:
    tensor = values()
    sent = casting().tensor(wrap("w", forms(tensor)[form]))
    whole, reader = bytes_of(tensor.bfloat16()), sent.reader(Scratch())
    for begin in range(0, sent.size, 3):
        for end in range(begin, sent.size + 1, 5):
            assert bytes(reader(begin, end)) == whole[begin:end]


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.bfloat16),
    ],
)
def test_what_is_no_plain_cast_goes_as_it_is(given: torch.Tensor) -> None:
    tensor = wrap("w", given)
    assert casting("BF16").tensor(tensor) is tensor
    assert casting("BF16", exact=True).tensor(tensor) is tensor


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "U8", "BOOL", "whatever"])
def test_nothing_becomes_what_is_no_plain_float(dtype: str) -> None:
    tensor = wrap("w", values())
    cast = casting(dtype)
    assert cast.tensor(tensor) is tensor
    assert cast.cast.total == 0


def test_what_the_engine_does_not_know_goes_as_it_is() -> None:
    tensor = wrap("other", values())
    assert casting().tensor(tensor) is tensor
    assert Casting(None, exact=True).tensor(tensor) is tensor


def test_exact_refuses_with_what_was_given_and_wanted() -> None:
    with pytest.raises(InvalidError) as caught:
        Casting(EngineLayout("s", {"w": EngineTensor("BF16", (7, 5))}), exact=True).tensor(
            wrap("w", values())
        )
    assert str(caught.value) == (
        "convert tensor 'w' to BF16, or push without dtype='exact' to have that done: it is F32 "
        "[7, 5], the engine has BF16 [7, 5]"
    )


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_a_value_beyond_the_range_is_refused_by_name_and_place(form: str) -> None:
    tensor = values()
    tensor[2, 1], tensor[0, 0] = 70_000.0, float("inf")
    sent = casting("F16").tensor(wrap("w", forms(tensor)[form]))
    with pytest.raises(InvalidError) as caught:
        read(sent)
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert "tensor 'w'" in caught.value.message
    assert "element 11 is 70000" in caught.value.message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wanted", ["F32", "BF16"])
@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_check_finite_names_the_tensor(form: str, wanted: str, bad: float) -> None:
    tensor = values()
    source = wrap("w", forms(tensor)[form])
    expected = bytes_of(tensor if wanted == "F32" else tensor.bfloat16())
    assert read(casting(wanted, finite=True).tensor(source)) == expected
    tensor[1, 2] = bad
    source = wrap("w", forms(tensor)[form])
    # It is not asked for.
    read(casting(wanted).tensor(source))
    sent = casting(wanted, finite=True).tensor(source)
    with pytest.raises(InvalidError, match="element 7 of tensor 'w'"):
        read(sent)
    if sent.flat is not None:
        assert sent.in_place is (wanted == "F32")
        with pytest.raises(InvalidError, match="element 7 of tensor 'w'"):
            sent.flat()


def test_check_finite_leaves_integers_alone() -> None:
    tensor = wrap("w", torch.full((3,), -1, dtype=torch.int32))
    assert Casting(finite=True).tensor(tensor) is tensor


def _content(source: Source) -> dict[str, bytes]:
    found = {}
    for shard in source.shards:
        reader = shard.open(Scratch())
        for entry in shard.tensors:
            begin, end = shard.data_start + entry.begin, shard.data_start + entry.end
            parts = reader.read(begin, end) if begin < end else []
            found[entry.name] = b"".join(map(bytes, parts))
            assert entry.dtype == ("I64" if entry.name == "n" else "BF16")
    return found


def _state() -> dict[str, torch.Tensor]:
    return {"w": values(), "v": values(3, 2).half(), "n": torch.arange(4), "z": torch.tensor(1.5)}


_NAMES = ("w", "v", "n", "z")


def _sources(tmp_path: Path) -> dict[str, object]:
    state = _state()
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, tensor in state.items():
        save_file({name: tensor.numpy()}, folder / f"{name}.safetensors")
    about = [(name, str(tensor.dtype), tensor.shape) for name, tensor in state.items()]
    return {
        "state dict": state,
        "pairs": list(state.items()),
        "iterable": iter(state.items()),
        "declared": Declared(iter(state.items()), about),
        "folder": folder,
    }


@pytest.mark.parametrize("form", ["state dict", "pairs", "iterable", "declared", "folder"])
@pytest.mark.parametrize("late", [False, True])
def test_each_source_is_cast_and_tells_how_much(tmp_path: Path, form: str, *, late: bool) -> None:
    expected = {
        name: bytes_of(tensor.bfloat16() if tensor.is_floating_point() else tensor)
        for name, tensor in _state().items()
    }
    cast = casting("BF16", *_NAMES)
    source = make_source(_sources(tmp_path)[form], 64, casting=None if late else cast)
    if late:
        source = source.cast(cast)
    assert _content(source) == expected
    assert source.casting.cast.total == 3
    if source.layout is not None:
        sizes = [tensor.end - tensor.begin for tensor in source.layout.tensors]
        assert sum(sizes) == sum(map(len, expected.values()))


def test_a_declared_source_is_compared_with_what_it_declares_not_with_what_is_sent() -> None:
    state = _state()
    about = [(name, str(tensor.dtype), tensor.shape) for name, tensor in state.items()]
    source = make_source(
        Declared(iter({**state, "w": values().bfloat16()}.items()), about),
        1 << 20,
        casting=casting("BF16", *_NAMES),
    )
    with pytest.raises(InvalidError, match="declared was 'w' \\(F32"):
        _content(source)


def test_boxes_are_cast_and_named_with_their_place() -> None:
    local = values(3, 4)
    part = ShardedTensor((6, 4), "F32", [((3, 0), local)])
    cast = casting("F16")
    made = cast.boxes(box_source("w", part, 1))
    assert made.whole.dtype == "F16"
    ((box, tensor),) = made.boxes
    assert box == Box((3, 0), (3, 4))
    assert tensor.dtype == "F16"
    assert read(tensor) == bytes_of(local.half())
    assert cast.cast.total == 1
    local[1, 1] = 1e6
    with pytest.raises(InvalidError, match=r"tensor 'w'\[3:6, 0:4\].*element 5 is 1e\+06"):
        read(tensor)


def _second() -> SourceWriter:
    return SourceWriter(2, 0, "k")


def test_a_source_of_boxes_is_cast_in_both_ways() -> None:
    local = values(3, 4)
    part = ShardedTensor((6, 4), "F32", [((0, 0), local)])
    sources: list[Any] = [part, local]
    for number, value in enumerate(sources):
        source = make_source({"w": value}, 64, writer=_second, together=True)
        sent = source.cast(casting("BF16"))
        assert sent.layout is not None
        assert [t.dtype for t in sent.layout.tensors] == ["BF16"], number
        (tensor,) = sent.tensors
        assert read(tensor) == bytes_of(local.bfloat16())


def test_on_another_device_the_pieces_of_a_scratch_block_are_cast() -> None:
    """A device without a GPU: its tensors lie on the host, and are read as a device's are."""
    tensor = values(50, 11)
    source = wrap("w", tensor)
    device = torch.device("cpu", 0)
    sent = casting().tensor(replace(source, device=device))
    whole = bytes_of(tensor.bfloat16())
    scratch = Scratch()
    scratch._block = torch.empty(64, dtype=torch.uint8)
    for views in (False, True):
        scratch.views = views
        reader = sent.reader(scratch)
        assert bytes(reader(0, sent.size)) == whole
        for begin in range(0, sent.size, 7):
            assert bytes(reader(begin, min(begin + 13, sent.size))) == whole[begin : begin + 13]
    assert isinstance(np.frombuffer(reader(0, 4), np.uint8), np.ndarray)


@pytest.mark.parametrize("form", ["state dict", "pairs", "iterable", "declared", "folder"])
def test_too_many_tensors_are_refused_before_any_is_read(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_TENSORS", 3)
    with pytest.raises(InvalidError, match="4 tensors; push at most 3"):
        _content(make_source(_sources(tmp_path)[form], 1 << 20))
