"""What a trainer that is attached to an engine has: views of the live parameters, by name."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import distributed

from weightsync.errors import Reason
from weightsync.shm.attach_socket import AttachClient
from weightsync_client.attach.joint_update import (
    TrainerBox,
    WrittenBox,
    check_joined,
    copy_boxes,
    find_unequal,
    overlap,
    update_together,
)
from weightsync_client.attach.live_tensors import (
    TensorKind,
    kind_of,
    open_memory,
    put_into,
    view_of_box,
    without_ties,
)
from weightsync_client.attach.transaction import InPlaceTransaction, Writing
from weightsync_client.errors import UnavailableError, invalid, refuse, typed_errors
from weightsync_client.options import PauseChoices, check_options
from weightsync_client.probes import Probes
from weightsync_client.source.flat_parameters import TrainerRanks
from weightsync_client.source.sharded_tensors import is_sharded


class AttachedBox(NamedTuple):
    """A part of a tensor that one rank has.

    `rank` is `dp/pp/tp`. `offsets` say where the part begins in the whole tensor, in elements.
    `view` is the live parameter's memory, in its dtype, which may be another than the checkpoint's.
    No kernel of another GPU reaches it.
    """

    rank: str
    offsets: tuple[int, ...]
    view: torch.Tensor


class Attached(Mapping[str, torch.Tensor]):
    """The live parameters of an engine by the names of its checkpoint; ends with `close`.

    As a mapping it has every tensor that lies whole in one place; what is written into one, in the
    block of a `transaction`, is what the engine computes with. With tensor parallelism most tensors
    are in parts, and some are in several places: `boxes` has all of them, and `read` and `write`
    see to it.

    On a CPU the views can be written in a block alone: a process that writes them at another time
    is ended by SIGSEGV, as is one that reads or writes them after `close`. On a GPU nothing keeps a
    kernel from writing; the server finds it, restores the version, and `check` says so.

    Attributes:
        checkpoint: Name or path of what vLLM has loaded.
        config: The model's configuration, as its `config.json` has it.
        version: What the parameters held when this was made.
        boxes: Every part, by the name of its tensor.
    """

    def __init__(self, engine: str, client: AttachClient, writing: Writing) -> None:
        self.engine = engine
        self._writing = writing
        self.version = client.version
        self.content_digest = client.content_digest
        self._client = client
        self._transaction: InPlaceTransaction | None = None
        self._closed = False
        self._pushers: TrainerRanks | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, str] = {}
        boxes: dict[str, list[AttachedBox]] = defaultdict(list)
        with contextlib.ExitStack() as stack:
            stack.callback(client.close)
            for rank in client.ranks:
                memory = open_memory(rank, stack)
                for box in rank.views.boxes:
                    part = AttachedBox(rank.views.rank, box.offsets, view_of_box(box, memory))
                    boxes[box.tensor].append(part)
                    self._shapes[box.tensor] = box.shape
                    self._stored[box.tensor] = box.stored
            self._stack = stack.pop_all()
        self.boxes: Mapping[str, tuple[AttachedBox, ...]] = {
            name: tuple(parts) for name, parts in boxes.items()
        }
        first = client.ranks[0].views
        self.checkpoint: str = first.checkpoint
        self.config: Mapping[str, Any] = first.config

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the view of a tensor that lies whole in one place.

        Raises:
            KeyError: It does not; `boxes` may have it.
        """
        self.check_open()
        parts = self.boxes[name]
        if len(parts) != 1 or tuple(parts[0].view.shape) != self._shapes[name]:
            msg = f"{name} is in {len(parts)} places; use boxes, read and write"
            raise KeyError(msg)
        return parts[0].view

    def __iter__(self) -> Any:
        """Yield the names of the tensors that lie whole in one place."""
        for name, parts in self.boxes.items():
            if len(parts) == 1 and tuple(parts[0].view.shape) == self._shapes[name]:
                yield name

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(1 for _ in self)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, in elements."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of a whole tensor, on the device of its first part."""
        self.check_open()
        parts = self.boxes[name]
        first = parts[0].view
        whole = torch.empty(self._shapes[name], dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for part in parts:
                _part(whole, part).copy_(part.view)
        return whole

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a whole tensor into every place where a part of it lies, on every rank.

        Raises:
            ClientError: It has another shape.
        """
        if tuple(tensor.shape) != self._shapes[name]:
            raise invalid(
                f"{name} has shape {list(self._shapes[name])}, not {list(tensor.shape)}",
            )
        self.write_box(name, (0,) * tensor.ndim, tensor)

    def write_box(self, name: str, offsets: Sequence[int], tensor: torch.Tensor) -> None:
        """Put a box of a tensor into every place where a part of it lies, on every rank.

        `offsets` say where the box begins in the tensor called `name`, in elements.

        Raises:
            ClientError: REQUEST_INVALID: no block of a transaction is open.
        """
        self.check_open()
        if not self._client.writable:
            raise invalid(
                f"write {name} inside `with attached.transaction():`; outside it the parameters "
                "are read-only",
            )
        copy_boxes(self._places(name, offsets, tensor))

    def places(self, boxes: Iterable[TrainerBox]) -> list[WrittenBox]:
        """Return every place where a part of a box lies, on every rank, with that part."""
        return [place for box in boxes for place in self._places(*box)]

    def check_written(self, places: Iterable[WrittenBox]) -> None:
        """Accept places that hold, bit for bit, what was written into them.

        Raises DIGEST_MISMATCH with the names of tensors that do not.
        """
        wrong = find_unequal(places)
        if wrong:
            raise refuse(
                Reason.DIGEST_MISMATCH,
                f"{', '.join(wrong[:10])} (of {len(wrong)}) changed while they were copied into "
                "the engine, or arrived damaged, and none of it is served; leave tensors "
                "unchanged until the update returns, or push them and apply the version",
            )

    def _places(
        self, name: str, offsets: Sequence[int], tensor: torch.Tensor
    ) -> Iterator[WrittenBox]:
        for part in self.boxes[name]:
            here = overlap(part.offsets, part.view.shape, offsets, tensor.shape)
            there = overlap(offsets, tensor.shape, part.offsets, part.view.shape)
            if here is not None and there is not None:
                yield WrittenBox(name, part.view[here], tensor[there])

    def transaction(
        self,
        *,
        lease_s: float = 60.0,
        background: bool = False,
        probes: Probes | None = None,
        **pause: Unpack[PauseChoices],
    ) -> InPlaceTransaction:
        """Pause the engine while this is written; see `InPlaceTransaction`.

        `version` and `content_digest` follow its result.

        Args:
            lease_s: How long this process may be silent while it writes, seconds; then the version
                before is restored. `renew` gives all of it again.
            background: Whether the block ends once the engine generates again, and what is live is
                pushed meanwhile by another thread, which reads these tensors. `result` waits for
                that, as the next transaction and `close` do, and reports its outcome.
            probes: Kept with the version, as of a push; nothing scores them before it is live.
            **pause: See `PauseChoices`; not "between_steps".

        Raises:
            TypeError: There is no such option.
        """
        check_options("transaction", pause, PauseChoices)
        return self._begun(lease_s, pause, probes, background=background)

    def update(
        self,
        tensors: Mapping[str, Any],
        *,
        lease_s: float = 60.0,
        background: bool = False,
        probes: Probes | None = None,
        **pause: Unpack[PauseChoices],
    ) -> InPlaceTransaction:
        """Have the engine serve a trainer's tensors, copied from where they lie into its memory.

        From one GPU to another, or within one, nothing goes through the host before the engine
        generates on them: every place on every rank was compared with them by then, bit for bit.
        Then these tensors are pushed, and every rank is proved to hold them as vLLM would have
        loaded them; what was freed or overwritten meanwhile is found by that, and the version
        before is served again. They must not change until this returns, with `background` until
        `result` does.

        Where one of them is a DTensor or a `ShardedTensor`, every process of torch.distributed
        calls this, each attached, with the parts that it has. What fails in one fails in all.

        Args:
            tensors: All of `boxes`, in the dtypes and shapes of the checkpoint; on any device. One
                that is tied to another of them, and that the checkpoint has not, is left out.
            lease_s: As of `transaction`.
            background: As of `transaction`; the same in all processes.
            probes: As of `transaction`.
            **pause: As of `transaction`.

        Raises:
            ClientError: Naming what is missing, or has another shape: nothing was paused. Naming
                what changed while it was copied: DIGEST_MISMATCH, nothing of it was served. Or as a
                transaction.
            TypeError: There is no such option.
        """
        check_options("update", pause, PauseChoices)
        tensors = without_ties(tensors, self.boxes.keys())
        transaction = self._begun(lease_s, pause, probes, background=background, source=tensors)
        if any(map(is_sharded, tensors.values())):
            check_joined()
            pushers = self._ranks_that_push() if background else None
            push = self._writing.with_probes(probes).push
            update_together(self, transaction, tensors, push, pushers)
            return transaction
        self.check_complete({name: kind_of(name, tensor) for name, tensor in tensors.items()})
        # Found before the engine stands still for them.
        places = self.places(
            TrainerBox(name, (0,) * each.ndim, each) for name, each in tensors.items()
        )
        with transaction:
            copy_boxes(places)
            self.check_written(places)
        return transaction

    def _ranks_that_push(self) -> TrainerRanks:
        if self._pushers is None:
            self._pushers = TrainerRanks().for_a_thread()
        return self._pushers

    def _begun(
        self,
        lease_s: float,
        pause: PauseChoices,
        probes: Probes | None,
        *,
        background: bool,
        source: Mapping[str, Any] | None = None,
    ) -> InPlaceTransaction:
        self._transaction = InPlaceTransaction(
            self._writing.with_probes(probes),
            self,
            lease_s,
            pause,
            background=background,
            before=self._transaction,
            source=source,
        )
        return self._transaction

    def check_complete(self, kinds: Mapping[str, TensorKind]) -> None:
        """Accept the dtypes and shapes of all tensors, by name.

        Raises a ClientError that names what is missing, unknown or of another kind.
        """
        here = {name: TensorKind(self._stored[name], shape) for name, shape in self._shapes.items()}
        wrong = sorted(name for name in here.keys() | kinds if here.get(name) != kinds.get(name))
        if wrong:
            raise invalid(
                "tensors are missing, unknown to the engine, or of a different dtype or shape "
                f"than in its checkpoint: {', '.join(wrong[:10])} (of {wrong[0]} it has "
                f"{here.get(wrong[0], 'none')}); give exactly those of `boxes`, converted",
            )

    def load_into(self, model: torch.nn.Module) -> None:
        """Give a model the live parameters as its own, so that ordinary training code runs on them.

        `model` was made on the meta device, with the names of the checkpoint. What it ties stays
        tied. Nothing is copied.

        Raises:
            ClientError: Naming what it has and the engine has not, or in parts. The model is as it
                was.
        """
        put_into(model, self)

    def check(self) -> None:
        """Return if this is still what the engine serves with.

        Raises:
            ClientError: RefusedError: something was written outside a transaction, and the version
                was restored. UnavailableError: engine or server were restarted.
        """
        self.check_open()
        try:
            with typed_errors():
                self._client.check()
        except OSError as error:
            raise _gone(error) from error

    def check_open(self) -> None:
        """Raise a ClientError (REQUEST_INVALID) if this was closed."""
        if self._closed:
            raise invalid("attach again: this attachment was closed")

    def open_block(self, transaction: str) -> None:
        """Have the parameters writable, in the block of a transaction.

        Raises:
            ClientError: It is not open; UnavailableError: the server has ended.
        """
        try:
            with typed_errors():
                self._client.open_block(transaction)
        except OSError as error:
            raise _gone(error) from error

    def close_block(self) -> None:
        """Have them readable only; also where no block is open."""
        self._client.close_block()

    def revoke_block(self, *, settled: bool = False) -> None:
        """Have what is written from now on served by nobody: the server has ended the block.

        `settled` says that there are no writes on a GPU any more.
        """
        self._client.revoke_block(settled=settled)

    @property
    def attachment(self) -> str:
        """What this is called when a transaction begins."""
        return self._client.attachment

    def settle_transaction(self) -> None:
        """Wait for what the last transaction has left to the background; raises as `result`."""
        if self._transaction is not None:
            self._transaction.result()

    def settle(self) -> None:
        """Wait until whatever this process has queued on the GPUs of the parameters is done."""
        views = (part.view for parts in self.boxes.values() for part in parts)
        for device in {view.device for view in views if view.is_cuda}:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Detach; a process that still uses a view is ended by SIGSEGV, or a fault of CUDA.

        Raises:
            ClientError: What a transaction has left to the background did not count.
        """
        try:
            self.settle_transaction()
            # What runs on a GPU would lose its memory.
            self.settle()
        finally:
            self._closed = True
            if self._pushers is not None:
                self._pushers.close()
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def attach(engine: str, socket: str, secret: str, writing: Writing) -> Attached:
    """Return the live parameters that a secret opens.

    The server hands them over at the path `socket`. `secret` is from the call Attach. `writing`
    says how transactions on them are begun.

    Raises:
        ClientError: With the reason and the remedy.
    """
    try:
        with typed_errors():
            client = AttachClient(socket, secret)
    except PermissionError as error:
        raise refuse(
            Reason.PERMISSION_DENIED,
            f"{socket} is for the user of weightsync-server alone ({error.strerror}); run the "
            "trainer as that user",
        ) from error
    except OSError as error:
        raise _gone(error) from error
    return Attached(engine, client, writing)


def _part(whole: torch.Tensor, part: AttachedBox) -> torch.Tensor:
    spans = zip(part.offsets, part.view.shape, strict=True)
    return whole[tuple(slice(begin, begin + length) for begin, length in spans)]


def _gone(error: OSError) -> UnavailableError:
    return UnavailableError(
        Reason.SERVER_AWAY,
        "check that the server runs on this host and that its folder is shared, then attach "
        f"again: it shares no memory ({error})",
    )


_KEY = "weightsync/job"

#: The process that has a name, and that.
_own: tuple[int, str] = (0, "")


def trainer_job() -> str:
    """Return the name of this process's job; processes of one torch.distributed have the same."""
    if distributed.is_available() and distributed.is_initialized():
        # Not a collective: processes attach when they like.
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - all have it
        if store.add(f"{_KEY}/asked", 1) == 1:
            store.set(_KEY, uuid.uuid4().hex)
        return bytes(store.get(_KEY)).decode()
    global _own  # noqa: PLW0603 - as long as the process
    if _own[0] != os.getpid():
        _own = os.getpid(), uuid.uuid4().hex
    return _own[1]
