"""What a transfer brings is kept whole, or known not to be; nothing that it brings raises."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load

from weightsync import failpoints
from weightsync.vllm.extensions.received import update_file
from weightsync.vllm.extensions.received.update_file import UpdateSink, announced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.vllm.extensions.received.update_file import TensorKind

_TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
}


def _kinds(tensors: dict[str, torch.Tensor]) -> Sequence[TensorKind]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def _bytes(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.fixture
def sink() -> Iterator[UpdateSink]:
    made = UpdateSink(keeps=True)
    yield made
    made.close()


def test_all_that_came_is_a_safetensors_file_that_nobody_can_change(sink: UpdateSink) -> None:
    sink.begin(_kinds(_TENSORS))
    for pair in reversed(_TENSORS.items()):
        assert sink.load_weights([pair]) == {pair[0]}
    sink.end()
    assert (sink.failure, sink.arrived) == ("", len(_TENSORS))
    (file,) = sink.files
    fd = file.sealed()
    assert os.fstat(fd).st_size == file.size
    found = load(_bytes(fd))
    assert found.keys() == _TENSORS.keys()
    for name, tensor in _TENSORS.items():
        assert found[name].dtype is tensor.dtype
        same = (each.contiguous().view(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(*same)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(fd, b"x", 0)


def test_each_call_of_an_update_is_a_file(sink: UpdateSink) -> None:
    for name, tensor in _TENSORS.items():
        sink.begin(_kinds({name: tensor}))
        sink.load_weights([(name, tensor)])
        sink.end()
    assert not sink.failure
    assert [file.name for file in sink.files] == sorted(file.name for file in sink.files)
    assert [list(load(_bytes(file.sealed()))) for file in sink.files] == [[n] for n in _TENSORS]


def test_one_rank_keeps_and_the_others_only_look(sink: UpdateSink) -> None:
    other = UpdateSink(keeps=False)
    other.begin(_kinds(_TENSORS))
    other.load_weights(_TENSORS.items())
    other.end()
    assert (other.failure, other.files, other.arrived) == ("", [], len(_TENSORS))
    other.begin(_kinds({"more": torch.zeros(1)}))
    other.end()
    assert "did not arrive, such as 'more'" in other.failure


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([("a", torch.zeros(2))], "1 of the announced tensors did not arrive, such as 'b'"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "'a' arrived without being announced"),
        ([("c", torch.zeros(2))], "'c' arrived without being announced"),
        (
            [("a", torch.zeros(3))],
            r"shape \[3\], but was announced as torch.float32 of shape \[2\]",
        ),
        ([("a", torch.zeros(2, dtype=torch.int32))], "arrived as torch.int32"),
    ],
)
def test_what_is_not_whole_is_known_and_raises_nothing(
    sink: UpdateSink, pairs: Any, sentence: str
) -> None:
    sink.begin(_kinds({"a": torch.zeros(2), "b": torch.zeros(2)}))
    sink.load_weights(pairs)
    sink.end()
    assert re.search(sentence, sink.failure)
    # The rest is drained, for whoever sends it waits for every rank.
    sink.load_weights([("b", torch.zeros(2))])
    assert re.search(sentence, sink.failure)


def test_a_tensor_comes_once_in_an_update(sink: UpdateSink) -> None:
    for _ in range(2):
        sink.begin(_kinds({"a": torch.zeros(2)}))
        sink.load_weights([("a", torch.zeros(2))])
        sink.end()
    assert "'a' already arrived in this update" in sink.failure


def test_memory_that_is_not_there_is_said_and_the_rest_drained(
    sink: UpdateSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_file, "available_bytes", lambda: 100)
    sink.begin(_kinds({"a": torch.zeros(1000)}))
    sink.load_weights([("a", torch.zeros(1000))])
    sink.end()
    assert "100 bytes are free; free as much" in sink.failure
    assert sink.files == []


def test_a_write_that_fails_voids_the_update(
    sink: UpdateSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan("worker.arrive=1*error(ENOMEM)"))
    sink.begin(_kinds(_TENSORS))
    sink.load_weights(_TENSORS.items())
    sink.end()
    assert "'matrix' could not be kept" in sink.failure


def test_a_dtype_that_safetensors_does_not_have_is_refused(sink: UpdateSink) -> None:
    tensor = torch.zeros(2, dtype=torch.complex128)
    sink.begin(_kinds({"a": tensor}))
    sink.load_weights([("a", tensor)])
    assert "torch.complex128, which safetensors does not have" in sink.failure


def test_memory_is_given_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    sink = UpdateSink(keeps=True)
    sink.begin(_kinds(_TENSORS))
    sink.load_weights(_TENSORS.items())
    sink.close()
    sink.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({}, "lacks names, dtype_names or shapes"),
        ({"names": [], "dtype_names": [], "shapes": []}, "has 0 names"),
        ({"names": ["a"], "dtype_names": [], "shapes": []}, "has 1 names, 0 dtype_names"),
        ({"names": ["a"], "dtype_names": ["load"], "shapes": [[1]]}, "announces 'a' as 'load'"),
        ({"names": ["a"], "dtype_names": ["int8"], "shapes": [[-1]]}, r"of shape \[-1\]"),
        ({"names": ["a"], "dtype_names": ["int8"], "shapes": [[True]]}, r"of shape \[True\]"),
        ({"names": [1], "dtype_names": ["int8"], "shapes": [[1]]}, "announces '1'"),
        (
            {"names": ["a", "a"], "dtype_names": ["int8"] * 2, "shapes": [[1]] * 2},
            "'a' is announced twice",
        ),
    ],
)
def test_what_announces_nothing_is_refused(info: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        announced(info)


def test_vllms_update_info_announces() -> None:
    info = {"names": ["a", "b"], "dtype_names": ["bfloat16", "int8"], "shapes": [[2, 3], []]}
    assert announced(info) == (("a", torch.bfloat16, (2, 3)), ("b", torch.int8, ()))
