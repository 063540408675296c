"""What can be pushed: a module, a state dict, safetensors files, or a sequence never collected."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from weightsync.errors import Reason
from weightsync.model.digest import signature_of
from weightsync.model.layout import check_version
from weightsync.model.manifest import Layout, TensorEntry
from weightsync_client.errors import invalid, refuse, typed_errors
from weightsync_client.rpc.validate import text, whole_number
from weightsync_client.source.casting import Casting
from weightsync_client.source.modules import is_module, module_tensors
from weightsync_client.source.peft_models import has_adapters, merged_tensors
from weightsync_client.source.sharded_tensors import box_source, is_sharded
from weightsync_client.source.shards import LayoutCache, Shard, file_tensors, open_shards
from weightsync_client.source.slice_shards import assembled, box_shards
from weightsync_client.source.tensor_stream import (
    Declaration,
    Declared,
    Pairs,
    TensorStream,
    check_owned,
    check_whole,
    drained_on_error,
    full_pairs,
    is_weight_source,
    named,
    note_name,
    wrap_pair,
)
from weightsync_client.source.tensors import SourceTensor, queued_work

if TYPE_CHECKING:
    import torch

    from weightsync_client.options import PushOptions
    from weightsync_client.source.sharded_tensors import BoxSource

_RUN_ID = "weightsync/run_id"


@dataclass(frozen=True, slots=True)
class SourceWriter:
    """One of several processes that push a version together, by one `key`, counted from 0."""

    count: int
    number: int
    key: str


def source_writer(options: PushOptions) -> SourceWriter:
    """Return which process this is: as the caller says, else as torch.distributed knows.

    Where that runs, the key is made of the step and a run id that its processes agree on.
    """
    process_group = _process_group()
    count, number = options.get("writers", 0), options.get("writer")
    if not count and process_group is not None:
        count, number = process_group.get_world_size(), process_group.get_rank()
    if not count or (count > 1 and number is None):
        raise invalid(
            "the source holds parts of tensors, and torch.distributed does not run: say with "
            "writers=, writer= and idempotency_key= how many processes push, which of them this "
            "is, and a key that all of them use for this push alone",
        )
    count = whole_number("writers", count, 1)
    number = whole_number("writer", number or 0)
    if number >= count:
        raise invalid(f"writer={number} of {count}; number them from 0")
    if count == 1:
        return SourceWriter(1, 0, options.get("idempotency_key") or "")
    return SourceWriter(count, number, _key(options, process_group))


def own_rank() -> int:
    """Return the rank of this process in torch.distributed; 0 where that does not run."""
    process_group = _process_group()
    return 0 if process_group is None else int(process_group.get_rank())


def _key(options: PushOptions, process_group: Any) -> str:
    if key := options.get("idempotency_key"):
        return text("idempotency_key", key)
    if process_group is None or "step" not in options:
        raise invalid(
            "processes that push one version together need a key: give step=, the step of the "
            "training, where torch.distributed runs, else idempotency_key=, the same in all of "
            "them and another one for each push",
        )
    return f"{_run_id(process_group)}/{whole_number('step', options['step'])}"


def _process_group() -> Any:
    # Not imported: who uses it has.
    module: Any = sys.modules.get("torch.distributed")
    running = module is not None and module.is_available() and module.is_initialized()
    return module if running else None


def _run_id(process_group: Any) -> str:
    store = process_group.distributed_c10d._get_default_store()  # noqa: SLF001 - PyTorch has no public way to it
    # An agent's store outlives the processes that it starts again.
    name = f"{_RUN_ID}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    agreed = store.compare_set(name, "", uuid.uuid4().hex)
    return agreed.decode() if isinstance(agreed, bytes) else str(agreed)


#: Iterables of these kinds have all of their tensors.
_ALL_THERE = (list, tuple, ItemsView)


#: Of so many writers each has `shard_bytes` of a shard; with more the shards stay as large.
_PARTS = 4


class _Module(Protocol):
    def named_modules(self) -> Iterator[tuple[str, Any]]: ...

    def state_dict(self) -> Any: ...


#: A module, a state dict, a path, or name and tensor pairs.
PushSource = _Module | Mapping[str, Any] | str | os.PathLike[str] | Pairs | Declared


class DeltaSource(Protocol):
    """A delta whose shards hold their own bytes: the caller's tensors are read for none of them."""

    @property
    def base_content_digest(self) -> str:
        """Content digest of the version that it changes."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of every shard that was made, by index."""

    @property
    def content_digest(self) -> str:
        """Content digest of the version that it makes; known once all its shards were made."""


@dataclass(frozen=True, slots=True)
class Source:
    """Shards to push.

    Attributes:
        layout: The whole layout; None when it is not known before the end.
        tensors: Those, or boxes of them, that this process sends, if each can be read again.
        flow: The tensors where they come one after the other.
        delta: What the shards change, where they are those of a delta.
        writer: Which of several processes this is, each of which pushes a part.
        ready: Waits until the tensors hold what they held when this was made.
        release: Undoes what was done to the caller's module, or reads an iterable to its end for
            other ranks; called when nothing is read any more, from any thread, and repeatedly.
        remade: Returns the same, cast otherwise, before anything was read of it.
    """

    shards: Iterable[Shard]
    layout: Layout | None
    tensors: tuple[SourceTensor, ...] = ()
    flow: TensorStream | None = None
    delta: DeltaSource | None = None
    writer: SourceWriter | None = None
    ready: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    casting: Casting = field(default_factory=Casting)
    remade: Callable[[Casting], Source] | None = None

    def cast(self, casting: Casting) -> Source:
        """Return the same, its tensors sent in another way; nothing was read of it yet."""
        if self.remade is None:
            return self
        return replace(self.remade(casting), ready=self.ready, release=self.release)

    @property
    def again(self) -> bool:
        """True for shards that can be read again; an iterator is used up by one reading."""
        return not isinstance(self.shards, Iterator)

    @property
    def outline(self) -> Iterable[Shard]:
        """What all shards are; those of a flow have no bytes here."""
        declared = self.flow.declared if self.flow is not None and self.delta is None else None
        return self.shards if declared is None else declared.shards

    @property
    def size(self) -> int:
        """Bytes that are sent; 0: not known."""
        if self.writer is not None:
            return sum(shard.entry.size for shard in self.shards)
        return self.layout.size if self.layout is not None else 0

    @property
    def signature(self) -> str | None:
        """Digest of the names, dtypes and shapes of what this process pushes; None: not known."""
        if self.writer is not None:
            return signature_of(sorted((t.name, t.dtype, t.shape) for t in self.tensors))
        return self.layout.signature if self.layout is not None else None

    @property
    def sizes(self) -> Mapping[int, int] | None:
        """Bytes of every shard that exists by now, by index; None where that is never known."""
        if self.writer is not None:
            return None
        if self.delta is not None:
            return self.delta.sizes
        if self.layout is None:
            return None
        return {index: shard.size for index, shard in enumerate(self.layout.shards)}


class _Writing(NamedTuple):
    writer: Callable[[], SourceWriter] | None
    together: bool


class _Shaping(NamedTuple):
    shard_bytes: int
    layouts: LayoutCache
    casting: Casting


def make_source(
    source: object,
    shard_bytes: int,
    layouts: LayoutCache | None = None,
    *,
    collective: bool = False,
    writer: Callable[[], SourceWriter] | None = None,
    together: bool = False,
    casting: Casting | None = None,
) -> Source:
    """Return the shards of whatever the caller pushes; no weight byte is read yet.

    Work that the calling thread has queued on a device may still write to tensors: `Source.ready`
    waits for it. The adapters of a PEFT model are merged until `Source.release`.

    Args:
        source: See `Client.push`.
        shard_bytes: Most bytes of tensors in a shard that holds more than one; of several
            processes' parts, up to four times as many.
        layouts: Knows how the tensors of the last push lay.
        collective: An iterable is read to its end in any case.
        writer: Returns which process this is; with None, tensors held in part cannot be pushed.
        together: Several processes push, whatever they hold.
        casting: How tensors are sent; None: as they are.

    Raises:
        InvalidError: It cannot be pushed, or its layout is wrong.
    """
    shaping = _Shaping(shard_bytes, layouts or LayoutCache(), casting or Casting())
    writing = _Writing(writer, together)
    if isinstance(source, Declared) or is_weight_source(source) or _comes_in_turn(source):
        return _of_flow(source, shaping, writing, collective=collective)
    shaping = shaping._replace(shard_bytes=whole_number("shard_bytes", shard_bytes, 1))
    if isinstance(source, (str, os.PathLike)):
        _check_alone(writing)
        return _of_files(Path(source), shaping)
    if is_module(source):
        return _of_module(cast("torch.nn.Module", source), shaping, writing)
    if isinstance(source, Mapping):
        source = source.items()
    if isinstance(source, _ALL_THERE):
        return _of_pairs(source, shaping, writing)
    hint = "a PyTorch module, a state dict, a path or name and tensor pairs"
    if hasattr(source, "state_dict"):
        hint = "its state_dict()"
    raise invalid(
        f"an object of type {type(source).__name__} cannot be pushed; push {hint}",
    )


def _comes_in_turn(source: object) -> bool:
    """Whether it is an iterable that may make its tensors one by one."""
    others = (str, os.PathLike, Mapping, *_ALL_THERE)
    return isinstance(source, Iterable) and not (isinstance(source, others) or is_module(source))


def _of_flow(source: Any, shaping: _Shaping, writing: _Writing, *, collective: bool) -> Source:
    given = source.pairs if isinstance(source, Declared) else source
    if is_weight_source(given):
        check_whole(given)
        check_owned(given, own_rank())
        collective = True
    pairs = full_pairs(given.items() if isinstance(given, Mapping) else given)
    with drained_on_error(pairs, collective=collective):
        shaping = shaping._replace(shard_bytes=whole_number("shard_bytes", shaping.shard_bytes, 1))
        _check_alone(writing)
        layout = list(source.layout) if isinstance(source, Declared) else None
        flow = TensorStream(pairs, shaping.shard_bytes)
        made = _of_shaped_flow(flow, layout, shaping)
    return replace(made, release=flow.drain) if collective else made


def _of_shaped_flow(
    flow: TensorStream, layout: Sequence[object] | None, shaping: _Shaping
) -> Source:
    flow.declared = Declaration(layout, *shaping) if layout is not None else None
    flow.casting = shaping.casting
    return Source(
        flow.shards(),
        flow.declared.layout if flow.declared is not None else None,
        flow=flow,
        casting=shaping.casting,
        remade=lambda casting: _of_shaped_flow(flow, layout, shaping._replace(casting=casting)),
    )


def _check_alone(writing: _Writing) -> None:
    if writing.together:
        raise invalid(
            "writers= and step= are for what several processes hold in memory; push a module or a "
            "state dict on each of them, or files and iterators from one process without these",
        )


def _of_module(module: torch.nn.Module, shaping: _Shaping, writing: _Writing) -> Source:
    if not has_adapters(module):
        return _of_pairs(module_tensors(module).items(), shaping, writing)
    tensors, release = merged_tensors(module)
    try:
        return replace(_of_pairs(tensors.items(), shaping, writing), release=release)
    except BaseException:
        release()
        raise


def _of_pairs(pairs: Iterable[object], shaping: _Shaping, writing: _Writing) -> Source:
    pairs = list(pairs)
    if writing.writer is not None and (writing.together or any(map(_is_part, pairs))):
        return _of_boxes(pairs, shaping, writing.writer())
    tensors = [wrap_pair(pair) for pair in pairs]
    seen: set[str] = set()
    for tensor in tensors:
        note_name(tensor.name, seen)
    return _of_tensors(tensors, shaping)


def _is_part(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and is_sharded(pair[1])


def _of_boxes(pairs: Iterable[object], shaping: _Shaping, writer: SourceWriter) -> Source:
    sources = [box_source(*named(pair), writer.number) for pair in pairs]
    seen: set[str] = set()
    for source in sources:
        note_name(source.whole.name, seen)
    if writer.count == 1:
        _check_whole_here(sources)
        whole = [replace(s.boxes[0][1], name=s.whole.name, title="") for s in sources]
        return _of_tensors(whole, shaping)
    # Each message, order and reply is of one writer's part of one shard.
    shard_bytes = shaping.shard_bytes * min(writer.count, _PARTS)
    return _of_parts(sources, shaping._replace(shard_bytes=shard_bytes), writer)


def _of_parts(sources: Sequence[BoxSource], shaping: _Shaping, writer: SourceWriter) -> Source:
    cast_sources = [shaping.casting.boxes(source) for source in sources]
    whole = [source.whole for source in cast_sources]
    shards, layout = shaping.layouts.shards_of(whole, shaping.shard_bytes)
    made = box_shards(shards, cast_sources)
    return Source(
        made,
        layout,
        tuple(local.bytes for shard in made for local in shard.sent),
        writer=writer,
        ready=queued_work(tensor for source in sources for _, tensor in source.boxes),
        casting=shaping.casting,
        remade=lambda casting: _of_parts(sources, shaping._replace(casting=casting), writer),
    )


def _check_whole_here(sources: Sequence[BoxSource]) -> None:
    for source in sources:
        if [box.sizes for box, _ in source.boxes] != [source.whole.shape]:
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"tensor {source.whole.name!r} is held in part, and this is the only process that "
                "pushes; give writers= and have all of them push",
            )


def _of_tensors(tensors: Sequence[SourceTensor], shaping: _Shaping) -> Source:
    sent = shaping.casting.all(tensors)
    shards, layout = shaping.layouts.shards_of(sent, shaping.shard_bytes)
    return Source(
        shards,
        layout,
        tuple(sent),
        ready=queued_work(tensors),
        casting=shaping.casting,
        remade=lambda casting: _of_tensors(tensors, shaping._replace(casting=casting)),
    )


def _of_files(path: Path, shaping: _Shaping) -> Source:
    files, chosen = open_shards(path)
    tensors = assembled(files)
    if tensors is not None:
        return _of_tensors(tensors, shaping)
    return _of_shards(files, chosen(), shaping)


def _of_shards(
    files: Sequence[tuple[Path, Shard]],
    groups: Sequence[Sequence[TensorEntry]],
    shaping: _Shaping,
) -> Source:
    given = _taken(files, groups)
    sent = shaping.casting.all(given)

    def remade(casting: Casting) -> Source:
        return _of_shards(files, groups, shaping._replace(casting=casting))

    shards = [shard for _, shard in files]
    whole = all(
        len(taken) == len(shard.tensors) for taken, shard in zip(groups, shards, strict=True)
    )
    if not whole or any(one is not other for one, other in zip(given, sent, strict=True)):
        # Cast, checked, or without the copies that do not count, they go as a state dict does.
        made, layout = shaping.layouts.shards_of(sent, shaping.shard_bytes)
        return Source(made, layout, tuple(sent), casting=shaping.casting, remade=remade)
    with typed_errors():
        layout = check_version([s.entry for s in shards], groups)
    return Source(shards, layout, tuple(given), casting=shaping.casting, remade=remade)


def _taken(
    files: Sequence[tuple[Path, Shard]], groups: Sequence[Sequence[TensorEntry]]
) -> list[SourceTensor]:
    found = []
    for file, group in zip(files, groups, strict=True):
        names = {tensor.name for tensor in group}
        found += [tensor for tensor in file_tensors(*file) if tensor.name in names]
    return found
