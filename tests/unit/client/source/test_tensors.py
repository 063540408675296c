from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save_file

from weightsync.delta.kernels import available
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_client import Client, InvalidError, PulledTensor
from weightsync_client.source.shards import cut, pieces, tensor_shard
from weightsync_client.source.tensors import Scratch, settle, wrap
from weightsync_client.transport import copying
from weightsync_client.transport.messages import ShardDigester

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def read(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    tensor = wrap("t", value)
    return tensor.dtype, tensor.shape, bytes(tensor.open(Scratch())(0, tensor.size))


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)])
def test_every_torch_dtype(name: str, shape: tuple[int, ...]) -> None:
    tensor = noise(TORCH_DTYPES[name], *shape)
    dtype, told, data = read(tensor)
    assert dtype == name
    if name == "F4":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    assert told == shape
    assert data == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("name", [n for n in TORCH_DTYPES if n not in ("F4", "F8_E8M0")])
def test_safetensors_reads_what_we_pack(name: str) -> None:
    tensors = {"a": noise(TORCH_DTYPES[name], 3, 5), "b": noise(TORCH_DTYPES[name], 2)}
    shard = tensor_shard([wrap(*pair) for pair in tensors.items()], 0, "x")
    data = b"".join(shard.open(Scratch()).read(0, shard.entry.size))
    loaded = load(data)
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert loaded[key].shape == tensor.shape
        assert bytes(loaded[key].view(torch.uint8).numpy()) == read(tensor)[2]


@pytest.mark.parametrize("name", sorted(DTYPE_BITS))
def test_every_safetensors_dtype_as_plain_bytes(name: str, client: Client) -> None:
    size = 8 * DTYPE_BITS[name] // 8 * 2
    plain = {"dtype": name, "shape": [4, 4], "data": bytes(range(size))}
    client.push({"t": plain}, version=3)
    (pulled,) = client.tensors(3)
    assert (pulled.dtype, pulled.shape, bytes(pulled.data)) == (name, (4, 4), plain["data"])
    # What was pulled can be pushed as it is.
    assert client.push({"t": pulled}, version=3).already


def test_strided_tensors_are_sent_row_by_row() -> None:
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    for view in (base.T, base[::2], base[:, 1:3], base[1:], base.expand(2, 4, 6)):
        assert read(view)[2] == bytes(view.contiguous().numpy().tobytes())
    wide = np.arange(24).reshape(4, 6)
    for part in (wide.T, wide[::-1], wide[:, ::2]):
        assert read(part)[2] == part.tobytes()


def test_views_with_a_flag_are_resolved() -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    assert read(tensor.conj())[2] == tensor.conj().resolve_conj().numpy().tobytes()
    negative = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    assert negative.is_neg()
    assert read(negative)[2] == np.array([-1, -1], np.float32).tobytes()


def test_parameters_and_inference_tensors() -> None:
    assert read(torch.nn.Parameter(torch.ones(2)))[2] == np.ones(2, np.float32).tobytes()
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert read(tensor)[2] == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (np.float16(2), "F16", ()),
        (np.zeros((2, 0), np.uint16), "U16", (2, 0)),
        (np.arange(3, dtype=">i4"), "I32", (3,)),
        (b"\x01\x02", "U8", (2,)),
        (array.array("d", [1.0, 2.0]), "F64", (2,)),
        (memoryview(b"1234").cast("I"), "U32", (1,)),
    ],
)
def test_numpy_and_buffers(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    told_dtype, told_shape, data = read(value)
    assert (told_dtype, told_shape) == (dtype, shape)
    assert data == np.asarray(value).astype(np.asarray(value).dtype.newbyteorder("<")).tobytes()


def test_dlpack_and_array_objects() -> None:
    class Exported:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self._tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._tensor.__dlpack_device__()

    class Array:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(3, dtype=np.int16)

    tensor = torch.randn(3).to(torch.bfloat16)
    assert read(Exported(tensor)) == ("BF16", (3,), read(tensor)[2])
    assert read(Array()) == ("I16", (3,), np.arange(3, dtype=np.int16).tobytes())


def test_safetensors_slices(tmp_path: Any) -> None:
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert read(file.get_slice("a"))[:2] == ("F32", (2, 3))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1.0], "is a list; push PyTorch or NumPy"),
        (np.array(["x"]), "safetensors cannot hold"),
        (torch.zeros(1, dtype=torch.complex128), "complex128, which safetensors cannot hold"),
        (torch.zeros(1, device="meta"), "meta device"),
        (torch.zeros(2, 2).to_sparse(), "to_dense"),
        ({"dtype": "F32", "shape": [2], "data": b"1"}, "has 1 bytes"),
        ({"dtype": "F33", "shape": [2], "data": b"1"}, "'F33'"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(
    client: Client, servicer: Any, value: Any, sentence: str
) -> None:
    with pytest.raises(InvalidError, match=sentence) as caught:
        client.push({"layers.0.weight": value})
    assert "layers.0.weight" in caught.value.message
    assert "BeginPush" not in servicer.calls


def test_sharded_tensors_are_refused() -> None:
    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return torch.ones(1)

    with pytest.raises(InvalidError, match="push all of them in a dict"):
        wrap("w", torch.ones(2).as_subclass(Sharded))


def test_tied_tensors_are_sent_under_both_names(client: Client) -> None:
    weight = torch.randn(8, 4)
    client.push({"embed": weight, "head": weight, "part": weight[2:]}, version=1)
    pulled = {t.name: t.torch() for t in client.tensors(1)}
    assert torch.equal(pulled["embed"], weight)
    assert torch.equal(pulled["head"], weight)
    assert torch.equal(pulled["part"], weight[2:])


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_digests_do_not_depend_on_chunks_or_repeats(chunk: int) -> None:
    shapes = [(0,), (3,), (), (0, 2), (100,), (1,), (0,)]
    tensors = [wrap(f"t{i}", torch.randn(shape)) for i, shape in enumerate(shapes)]
    shard = tensor_shard(tensors, 0, "x")
    reader = shard.open(Scratch())
    digester = ShardDigester(shard)
    size = shard.entry.size
    for begin in range(0, size, chunk):
        # Each chunk again, and half of it a third time, as after a cut.
        for start in (begin, max(0, begin - chunk), begin + chunk // 2):
            if start <= digester.position or start < shard.entry.data_start:
                stop = min(start + chunk, size)
                digester.update(start, b"".join(reader.read(start, stop)))
        digester.update(begin, b"".join(reader.read(begin, min(begin + chunk, size))))
    assert digester.done
    whole = ShardDigester(shard)
    whole.update(0, b"".join(reader.read(0, size)))
    assert digester.digests == whole.digests
    names = {t.name: t for t in tensors}
    from weightsync.model.digest import tensor_digest

    assert digester.digests == [
        tensor_digest(names[e.name].open(Scratch())(0, e.end - e.begin)) for e in shard.tensors
    ]


def test_a_tensor_is_kept_from_its_first_byte_on_and_only_then() -> None:
    tensors = [wrap(name, np.arange(8, dtype=np.uint8)) for name in ("a", "b")]
    shard = tensor_shard([*tensors, wrap("c", np.zeros(0, np.uint8))], 0, "x")
    kept: list[tuple[str, int, int]] = []
    digester = ShardDigester(shard, lambda name, at, data: kept.append((name, at, len(data))))
    start = shard.entry.data_start
    # The first piece ends where the second tensor begins.
    digester.update(start, bytes(range(8)))
    assert kept == [("a", 0, 8)]
    digester.update(start + 8, bytes(range(4)))
    digester.update(start + 12, bytes(range(4, 8)))
    assert kept == [("a", 0, 8), ("b", 0, 4), ("b", 4, 4), ("c", 0, 0)]
    assert digester.done


def test_cut_respects_bytes_and_headers() -> None:
    tensors = [wrap(f"t{i}", np.zeros(10, np.uint8)) for i in range(10)]
    assert [len(g) for g in cut(tensors, 35)] == [3, 3, 3, 1]
    assert [len(g) for g in cut(tensors, 1)] == [1] * 10
    names = [wrap("n" * 1000 + str(i), np.zeros(0, np.uint8)) for i in range(8000)]
    groups = list(cut(names, 1 << 30))
    assert len(groups) > 1
    for index, group in enumerate(groups):
        assert tensor_shard(group, index, "x").entry.header_size <= 8 << 20


def test_only_the_tensor_in_turn_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    tensors = [wrap(f"t{i}", torch.zeros(10, 2).T) for i in range(5)]
    shard = tensor_shard(tensors, 0, "x")
    reader: Any = shard.open(Scratch())
    for begin in range(shard.entry.data_start, shard.entry.size, 40):
        reader.read(begin, min(begin + 40, shard.entry.size))
        opened.append(reader._open[0])
    assert opened == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_pulled_tensors_become_torch_tensors(name: str) -> None:
    tensor = noise(TORCH_DTYPES[name], 2, 4)
    dtype, shape, data = read(tensor)
    back = PulledTensor("t", dtype, shape, bytearray(data)).torch()
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert bytes(back.view(torch.uint8).numpy()) == data
    empty = PulledTensor("t", dtype, (0, 4), bytearray()).torch()
    assert empty.numel() == 0


def test_pulled_tensors_become_arrays_where_numpy_can() -> None:
    tensor = PulledTensor("t", "I16", (2, 1), bytearray(b"\x01\x00\x02\x00"))
    assert tensor.numpy().tolist() == [[1], [2]]
    with pytest.raises(InvalidError, match=r"use torch\(\)"):
        PulledTensor("t", "BF16", (1,), bytearray(2)).numpy()
    with pytest.raises(InvalidError, match="use data"):
        PulledTensor("t", "F6_E2M3", (4,), bytearray(3)).torch()


def test_a_device_without_streams_is_waited_for_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Queue:
        @staticmethod
        def synchronize() -> None:
            waited.append("all")

    class Streams(Queue):
        @staticmethod
        def current_stream(device: torch.device) -> Any:
            waited.append(str(device))
            return Queue

    monkeypatch.setattr(torch, "mps", Queue)
    monkeypatch.setattr(torch, "xpu", Streams)
    for name in ("cpu", "mps", "xpu:1"):
        settle(torch.device(name))
    assert waited == ["all", "xpu:1", "all"]


@pytest.mark.parametrize("level", ["plain", "avx2", "avx512"])
def test_what_goes_by_is_copied_where_it_belongs(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level not in available():
        pytest.skip(f"this machine has no {level} kernels")
    monkeypatch.setattr(copying, "_level", lambda: level)
    monkeypatch.setattr(copying, "_LEAST", 241)
    sizes = {"a": 5, "b": 0, "c": 40_000, "d": 2 << 10, "e": 0}
    content = np.random.default_rng(1)
    tensors = [wrap(n, content.integers(0, 256, s, np.uint8)) for n, s in sizes.items()]
    shard = tensor_shard(tensors, 0, "x")
    reader, size = shard.open(Scratch()), shard.entry.size
    whole = b"".join(reader.read(0, size))
    plain = ShardDigester(shard)
    plain.update(0, whole)
    for step in (1 << 10, 16 << 10, 1 << 20):
        target = memoryview(bytearray(size))
        digester = ShardDigester(shard, target=target)
        for begin, end in pieces(shard, step, apart=False):
            at = begin
            for part in reader.read(begin, end):
                digester.update(at, part)
                at += len(part)
        digester.update(size, b"")
        assert digester.digests == plain.digests
        assert target == whole


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    step=st.integers(1, 64),
    apart=st.booleans(),
)
def test_pieces_cut_a_tensor_only_where_a_copier_can_go_on(
    sizes: list[int], step: int, apart: bool
) -> None:
    tensors = [wrap(f"t{at}", np.zeros(size, np.uint8)) for at, size in enumerate(sizes)]
    shard = tensor_shard(tensors, 0, "x")
    found = [*pieces(shard, step, apart=apart)]
    assert [end for _, end in found[:-1]] == [begin for begin, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, shard.entry.size)
    assert all(0 < end - begin <= step for begin, end in found)
    start = shard.entry.data_start
    for tensor in shard.tensors:
        inside = [end for _, end in found if start + tensor.begin < end < start + tensor.end]
        assert all((end - start - tensor.begin) % step == 0 for end in inside)
        if apart:
            assert not any(begin < start + tensor.begin < end for begin, end in found)
