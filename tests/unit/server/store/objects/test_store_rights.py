"""The rights that the page gives for S3, which moto enforces: they suffice, and are all."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.object_servers import BUCKET, ObjectServer, moto
from tests.support.versions import make_version
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store import open_store
from weightsync_server.store.objects.object_store import ObjectStore
from weightsync_server.store.objects.shard_transfer import download, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parents[5] / "docs/how-to/bucket-and-etcd-rights.md"
URL = f"s3://{BUCKET}/prod"
#: More than is put at once.
LARGE = 17 << 20


def policies() -> dict[str, Any]:
    """Return the page's policies, and that of an origin that may not remove anything."""
    found = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    follower, origin, frugal = (json.loads(text) for text in (*found[-2:], found[-1]))
    frugal["Statement"][1]["Action"].remove("s3:DeleteObject")
    # For the removal of several objects at once moto asks for the bucket; Amazon for each object.
    remove = {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{BUCKET}"}
    origin["Statement"].append(remove)
    return {"follower": follower, "origin": origin, "frugal": frugal}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ObjectServer]]:
    """Return a server as each user sees it: name and secret are of the user's."""
    with moto(tmp_path_factory.mktemp("moto"), asks=True) as server:
        users = {}
        for name, policy in policies().items():
            _iam(server, "CreateUser", UserName=name)
            document = json.dumps(policy)
            _iam(server, "PutUserPolicy", UserName=name, PolicyName="p", PolicyDocument=document)
            key = _iam(server, "CreateAccessKey", UserName=name)
            pair = (_found("AccessKeyId", key), _found("SecretAccessKey", key))
            users[name] = ObjectServer(server.port, "s3", server.pid, pair)
        # From here on nothing is done without the right to do it.
        httpx.post(
            f"http://127.0.0.1:{server.port}/moto-api/reset-auth",
            content=b"0",
            headers={"Content-Type": "text/plain"},
        ).raise_for_status()
        yield users


def _iam(server: ObjectServer, action: str, **facts: str) -> str:
    scope = "nobody/20260101/us-east-1/iam/aws4_request"
    header = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=none"
    reply = httpx.post(
        f"http://127.0.0.1:{server.port}/",
        data={"Action": action, "Version": "2010-05-08", **facts},
        headers={"Authorization": header},
    )
    return reply.raise_for_status().text


def _found(tag: str, text: str) -> str:
    (value,) = re.findall(f"<{tag}>(.*?)</{tag}>", text)
    return str(value)


async def test_an_origin_writes_and_removes_and_a_follower_reads(
    guarded: dict[str, ObjectServer], reached: Callable[..., None]
) -> None:
    reached(guarded["origin"])
    origin = open_store(URL, "origin")
    await origin.open()
    await origin.write_epoch("m", 1)
    await origin.write_marks("m", {"pinned": []})
    for version in (1, 2):
        made = make_version(version, epoch=1)
        await asyncio.to_thread(made.write, origin)
        await origin.commit(made.record, made.manifest)
    await origin.delete("m", 1)
    place = origin.shard_path("m", 3, 0)
    assert place
    await asyncio.to_thread(upload, memoryview(bytes(LARGE)), place, lambda: None)
    await origin.discard("m", 3)
    reached(guarded["follower"])
    follower = ObjectStore(URL)
    (record,) = await follower.committed("m")
    manifest = await follower.manifest("m", record.version)
    view = bytearray(manifest.layout.shards[0].size)
    shard = follower.shard_path("m", record.version, 0)
    await asyncio.to_thread(download, shard, memoryview(view), lambda: None)
    assert bytes(view) == make_version(2, epoch=1).shards[0]


@pytest.mark.parametrize("user", ["follower", "frugal"])
async def test_without_a_right_it_is_refused_in_one_sentence(
    guarded: dict[str, ObjectServer], reached: Callable[..., None], user: str
) -> None:
    reached(guarded[user])
    with pytest.raises(
        WeightSyncError, match=r"not allowed .* docs/how-to/bucket-and\S+ lists"
    ) as caught:
        await open_store(f"{URL}/{user}").open()
    assert caught.value.reason is Reason.REQUEST_INVALID


async def test_nothing_beside_the_prefix_is_read_or_written(
    guarded: dict[str, ObjectServer], reached: Callable[..., None]
) -> None:
    reached(guarded["origin"])
    with pytest.raises(WeightSyncError, match=r"not allowed .* docs/how-to/bucket-and\S+ lists"):
        await open_store(f"s3://{BUCKET}/elsewhere").open()
