"""Addresses of object stores that are none: one sentence, and obstore never sees them."""

from __future__ import annotations

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store import open_store
from weightsync_server.store.objects.object_client import connect

# It ends with the environment that it made clients for.
pytestmark = pytest.mark.usefixtures("reached")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    connect.cache_clear()


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("s3", "AWS_ENDPOINT_URL"),
        ("s3", "AWS_ENDPOINT_URL_S3"),
        ("s3", "AWS_ENDPOINT"),
        ("gs", "GOOGLE_BASE_URL"),
        ("az", "AZURE_STORAGE_ENDPOINT"),
        ("az", "AZURE_ENDPOINT"),
    ],
)
@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:9000", "minio:9000", "minio", "", "http://", "https:/minio", "ftp://minio"),
        *(
            "http://minio:65536",
            "http://minio:port",
            "http://1.2.3.400:1",
            "http://a b",
            "http://ä",
        ),
        *("http://[::1", "http://[1]", "http://minio/a b", "http://minio/?a=b", "http://u:p@"),
    ],
)
async def test_an_address_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, scheme: str, name: str, address: str
) -> None:
    monkeypatch.setenv(name, address)
    with pytest.raises(
        WeightSyncError, match=f"{name} is not the address of an object store"
    ) as caught:
        await open_store(f"{scheme}://bucket/prefix").open()
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert "http://127.0.0.1:9000" in caught.value.message


@pytest.mark.parametrize(
    "address",
    [
        *("http://127.0.0.1:9000", "https://minio", "HTTPS://minio.example:65535/", "http://a_b:1"),
        *("http://[::1]:9000", "http://user:secret@minio:9000", "https://minio/below/it"),
    ],
)
async def test_other_addresses_are_taken(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    connect("s3://bucket")
