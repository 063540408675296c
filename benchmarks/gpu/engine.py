"""A real vLLM with requests that run all the time, and a watch on its pauses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine import Load, set_environment
from benchmarks.gpu.results import Results
from benchmarks.servers import descendants
from weightsync.vllm.bridge.llm_calls import VllmCalls

__all__ = [
    "NO_MULTICAST",
    "Setup",
    "Site",
    "Stops",
    "engine_arguments",
    "generating",
    "plugins_on_path",
    "prepare_environment",
]

_LENGTH = 4000
_SMALL_LENGTH = 900
_ROOM = 96
_MEMORY_SHARE = 0.35
_CALM_S = 1.0
#: The lowest priority, by setpriority(2).
_LEAST = 19
#: NVLink multicast stays off unless the user turns it on: on some hosts a program that is killed
#: while it uses it, as a part that overruns is, leaves the GPUs unusable.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setup:
    """How vLLM is started.

    Attributes:
        folder: For sockets; a short path, because unix sockets allow 107 bytes.
        checkpoint: What it serves.
        device: `cuda` or `cpu`.
        tp: Tensor parallel size.
        requests: That run all the time.
        backend: Of vLLM's own weight transfer; empty: none.
        executor: vLLM's distributed_executor_backend.
        compiled: Whether vLLM compiles and captures as it does by default, in place of CUDA graphs
            for decoding alone.
        memory_share: vLLM's gpu_memory_utilization.
        arguments: More of vLLM's engine, by the names of AsyncEngineArgs.
        variables: More environment variables of vLLM.
    """

    folder: Path
    checkpoint: Path
    device: str
    tp: int = 1
    requests: int = 8
    backend: str = ""
    executor: str = "mp"
    compiled: bool = False
    memory_share: float = _MEMORY_SHARE
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Stops:
    """When the engine core was asked to pause and to resume, and when it had, by perf_counter.

    Attributes:
        pauses: Begin and end of each call.
        resumes: The same.
    """

    pauses: list[tuple[float, float]] = field(default_factory=list)
    resumes: list[tuple[float, float]] = field(default_factory=list)

    def watch(self, core: Any) -> None:
        """Note the calls of vLLM's client of the engine core from now on."""
        stop = next(
            name
            for name in ("pause_scheduler_async", "pause_generation_async")
            if hasattr(core, name)
        )
        setattr(core, stop, _timed(getattr(core, stop), self.pauses))
        core.resume_scheduler_async = _timed(core.resume_scheduler_async, self.resumes)


def _timed(
    call: Callable[..., Awaitable[Any]], times: list[tuple[float, float]]
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            times.append((begin, time.perf_counter()))

    return timed


@dataclass
class Site:
    """An engine that generates.

    Attributes:
        llm: vLLM's AsyncLLM.
        calls: What we call on it to pause and resume.
        load: The requests.
        stops: Its pauses.
        results: Where figures go.
    """

    llm: Any
    calls: VllmCalls
    load: Load
    stops: Stops
    results: Results

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the workers' extension; one answer per rank."""
        answers: list[Any] = await self.llm.collective_rpc(method, args=args)
        return answers

    async def settled(self, begin: float) -> dict[str, float]:
        """Return what a stop since `begin` did to the requests.

        Returns:
            `first_token`: when the first token after it came. `gap_s`: the longest time between
            two tokens of one request from `begin` on. `paused_s`: from the request to pause until
            vLLM had resumed. `paused_at`: when the request to pause came.
        """
        paused = self.stops.pauses[-1]
        assert paused[0] >= begin, "nothing has paused vLLM"
        # What runs may be asked to run once more, under another name.
        resumed = next(times for times in self.stops.resumes if times[0] >= paused[0])
        await self.load.spoken(max(resumed[1], time.perf_counter()))
        first = min(at for times in self.load.times for at in times if at > resumed[0])
        gaps = self.load.gaps(begin, resumed[1])
        return {
            "first_token": first,
            "gap_s": max(gaps),
            "paused_s": resumed[1] - paused[0],
            "paused_at": paused[0],
        }

    async def calm(self, seconds: float = _CALM_S) -> float:
        """Generate while nothing else goes on, note the gaps between tokens, return the median."""
        begin = time.perf_counter()
        await asyncio.sleep(seconds)
        end = time.perf_counter()
        # However long the last gap is, it counts as a whole.
        await self.load.spoken(end)
        gaps = self.load.gaps(begin, end)
        median = statistics.median(gaps)
        self.results.add(token_gap_p50_s=median, token_gap_max_s=max(gaps))
        return median


@contextlib.asynccontextmanager
async def generating(setup: Setup, results: Results) -> AsyncIterator[Site]:
    """Run vLLM, without requests yet, until the block ends; `site.load.running()` makes them."""
    results.say(f"vLLM starts (TP {setup.tp})")
    begin = time.perf_counter()
    llm = _start(setup)
    try:
        stops = Stops()
        stops.watch(llm.engine_core)
        results.facts["vllm_start_s"] = round(time.perf_counter() - begin, 1)
        results.say("vLLM runs")
        length = _LENGTH if setup.device == "cuda" else _SMALL_LENGTH
        yield Site(llm, VllmCalls(llm), Load(llm, setup.requests, length), stops, results)
    finally:
        results.say("vLLM stops")
        llm.shutdown()


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Return what vLLM's engine is started with, by the names of AsyncEngineArgs."""
    cuda = setup.device == "cuda"
    special: dict[str, Any] = {}
    if cuda:
        if not setup.compiled:
            # CUDA graphs for decoding, and no compilation.
            special["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        special["gpu_memory_utilization"] = setup.memory_share
    if setup.backend:
        special["weight_transfer_config"] = {"backend": setup.backend}
    return {
        "model": str(setup.checkpoint),
        "dtype": "bfloat16",
        "max_model_len": (_LENGTH if cuda else _SMALL_LENGTH) + _ROOM,
        "max_num_seqs": setup.requests,
        "enforce_eager": not cuda,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "tensor_parallel_size": setup.tp,
        "distributed_executor_backend": setup.executor,
        "worker_extension_cls": "benchmarks.gpu.extension.GpuProbe",
        **special,
        **setup.arguments,
    }


def _start(setup: Setup) -> Any:
    prepare_environment(setup)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    others = descendants(os.getpid())
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(setup)))
    if setup.device == "cpu":
        for pid in set(descendants(os.getpid())).difference(others):
            _give_way(pid)
    return llm


def _give_way(pid: int) -> None:
    """Let a process have only what others leave of the processor.

    On a CPU vLLM's processes wait for each other by sched_yield(2), a core each. Where there are
    two, a push of 0.1 s beside them took up to 52 s.
    """
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _LEAST)


def prepare_environment(setup: Setup) -> None:
    """Set what vLLM's processes inherit; call it before vllm is imported."""
    given = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    set_environment(str(setup.folder), plain=True)
    if given is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = given
    # vLLM's ipc backend takes handles from a trainer in no other form.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if setup.device == "cpu" and setup.tp > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(setup.tp)))
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    os.environ |= setup.variables
    plugins_on_path(setup.folder)


def plugins_on_path(folder: Path) -> None:
    """Let vLLM's processes find this checkout and our plugins where neither is installed."""
    import importlib.metadata
    import sys

    paths = [str(_ROOT / name) for name in (".", "server", "client")]
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "weightsync" not in group.names:
        info = folder / "meta" / "weightsync-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightsync\nVersion: 0\n")
        plugin = "[vllm.general_plugins]\nweightsync = weightsync.vllm.plugin:register\n"
        (info / "entry_points.txt").write_text(plugin)
        paths.append(str(info.parent))
        sys.path.append(str(info.parent))
    before = os.environ.get("PYTHONPATH", "")
    missing = [path for path in paths if path not in before.split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*missing, *([before] if before else [])])
