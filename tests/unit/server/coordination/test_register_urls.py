"""URLs of registers, and files for TLS, that cannot be: one sentence each, and the remedy in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization

from tests.support.certificates import Authority
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination import open_register
from weightsync_server.coordination.etcd_channels import EtcdTls

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "no register can be opened at ''; use file:///absolute/path"),
        ("/tmp/register", "no register can be opened"),
        ("file://host/tmp", "no register can be opened"),
        ("file:relative", "no register can be opened"),
        ("http://127.0.0.1:2379/a", "no register can be opened"),
        ("s3://user:secret@bucket/a", "no store can be opened"),
        ("s3:///a", "no store can be opened"),
        ("etcd://127.0.0.1/a", "'127.0.0.1' in .* is not an address of etcd; use host:port"),
        ("etcd:///a", "'' in .* is not an address of etcd"),
        ("etcd://:2379/a", "':2379' in .* is not an address of etcd"),
        ("etcd://one:2379,/a", "'' in .* is not an address of etcd"),
        ("etcd://one:0/a", "'one:0' in .* is not an address of etcd"),
        ("etcd://one:65536/a", "'one:65536' in .* is not an address of etcd"),
        ("etcd://one:port/a", "'one:port' in .* is not an address of etcd"),
        ("etcd://::1:2379/a", "'::1:2379' in .* is not an address of etcd"),
        ("etcd://one:1,one:1/a", "names an address twice"),
        ("etcd://one:1", "has no prefix; end it with one"),
        ("etcd://one:1/", "has no prefix; end it with one"),
        ("etcd://one:1//", "has no prefix; end it with one"),
        ("etcd://one:1/a//b", "cannot have the key 'a//b'"),
        ("etcd://one:1/a?ca=b", "cannot have the key 'a\\?ca=b'"),
        ("etcd://user:secret@one:1/a", "cannot have a user and password; use etcds://"),
    ],
)
async def test_a_wrong_url_is_refused_in_one_sentence(url: str, sentence: str) -> None:
    with pytest.raises(WeightSyncError, match=sentence) as caught:
        open_register(url)
    assert caught.value.reason in (Reason.REQUEST_INVALID, Reason.NOT_SUPPORTED)
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message


async def test_all_kinds_of_addresses_are_taken() -> None:
    for url in (
        "etcd://127.0.0.1:1,127.0.0.2:1/a/b/",
        "etcd://localhost:1,[::1]:2/a",
        "etcds://localhost:1,127.0.0.1:2/a",
    ):
        register = open_register(url)
        assert register.url == url
        await register.close()


async def test_wrong_files_for_tls_are_refused(tmp_path: Path) -> None:
    pair, other = (Authority(tmp_path / name).sign("member") for name in ("one", "other"))
    rubbish = tmp_path / "rubbish"
    rubbish.touch(mode=0o600)
    rubbish.write_text("no PEM")
    locked = tmp_path / "locked"
    locked.touch(mode=0o600)
    locked.write_bytes(_locked(pair.key.read_bytes()))
    for tls, sentence in (
        (EtcdTls(ca=tmp_path / "none"), "etcd's CA .*none cannot be read: No such file"),
        (EtcdTls(certificate=pair.certificate), "needs its key, and a key its certificate"),
        (EtcdTls(key=pair.key), "needs its key, and a key its certificate"),
        (EtcdTls(certificate=tmp_path / "none", key=pair.key), "the certificate for etcd .*none"),
        (EtcdTls(certificate=pair.certificate, key=tmp_path / "none"), "the key for etcd .*none"),
        (EtcdTls(ca=rubbish), "etcd's CA .*rubbish holds no PEM certificate"),
        (EtcdTls(certificate=rubbish, key=pair.key), "name a PEM certificate and its key"),
        (EtcdTls(certificate=pair.certificate, key=rubbish), "name a PEM certificate and its key"),
        (
            EtcdTls(certificate=pair.certificate, key=other.key),
            "name a PEM certificate and its key",
        ),
        (
            EtcdTls(certificate=pair.certificate, key=locked),
            "without a password",
        ),
    ):
        with pytest.raises(WeightSyncError, match=sentence) as caught:
            open_register("etcds://localhost:1/a", tls)
        assert caught.value.reason == Reason.REQUEST_INVALID
    pair.key.chmod(0o644)
    with pytest.raises(WeightSyncError, match="the key for etcd"):
        open_register("etcds://localhost:1/a", EtcdTls(certificate=pair.certificate, key=pair.key))
    for url in ("etcd://localhost:1/a", tmp_path.as_uri()):
        with pytest.raises(WeightSyncError, match="for a register at etcds:// alone"):
            open_register(url, EtcdTls())


def _locked(key: bytes) -> bytes:
    """Return a key behind a password."""
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
