"""What can be pushed: a module, a state dict, safetensors files, or a sequence never collected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from weightsync.errors import Reason
from weightsync.model.digest import signature_of
from weightsync.model.layout import check_version
from weightsync.model.manifest import Layout
from weightsync_client.errors import refuse, typed_errors
from weightsync_client.rpc.validate import whole_number
from weightsync_client.source.box_files import assembled
from weightsync_client.source.box_shards import box_shards
from weightsync_client.source.declared import Declaration, Declared
from weightsync_client.source.flow import Flow, drained_on_error, named, note_name, wrap_pair
from weightsync_client.source.layout_cache import LayoutCache
from weightsync_client.source.modules import is_module, module_tensors
from weightsync_client.source.peft_models import has_adapters, merged_tensors
from weightsync_client.source.sharded_tensors import box_source, is_sharded
from weightsync_client.source.shards import Shard, file_shard, file_tensors
from weightsync_client.source.source_writer import own_rank
from weightsync_client.source.tensors import SourceTensor, queued_work
from weightsync_client.source.weight_sources import (
    Pairs,
    check_owned,
    check_whole,
    full_pairs,
    is_weight_source,
)

if TYPE_CHECKING:
    import torch

    from weightsync_client.source.sharded_tensors import BoxSource
    from weightsync_client.source.source_writer import SourceWriter

__all__ = ["DeltaSource", "Flow", "PushSource", "Source", "make_source"]

_INDEX = "model.safetensors.index.json"
#: Iterables of these kinds have all of their tensors.
_ALL_THERE = (list, tuple, ItemsView)


#: Of so many writers each has `shard_bytes` of a shard; with more the shards stay as large.
_PARTS = 4


class _Module(Protocol):
    """A PyTorch module: who pushes none needs no PyTorch."""

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
        shards: The shards, in order.
        layout: The whole layout; None when it is not known before the end.
        tensors: The tensors, or the boxes of them that this process sends, where each can be read
            by itself and again.
        flow: The tensors where they come one after the other.
        delta: What the shards change, where they are those of a delta.
        writer: Which of several processes this is, each of which pushes a part.
        ready: Waits until the tensors hold what they held for whoever made this.
        release: Undoes what was done to the caller's module for this, or reads an iterable to its
            end for other ranks; called when nothing is read of the tensors any more, from any
            thread, and more than once.
    """

    shards: Iterable[Shard]
    layout: Layout | None
    tensors: tuple[SourceTensor, ...] = ()
    flow: Flow | None = None
    delta: DeltaSource | None = None
    writer: SourceWriter | None = None
    ready: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None

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
    """Whether several processes push; see `make_source`."""

    writer: Callable[[], SourceWriter] | None
    together: bool


def make_source(
    source: object,
    shard_bytes: int,
    layouts: LayoutCache | None = None,
    *,
    collective: bool = False,
    writer: Callable[[], SourceWriter] | None = None,
    together: bool = False,
) -> Source:
    """Return the shards of whatever the caller pushes; no weight byte is read yet.

    Work that the calling thread has queued on a device may still write to tensors: `Source.ready`
    waits for it. The adapters of a PEFT model are merged until `Source.release`.

    Args:
        source: See `Client.push`.
        shard_bytes: Most bytes of tensors in a shard that holds more than one; of several
            processes' parts, up to four times as many.
        layouts: Knows how the tensors of the last push lay.
        collective: An iterable is read to its end in any case; see `PushOptions`.
        writer: Tells which of several processes this is, where tensors are held in part; None: they
            cannot be pushed so.
        together: Several processes push, whatever they hold.

    Raises:
        InvalidError: It is nothing that can be pushed, or its layout is wrong.
    """
    layouts, writing = layouts or LayoutCache(), _Writing(writer, together)
    if isinstance(source, Declared) or is_weight_source(source) or _comes_in_turn(source):
        return _of_flow(source, shard_bytes, layouts, writing, collective=collective)
    shard_bytes = whole_number("shard_bytes", shard_bytes, 1)
    if isinstance(source, (str, os.PathLike)):
        _check_alone(writing)
        return _of_files(Path(source), shard_bytes, layouts)
    if is_module(source):
        return _of_module(cast("torch.nn.Module", source), shard_bytes, layouts, writing)
    if isinstance(source, Mapping):
        source = source.items()
    if isinstance(source, _ALL_THERE):
        return _of_pairs(source, shard_bytes, layouts, writing)
    hint = "a PyTorch module, a state dict, a path or name and tensor pairs"
    if hasattr(source, "state_dict"):
        hint = "its state_dict()"
    raise refuse(
        Reason.REQUEST_INVALID,
        f"an object of type {type(source).__name__} cannot be pushed; push {hint}",
    )


def _comes_in_turn(source: object) -> bool:
    """Whether it is an iterable that may make its tensors one by one."""
    others = (str, os.PathLike, Mapping, *_ALL_THERE)
    return isinstance(source, Iterable) and not (isinstance(source, others) or is_module(source))


def _of_flow(
    source: Any,
    shard_bytes: int,
    layouts: LayoutCache,
    writing: _Writing,
    *,
    collective: bool,
) -> Source:
    given = source.pairs if isinstance(source, Declared) else source
    if is_weight_source(given):
        check_whole(given)
        check_owned(given, own_rank())
        collective = True
    pairs = full_pairs(given.items() if isinstance(given, Mapping) else given)
    with drained_on_error(pairs, collective=collective):
        shard_bytes = whole_number("shard_bytes", shard_bytes, 1)
        _check_alone(writing)
        declared = None
        if isinstance(source, Declared):
            declared = Declaration(source.layout, shard_bytes, layouts)
        flow = Flow(pairs, shard_bytes, declared)
    made = Source(flow.shards(), declared.layout if declared else None, flow=flow)
    return replace(made, release=flow.drain) if collective else made


def _check_alone(writing: _Writing) -> None:
    if writing.together:
        raise refuse(
            Reason.REQUEST_INVALID,
            "writers= and step= are for what several processes hold in memory; push a module or a "
            "state dict on each of them, or files and iterators from one process without these",
        )


def _of_module(
    module: torch.nn.Module,
    shard_bytes: int,
    layouts: LayoutCache,
    writing: _Writing,
) -> Source:
    if not has_adapters(module):
        return _of_pairs(module_tensors(module).items(), shard_bytes, layouts, writing)
    tensors, release = merged_tensors(module)
    try:
        return replace(_of_pairs(tensors.items(), shard_bytes, layouts, writing), release=release)
    except BaseException:
        release()
        raise


def _of_pairs(
    pairs: Iterable[object],
    shard_bytes: int,
    layouts: LayoutCache,
    writing: _Writing,
) -> Source:
    pairs = list(pairs)
    if writing.writer is not None and (writing.together or any(map(_is_part, pairs))):
        return _of_boxes(pairs, shard_bytes, layouts, writing.writer())
    tensors = [wrap_pair(pair) for pair in pairs]
    seen: set[str] = set()
    for tensor in tensors:
        note_name(tensor.name, seen)
    return _of_tensors(tensors, shard_bytes, layouts)


def _is_part(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and is_sharded(pair[1])


def _of_boxes(
    pairs: Iterable[object], shard_bytes: int, layouts: LayoutCache, writer: SourceWriter
) -> Source:
    sources = [box_source(*named(pair), writer.number) for pair in pairs]
    seen: set[str] = set()
    for source in sources:
        note_name(source.whole.name, seen)
    parts = [tensor for source in sources for _, tensor in source.boxes]
    if writer.count == 1:
        _check_whole_here(sources)
        whole = [replace(s.boxes[0][1], name=s.whole.name) for s in sources]
        return _of_tensors(whole, shard_bytes, layouts)
    # Each message, order and reply is of one writer's part of one shard.
    shard_bytes *= min(writer.count, _PARTS)
    shards, layout = layouts.shards_of([source.whole for source in sources], shard_bytes)
    made = box_shards(shards, sources)
    sent = tuple(local.bytes for shard in made for local in shard.sent)
    return Source(made, layout, sent, writer=writer, ready=queued_work(parts))


def _check_whole_here(sources: Sequence[BoxSource]) -> None:
    for source in sources:
        if [box.sizes for box, _ in source.boxes] != [source.whole.shape]:
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"tensor {source.whole.name!r} is held in part, and this is the only process that "
                "pushes; give writers= and have all of them push",
            )


def _of_tensors(tensors: Sequence[SourceTensor], shard_bytes: int, layouts: LayoutCache) -> Source:
    shards, layout = layouts.shards_of(tensors, shard_bytes)
    return Source(shards, layout, tuple(tensors), ready=queued_work(tensors))


def _of_files(path: Path, shard_bytes: int, layouts: LayoutCache) -> Source:
    files = _files(path)
    shards = [file_shard(file, number) for number, file in enumerate(files)]
    tensors = assembled(list(zip(files, shards, strict=True)))
    if tensors is not None:
        return _of_tensors(tensors, shard_bytes, layouts)
    with typed_errors():
        layout = check_version([s.entry for s in shards], [s.tensors for s in shards])
    pairs = zip(files, shards, strict=True)
    return Source(shards, layout, tuple(t for pair in pairs for t in file_tensors(*pair)))


def _files(path: Path) -> list[Path]:
    files = [path]
    if path.is_dir():
        index = path / _INDEX
        files = _indexed(index) if index.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise refuse(
                Reason.REQUEST_INVALID,
                f"there is no .safetensors file in {path}; give the folder that holds them",
            )
    return files


def _indexed(index: Path) -> list[Path]:
    # A folder may hold the same weights a second time (consolidated.safetensors): the index tells
    # which files belong together.
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
        inside = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        inside = False
    if not inside:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"{index} is no index of safetensors files; correct it or remove it",
        )
    return [index.parent / name for name in names]
