"""A part of the model over `weightsync_nccl`, with `WEIGHTSYNC_UPDATE_PARTIAL=1`: two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.receiving_site import receiving_site
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.receiving_site import ReceivingSite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Of the checkpoint: a whole matrix that vLLM fuses with others, one that it splits, and a vector.
_PART = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReceivingSite]:
    faults = tmp_path_factory.mktemp("faults") / "wire"
    with receiving_site({"WEIGHTSYNC_UPDATE_PARTIAL": "1"}, faults) as site:
        yield site


def _part(it: ReceivingSite, *names: str) -> torch.nn.Module:
    """Return a module that has these parameters of the trainer's model alone."""
    part = torch.nn.Module()
    for name in names:
        *path, last = name.split(".")
        at = part
        for one in path:
            if one not in dict(at.named_children()):
                at.add_module(one, torch.nn.Module())
            at = at.get_submodule(one)
        at.register_parameter(last, it.site.model.get_parameter(name))
    return part


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_a_part_makes_a_version_of_which_the_rest_is_what_is_served(it: ReceivingSite) -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    site = it.site
    trainer = it.trainer()
    site.set(site.served)
    trainer.send_weights()
    base = site.live()
    mixed = site.served | {name: site.trained[name] for name in _PART}
    site.set(mixed)
    it.trainer(ModuleSource(_part(it, *_PART))).send_weights()
    made, answers = site.live(), site.answers()
    assert made > base
    with Client(site.server.address) as client:
        assert client.verify().verified
        assert client.get_version(made).metadata["base_version"] == str(base)
        pulled = {one.name: bytes(one.data) for one in client.tensors(made)}
        for name, tensor in mixed.items():
            assert pulled[name] == _bytes(tensor), name
        # What the whole of it answers, sent at once, is what the part answers.
        assert client.rollback().report.version == base
        assert site.answers() != answers
        it.trainer().send_weights()
        assert site.answers() == answers
        assert client.verify().verified


def test_what_the_served_version_lacks_is_refused_and_changes_nothing(it: ReceivingSite) -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    part = _part(it, _PART[0])
    part.other = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert "other" in it.refused(it.trainer(ModuleSource(part)).send_weights)


def test_an_apply_meanwhile_is_not_undone(it: ReceivingSite) -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    site = it.site
    site.set(site.served)
    it.trainer().send_weights()
    site.set(site.trained)
    sender = it.trainer(ModuleSource(_part(it, _PART[2])))
    finish = sender.client.finish_weight_update
    with Client(site.server.address) as client:

        def roll_back_and_finish() -> None:
            client.rollback()
            finish()

        sender.client.finish_weight_update = roll_back_and_finish
        sender.send_weights()
        made = site.live()
        # It is a part of what is served when it is applied, whatever was served when it began.
        about = client.get_version(made)
        live_before = int(about.metadata["base_version"])
        pulled = {one.name: bytes(one.data) for one in client.tensors(made)}
        kept = {one.name: bytes(one.data) for one in client.tensors(live_before)}
        assert pulled == kept | {_PART[2]: _bytes(site.trained[_PART[2]])}
        assert client.verify().verified
