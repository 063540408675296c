"""Every name of vLLM that `weightsync.vllm` uses, and how to look names up without importing."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FIRST_RELEASE", "LAST_RELEASE", "SYMBOLS", "Symbol", "found", "modules"]

#: The releases that we are written for.
FIRST_RELEASE = (0, 26)
LAST_RELEASE = (0, 33)


@dataclass(frozen=True)
class Symbol:
    """One thing that we use.

    Attributes:
        places: `module:Name.attribute`; any one of them is enough.
        needed: False for what we use only where it exists.
        used_for: Why.
    """

    places: tuple[str, ...]
    used_for: str
    needed: bool = True


def _each(prefix: str, names: str, used_for: str) -> list[Symbol]:
    return [Symbol((f"{prefix}.{name}",), used_for) for name in names.split()]


_GROUPS = "vllm.distributed.parallel_state"
_LAUNCH = "vllm.entrypoints.launchers"
_OPENAI = "vllm.entrypoints.openai"
_CLI_HOMES = ("vllm.entrypoints.common", _LAUNCH, _OPENAI)
_HTTP_FLAGS = (
    "host",
    "port",
    "uds",
    "uvicorn_log_level",
    "disable_uvicorn_access_log",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
)
_TRANSFER = "vllm.distributed.weight_transfer"
_LLM = "vllm.v1.engine.async_llm:AsyncLLM"

SYMBOLS: tuple[Symbol, ...] = (
    # plugin, worker and rank
    *_each(
        "vllm.v1.worker.worker_base:WorkerBase",
        "vllm_config parallel_config rank device model_runner",
        "worker methods",
    ),
    Symbol(
        ("vllm.v1.worker.worker_base:WorkerWrapperBase#load_general_plugins()",),
        "plugins run in workers",
    ),
    Symbol(("vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",), "the rank's model"),
    Symbol(("vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model",), "the same, runner V2"),
    Symbol(("vllm.config:set_current_vllm_config",), "capture"),
    Symbol(
        ("vllm.model_executor.model_loader.base_loader:initialize_model",),
        "seeing what loading makes of a model",
    ),
    Symbol(
        ("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",),
        "seeing what loading makes of a model",
    ),
    Symbol(("vllm.config.parallel:ParallelConfig.enable_eplb",), "refusals"),
    *_each(
        "vllm.config.vllm:VllmConfig", "kv_transfer_config ec_transfer_config", "refusals of caches"
    ),
    *_each(
        "vllm.config.kv_transfer:KVTransferConfig",
        "kv_connector kv_connector_extra_config",
        "refusals of caches",
    ),
    *_each(
        "vllm.config.ec_transfer:ECTransferConfig",
        "ec_connector ec_connector_extra_config",
        "refusals of caches",
    ),
    Symbol(
        ("vllm.config.ec_manager_config:EncoderCacheManagerConfig.encoder_cache_manager_cls",),
        "refusals of caches; releases before have no such manager",
        needed=False,
    ),
    Symbol(("vllm.platforms:current_platform",), "CPU switch"),
    Symbol(("vllm.platforms.interface:Platform.is_cpu",), "CPU switch"),
    Symbol(("vllm._custom_ops:_supports_onednn",), "CPU switch"),
    Symbol(("vllm.model_executor.layers.utils:check_cpu_sgl_kernel",), "CPU switch"),
    Symbol(
        (
            "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",
            "vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.check_grouped_gemm",
        ),
        "CPU switch, of experts; without it what they pack is refused",
        needed=False,
    ),
    Symbol(
        ("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm#layer.cpu_linear",),
        "finding repacked layers",
    ),
    # loaders
    Symbol(("vllm.v1.worker.gpu_worker:init_worker_distributed_environment",), "loaders"),
    Symbol(("vllm.v1.worker.workspace:init_workspace_manager",), "loaders"),
    Symbol(
        ("vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",),
        "loaders",
    ),
    Symbol(
        (f"{_GROUPS}:init_distributed_environment#get_distributed_init_method(",),
        "loaders of replicas that share experts",
    ),
    # adapter
    *_each(
        _LLM,
        "collective_rpc resume_generation is_sleeping sleep wake_up errored engine_core "
        "output_processor vllm_config renderer",
        "the adapter",
    ),
    Symbol((f"{_LLM}.update_weight_version",), "labels of versions", needed=False),
    Symbol((f"{_LLM}.release_kv_cache_memory",), "knowing what sleeps", needed=False),
    *_each(
        "vllm.v1.engine.core:EngineCore",
        "resume_scheduler sleep wake_up",
        "keeping others from starting it, and from having it sleep unseen",
    ),
    Symbol(
        (
            "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async",
            "vllm.v1.engine.core_client:AsyncMPClient.pause_generation_async",
        ),
        "pausing",
    ),
    Symbol(
        (
            "vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async",
            "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
        ),
        "answers of every engine core",
    ),
    Symbol(
        ("vllm.v1.engine.core_client:DPLBAsyncMPClient.call_utility_async",),
        "pauses, labels and resumes that reach every engine core",
    ),
    Symbol(("vllm.v1.engine.core_client:MPClient.core_engines",), "engine cores"),
    Symbol(
        ("vllm.v1.engine.output_processor:OutputProcessor.request_states",), "counting requests"
    ),
    # answers
    Symbol(
        ("vllm.v1.engine.output_processor:OutputProcessor.add_request",),
        "which requests an answer is made of",
    ),
    *_each(
        "vllm.v1.engine:EngineCoreRequest",
        "request_id pooling_params",
        "which requests an answer is made of",
    ),
    # keys apart by version
    *_each(
        "vllm.v1.engine.core:EngineCore",
        "scheduler request_block_hasher model_executor collective_rpc",
        "cache_lineage",
    ),
    *_each(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "running requests hash_block_size prev_step_scheduled_req_ids kv_cache_manager "
        "encoder_cache_manager reset_prefix_cache reset_encoder_cache",
        "cache_lineage",
    ),
    *_each(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "coordinator get_computed_blocks reset_prefix_cache",
        "cache_lineage",
    ),
    *_each(
        "vllm.v1.request:Request",
        "block_hashes update_block_hashes cache_salt num_computed_tokens mm_features",
        "cache_lineage",
    ),
    Symbol(
        ("vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.num_cached_block",),
        "cache_lineage",
    ),
    Symbol(
        ("vllm.v1.core.encoder_cache_manager:EncoderCacheManager.get_cached_input_ids",),
        "cache_lineage",
    ),
    Symbol(
        ("vllm.v1.engine.output_processor:RequestState.weight_version_starts",),
        "versions of an answer; without it all that were live meanwhile",
        needed=False,
    ),
    Symbol(
        (
            "vllm.renderers.base:BaseRenderer.clear_mm_cache_async",
            "vllm.renderers.base:BaseRenderer.clear_mm_cache",
        ),
        "clearing the multimodal cache",
    ),
    *_each(
        "vllm.config.vllm:VllmConfig",
        "parallel_config model_config load_config lora_config speculative_config",
        "refusals",
    ),
    Symbol(("vllm.config.model:ModelConfig.served_model_name",), "metrics that join with vLLM's"),
    *_each(
        "vllm.config.parallel:ParallelConfig",
        "data_parallel_size data_parallel_rank tensor_parallel_size pipeline_parallel_size "
        "_api_process_count data_parallel_size_local data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_backend enable_expert_parallel enable_elastic_ep "
        "nnodes use_ray",
        "rank names and refusals",
    ),
    Symbol(
        ("vllm.config.parallel:ParallelConfig.data_parallel_index",), "rank names", needed=False
    ),
    Symbol(
        ("vllm.config.parallel:ParallelConfig.prefill_context_parallel_size",),
        "refusals",
        needed=False,
    ),
    *_each("vllm.config.model:ModelConfig", "model revision quantization", "checkpoint files"),
    *_each("vllm.config.model:ModelConfig", "hf_config enable_sleep_mode", "trainers that attach"),
    *_each("vllm.config.load:LoadConfig", "load_format download_dir", "checkpoint files"),
    # endpoint
    *_each(
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin",
        "name required_tasks attach_router init_state",
        "the bridge",
    ),
    Symbol(("vllm.plugins:load_endpoint_plugins",), "the bridge"),
    Symbol(("vllm.plugins:load_general_plugins",), "worker methods"),
    Symbol(("vllm:__version__",), "hello"),
    Symbol(("vllm.envs:VLLM_PLUGINS",), "finding out whether our plugin is allowed"),
    Symbol(("vllm.envs:VLLM_SERVER_DEV_MODE",), "warnings"),
    Symbol(("vllm.envs:VLLM_ALLOW_INSECURE_SERIALIZATION",), "warnings"),
    # transfer
    Symbol((f"{_TRANSFER}.factory:WeightTransferEngineFactory.register_engine",), "our backend"),
    Symbol(
        (f"{_TRANSFER}.factory:WeightTransferTrainerFactory.register_engine",), "our trainer side"
    ),
    Symbol((f"{_TRANSFER}.base:WeightTransferEngine",), "our backend"),
    *_each(
        f"{_TRANSFER}.base:WeightTransferEngine",
        "parse_init_info parse_update_info init_transfer_engine receive_weights shutdown",
        "transfers that are received",
    ),
    Symbol((f"{_TRANSFER}.factory:WeightTransferEngineFactory.create_engine",), "their wires"),
    *(
        Symbol((f"{_TRANSFER}.{home}_engine:{name}#self.model.load_weights",), "their tensors")
        for home, name in (("nccl", "NCCLWeightTransferEngine"), ("ipc", "IPCWeightTransferEngine"))
    ),
    Symbol(
        (f"{_TRANSFER}.nccl_engine:NCCLWeightTransferEngine#self.model_update_group.broadcast",),
        "refusing what a connection that ends would begin",
    ),
    Symbol(
        ("vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.destroy",),
        "aborting what a device waits for",
    ),
    Symbol(("vllm.v1.worker.gpu_worker:Worker#self.weight_transfer_engine",), "our engine"),
    *_each(
        _LLM,
        "init_weight_transfer_engine start_weight_update update_weights finish_weight_update",
        "verbs of a weight transfer",
    ),
    Symbol((f"{_LLM}.get_weight_version",), "verbs of a weight transfer", needed=False),
    # embedded
    Symbol(("vllm.utils.argparse_utils:FlexibleArgumentParser",), "embedded"),
    *(
        Symbol(tuple(f"{home}.cli_args:{name}" for home in _CLI_HOMES), "embedded")
        for name in ("make_arg_parser", "validate_parsed_serve_args")
    ),
    *(
        Symbol((f"{_LAUNCH}.{home}:{name}", f"{_OPENAI}.api_server:{name}"), "embedded")
        for home, name in (
            ("api_server.entry", "build_async_engine_client"),
            ("app", "build_app"),
            ("api_server.app_state", "init_app_state"),
        )
    ),
    *(
        Symbol(tuple(f"{home}.cli_args:FrontendArgs.{name}" for home in _CLI_HOMES), "embedded")
        for name in _HTTP_FLAGS
    ),
)


def modules() -> set[str]:
    """Return all modules that the table names."""
    return {place.partition(":")[0] for symbol in SYMBOLS for place in symbol.places}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those inside if, try and with."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _statements(getattr(statement, part, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _targets(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def _attributes(node: ast.ClassDef, tree: ast.Module) -> set[str]:
    names = {name for statement in _statements(node.body) for name in _targets(statement)}
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            names.add(inner.attr)
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        for other in tree.body:
            if isinstance(other, ast.ClassDef) and other.name == name and other is not node:
                names |= _attributes(other, tree)
    return names


def found(place: str, source_of: Callable[[str], str | None]) -> bool:
    """Return whether a release has a symbol.

    Args:
        place: `module:Name`, `module:Class.attribute`, or `module:function#text in its source`.
        source_of: Returns the source of a module, None where there is none.
    """
    module, _, path = place.partition(":")
    source = source_of(module)
    if source is None:
        return False
    tree = ast.parse(source)
    path, _, text = path.partition("#")
    owner, _, attribute = path.partition(".")
    for statement in _statements(tree.body):
        if owner not in _targets(statement):
            continue
        if attribute:
            return isinstance(statement, ast.ClassDef) and attribute in _attributes(statement, tree)
        return text in (ast.get_source_segment(source, statement) or "")
    return False
