"""A trainer in the memory of a CUDA vLLM: views by name, transactions, and what ends badly.

Needs a GPU, and a vLLM of 0.26 or newer built for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.servers import descendants
from tests.support.attached_site import AttachedTrainer, content_of, started, unlike
from tests.support.attached_trainer import keep_busy
from weightsync.errors import Reason
from weightsync.gpu.ipc import DeviceError, device_with
from weightsync_client import Client, ClientError, LiveCheck, RefusedError, TransferPath
from weightsync_client.attach.joint_update import TrainerBox, copy_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.support.attached_site import AttachedSite
    from weightsync_client.attach import Attached
    from weightsync_client.attach.joint_update import WrittenBox

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def site() -> Iterator[AttachedSite]:
    with started() as site:
        yield site


def _until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _passed(client: Client, version: int) -> bool:
    return client.get_version(version).live_check is LiveCheck.PASSED


def _live(client: Client) -> int:
    (model,) = client.status().models
    return model.live_version


def test_every_tensor_is_there_and_every_allocation_was_opened_once(site: AttachedSite) -> None:
    begun = time.perf_counter()
    with site.attached() as attached:
        print(f"attached in {time.perf_counter() - begun:.3f} s")  # noqa: T201 - worth reading
        (rank,) = attached._client.ranks
        assert attached.checkpoint == str(site.first)
        assert unlike(attached, site.first) == []
        assert len(set(rank.handles)) == len(rank.handles) <= len(attached.boxes)
        assert rank.handles
        for log in (site.server.log, site.vllm.log_path.read_text(errors="replace")):
            assert not any(handle.hex() in log for handle in rank.handles)
        name = "model.layers.0.mlp.down_proj.weight"
        place = attached[name].data_ptr()
        with site.attached() as again:
            assert unlike(again, site.first) == []
        # What was opened twice is there until both have closed it.
        assert attached[name].data_ptr() == place
        assert unlike(attached, site.first) == []


def test_what_is_closed_is_mapped_no_more(site: AttachedSite) -> None:
    with site.attached() as attached:
        places = {tensor.data_ptr() for tensor in attached.values()}
        for place in places:
            device_with(place)
    for place in places:
        with pytest.raises(DeviceError):
            device_with(place)
    assert torch.ones(9, device="cuda").sum().item() == 9


def test_an_apply_is_seen_through_the_views(site: AttachedSite) -> None:
    before = site.answers()
    with site.client() as client, client.attach() as attached:
        client.apply(client.push(site.second).version)
        assert unlike(attached, site.second) == []
        client.rollback()
        assert unlike(attached, site.first) == []
        attached.check()
    assert site.answers() == before


def test_what_is_attached_is_pushed_from_where_it_lies(site: AttachedSite) -> None:
    with site.client() as client, client.attach() as attached:
        pushed = client.push(dict(attached), delta="never")
        assert (pushed.way, pushed.way_reason) == (TransferPath.SAME_HOST, "")
        wanted = content_of(site.first)
        for pulled in client.tensors(pushed.version):
            assert torch.equal(pulled.torch(), wanted[pulled.name]), pulled.name
    assert site.violations() == {}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adam fused"])
def test_a_step_of_training_is_a_version(site: AttachedSite, optimizer: str) -> None:
    import transformers

    before = site.answers()
    with site.client() as client, client.attach() as attached:
        config = transformers.AutoConfig.from_pretrained(site.first)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        attached.load_into(model)
        device = model.lm_head.weight.device
        tokens = torch.arange(1, 40, device=device)[None]
        if optimizer == "SGD":
            made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        else:
            made = torch.optim.Adam(model.parameters(), lr=0.02, fused="fused" in optimizer)
        out = model(tokens, labels=tokens)
        out.loss.backward()
        with attached.transaction() as transaction:
            made.step()
        assert model(tokens, labels=tokens).loss.item() != out.loss.item()
        assert transaction.report is not None
        print(transaction.report.phases)  # noqa: T201 - worth reading
        after = site.answers()
        assert after != before
        assert client.verify().verified
        trained = dict(model.named_parameters())
        pulled = {tensor.name: tensor.torch() for tensor in client.tensors()}
        assert pulled.keys() == content_of(site.first).keys()
        for name, tensor in pulled.items():
            assert torch.equal(tensor, trained[name].cpu()), name
        client.rollback()
        assert site.answers() == before
        assert unlike(attached, site.first) == []
    assert site.violations() == {}


def test_what_is_queued_still_counts(site: AttachedSite) -> None:
    before = site.answers()
    with site.client() as client, client.attach() as attached:
        content = {name: tensor * 2 for name, tensor in content_of(site.first).items()}
        device = next(iter(attached.values())).device
        near = {name: tensor.to(device) for name, tensor in content.items()}
        # Not the stream that a push would wait for.
        other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own gap
        with attached.transaction(), torch.cuda.stream(other):
            keep_busy(device)
            for name, tensor in near.items():
                attached.write(name, tensor)
        for pulled in client.tensors():
            assert torch.equal(pulled.torch(), content[pulled.name]), pulled.name
        assert site.answers() != before
        client.rollback()
    assert site.answers() == before


def test_a_trainer_s_own_tensors_are_served_before_they_are_pushed(site: AttachedSite) -> None:
    before = site.answers()
    with site.attached() as attached:
        own = {name: tensor.cuda() for name, tensor in content_of(site.second).items()}
        site.check_served(attached, own, attached.update(own, background=True))
    assert site.answers() == before
    assert site.violations() == {}


def test_what_changes_while_it_is_copied_is_never_served(
    site: AttachedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = site.answers()
    with site.attached() as attached:
        own = {name: tensor.cuda() for name, tensor in content_of(site.second).items()}
        check = attached.check_written

        def after_a_change(places: Iterable[WrittenBox]) -> None:
            own["model.norm.weight"][-1] *= -2
            check(places)

        monkeypatch.setattr(attached, "check_written", after_a_change)
        live = site.server.log.count("is live, and not pushed")
        with pytest.raises(ClientError, match=r"^model\.norm\.weight \(of 1\) changed"):
            attached.update(own)
        assert site.server.log.count("is live, and not pushed") == live
        assert unlike(attached, site.first) == []
    assert site.answers() == before
    assert site.violations() == {}


def test_tensors_of_another_dtype_are_refused_before_the_pause(site: AttachedSite) -> None:
    before = site.answers()
    with site.client() as client, client.attach() as attached:
        own = {name: tensor.cuda().float() for name, tensor in content_of(site.second).items()}
        with pytest.raises(ClientError, match="give exactly those"):
            attached.update(own)
        assert unlike(attached, site.first) == []
        assert site.answers() == before
        assert client.verify().verified
    assert site.violations() == {}


def test_a_tensor_that_is_overwritten_too_early_is_found(site: AttachedSite) -> None:
    before = site.answers()
    with site.client() as client, client.attach() as attached:
        own = {name: tensor.cuda() for name, tensor in content_of(site.second).items()}
        push = attached._writing.push

        def overwrite(content: dict[str, torch.Tensor], **options: Any) -> object:
            own["model.norm.weight"][3] += 1
            return push(content, **options)

        object.__setattr__(attached._writing, "push", overwrite)
        with pytest.raises(ClientError) as caught:
            attached.update(own)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert "model.norm.weight" in caught.value.message
        assert unlike(attached, site.first) == []
        assert site.answers() == before
        assert client.verify().verified
    assert site.violations() == {}


def _fail_in(attached: Attached, content: dict[str, torch.Tensor]) -> None:
    with attached.transaction():
        keep_busy(next(iter(attached.values())).device)
        for name, tensor in content.items():
            attached.write(name, tensor)
        _ = 1 / 0


def test_what_is_taken_back_was_never_served(site: AttachedSite) -> None:
    before = site.answers()
    with site.client() as client, client.attach() as attached:
        content = content_of(site.second)
        with pytest.raises(ZeroDivisionError):
            _fail_in(attached, content)
        assert unlike(attached, site.first) == []
        assert site.answers() == before
        assert client.verify().verified
        with attached.transaction():
            for name, tensor in content.items():
                attached.write(name, tensor)
        assert unlike(attached, site.second) == []
        client.rollback()
    assert site.answers() == before
    assert site.violations() == {}


def test_a_trainer_that_is_killed_in_a_transaction_leaves_nothing(site: AttachedSite) -> None:
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        assert trainer.ask("write") == "written"
        trainer.process.send_signal(signal.SIGKILL)
        # Gone or detached: whichever of its two streams the server sees end first.
        _until(lambda: "is being restored: the trainer " in site.server.log)
    site.server.wait_serving()
    with site.client() as client, client.attach() as attached:
        assert unlike(attached, site.first) == []
        assert site.answers() == before
        # What it had queued is compared as well, once it has left.
        _until(lambda: _passed(client, _live(client)))
        assert client.verify().verified
    assert site.violations() == {}


def test_an_engine_that_dies_leaves_a_trainer_its_own_life(site: AttachedSite) -> None:
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        assert trainer.ask("check") == "live"
        vllm = site.vllm.process
        assert vllm is not None
        _kill(descendants(vllm.pid)[1:])
        # What was opened stays until it is closed.
        assert trainer.ask("read") == "alike"
        _until(lambda: trainer.ask("check") == Reason.ENGINE_AWAY.value)
        site.vllm.stop()
        site.vllm.start()
        site.server.wait_serving()
        with site.attached() as attached:
            assert unlike(attached, site.first) == []
        # Its memory is given back once it is closed.
        free, size = _free(), sum(tensor.nbytes for tensor in content_of(site.first).values())
        assert trainer.ask("read") == "alike"
        assert trainer.ask("close") == "closed"
        _until(lambda: _free() - free >= size // 2)
        assert trainer.process.poll() is None
    assert site.answers() == before


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_in(
    attached: Attached, content: dict[str, torch.Tensor], processes: Iterable[int]
) -> None:
    with attached.transaction():
        for name, tensor in content.items():
            attached.write(name, tensor)
        _kill(processes)


def _free() -> int:
    return torch.cuda.mem_get_info()[0]


def test_an_engine_that_dies_in_a_transaction_comes_back_with_the_version_before(
    site: AttachedSite,
) -> None:
    before = site.answers()
    with site.attached() as attached:
        vllm = site.vllm.process
        assert vllm is not None
        with pytest.raises(ClientError):
            _kill_in(attached, content_of(site.second), descendants(vllm.pid)[1:])
        site.vllm.stop()
        site.vllm.start()
        site.server.wait_serving()
        with pytest.raises(ClientError):
            attached.check()
        assert site.answers() == before
        # Of the engine before, which nobody computes with.
        assert unlike(attached, site.second) == []
    with site.client() as client, client.attach() as attached:
        assert unlike(attached, site.first) == []
        assert client.verify().verified
    assert site.violations() == {}


def test_a_trainer_that_sees_no_gpu_is_told_so(site: AttachedSite) -> None:
    code = "import sys; from weightsync_client import Client; Client(sys.argv[1]).attach()"
    done = subprocess.run(
        [sys.executable, "-c", code, site.server.address],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert b"cannot be reached from here" in done.stderr, done.stderr
    assert site.server.wait_serving()


# What a trainer writes outside a transaction counts as a violation: last.
def test_what_is_written_outside_a_transaction_is_found_and_undone(site: AttachedSite) -> None:
    before = site.answers()
    with site.client() as client:
        live = _live(client)
        attached = client.attach()
        _until(lambda: _passed(client, live))
        boxes = (TrainerBox(n, (0,) * t.ndim, t) for n, t in content_of(site.second).items())
        copy_boxes(attached.places(boxes))
        assert site.answers() != before
        with client.attach():
            _until(lambda: "outside a transaction; version" in site.server.log)
            with pytest.raises(RefusedError, match="outside a transaction"):
                attached.check()
            _until(lambda: client.health("serving") and _passed(client, live))
        assert site.answers() == before
        assert unlike(attached, site.first) == []
        attached.close()
        assert client.verify().verified
    assert site.violations() == {"never_mixed": 1}


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        pytest.param(
            (),
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "expandable_segments",
            id="expandable",
        ),
        pytest.param(
            ("--enable-sleep-mode",),
            {},
            "--enable-sleep-mode",
            id="sleep",
        ),
    ],
)
def test_memory_that_cannot_be_shared_is_refused_and_nothing_changes(
    flags: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    with started(*flags, variables=variables) as site, site.client() as client:
        before = site.answers()
        with pytest.raises(RefusedError, match=said) as caught:
            client.attach()
        print(caught.value)  # noqa: T201 - worth reading
        assert caught.value.reason is Reason.ENGINE_REFUSED
        client.apply(client.push(site.second).version)
        assert site.answers() != before
        client.rollback()
        assert site.answers() == before
        assert site.violations() == {}
