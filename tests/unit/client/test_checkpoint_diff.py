from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from weightsync_client import Client
from weightsync_client.checkpoint_diff import compare
from weightsync_client.source.source import make_source

Run = Callable[..., tuple[int, str, str]]


def difference(before: dict[str, Any], after: dict[str, Any]) -> Any:
    return compare(make_source(before, 1 << 20), make_source(after, 1 << 20))


def test_fractions_codings_and_totals() -> None:
    before = {
        "sparse": torch.ones(100_000, dtype=torch.bfloat16),
        "same": torch.ones(1000),
        "dense": torch.randn(5000),
        "moved": torch.ones(3, 4),
        "gone": torch.ones(1),
    }
    after = {name: tensor.clone() for name, tensor in before.items() if name != "gone"}
    after["sparse"].view(torch.int16)[::1000] += 1
    after["dense"] = torch.randn(5000)
    after["moved"] = torch.ones(4, 3)
    after["new"] = torch.ones(1)
    found = difference(before, after)
    sparse = next(t for t in found.tensors if t.name == "sparse")
    assert (sparse.changed, sparse.elements, sparse.coding) == (100, 100_000, "gap16+sm")
    assert sparse.distances == {"1": 100}
    # Gaps of 16 bits, a sign and one bit more for each.
    assert sparse.delta_bytes == pytest.approx(100 * 2.25, abs=4)
    assert sparse.packed_bytes < sparse.delta_bytes
    assert [t.coding for t in found.tensors] == ["dense", "unchanged", "gap16+sm"]
    assert (found.only_before, found.only_after, found.reshaped) == (
        ("gone",),
        ("new",),
        ("moved",),
    )
    assert found.elements == 106_000
    assert found.changed_fraction == pytest.approx(5100 / 106_000, rel=1e-3)
    assert found.bytes_by_coding == {
        "dense": 20_000, "unchanged": 0, "gap16+sm": sparse.delta_bytes
    }  # fmt: skip
    assert found.dense_bytes == 2 * 100_000 + 4 * 6000


@given(st.lists(st.tuples(st.floats(width=16), st.floats(width=16)), min_size=1, max_size=50))
def test_distances_count_the_values_between(pairs: list[tuple[float, float]]) -> None:
    before, after = (np.array(values, np.float16) for values in zip(*pairs, strict=True))
    told: dict[str, int] = {}
    for a, b in zip(before, after, strict=True):
        if a.tobytes() == b.tobytes():
            continue
        # Numbers in order: the negative ones fall as their bits rise.
        places = [
            -1 - (bits & 0x7FFF) if bits & 0x8000 else bits
            for bits in (int(x.view(np.uint16)) for x in (a, b))
        ]
        k = math.floor(math.log2(abs(places[0] - places[1])))
        name = "1" if k == 0 else f"{1 << k}-{(2 << k) - 1}"
        told[name] = told.get(name, 0) + 1
    assert difference({"w": before}, {"w": after}).distances == told


@pytest.mark.parametrize(
    ("dtype", "low", "high", "bucket"),
    [
        (np.int8, -128, 127, "128-255"),
        (np.uint32, 3, 3 + (1 << 20), "1048576-2097151"),
        (np.int64, -(1 << 62), 1 << 62, f"{1 << 63}-{(1 << 64) - 1}"),
        (np.float64, 1.0, np.nextafter(1.0, 2), "1"),
        (np.float32, -0.0, 0.0, "1"),
    ],
)
def test_distances_of_other_dtypes(dtype: Any, low: Any, high: Any, bucket: str) -> None:
    before, after = np.array([low], dtype), np.array([high], dtype)
    assert difference({"w": before}, {"w": after}).distances == {bucket: 1}
    assert difference({"w": after}, {"w": before}).distances == {bucket: 1}


def test_distances_are_counted_over_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync_client.checkpoint_diff._PIECE", 64)
    before = torch.ones(1000)
    after = before.clone()
    after.view(torch.int32)[::10] += 1
    after.view(torch.int32)[-1] += 2
    assert difference({"w": before}, {"w": after}).distances == {"1": 100, "2-3": 1}


def test_truth_values_know_no_distance() -> None:
    found = difference({"w": np.array([True])}, {"w": np.array([False])})
    assert (found.changed, found.distances) == (1, {})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    before = {f"layers.{i}": torch.randn(50_000).bfloat16() for i in range(3)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["layers.1"].view(torch.int16)[::50] += 1
    after["layers.2"].view(torch.int16)[::500] += 3
    paths = tmp_path / "before.safetensors", tmp_path / "after"
    paths[1].mkdir()
    save_file(before, paths[0])
    save_file(after, paths[1] / "model.safetensors")
    return paths


def test_the_command_shows_and_tells(run: Run, folders: tuple[Path, Path]) -> None:
    code, out, err = run("diff", *folders)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].split()[:5] == ["layers.1", "BF16", "50000", "2.000%", "gap8+sm"]
    assert lines[2].split()[0] == "layers.2"
    assert lines[3] == "1100 of 150000 elements changed (0.7333%), in 2 of 3 tensors"
    shares = [line.split()[:2] for line in lines[-2:]]
    assert shares == [["1", "90.909%"], ["2-3", "9.091%"]]
    told = json.loads(run("diff", *folders, "--json")[1])
    assert told["changed"] == 1100
    assert [tensor["changed"] for tensor in told["tensors"]] == [0, 1000, 100]


def test_versions_are_pulled_and_compared(
    run: Run, folders: tuple[Path, Path], client: Client
) -> None:
    for folder in folders:
        client.push(folder)
    told = json.loads(run("diff", "1", "2", "--json")[1])
    assert told["distances"] == {"1": 1000, "2-3": 100}
    assert json.loads(run("diff", "2", folders[1], "--json")[1])["changed"] == 0
    assert run("diff", "1", "7")[0] == 3


def test_push_with_a_base(run: Run, folders: tuple[Path, Path], servicer: Any) -> None:
    assert "delta" not in run("push", folders[0])[1]
    code, out, _ = run("push", folders[1], "--base", folders[0])
    assert code == 0
    assert "delta of version 1: 0.73% changed, " in out
    assert " sent instead of 300.2 kB" in out
    code, out, _ = run("push", folders[0], "--base", folders[1], "--json")
    told = json.loads(out)
    assert (told["kind"], told["base_version"]) == ("delta", 2)
    assert told["sent_bytes"] < 5000
    # Only what the server holds can be a base.
    servicer.uploads.clear()
    code, _, err = run("push", folders[1], "--base", folders[0])
    assert code == 3
    assert "no version of the server has this content" in err


def test_push_a_part(run: Run, folders: tuple[Path, Path], tmp_path: Path) -> None:
    run("push", folders[0])
    part = tmp_path / "part.safetensors"
    tensors = load_file(next(folders[1].glob("*.safetensors")))
    name = min(tensors)
    save_file({name: tensors[name]}, part)
    code, out, _ = run("push", part, "--partial", "--keep", "1", "--json")
    told = json.loads(out)
    assert (code, told["kind"], told["base_version"]) == (0, "delta", 1)
    assert told["tensor_count"] > 1
    code, _, err = run("push", part, "--partial", "--base", folders[0])
    assert code == 2
    assert "--base compares a whole checkpoint" in err
    code, _, err = run("push", part, "--keep", "1")
    assert code == 2
    assert "--keep 1 is given, but --partial is not" in err


def test_a_base_that_does_not_fit_is_told(
    run: Run, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run("push", folders[0])
    other = tmp_path / "other.safetensors"
    save_file({"another": torch.ones(5)}, other)
    out = run("push", other, "--base", folders[0])[1]
    assert "sent in full: layout_changed" in out


def test_a_trainer_holds_what_the_engine_serves(client: Client, folders: tuple[Path, Path]) -> None:
    with Client(client._link.address) as another:
        another.push(folders[0])
    version = client.hold(folders[0])
    assert version.version == 1
    assert client.push(folders[1]).base_version == 1
    with pytest.raises(Exception, match="iterable cannot be held"):
        client.hold(iter([("w", torch.ones(2))]))
