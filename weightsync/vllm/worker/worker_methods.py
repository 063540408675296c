"""The worker methods that `collective_rpc` calls by name on every rank.

They never raise: vLLM leaves the other ranks' replies of a failed call in its queues, and every
later call then reads a stale one. Each takes one dict and returns one, of JSON-plain values.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from weightsync import failpoints
from weightsync.vllm.apply.device_ops import DeviceOps
from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.cuda.cuda_ops import CudaOps
from weightsync.vllm.draft import draft_of
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.model_parts import ModelWithDraft
from weightsync.vllm.shadow.shadow_transform import shadow_of
from weightsync.vllm.worker.between_steps import switch, tensor_rank_group
from weightsync.vllm.worker.live_memory import facts_of
from weightsync.vllm.worker.rank import Rank
from weightsync.vllm.worker.rank_job import RefusedCallError, refused
from weightsync.vllm.worker_protocol import METHODS, rank_name, rank_names

logger = logging.getLogger(__name__)

#: What a rank does of a call: takes vLLM's worker and the arguments, and returns the answer.
WorkerMethod = Callable[[Any, "Mapping[str, Any]"], dict[str, Any]]

_ATTRIBUTE = "_weightsync_rank"


def _rank_of(worker: Any) -> Rank:
    found = getattr(worker, _ATTRIBUTE, None)
    if found is None:
        model = _model_of(worker)
        name = rank_name(worker.parallel_config, worker.rank)
        settings = EngineSettings.load()
        ranks = len(rank_names(worker.parallel_config))
        ops = _device_ops(worker, settings, ranks)
        room = _host_room(settings)
        make_shadow = partial(shadow_of, worker, model, name, ops, ranks, room)
        alone = not _divides_tensors(worker.parallel_config)
        socket = settings.segment_socket
        found = Rank(model, worker.device, name, socket, ops, ranks, make_shadow, alone=alone)
        setattr(worker, _ATTRIBUTE, found)
        _spare_collector()
    assert isinstance(found, Rank)  # noqa: S101 - nobody else uses the name
    return found


def _spare_collector() -> None:
    """Have the garbage collector leave alone what exists now, as vLLM's engine core does.

    Else reading a version of tens of thousands of tensors stops all threads for 0.2 to 0.5 s.
    """
    gc.collect()
    gc.freeze()


def _model_of(worker: Any) -> torch.nn.Module:
    model: torch.nn.Module = worker.model_runner.get_model()
    draft = draft_of(worker)
    return ModelWithDraft(model, *draft) if draft else model


def _divides_tensors(parallel: Any) -> bool:
    """Whether ranks load different tensors, and not only different parts of each."""
    experts = bool(getattr(parallel, "enable_expert_parallel", False))
    return experts or parallel.pipeline_parallel_size > 1


def _device_ops(worker: Any, settings: EngineSettings, ranks: int) -> DeviceOps:
    if worker.device.type != "cuda":
        return HostOps(worker.device, ranks)
    cache = getattr(getattr(worker, "vllm_config", None), "cache_config", None)
    share = float(getattr(cache, "gpu_memory_utilization", 1.0))
    return CudaOps(worker.device, settings.device_room, share, ranks)


def _host_room(settings: EngineSettings) -> int | None:
    if settings.device_room is None:
        return None
    return settings.device_room.of(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _with_config(worker: Any) -> contextlib.AbstractContextManager[Any]:
    # Some loaders ask for the current config, which vLLM sets only while it loads a model.
    from vllm.config import set_current_vllm_config

    context: contextlib.AbstractContextManager[Any] = set_current_vllm_config(worker.vllm_config)
    return context


def _stand(worker: Any) -> None:
    """Wait until nothing runs in the model: worker calls come between two steps."""
    if worker.device.type == "cuda":
        # vLLM sends the next step before it has the outcome of the last one: let it end first.
        torch.cuda.synchronize(worker.device)


def _call(word: str, worker: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    return _falsified(word, _answer(word, worker, args))


def _answer(word: str, worker: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    if word in ("switch", "check"):
        _stand(worker)
    if word == "switch":
        return switch(_rank_of(worker), args, tensor_rank_group())
    if word == "attach":
        return _rank_of(worker).attach(args, facts_of(worker))
    loads = word in ("capture", "check")
    context = _with_config(worker) if loads else contextlib.nullcontext()
    with context:
        reply: dict[str, Any] = getattr(_rank_of(worker), word)(args)
    return reply


def _falsified(word: str, reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply, or what a failpoint makes of it: FIELD or FIELD=VALUE is another."""
    lie = None
    if word in ("commit", "switch"):
        lie = failpoints.lie("worker.reply")
    elif word == "state":
        lie = failpoints.lie("worker.tell")
    if lie is None:
        return reply
    field, _, value = lie.partition("=")
    return reply | {field: value or "falsified"}


def _method(name: str, run: WorkerMethod) -> Callable[..., dict[str, Any]]:
    def method(self: Any, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
        # The name of the call goes back with the reply: vLLM pairs them by order only.
        call = (args or {}).get("call", "")
        reply: dict[str, Any] = {"ok": True, "rank": "", "call": call, "error": ""}
        try:
            reply["rank"] = rank_name(self.parallel_config, self.rank)
            return reply | run(self, args or {})
        except PlanRefusedError as error:
            return reply | {"ok": False} | refused(error)
        except RefusedCallError as error:
            return reply | {"ok": False, "error": str(error)}
        except Exception as error:
            logger.exception("%s failed", name)
            return reply | {"ok": False, "error": f"{type(error).__name__}: {error}"}

    method.__name__ = name
    method.__doc__ = "Never raises."
    return method


def register_methods(worker_class: type, methods: Mapping[str, WorkerMethod]) -> None:
    """Put methods on vLLM's worker base class, which raise nothing there; once is enough."""
    for name, run in methods.items():
        if not hasattr(worker_class, name):
            setattr(worker_class, name, _method(name, run))


def install(worker_class: type) -> None:
    register_methods(worker_class, {name: partial(_call, word) for name, word in METHODS.items()})
