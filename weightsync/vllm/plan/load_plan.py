"""The load plan: which part of which checkpoint tensor lies where in the live parameters.

A plan holds no tensor. It is captured from the model's own weight loaders (`capture`), so there is
no table per architecture, and it is valid for one signature. One file, because a plan's document
and its copies are checked against each other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch

from weightsync.model.layout import unlike
from weightsync.model.manifest import Layout, TensorEntry


class PlanRefusedError(Exception):
    """A version that cannot be written into this model.

    `cause` is one sentence, and `names` are the tensors or parameters at fault. `remedy` is what to
    do where nothing else writes the version; empty if the cause says it.
    """

    def __init__(self, cause: str, names: Iterable[str] = (), remedy: str = "") -> None:
        self.message = f"{cause}; {remedy}" if remedy else cause
        super().__init__(self.message)
        self.cause = cause
        self.remedy = remedy
        self.names = list(names)


@dataclass(frozen=True, slots=True)
class Strides:
    """A strided view in elements, relative to the first element of what it views."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Slice:
    """One copy that the loaders make, both sides of one shape; `cast`: it changes the dtype."""

    tensor: str
    param: str
    source: Strides
    target: Strides
    cast: bool


@dataclass(frozen=True)
class LoadPlan:
    """All copies that load one layout into this rank, in the order of the loaders.

    Attributes:
        signature: Digest of names, dtypes and shapes of the layout.
        exchanged: Parameters whose halves vLLM exchanged after loading; the slices write them so.
        same_as: For every tensor that no rank loads, the loaded one that it repeated in the
            adopted checkpoint (a tied output head), or ""; filled by the adoption.
        kept: Digests of the former, as the adopted checkpoint has them.
        unread: Names of those of which loading that checkpoint is known to have read nothing.
        draft: Parameters that only a draft has; a version may leave out all of them, or none.
        shared: Tensors of a draft that vLLM serves from its target, each with the target's tensor
            that it must repeat; "" where that is not one tensor.
        repeats: Tensors that another one is loaded over, each with that one, which it must repeat.
    """

    signature: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    slices: tuple[Slice, ...]
    param_dtypes: Mapping[str, str]
    exchanged: frozenset[str] = frozenset()
    same_as: dict[str, str] = field(default_factory=dict)
    kept: dict[str, bytes] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    draft: frozenset[str] = frozenset()
    shared: Mapping[str, str] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> frozenset[str]:
        return frozenset(item.tensor for item in self.slices)

    @cached_property
    def drafted(self) -> frozenset[str]:
        """Names of the tensors from which what only the draft has is loaded."""
        return frozenset(item.tensor for item in self.slices if item.param in self.draft)

    def brings_draft(self, names: Collection[str]) -> bool:
        return not self.drafted.isdisjoint(names)

    def asked_of(self, names: Collection[str]) -> LoadPlan:
        """Return what a version with these tensors must bring, by this plan, the adopted one."""
        if not self.draft or self.brings_draft(names):
            return self
        slices = tuple(item for item in self.slices if item.param not in self.draft)
        return replace(self, slices=slices, draft=frozenset())

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors of the layout as a reader of it sees them, wherever their bytes lie."""
        kinds = self.tensors.items()
        return tuple(TensorEntry(name, dtype, shape, 0, 0, 0) for name, (dtype, shape) in kinds)

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Names of the tensors that the loaders did nothing with; other ranks may load them."""
        return tuple(name for name in self.tensors if name not in self.loaded)

    @cached_property
    def written(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for item in self.slices:
            counts[item.param] += item.target.numel
        return counts

    @cached_property
    def whole(self) -> frozenset[int]:
        """Slices that are a whole tensor, byte for byte."""
        return frozenset(
            index
            for index, item in enumerate(self.slices)
            if not item.cast
            and item.source.contiguous
            and item.source.numel == math.prod(self.tensors[item.tensor][1])
        )

    def accept_ignored(
        self, digests: Mapping[str, bytes], base: LoadPlan, unloaded: frozenset[str]
    ) -> None:
        """Refuse, by name, tensors whose content would get lost.

        A tensor that no rank loads is fine when it repeats a loaded one (a tied output head), or
        when the adopted checkpoint, that of `base`, had it too and vLLM read nothing of it there;
        where that is not known, when it is as it was there. So is one of a draft that vLLM serves
        from its target. `unloaded` has those of `ignored` that no other rank of the engine loads
        either.
        """
        other = [
            name
            for name, same in self.shared.items()
            if digests[name] != digests.get(same, b"") and base.same_as.get(name) != ""
        ]
        if other:
            msg = (
                "make these tensors of the draft equal to those of its target, or leave them "
                "out: vLLM serves them from the target, and they differ"
            )
            raise PlanRefusedError(msg, other)
        unlike = [n for n, same in self.repeats.items() if digests[n] != digests[same]]
        if unlike:
            msg = (
                "leave these tensors out, or make them equal: the model loads them over others, "
                "and their content differs"
            )
            raise PlanRefusedError(msg, unlike)
        loaded = {digests[name] for name in self.tensors if name not in unloaded}
        alone = [
            name
            for name in self.tensors
            if name in unloaded and digests[name] not in loaded and name not in self.shared
        ]
        lost = [name for name in alone if base.same_as.get(name) != ""]
        if lost:
            msg = (
                "the model loads nothing from these tensors and their content is in no other one; "
                "leave them out, or tie them as in the engine's checkpoint"
            )
            raise PlanRefusedError(msg, lost)
        changed = [
            name
            for name in alone
            if name not in base.unread and digests[name] != base.kept.get(name)
        ]
        if changed:
            msg = (
                "leave these tensors out, or send them as in the engine's checkpoint: they "
                "differ from it, and an update in place cannot write them"
            )
            raise PlanRefusedError(msg, changed)

    def note_ignored(
        self,
        digests: Mapping[str, bytes],
        unloaded: frozenset[str],
        uniform: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Remember, at adoption, which tensors that no rank loads repeat loaded ones.

        One that is `uniform` repeats nothing: norms and scales are alike by chance.
        """
        for name, same in self.shared.items():
            if same and name not in self.same_as:
                # VLLM has compared the two, unless they differ: then it serves the target's anyhow.
                self.same_as[name] = same if digests[name] == digests.get(same) else ""
        loaded = {
            (digests[name], kind): name
            for name, kind in self.tensors.items()
            if name not in unloaded
        }
        for name in unloaded.difference(self.same_as):
            twin = loaded.get((digests[name], self.tensors[name]), "")
            self.same_as[name] = "" if twin and uniform(name) else twin
        for name in unloaded:
            # Those of the first one: others of its layout come by here too.
            self.kept.setdefault(name, digests[name])


def check_against_base(layout: Layout, base: LoadPlan, *, alone: bool) -> None:
    """Refuse, without a capture, a layout that cannot fit that of `base`.

    Passing proves nothing: the capture decides. `alone` says whether no other rank loads what this
    one does not.
    """
    names = {tensor.name for tensor in layout.tensors}
    base = base.asked_of(names)
    known = check_known(layout, base)
    missing = not base.loaded <= names
    if missing and len(known) == len(layout.tensors):
        check_lacks_none(layout, base)
    extra = [t.name for t in layout.tensors if t.name not in base.tensors]
    lost = placeless(layout, base, extra) if alone and not missing else []
    if lost:
        raise PlanRefusedError("leave them out: the model does not have these tensors", lost)


def check_lacks_none(layout: Layout, base: LoadPlan) -> None:
    """Refuse a layout that lacks loaded tensors, unless it has unknown ones.

    Those may stand for what is absent: the capture decides.
    """
    names = {tensor.name for tensor in layout.tensors}
    missing = base.asked_of(names).loaded - names
    if missing and names <= base.tensors.keys():
        msg = "push all of them: the version lacks these tensors of the model"
        raise PlanRefusedError(msg, sorted(missing))


def check_known(layout: Layout, base: LoadPlan) -> list[TensorEntry]:
    """Return the tensors that the adopted layout has too; refuse any of another shape or dtype."""
    known = [t for t in layout.tensors if t.name in base.tensors]
    shapes = [t for t in known if t.shape != base.tensors[t.name][1]]
    if shapes:
        first = shapes[0]
        clause = unlike(first.name, (first.dtype, first.shape), base.tensors[first.name])
        msg = f"push its model: {clause}; a different shape than in the engine's checkpoint"
        raise PlanRefusedError(msg, [t.name for t in shapes])
    params = {item.tensor: base.param_dtypes[item.param] for item in base.slices}
    dtypes = [
        t
        for t in known
        if t.name in params and t.dtype not in (base.tensors[t.name][0], params[t.name])
    ]
    if dtypes:
        first = dtypes[0]
        own, shape = base.tensors[first.name]
        taken = " or ".join(dict.fromkeys((own, params[first.name])))
        clause = unlike(first.name, (first.dtype, first.shape), (taken, shape))
        msg = (
            f"convert before the push: {clause}; neither the dtype of the engine's checkpoint nor "
            "that of its parameters"
        )
        raise PlanRefusedError(msg, [t.name for t in dtypes])
    return known


def placeless(layout: Layout, base: LoadPlan, unplaced: Iterable[str]) -> list[str]:
    """Return the tensors of `unplaced` whose shape is of none that this rank loads.

    A tensor that repeats another one has its shape; the digests decide later.
    """
    loaded = {base.tensors[name][1] for name in base.loaded}
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    return [name for name in unplaced if shapes[name] not in loaded]


def check_coverage(plan: LoadPlan, base: LoadPlan) -> None:
    """Refuse a plan that writes less of a parameter than the adopted checkpoint did."""
    base = base.asked_of(plan.tensors)
    partly = [name for name, count in base.written.items() if plan.written.get(name, 0) < count]
    if partly:
        msg = "the version leaves parts of these parameters unwritten; push all of the model"
        raise PlanRefusedError(msg, partly)
    more = [name for name, count in plan.written.items() if count > base.written.get(name, 0)]
    if more:
        msg = (
            "the version writes more of these parameters than the engine's checkpoint did; "
            "push the same model"
        )
        raise PlanRefusedError(msg, more)


def without_repeats(
    slices: Sequence[Slice], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[list[Slice], dict[str, str]]:
    """Return the copies without those of a tensor that another one is loaded over, and these two.

    A tied head that was written out as well is loaded into one parameter with the embeddings. The
    one that bears its name stays; the other must repeat it in every version.
    """
    copies: dict[str, list[tuple[str, Strides, Strides, bool]]] = {}
    for item in slices:
        copies.setdefault(item.tensor, []).append((item.param, item.source, item.target, item.cast))
    alike: dict[object, list[str]] = {}
    for name, places in copies.items():
        alike.setdefault((tensors[name], tuple(places)), []).append(name)
    repeats: dict[str, str] = {}
    for names in alike.values():
        params = {param for param, *_ in copies[names[0]]}
        for stays in params.intersection(names):
            repeats |= {name: stays for name in names if name != stays}
    return [item for item in slices if item.tensor not in repeats], repeats


def check_overlap(slices: Iterable[Slice], sizes: Mapping[str, int]) -> None:
    """Refuse copies that overwrite each other: the result would depend on their order."""
    by_param: dict[str, list[Slice]] = {}
    for item in slices:
        if item.target.numel:
            by_param.setdefault(item.param, []).append(item)
    for param, group in by_param.items():
        if all(item.target.contiguous for item in group):
            overlapping = _overlapping_ranges(group)
        else:
            overlapping = _overlapping_views(group, sizes[param])
        if overlapping:
            msg = f"these tensors are loaded into the same place of {param}; push one of them"
            raise PlanRefusedError(msg, overlapping)


def _overlapping_ranges(group: list[Slice]) -> list[str]:
    ordered = sorted(group, key=lambda item: item.target.offset)
    for left, right in pairwise(ordered):
        if left.target.offset + left.target.numel > right.target.offset:
            return [left.tensor, right.tensor]
    return []


def _overlapping_views(group: list[Slice], size: int) -> list[str]:
    taken = torch.zeros(size, dtype=torch.bool)
    for item in group:
        view = taken.as_strided(item.target.shape, item.target.stride, item.target.offset)
        if bool(view.any()):
            return [other.tensor for other in group]
        view.fill_(1)
    return []


def row_major(offset: int, shape: Sequence[int]) -> Strides:
    stride, size = [], 1
    for length in reversed(shape):
        stride.append(size)
        size *= length
    return Strides(offset, tuple(shape), tuple(reversed(stride)))


def merge_neighbours(plan: LoadPlan) -> LoadPlan:
    """Return a plan that makes the same copies with as few slices as possible.

    Each copy costs as much time as a few kilobytes of it.
    """
    by_param: dict[str, list[Slice]] = defaultdict(list)
    for item in plan.slices:
        by_param[item.param].append(item)
    slices = tuple(merged for group in by_param.values() for merged in _merged(group))
    return plan if len(slices) == len(plan.slices) else replace(plan, slices=slices)


def _merged(group: Sequence[Slice]) -> Iterator[Slice]:
    run: list[Slice] = []
    for item in sorted(group, key=lambda item: item.target.offset):
        if run and not _follows(run, item):
            yield _as_one(run)
            run = []
        run.append(item)
    if run:
        yield _as_one(run)


def _follows(run: Sequence[Slice], item: Slice) -> bool:
    first, last = run[0], run[-1]
    if (item.tensor, item.cast) != (last.tensor, last.cast):
        return False
    if (item.source.shape, item.source.stride) != (last.source.shape, last.source.stride):
        return False
    if not (item.target.numel and last.target.contiguous and item.target.contiguous):
        return False
    step = item.source.offset - last.source.offset
    regular = len(run) == 1 or step == run[1].source.offset - first.source.offset
    return step > 0 and regular and item.target.offset == last.target.offset + last.target.numel


def _as_one(run: Sequence[Slice]) -> Slice:
    first = run[0]
    if len(run) == 1:
        return first
    step = run[1].source.offset - first.source.offset
    source = _simplified(
        Strides(first.source.offset, (len(run), *first.source.shape), (step, *first.source.stride))
    )
    return replace(first, source=source, target=row_major(first.target.offset, source.shape))


def _simplified(view: Strides) -> Strides:
    shape: list[int] = []
    stride: list[int] = []
    for length, step in zip(view.shape, view.stride, strict=True):
        if length == 1:
            continue
        if shape and stride[-1] == length * step:
            shape[-1] *= length
            stride[-1] = step
        else:
            shape.append(length)
            stride.append(step)
    return Strides(view.offset, tuple(shape), tuple(stride))


@dataclass(frozen=True)
class PitchedRows:
    """As many rows of as many bytes on both sides; widths and pitches are in bytes."""

    count: int
    width: int
    target_pitch: int
    source_pitch: int


def rows_of(target: torch.Tensor, source: torch.Tensor) -> PitchedRows | None:
    """Return two views of one shape and one width of elements as rows; None: they are no rows."""
    size = source.element_size()
    # From the innermost dimension outwards: [elements, stride of target, stride of source].
    found: list[list[int]] = [[1, 1, 1]]
    for dim in reversed(range(source.dim())):
        length = source.shape[dim]
        if length == 1:
            continue
        to, of = target.stride(dim), source.stride(dim)
        inner = found[-1]
        if (to, of) == (inner[0] * inner[1], inner[0] * inner[2]):
            inner[0] *= length
        else:
            found.append([length, to, of])
    (width, _, _), *outer = found
    if len(outer) > 1:
        return None
    ((count, to, of),) = outer or [[1, width, width]]
    if to < width or of < width:
        return None
    return PitchedRows(count, width * size, to * size, of * size)


def chunks(
    target: torch.Tensor, source: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both sides cut alike, in at most `limit` bytes of the source, gaps included."""
    if source.numel() == 0:
        return
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.reshape(-1), source.reshape(-1)
    while source.dim() and source.shape[0] == 1:
        target, source = target[0], source[0]
    if not source.dim():
        yield target, source
        return
    span = max(source.numel() // source.shape[0], abs(source.stride(0))) * source.element_size()
    if span > limit and source.dim() > 1:
        for to, of in zip(target, source, strict=True):
            yield from chunks(to, of, limit)
        return
    count = max(1, limit // span)
    yield from zip(torch.split(target, count), torch.split(source, count), strict=True)
