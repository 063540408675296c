"""Probes that come with a commit: checked first, kept with the version, refused without harm."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.push.boxes import sharded, version
from tests.unit.server.push.test_commit import ask, refused, sent
from tests.unit.server.world import World, content, one_stream, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog import kept_probes

if TYPE_CHECKING:
    from pathlib import Path

GOOD = pb.Probes(
    probes=[
        pb.Probe(tokens=[5, 6, 7], logprobs=[-1.0, -2.0]),
        pb.Probe(tokens=[1, 2, 3, 4], logprobs=[-0.5], start=3),
        pb.Probe(tokens=list(range(512))),
        pb.Probe(tokens=[1, 2], logprobs=[1e-7]),
    ]
)


def _one(**fields: Any) -> pb.Probes:
    return pb.Probes(probes=[pb.Probe(**fields)])


BAD = {
    "none": (pb.Probes(), "send 1 to 64 probes: there are 0"),
    "many": (pb.Probes(probes=[pb.Probe(tokens=[1, 2])] * 65), "there are 65"),
    "short": (_one(tokens=[1]), "probe 0 must have 2 to 512 tokens: it has 1"),
    "long": (_one(tokens=[1] * 513), "it has 513"),
    "start": (_one(tokens=[1, 2], start=2), "must have a start of 1 to 1: it has 2"),
    "few": (_one(tokens=[1, 2, 3], logprobs=[-1.0]), "must have no logprobs, or 2"),
    "nan": (_one(tokens=[1, 2], logprobs=[math.nan]), "finite and 0 or less: one is nan"),
    "inf": (_one(tokens=[1, 2], logprobs=[-math.inf]), "one is -inf"),
    "above": (_one(tokens=[1, 2], logprobs=[0.01]), "finite and 0 or less"),
    "large": (
        pb.Probes(probes=[pb.Probe(tokens=[2**32 - 1] * 512, logprobs=[-1.0] * 511)] * 64),
        "",
    ),
}


async def test_probes_are_kept_with_the_version_and_not_in_its_content(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        shards = simple(1)
        await here.push(shards, 1, probes=GOOD)
        record = here.model.table.get(1)
        assert record.commit is not None
        assert kept_probes.unpack(record.commit.probes) == GOOD
        assert record.to_info().probe_count == 4
        assert record.content_digest == content(shards)
    async with world(tmp_path) as here:
        record = here.model.table.get(1)
        assert record.commit is not None
        assert kept_probes.unpack(record.commit.probes) == GOOD
        # What exists is answered as before, whatever probes come with it.
        again = await here.pushes.stream(one_stream(shards, version=1, probes=_one(tokens=[1, 2])))
        assert again.commit.already
        assert kept_probes.unpack(record.commit.probes) == GOOD


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "large"])
async def test_bad_probes_leave_the_push_as_it_was(here: World, kind: str) -> None:
    probes, sentence = BAD[kind]
    push = await sent(here, simple(1), version=1)
    error = await refused(here, ask(push, probes=probes))
    assert error.reason is Reason.REQUEST_INVALID
    assert sentence in error.message
    assert here.model.table.get(1).commit is None
    answer = await here.pushes.commit(ask(push, probes=GOOD))
    assert (answer.version, answer.already) == (1, False)
    assert here.model.table.get(1).to_info().probe_count == 4


async def test_a_stream_is_refused_before_anything_is_committed(here: World) -> None:
    with pytest.raises(WeightSyncError, match="probe 0 must have 2 to 512 tokens"):
        await here.pushes.stream(one_stream(simple(1), version=1, probes=_one(tokens=[1])))
    assert here.model.table.get(1).commit is None
    (push,) = here.pushes.status()
    answer = await here.pushes.commit(ask(push.push_id, probes=GOOD))
    assert answer.version == 1


async def test_the_last_probes_of_a_writer_count(here: World) -> None:
    shards = simple(1)
    push = (await here.pushes.begin(pb.BeginPushRequest(model="m", version=1), 1)).push_id
    error = await refused(here, ask(push, shard_count=2, probes=_one(tokens=[1, 2])))
    assert error.reason is Reason.PUSH_INCOMPLETE
    await here.join(push, [message for shard in shards for message in shard.all()])
    await here.pushes.commit(ask(push, probes=GOOD))
    assert here.model.table.get(1).to_info().probe_count == 4


def test_what_cannot_be_read_is_none() -> None:
    kept = kept_probes.pack(GOOD)
    assert kept_probes.count(kept) == 4
    assert kept_probes.count("") == 0
    assert kept_probes.unpack("") is None
    for text in ("4:", "4:!!", kept[:-9], "4:" + "A" * 40):
        assert kept_probes.unpack(text) is None


async def test_who_is_no_writer_leaves_no_probes(here: World) -> None:
    push = await sent(here, simple(1), version=1)
    other = _one(tokens=[1, 2])
    error = await refused(here, ask(push, probes=other, writer=3))
    assert "number them from 0" in error.message
    await here.pushes.commit(ask(push, probes=GOOD))
    assert here.model.table.get(1).to_info().probe_count == 4


@pytest.mark.parametrize("again", ["none", "same"])
async def test_several_writers_send_the_same_probes_or_none(here: World, again: str) -> None:
    shards = version(shards=1)
    first, second = sharded(shards, 2)
    for writer in (first, second):
        await writer.begin(here)
        await writer.stream(here)

    def asked(writer: int, probes: pb.Probes | None) -> pb.CommitPushRequest:
        return ask(first.push_id, writer=writer, probes=probes)

    waiting = asyncio.ensure_future(here.pushes.commit(asked(0, GOOD)))
    await asyncio.sleep(0)
    error = await refused(here, asked(1, _one(tokens=[1, 2])))
    assert error.reason is Reason.REQUEST_INVALID
    assert "leave the probes of writer 1 out: another writer" in error.message
    assert not waiting.done()
    assert here.model.table.get(1).commit is None
    answer = await here.pushes.commit(asked(1, GOOD if again == "same" else None))
    assert answer.content_digest == (await waiting).content_digest == content(shards)
    commit = here.model.table.get(1).commit
    assert commit is not None
    assert kept_probes.unpack(commit.probes) == GOOD
