"""The environment of the parts inside vLLM, and the files that are offered."""

from __future__ import annotations

import json
import os
import socket
import stat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np
import pytest
from safetensors.numpy import load, save_file

from weightsync.errors import Reason, WeightSyncError
from weightsync.host_dirs import run_dir
from weightsync.shm.segment_socket import SegmentServer
from weightsync.vllm.bridge.checkpoint import checkpoint_files, offer_files
from weightsync.vllm.endpoint import BridgePlugin, _bind
from weightsync.vllm.env import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path


def test_defaults_and_overrides() -> None:
    settings = EngineSettings.load({})
    assert settings.engine_socket == f"{run_dir()}/engine.sock"
    assert settings.segment_socket == f"{run_dir()}/segments.sock"
    settings = EngineSettings.load({"WEIGHTSYNC_RUN_DIR": "/c"})
    assert settings.engine_socket == "/c/engine.sock"
    assert settings.segment_socket == "/c/segments.sock"
    settings = EngineSettings.load({"WEIGHTSYNC_ENGINE_SOCKET": "unix:/a/e.sock"})
    assert settings.segment_socket == "/a/segments.sock"
    settings = EngineSettings.load({"WEIGHTSYNC_SEGMENT_SOCKET": "/b/s.sock"})
    assert settings.segment_socket == "/b/s.sock"


@pytest.mark.parametrize(
    ("text", "linear", "experts"),
    [("", False, False), ("0", False, False), ("1", True, True), (" linear ", True, False)],
)
def test_what_is_plain_on_a_cpu(text: str, linear: bool, experts: bool) -> None:
    settings = EngineSettings.load({"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": text})
    assert (settings.cpu_plain_linear, settings.cpu_plain_experts) == (linear, experts)


@pytest.mark.parametrize(
    "environment",
    [{"WEIGHTSYNC_ENGINE_SOCKET": "localhost:1"}, {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "yes"}],
)
def test_nonsense_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"unix:/absolute/path|WEIGHTSYNC_CPU_PLAIN_WEIGHTS"):
        EngineSettings.load(environment)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0), ("1000", 1000), ("16GiB", 16 << 30), ("1.5 MB", 1_500_000), ("12.5%", 125),
        ("3 B", 3), ("100%", 1000), ("2kB", 2000),
    ],
)  # fmt: skip
def test_room_is_bytes_or_a_share(text: str, amount: int) -> None:
    room = EngineSettings.load({"WEIGHTSYNC_DEVICE_ROOM": text}).device_room
    assert room is not None
    assert room.of(1000) == amount


def test_without_a_room_it_is_worked_out() -> None:
    assert EngineSettings.load({"WEIGHTSYNC_DEVICE_ROOM": " "}).device_room is None


@pytest.mark.parametrize("text", ["much", "-1", "101%", "1 GiBs", "1e9", "%"])
def test_a_room_that_means_nothing_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"WEIGHTSYNC_DEVICE_ROOM.*16GiB"):
        EngineSettings.load({"WEIGHTSYNC_DEVICE_ROOM": text})


@pytest.mark.parametrize(("text", "seconds"), [("", 60), ("0.5", 0.5), (" 3600 ", 3600)])
def test_a_wait_for_a_trainer_is_bounded(text: str, seconds: float) -> None:
    found = EngineSettings.load({"WEIGHTSYNC_UPDATE_TIMEOUT": text}).update_timeout_s
    assert found == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "3601", "1 min"])
def test_a_wait_that_means_nothing_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"WEIGHTSYNC_UPDATE_TIMEOUT.*at most 3600"):
        EngineSettings.load({"WEIGHTSYNC_UPDATE_TIMEOUT": text})


@pytest.mark.parametrize(("text", "named"), [("", True), ("1", True), (" 0 ", False)])
def test_answers_name_versions_unless_that_is_off(text: str, named: bool) -> None:
    assert EngineSettings.load({"WEIGHTSYNC_ANSWER_VERSIONS": text}).answer_versions is named
    assert EngineSettings.load({}).answer_versions


@pytest.mark.parametrize(
    ("text", "kind"), [("", "core"), ("1", "core"), (" admission", "admission"), ("0", "none")]
)
def test_keys_are_kept_apart_as_the_setting_says(text: str, kind: str) -> None:
    assert EngineSettings.load({"WEIGHTSYNC_CACHE_LINEAGE": text}).cache_lineage == kind


def test_nonsense_about_keys_is_named() -> None:
    with pytest.raises(ValueError, match=r"WEIGHTSYNC_CACHE_LINEAGE is 'core'; set it to 1, the"):
        EngineSettings.load({"WEIGHTSYNC_CACHE_LINEAGE": "core"})


def test_nonsense_about_answers_is_named() -> None:
    with pytest.raises(ValueError, match=r"WEIGHTSYNC_ANSWER_VERSIONS is 'no'; set it to 1"):
        EngineSettings.load({"WEIGHTSYNC_ANSWER_VERSIONS": "no"})


def _config(model: Path | str, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def _files(model: Path, load_format: str = "auto") -> list[Path]:
    config = _config(model, load_format)
    return checkpoint_files(config.model_config, config.load_config)[0]


def test_files_of_the_index_are_offered_and_no_others(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "extra.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [path.name for path in _files(tmp_path)]
    assert names == ["model-1.safetensors", "model-2.safetensors"]
    server = SegmentServer(tmp_path / "s.sock")
    offer = server.expect_offer("o")
    assert offer_files(_config(tmp_path), str(tmp_path / "s.sock"), "o") == names
    for name, size, fd in offer.result(5):
        with os.fdopen(fd, "rb") as file:
            assert file.read() == name.encode()
            assert size == len(name)
    with pytest.raises(WeightSyncError) as caught:
        offer_files(_config(tmp_path), str(tmp_path / "s.sock"), "unexpected")
    assert caught.value.reason is Reason.ENGINE_REFUSED
    server.close()


def test_the_copy_is_offered_that_vllm_reads_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # By their numbers, as vLLM reads them, which looks at no entry of the index.
    early, late = "model-2.safetensors", "model-10.safetensors"
    for name, tensors in ((early, {"x": 1.0, "w": 5.0}), (late, {"x": 9.0, "y": 2.0})):
        arrays = {key: np.full(3, value, np.float32) for key, value in tensors.items()}
        save_file(arrays, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    # That a file lacks what the index tells of it is no reason to fence an engine that serves.
    weight_map = {"x": early, "w": early, "y": late, "z": late}
    server = SegmentServer(tmp_path / "s.sock")
    for text in (json.dumps({"weight_map": weight_map}), None):
        index.unlink(missing_ok=True)
        if text:
            index.write_text(text)
        offer = server.expect_offer("o")
        assert sorted(offer_files(_config(tmp_path), str(tmp_path / "s.sock"), "o")) == [
            late,
            early,
        ]
        found = {}
        for name, size, fd in offer.result(5):
            found[name] = {key: each[0] for key, each in load(os.pread(fd, size, 0)).items()}
            os.close(fd)
        assert found == {early: {"w": 5.0}, late: {"x": 9.0, "y": 2.0}}
    logged = " ".join(record.message for record in caplog.records)
    assert f'places "z" in "{late}", which does not hold it' in logged
    assert (
        f'in "{late}" and in "{early}", is taken from "{late}", as the order in which vLLM'
        in logged
    )
    index.write_text("{")
    with pytest.raises(
        WeightSyncError, match=r"checkpoint cannot be read.*is not an index"
    ) as refused:
        offer_files(_config(tmp_path), str(tmp_path / "s.sock"), "o")
    assert refused.value.reason is Reason.ENGINE_REFUSED
    server.close()


def test_mistral_format_is_chosen_as_vllm_does(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
    (path,) = _files(tmp_path)
    assert path.name == "consolidated.safetensors"
    (path,) = _files(tmp_path, "safetensors")
    assert path.name == "model.safetensors"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_safetensors_no_adoption(tmp_path: Path, load_format: str) -> None:
    if load_format == "dummy":
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(WeightSyncError) as caught:
        _files(tmp_path, load_format)
    assert caught.value.reason is Reason.ENGINE_UNSUPPORTED


class Watched:
    """A gRPC server, and the mode of its socket as soon as it listens."""

    def __init__(self, path: Path) -> None:
        self.server = grpc.aio.server()
        self._path = path
        self.first_mode = 0o777

    def add_insecure_port(self, address: str) -> int:
        port = self.server.add_insecure_port(address)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self._path))
        self.first_mode = stat.S_IMODE(self._path.stat().st_mode)
        return port


async def test_the_bridge_is_closed_to_others_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    watched = Watched(path)
    old = os.umask(0)
    try:
        _bind(cast("Any", watched), str(path))
        assert os.umask(0) == 0
    finally:
        os.umask(old)
    assert watched.first_mode & 0o007 == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(WeightSyncError, match=r"another process listens.*ENGINE_SOCKET"):
        _bind(grpc.aio.server(), str(path))
    await watched.server.stop(None)


@pytest.mark.parametrize("path", ["/nowhere/at/all/e.sock", "/tmp/" + "x" * 120])
def test_impossible_socket_paths_are_named(path: str) -> None:
    with pytest.raises(WeightSyncError, match="WEIGHTSYNC_ENGINE_SOCKET"):
        _bind(cast("Any", None), path)


async def test_several_api_servers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="--api-server-count 1"):
        await BridgePlugin().init_state(object(), None, SimpleNamespace(api_server_count=2))
    await BridgePlugin().init_state(None, None, SimpleNamespace())


@pytest.mark.parametrize(("text", "attachable"), [("", False), ("0", False), ("1", True)])
def test_parameters_are_shared_where_that_is_asked_for(text: str, *, attachable: bool) -> None:
    assert EngineSettings.load({"WEIGHTSYNC_ATTACH": text}).attachable is attachable


def test_a_wrong_switch_for_sharing_is_named() -> None:
    with pytest.raises(ValueError, match=r"WEIGHTSYNC_ATTACH is 'yes'; set it to 1 or 0"):
        EngineSettings.load({"WEIGHTSYNC_ATTACH": "yes"})


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8551",
        "http://localhost:8551/",
        "http://[::1]:8551",
        "https://gpu7.example:8551",
        "",
    ],
)
def test_where_the_server_is(text: str) -> None:
    found = EngineSettings.load({"WEIGHTSYNC_HTTP": text, "WEIGHTSYNC_TLS_CA": "/ca.pem"})
    assert (found.server_url, found.server_ca) == (text.rstrip("/"), "/ca.pem")
    assert EngineSettings.load({}).server_url == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("127.0.0.1:8551", "set it to http://127.0.0.1:PORT or https://HOST:PORT"),
        ("http://127.0.0.1", "set it to"),
        ("https://host:port", "set it to"),
        ("https://host:1/path", "set it to"),
        ("https://host:1?a=b", "set it to"),
        ("https://me:secret@host:1", "set it to"),
        ("unix:/a.sock", "set it to"),
        ("http://gpu7:8551", "tokens would go in plain text"),
        ("http://10.0.0.1:8551", "tokens would go in plain text"),
    ],
)
def test_where_no_server_can_be(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"WEIGHTSYNC_HTTP is .*{wrong}"):
        EngineSettings.load({"WEIGHTSYNC_HTTP": text})


@pytest.mark.parametrize(("text", "partial"), [("", False), ("0", False), (" 1 ", True)])
def test_an_update_may_be_a_part_where_that_is_asked_for(text: str, *, partial: bool) -> None:
    assert EngineSettings.load({"WEIGHTSYNC_UPDATE_PARTIAL": text}).update_partial is partial


def test_a_wrong_switch_for_parts_is_named() -> None:
    with pytest.raises(ValueError, match="WEIGHTSYNC_UPDATE_PARTIAL is 'yes'; set it to 1 or 0"):
        EngineSettings.load({"WEIGHTSYNC_UPDATE_PARTIAL": "yes"})
