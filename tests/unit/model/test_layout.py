"""Attacks A5 to A7 of the research on headers and layouts, and agreement with safetensors."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st

from weightsync.errors import Reason, WeightSyncError
from weightsync.model import layout
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.layout import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    build_header,
    check_header,
    check_shard,
    check_version,
    parse_header,
    unlike,
)
from weightsync.model.manifest import ShardEntry, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    Spec = tuple[str, str, tuple[int, ...]]

_BIG = 1 << 62


def _file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _header(**tensors: Any) -> bytes:
    return json.dumps(tensors, separators=(",", ":")).encode()


def _tensor(shape: Any = (4,), offsets: Any = (0, 4), dtype: Any = "U8", **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


def _accept(file: bytes) -> tuple[TensorEntry, ...]:
    """What the server does with a whole shard."""
    size = int.from_bytes(file[:8], "little")
    shard = ShardEntry("shard", len(file), size)
    tensors = check_shard(shard, parse_header(file[8 : 8 + size]))
    check_version([shard], [tensors])
    return tensors


def _theirs(file: bytes) -> list[tuple[str, Any]]:
    deserialize: Callable[[bytes], list[tuple[str, Any]]] = safetensors.deserialize
    return deserialize(file)


def _refused(file: bytes) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        _accept(file)
    assert caught.value.reason in (Reason.LAYOUT_INVALID, Reason.SHARD_INVALID)
    assert len(caught.value.message) < 1000
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()
    return caught.value


def _entry(name: str = "w", begin: int = 0, end: int = 4, **more: Any) -> TensorEntry:
    facts: dict[str, Any] = {"dtype": "U8", "shape": (end - begin,), "shard": 0} | more
    return TensorEntry(name=name, begin=begin, end=end, **facts)


def _check(*tensors: TensorEntry, size: int | None = None) -> tuple[TensorEntry, ...]:
    end = max((t.end for t in tensors), default=0)
    return check_shard(ShardEntry("s", 108 + end if size is None else size, 100), tensors)


# Names: A5 of the research.


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 bytes"),
        ("a\0b", "printable"),
        ("a\nb", "printable"),
        ("a\x1b[31mb", "printable"),
        ("a\x7f", "printable"),
        ("a\N{RIGHT-TO-LEFT OVERRIDE}b", "printable"),
        ("a\N{ZERO WIDTH SPACE}b", "printable"),
        ("a\N{LINE SEPARATOR}b", "printable"),
        ("a\ud800b", "UTF-8"),
        ("__metadata__", "reserved"),
        ("x" * 1025, "1025 bytes"),
        ("ä" * 513, "1026 bytes"),
        ("y" * (1 << 20), "1048576 bytes"),
    ],
)
def test_names_that_are_refused(name: str, why: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        _check(_entry(name))
    assert caught.value.reason is Reason.LAYOUT_INVALID
    assert why in caught.value.message
    assert json.dumps(name[:40])[:-1] in caught.value.message
    assert len(caught.value.message) < 800
    if name != "__metadata__":
        _refused(_file(_header(**{name: _tensor()}), bytes(4)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "a\\b", "gewicht_ä", "x" * 1024, " "])
def test_names_are_never_paths_so_these_are_only_text(name: str) -> None:
    assert _check(_entry(name))[0].name == name


# Lengths: A6.


@pytest.mark.parametrize("size", [0, 1, MAX_HEADER_BYTES + 1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_header_lengths_that_are_refused_before_anything_is_read(size: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WeightSyncError) as caught:
            check_shard(ShardEntry("s", max(size, 108), size), [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.reason is Reason.LAYOUT_INVALID
    assert str(size) in caught.value.message


@pytest.mark.parametrize("size", [0, 107, (1 << 46) + 1, (1 << 64) - 1])
def test_shard_sizes_that_are_refused(size: int) -> None:
    with pytest.raises(WeightSyncError, match="impossible size"):
        check_shard(ShardEntry("s", size, 100), [])


def test_a_header_over_the_limit_is_refused_unparsed() -> None:
    with pytest.raises(WeightSyncError, match="at most 8388608"):  # parsed: "is not JSON"
        parse_header(b"{" + b" " * MAX_HEADER_BYTES)


# Ranges and structure: A7.

_REFUSED: dict[str, bytes] = {
    "overlap": _file(_header(a=_tensor(), b=_tensor(offsets=(2, 6))), bytes(6)),
    "same range": _file(_header(a=_tensor(), b=_tensor()), bytes(4)),
    "hole": _file(_header(a=_tensor(), b=_tensor(offsets=(5, 9))), bytes(9)),
    "trailing": _file(_header(a=_tensor()), bytes(5)),
    "truncated": _file(_header(a=_tensor()), bytes(3)),
    "first not 0": _file(_header(a=_tensor(offsets=(1, 5))), bytes(5)),
    "begin after end": _file(_header(a=_tensor(offsets=(4, 0))), bytes(4)),
    "size": _file(_header(a=_tensor(shape=(5,))), bytes(4)),
    "dtype": _file(_header(a=_tensor(dtype="F3")), bytes(4)),
    "dtype is text": _file(_header(a=_tensor(dtype=7)), bytes(4)),
    "huge dtype": _file(_header(a=_tensor(dtype="F" * 100_000)), bytes(4)),
    "dims overflow": _file(_header(a=_tensor(shape=(_BIG, _BIG))), bytes(4)),
    "dims overflow a float": _file(_header(a=_tensor(shape=(_BIG,) * 32)), bytes(4)),
    "dims overflow to 0": _file(_header(a=_tensor(shape=(_BIG, _BIG, 0), offsets=(0, 0)))),
    "a dim of 2^63": _file(_header(a=_tensor(shape=(1 << 63,))), bytes(4)),
    "negative dim": _file(_header(a=_tensor(shape=(-2, -2))), bytes(4)),
    "minus zero": _file(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
    "float dim": _file(_header(a=_tensor(shape=(4.0,))), bytes(4)),
    "bool dim": _file(_header(a=_tensor(shape=(True, 4))), bytes(4)),
    "text dim": _file(_header(a=_tensor(shape=("4",))), bytes(4)),
    "NaN offset": _file(_header(a=_tensor(offsets=(0, math.nan))), bytes(4)),
    "negative offset": _file(_header(a=_tensor(offsets=(-1, 3))), bytes(4)),
    "three offsets": _file(_header(a=_tensor(offsets=(0, 4, 4))), bytes(4)),
    "half a byte": _file(_header(a=_tensor(dtype="F4", shape=(7,))), bytes(4)),
    "missing key": _file(_header(a={"dtype": "U8", "shape": [4]}), bytes(4)),
    "unknown key": _file(_header(a=_tensor(strides=(1,))), bytes(4)),
    "no object": _file(_header(a=[1]), bytes(4)),
    "null": _file(_header(a=None), bytes(4)),
    "no tensor": _file(b"{}"),
    "not JSON": _file(b"{nope}"),
    "an array": _file(b"[{}]"),
    "leading space": _file(b" " + _header(a=_tensor()), bytes(4)),
    "byte order mark": _file(b"\xef\xbb\xbf" + _header(a=_tensor()), bytes(4)),
    "UTF-16": _file(_header(a=_tensor()).decode().encode("utf-16-le"), bytes(4)),
    "UTF-32": _file(_header(a=_tensor()).decode().encode("utf-32-le"), bytes(4)),
    "not UTF-8": _file(_header(a=_tensor()).replace(b'"a"', b'"\xff"'), bytes(4)),
    "encoded surrogate": _file(_header(a=_tensor()).replace(b'"a"', b'"\xed\xa0\x80"'), bytes(4)),
    "NUL padding": _file(_header(a=_tensor()) + b"\0\0", bytes(4)),
    "twice": _file(b'{"a":%b,"a":%b}' % ((json.dumps(_tensor()).encode(),) * 2), bytes(4)),
    "inner key twice": _file(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)
    ),
    "metadata of numbers": _file(_header(__metadata__={"a": 1}, a=_tensor()), bytes(4)),
    "metadata is a list": _file(_header(__metadata__=["a"], a=_tensor()), bytes(4)),
    "metadata is no text": _file(_header(__metadata__={"a": "\ud800"}, a=_tensor()), bytes(4)),
    "metadata key is no text": _file(_header(__metadata__={"\ud800": ""}, a=_tensor()), bytes(4)),
    "33 dims": _file(_header(a=_tensor(shape=(1,) * 32 + (4,))), bytes(4)),
    "10^6 dims": _file(_header(a=_tensor(shape=[1] * 10**6))),
    "depth 10^4": _file(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "depth 10^4 objects": _file(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "a number of 10^6 digits": _file(_header(a=7).replace(b"7", b"7" * 10**6)),
    "an exponent": _file(_header(a=7).replace(b"7", b"1e999999")),
    "pickle": _file(b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtins"),
    "zip": _file(b"PK\x03\x04" + bytes(60)),
    "ELF": _file(b"\x7fELF\x02\x01\x01" + bytes(60)),
}  # fmt: skip


@pytest.mark.parametrize("attack", _REFUSED)
def test_shards_that_are_refused(attack: str) -> None:
    start = time.thread_time()
    _refused(_REFUSED[attack])
    # That it ends, whatever runs beside it: what grows with the square takes minutes. The research
    # asks for 100 ms on an idle machine.
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    "attack", ["10^6 dims", "depth 10^4", "a number of 10^6 digits", "huge dtype"]
)
def test_refusing_takes_little_memory(attack: str) -> None:
    file = _REFUSED[attack]
    tracemalloc.start()
    try:
        _refused(file)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        ("overlap", '"b"'),
        ("hole", '"b"'),
        ("size", '"a"'),
        ("dtype", '"F3"'),
        ("twice", '"a"'),
        ("unknown key", '"a"'),
        ("dims overflow", '"a"'),
        ("half a byte", '"a"'),
    ],
)
def test_the_refusal_names_the_offender(attack: str, named: str) -> None:
    assert named in _refused(_REFUSED[attack]).message


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TENSORS == 2_000_000
    monkeypatch.setattr(layout, "MAX_TENSORS", 100)
    tensors = [_entry(str(index), 0, 0) for index in range(101)]
    shard = ShardEntry("s", 108, 100)
    with pytest.raises(WeightSyncError, match="101 tensors; push at most 100") as caught:
        check_version([shard], [tensors])
    assert caught.value.reason is Reason.LAYOUT_INVALID
    assert len(check_version([shard], [tensors[:-1]]).tensors) == 100


def test_a_name_in_two_shards_is_refused() -> None:
    shard = ShardEntry("s", 112, 100)
    with pytest.raises(WeightSyncError, match='"w" is in the version twice'):
        check_version([shard, shard], [_check(_entry()), _check(_entry(shard=1))])


# What is legal


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
@pytest.mark.parametrize("shape", [(8,), (2, 4), (0, 3), (1, 8, 1)])
def test_every_dtype(dtype: str, bits: int, shape: tuple[int, ...]) -> None:
    header, places = build_header([("w", dtype, shape)])
    data = bytes(math.prod(shape) * bits // 8)
    file = _file(header, data)
    assert _accept(file) == places
    ((name, told),) = _theirs(file)
    assert (name, told["dtype"], tuple(told["shape"])) == ("w", dtype, shape)


def test_there_are_22_dtypes() -> None:
    assert len(DTYPE_BITS) == 22


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
@pytest.mark.parametrize("count", range(1, 9))
def test_values_below_a_byte_must_fill_bytes(dtype: str, count: int) -> None:
    bits = count * DTYPE_BITS[dtype]
    tensor = _entry(dtype=dtype, shape=(count,), end=bits // 8)
    if bits % 8:
        with pytest.raises(WeightSyncError, match="needs"):
            _check(tensor)
    else:
        _check(tensor)


def test_small_and_empty_tensors() -> None:
    specs: list[Spec] = [
        ("empty", "F32", (0,)),
        ("scalar", "BF16", ()),
        ("nothing", "F64", (3, 0, 2)),
        ("byte", "U8", (1,)),
    ]
    header, places = build_header(specs)
    assert len(header) % 8 == 0
    file = _file(header, b"abc")
    assert _accept(file) == places
    assert {name for name, _ in _theirs(file)} == {name for name, _, _ in specs}
    check_header(header, places)


# The header against the layout


def _places(**change: Any) -> tuple[TensorEntry, ...]:
    entries = [_entry("a", 0, 4, shard=3), _entry("b", 4, 9, shard=3)]
    entries[1] = _entry("b", 4, 9, **({"shard": 3} | change))
    return tuple(entries)


def _told(specs: list[Spec]) -> bytes:
    return build_header(specs)[0]


def test_a_header_that_tells_the_layout_passes() -> None:
    check_header(_told([("a", "U8", (4,)), ("b", "U8", (5,))]), _places())
    check_header(b"{}", ())


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (_told([("a", "U8", (4,)), ("c", "U8", (5,))]), '"c"'),
        (_told([("a", "U8", (4,)), ("b", "I8", (5,))]), '"I8"'),
        (_told([("a", "U8", (4,)), ("b", "U8", (1, 5))]), "[1, 5]"),
        (_told([("a", "U8", (4,)), ("b", "U8", (6,))]), "4 to 10"),
        (_told([("a", "U8", (4,))]), "1 tensors"),
        (_told([("a", "U8", (4,)), ("b", "U8", (5,)), ("c", "U8", (0,))]), "3 tensors"),
        (_header(a=_tensor(), b=_tensor(dtype="\ud800" * 9999)), '"b"'),
        (b"", "'{'"),
    ],
)
def test_a_header_that_tells_something_else_is_refused(header: bytes, named: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        check_header(header, _places())
    assert caught.value.reason is Reason.SHARD_INVALID
    assert named in caught.value.message
    assert len(caught.value.message) < 2000
    assert caught.value.message.isascii()


# Agreement with the safetensors package, and nothing but WeightSyncError

_names = st.text(max_size=6) | st.sampled_from(["a", "b", "__metadata__", "-0"])
_ints = st.integers(-2, 12) | st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64])
_dtypes = st.sampled_from([*DTYPE_BITS, "F3", ""])
_shapes = st.lists(_ints, max_size=4)
_loose = st.recursive(
    st.none() | st.booleans() | _ints | st.floats() | st.text(max_size=3) | _dtypes,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": _dtypes | _loose,
        "shape": _shapes | _loose,
        "data_offsets": st.lists(_ints, min_size=2, max_size=2) | _loose,
    }
)


_small = st.lists(st.integers(0, 8), max_size=3)


@st.composite
def _packed(draw: st.DrawFn) -> bytes:
    """Nearly always a legal file, so that agreement is tried and not only refusal."""
    specs = draw(
        st.lists(
            st.tuples(_names, st.sampled_from([*DTYPE_BITS]), _small),
            max_size=4,
            unique_by=lambda spec: spec[0],
        )
    )  # fmt: skip
    header, places = build_header([(n, d, tuple(s)) for n, d, s in specs])
    if draw(st.booleans()):
        header = header.rstrip() + draw(st.sampled_from([b"", b" ", b"\n", b"\t\r\n", b"\0"]))
    return _file(header, bytes(max((place.end for place in places), default=0)))


_files = st.one_of(
    _packed(),
    st.tuples(st.dictionaries(_names, _entries | _loose, max_size=3), st.binary(max_size=9)).map(
        lambda both: _file(json.dumps(both[0]).encode(), both[1])
    ),
    st.tuples(st.binary(max_size=40), st.binary(max_size=9)).map(lambda both: _file(*both)),
)


@given(_files)
@example(_REFUSED["dims overflow to 0"])
@example(_REFUSED["minus zero"])
@example(_REFUSED["UTF-16"])
def test_what_we_accept_the_safetensors_package_accepts(file: bytes) -> None:
    try:
        tensors = _accept(file)
    except WeightSyncError:
        return
    theirs = {name: (t["dtype"], tuple(t["shape"])) for name, t in _theirs(file)}
    assert theirs == {t.name: (t.dtype, t.shape) for t in tensors}


def _mutated(file: bytes) -> st.SearchStrategy[bytes]:
    at = st.integers(8, max(8, len(file) - 1))
    flip: Callable[[int, int], bytes] = lambda i, b: file[:i] + bytes([b]) + file[i + 1 :]  # noqa: E731
    return st.builds(flip, at, st.integers(0, 255))


@given(_packed().flatmap(_mutated))
def test_one_wrong_byte_never_raises_anything_else(file: bytes) -> None:
    try:
        tensors = _accept(file)
    except WeightSyncError:
        return
    assert len(_theirs(file)) == len(tensors)


@given(st.binary(max_size=64) | _files.map(lambda file: file[8:]))
def test_only_our_error_escapes(header: bytes) -> None:
    try:
        places = tuple(parse_header(header))
        check_header(header, sorted(places, key=lambda t: (t.begin, t.end, t.name)))
    except WeightSyncError:
        return


def test_both_are_told() -> None:
    assert unlike("w", ("F32", (2, 3)), ("BF16", (2, 3))) == (
        "tensor w is F32 [2, 3], the engine has BF16 [2, 3]"
    )
    assert unlike("w", ("F32", ()), ("BF16", (1,))) == (
        "tensor w is F32 [], the engine has BF16 [1]"
    )


def test_rows_that_pad_a_vocabulary_are_told() -> None:
    padded = unlike("embed", ("BF16", (576, 64)), ("BF16", (509, 64)))
    assert padded.endswith("(it has 576 rows, the engine has 509: cut a vocabulary that is padded)")
    assert "rows" not in unlike("embed", ("BF16", (500, 64)), ("BF16", (509, 64)))
    assert "rows" not in unlike("embed", ("BF16", (576, 65)), ("BF16", (509, 64)))


def test_a_long_name_is_cut() -> None:
    assert len(unlike("n" * 1000, ("U8", (1,)), ("I8", (1,)))) < 200
