"""Why several processes that push one version contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason

if TYPE_CHECKING:
    from weightsync_client.errors import ClientError
    from weightsync_client.push.partial import NamedBase
    from weightsync_client.rpc.engine_layout import EngineLayout
    from weightsync_client.source.source import Source

__all__ = ["explain_base", "explain_cast", "explain_lacking"]


def explain_cast(error: ClientError, source: Source, now: EngineLayout | None) -> ClientError:
    """Return an error with the remedy where the engine changed while processes asked, or the same.

    Each process asks by itself which dtypes the engine has, so that one that came before an engine
    was proved sends others than one that came later. Whoever asks again sees that it has changed.

    Args:
        error: Of a push of several processes.
        source: What this one pushed, as it was cast.
        now: What the engine holds by now; None: it is not known.
    """
    then = source.casting.layout
    if error.reason is not Reason.LAYOUT_INVALID or source.layout is None:
        return error
    if now is None or now is then:
        return error
    known = then.kinds if then is not None else {}
    for tensor in source.layout.tensors:
        kind = now.kinds.get(tensor.name)
        if kind is not None and kind.dtype != tensor.dtype and kind != known.get(tensor.name):
            return _reworded(
                error,
                "push again: the engine became ready, or another one, after this process had asked "
                f"what it holds (tensor {tensor.name!r} was sent as {tensor.dtype} and is "
                f"{kind.dtype} there), and others may have asked later; {error.message}",
            )
    return error


def explain_base(error: ClientError, named: NamedBase, now: NamedBase) -> ClientError:
    """Return an error with the remedy where a base was rejected meanwhile, or the same one.

    Args:
        error: Of a push of some tensors by several processes.
        named: The base that this one named.
        now: What it would name by now.
    """
    if error.reason is not Reason.LAYOUT_INVALID or named == now:
        return error
    return _reworded(
        error,
        f"push again: version {named.version} was rejected after this process had named it as "
        f"base, and others may have come later; {error.message}",
    )


def explain_lacking(error: ClientError, source: Source, engine: EngineLayout | None) -> ClientError:
    """Return an error with the tensors that this process lacks, or the same one.

    The server knows sums of what each process would push, before any of them names a tensor.

    Args:
        error: Of a push of several processes.
        source: What this one pushes.
        engine: What the engine holds; None: it is not known.
    """
    if error.reason is not Reason.LAYOUT_INVALID or source.layout is None or engine is None:
        return error
    names = {tensor.name for tensor in source.layout.tensors}
    lacking = [name for name in engine.kinds if name not in names]
    if not lacking:
        return error
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return _reworded(
        error,
        f"{error.message}; this process did not push tensor {lacking[0]!r}{more} of the engine's",
    )


def _reworded(error: ClientError, message: str) -> ClientError:
    return type(error)(
        error.reason,
        message,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
        code=error.code,
    )
