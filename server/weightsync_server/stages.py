"""Opens the parts of a server in stages, each on those before it; a stack ends them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.host_dirs import make_dir
from weightsync.log_lines import event
from weightsync.model.manifest import MAX_VERSION
from weightsync.shm.segment_socket import SegmentServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.extras import needing
from weightsync_server.attach import Attachments, InPlaceCalls
from weightsync_server.auth import PUSH_WEIGHTS, Endpoint
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.caller import UseCase
from weightsync_server.auth.listeners import Listeners
from weightsync_server.catalog.scrubber import Scrubber
from weightsync_server.catalog.version_events import ChainFolded
from weightsync_server.engine import Applier, EngineContext, JournalFile
from weightsync_server.engine.apply_history import ApplyHistory
from weightsync_server.engine.engine_set import engine_name
from weightsync_server.engine.journal import live_in_store
from weightsync_server.engine.served_engines import Engines, MakeWatcher
from weightsync_server.fleet_host.fleet_service import FleetNeeds, FleetService
from weightsync_server.http.extension_points import ExtraService, MakeHttpVerbs
from weightsync_server.http.http_app import HttpApi
from weightsync_server.http.http_calls import HttpCalls
from weightsync_server.http.http_server import MetricsEndpoint
from weightsync_server.http.known_hosts import KnownHosts
from weightsync_server.http.read_verbs import ReadVerbs
from weightsync_server.http.status_page import StatusPage
from weightsync_server.ingest.ingest_pool import IngestPool
from weightsync_server.invariants import InvariantMonitor, count_lost
from weightsync_server.model import Model, open_model
from weightsync_server.nodes import NodeServicer
from weightsync_server.ops.disk_watch import DiskWatch
from weightsync_server.ops.durable_files import StateLock
from weightsync_server.ops.logprob_gaps import LogprobGaps
from weightsync_server.ops.metrics import Metrics
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.traces import SpanMaker, refusing_variables
from weightsync_server.push import PushService, SameHostOffers, serve_same_host
from weightsync_server.replicate.start_follower import Replica
from weightsync_server.residency.segment_allocator import SegmentAllocator, SegmentBudget
from weightsync_server.rpc import (
    CHECK_HEALTH,
    PUSH,
    SERVING,
    Announcer,
    HealthServicer,
    PushHealth,
    add_calls,
    failpoint_calls,
)
from weightsync_server.rpc.status_interceptor import GuardInterceptor
from weightsync_server.settings import STORE, Settings
from weightsync_server.status import AppliesStatus, StatusSource
from weightsync_server.store import open_store, server_identity
from weightsync_server.store.protocol import Store
from weightsync_server.usecases.core import EngineBundle, ServerCore, VersionBundle
from weightsync_server.usecases.guard import CallGuard, RpcMetrics
from weightsync_server.usecases.methods import use_cases
from weightsync_server.usecases.rate_limits import RateLimits
from weightsync_server.workers.fetch.fetch_pool import FetcherPool
from weightsync_server.workers.fetch.gpu_copy import GpuFetchPool

logger = logging.getLogger(__name__)

#: How long the end of a server waits for a collector to take the last spans, seconds.
_LAST_SPANS_S = 2.0
_SERVICE = pb.DESCRIPTOR.services_by_name["WeightSync"]


@dataclass(frozen=True, slots=True)
class GroundBundle:
    """What all else stands on.

    Other parts ask `needs` and `replica` from the start; they are given a register and an origin
    later. `push_health` says in `health` whether pushes are let in.
    """

    settings: Settings
    listeners: Listeners
    metrics: Metrics
    fetchers: FetcherPool
    ingesters: IngestPool
    segments: SegmentServer
    identity: str
    store: Store
    journal: JournalFile
    health: HealthServicer
    push_health: PushHealth
    needs: FleetNeeds
    replica: Replica
    spans: SpanMaker | None


async def open_ground(settings: Settings, stack: contextlib.AsyncExitStack) -> GroundBundle:
    paths = settings.paths
    # Before anything is made: a file that is not right changes nothing.
    listeners = Listeners(settings.name, settings.listeners, settings.extra_endpoints)
    lock = StateLock(paths.state_dir)
    stack.callback(lock.close)
    metrics = Metrics(settings.name)
    fetchers = FetcherPool(settings.fetchers, on_restart=metrics.count_fetcher_restart)
    # Before any channel exists: children are spawned, gRPC does not survive a fork.
    await fetchers.start()
    stack.push_async_callback(fetchers.stop)
    spans = _open_spans(settings, metrics, stack)
    make_dir(paths.run_dir)
    segments = SegmentServer(paths.segment_socket)
    stack.callback(segments.close)
    with translate_os_errors("naming this server"):
        identity = server_identity(paths.state_dir)
    store = open_store(paths.store_url, identity)
    logger.info(
        "weightsync-server %s, model %s, store %s",
        __version__,
        settings.name,
        store.url,
        extra=event("server.starting", release=__version__, store=store.url),
    )
    with translate_os_errors("opening the journal"):
        lasting = store.url if store.durable else ""
        journal = JournalFile(paths.state_dir / "journal", lasting)
    stack.callback(journal.close)
    health = HealthServicer()
    for name in (PUSH, SERVING):
        await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    return GroundBundle(
        settings,
        listeners,
        metrics,
        fetchers,
        IngestPool(settings, metrics),
        segments,
        identity,
        store,
        journal,
        health,
        PushHealth(health),
        FleetNeeds(settings.fleet.fleet),
        Replica(),
        spans,
    )


def _open_spans(
    settings: Settings, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> SpanMaker | None:
    """Return what sends spans, the last ones when the stack ends; None: traces are off."""
    if not settings.traces:
        return None
    with needing("--traces"), refusing_variables():
        from weightsync_server.ops.otlp import OtlpSpans
    engines = ",".join(map(engine_name, settings.engines.names(settings.paths.run_dir)))
    facts = {"gen_ai.request.model": settings.name, "weightsync.engine": engines}
    spans = OtlpSpans(facts, metrics.count_dropped_spans)
    stack.push_async_callback(spans.close, min(_LAST_SPANS_S, settings.stop_timeout_s / 4))
    return spans


async def open_versions(ground: GroundBundle, stack: contextlib.AsyncExitStack) -> VersionBundle:
    model = await _open_model(ground, stack)
    model.segments.mappers.append(ground.ingesters.forget)
    pushes = await _open_pushes(ground, model, stack)
    same_host = _serve_same_host(ground, model, pushes, stack)
    disks = _watch_disks(ground, stack)
    origin = ground.settings.replica.url
    logprobs = LogprobGaps(ground.settings.name, ground.metrics.registry)
    endpoints = ground.ingesters.endpoints
    return VersionBundle(model, pushes, disks, logprobs, same_host, endpoints, origin)


async def _open_model(ground: GroundBundle, stack: contextlib.AsyncExitStack) -> Model:
    settings, store, metrics = ground.settings, ground.store, ground.metrics
    budget = SegmentBudget(settings.memory_bytes)
    records = await store.open()
    model = await open_model(
        settings.name,
        store,
        ground.fetchers,
        SegmentAllocator(budget, ground.segments, ground.fetchers),
        settings.model,
        records,
        ground.needs.contents,
        lambda: ground.replica.follower,
    )
    model.table.refused.open(settings.paths.state_dir / "refused.json")
    known = {record.version for record in model.table.list()}
    for version in live_in_store(ground.journal):
        count_lost(store, known, version, metrics)
    stack.push_async_callback(model.close)
    model.events.on(ChainFolded, lambda _: metrics.deltas.count_fold())
    return model


async def _open_pushes(
    ground: GroundBundle, model: Model, stack: contextlib.AsyncExitStack
) -> PushService:
    settings, store = ground.settings, ground.store
    limits = settings.push
    if settings.replica.url:
        # An origin has decided already which number its version gets.
        limits = replace(limits, max_version_jump=MAX_VERSION)
    pushes = PushService(model, limits=limits, meters=ground.metrics, spans=ground.spans)
    await pushes.restore()
    # An object store checks what it keeps by itself, and every byte read from it costs.
    if store.durable and store.local and settings.scrub_bytes_per_s:
        lock = model.materializer.lock
        scrubber = Scrubber(model.table, store, lock, settings.scrub_bytes_per_s)
        scrubbing = asyncio.create_task(scrubber.run())
        stack.callback(scrubbing.cancel)
    stack.push_async_callback(pushes.close)
    return pushes


def _serve_same_host(
    ground: GroundBundle, model: Model, pushes: PushService, stack: contextlib.AsyncExitStack
) -> SameHostOffers | None:
    settings = ground.settings
    if not settings.same_host:
        return None
    collector = GpuFetchPool(on_restart=ground.metrics.count_fetcher_restart)
    stack.push_async_callback(collector.close)
    model.segments.mappers.append(collector.forget)
    silence_s = settings.push.stream_idle_timeout_s
    return serve_same_host(stack, pushes, settings.paths.trainers_socket, silence_s, collector)


def _watch_disks(ground: GroundBundle, stack: contextlib.AsyncExitStack) -> DiskWatch:
    def change(name: str, error: str) -> None:
        if name == STORE:
            ground.push_health.fill(bool(error))

    disks = DiskWatch(list(ground.settings.data_folders(ground.store.url)), change)
    disks.start()
    stack.callback(disks.stop)
    return disks


async def open_engines(
    ground: GroundBundle,
    versions: VersionBundle,
    stack: contextlib.AsyncExitStack,
    engine_args: Sequence[str],
    watchers: Sequence[MakeWatcher],
) -> EngineBundle:
    """Make the engines, not started, and what acts on them.

    `engine_args` are flags of vLLM, for the embedded engine. `watchers` make what watches each
    engine.
    """
    settings, segments, metrics = ground.settings, ground.segments, ground.metrics
    paths, model = settings.paths, versions.model
    fleet_name = settings.fleet.fleet
    history = ApplyHistory(settings.apply.history, ground.spans)
    await history.open(paths.state_dir / "applies.jsonl")
    # After the engines, which may end an apply until then.
    stack.push_async_callback(history.close)
    context = EngineContext(model, segments, metrics, settings.apply, fleet_name, history=history)
    engines = Engines(
        settings.engines,
        context,
        ground.journal,
        paths.own_sockets,
        Announcer(ground.health, SERVING).tell,
        watchers,
    )
    await engines.open(paths.segment_socket, engine_args, stack)
    applier = Applier(engines.set, context)
    attachments = Attachments(engines.set, paths.attach_socket, metrics)
    attachments.start(stack)
    transactions = InPlaceCalls(context, versions.pushes.give_up, attachments.blocks)
    fleet = None
    if fleet_name:
        coordination = ground.needs.open(settings.fleet, stack)
        if settings.engines.given != ["none"]:
            fleet = FleetService(
                settings.fleet,
                coordination,
                paths.state_dir / "fleet.json",
                engines.set,
                context,
                lambda: ground.replica.follower,
            )
    return EngineBundle(engines, applier, attachments, transactions, context.nodes, history, fleet)


def open_core(
    ground: GroundBundle,
    versions: VersionBundle,
    engines: EngineBundle,
    stack: contextlib.AsyncExitStack,
) -> ServerCore:
    """Have status, metrics and invariants read from all parts; return those that are asked."""
    model, pushes, metrics = versions.model, versions.pushes, ground.metrics
    known, pools = engines.served.set, (ground.fetchers, ground.ingesters)
    applies = AppliesStatus(model, engines.history, ground.settings.fleet.fleet)
    status = StatusSource(model, pushes, known, *pools, metrics, versions.disks, applies)
    status.track()
    census = InvariantMonitor(model, metrics, [metrics.bounds.overdue, pushes.overdue])
    census.start()
    stack.push_async_callback(census.stop)
    return ServerCore(versions, engines, status)


@dataclass(frozen=True, slots=True)
class DoorBundle:
    """Where callers come in. A `metrics_port` of 0, an `http` of None: there is no such address."""

    addresses: list[str]
    metrics_port: int
    http: HttpApi | None


async def open_doors(
    ground: GroundBundle,
    core: ServerCore,
    stack: contextlib.AsyncExitStack,
    services: Sequence[ExtraService],
    verbs: Callable[[], Sequence[MakeHttpVerbs]],
) -> DoorBundle:
    """Take every address; gRPC's are served from `listen` on.

    `verbs` returns what makes the verbs over HTTP, and is called where there is HTTP.
    """
    audit = Audit(ground.settings.name, ground.metrics)
    calls = audit.witnessed(_use_cases(core, services))
    guard = _guard(ground)
    addresses = _bind(ground, calls, guard, audit)
    calls[CHECK_HEALTH] = ground.health.check
    guarded = {path: guard.guarded(path, call) for path, call in calls.items()}
    # With the other addresses: one that is taken ends the start before the engine hears of it.
    metrics_port = _serve_metrics(ground, stack)
    http = _serve_verbs(ground, core, guarded, services, verbs, audit, stack)
    stack.push_async_callback(ground.ingesters.close)
    await ground.ingesters.serve(guarded[PUSH_WEIGHTS], audit)
    return DoorBundle(addresses, metrics_port, http)


def _use_cases(core: ServerCore, services: Sequence[ExtraService]) -> dict[str, UseCase]:
    calls = use_cases(core) | dict(NodeServicer(core.engines.nodes).use_cases())
    for service in services:
        its = service.use_cases()
        if both := sorted(calls.keys() & its.keys()):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"give one of the services another name: two serve {', '.join(both)}",
            )
        calls |= its
    return calls


def _guard(ground: GroundBundle) -> CallGuard:
    metrics = ground.metrics
    rpcs = RpcMetrics(metrics.registry)
    rpcs.initialize(_SERVICE)
    limits = RateLimits(ground.settings.calls)
    fault = partial(metrics.violate, "only_data")
    return CallGuard(rpcs, fault, limits, metrics.bounds, ground.spans)


def _bind(
    ground: GroundBundle, calls: Mapping[str, UseCase], guard: CallGuard, audit: Audit
) -> list[str]:
    settings, failing = ground.settings, failpoint_calls()

    def serve(server: grpc.aio.Server) -> None:
        add_calls({**calls, **failing}, server)
        health_pb2_grpc.add_HealthServicer_to_server(ground.health, server)
        if failing:
            logger.warning("failpoints are enabled; this server fails on purpose")
        if settings.reflection:
            names = (_SERVICE.full_name, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    interceptors = [GuardInterceptor(guard, settings.calls.reader_timeout_s)]
    bound = ground.listeners.bind(audit, interceptors, serve)
    return [endpoint.address for endpoint in bound]


def _serve_metrics(ground: GroundBundle, stack: contextlib.AsyncExitStack) -> int:
    address = ground.settings.metrics
    if not address:
        return 0
    host, _, port = address.rpartition(":")
    with _refusing_address(address, "--metrics"):
        hosts = KnownHosts(ground.settings.host_names)
        endpoint = MetricsEndpoint(ground.metrics.registry, host, int(port), hosts)
    stack.callback(endpoint.close)
    return endpoint.port


def _serve_verbs(
    ground: GroundBundle,
    core: ServerCore,
    guarded: Mapping[str, UseCase],
    services: Sequence[ExtraService],
    verbs: Callable[[], Sequence[MakeHttpVerbs]],
    audit: Audit,
    stack: contextlib.AsyncExitStack,
) -> HttpApi | None:
    settings, listeners = ground.settings, ground.listeners
    if not settings.http:
        return None
    host, _, port = settings.http.rpartition(":")
    admission = listeners.admission(Endpoint(settings.http), audit)
    hosts = KnownHosts(settings.host_names)
    calls = HttpCalls(guarded, admission, settings.fleet.fleet, hosts)
    fault = partial(ground.metrics.violate, "only_data")
    others = [ReadVerbs(calls, settings.name).verbs]
    others += [each.verbs(calls, settings.name) for each in services]
    page = StatusPage(calls, core)
    made = [make(calls, settings.name, settings.import_folders) for make in verbs()]
    tls = listeners.tls_context()
    with _refusing_address(settings.http, "--http"):
        api = HttpApi(host, int(port), tls, calls, [page, *made], others, fault)
    stack.push_async_callback(api.drain, 0.0)
    return api


@contextlib.contextmanager
def _refusing_address(address: str, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"{address} is in use, or is not an address that this server may use; choose another "
            f"with {flag}",
        ) from error


async def start_engines(
    ground: GroundBundle,
    core: ServerCore,
    stack: contextlib.AsyncExitStack,
    drain_s: Callable[[], float],
) -> None:
    """Connect to the engines; `drain_s` returns the seconds that are left when all is ended."""
    versions, engines = core.versions, core.engines
    fleet = engines.fleet
    # Before the engine: what it starts on may be a version of the origin.
    replica = ground.settings.replica
    await ground.replica.start(replica, versions.model, versions.pushes, ground.metrics, stack)
    if fleet is not None:
        # What its engines begin to serve is said by its fleet.
        await fleet.host.begin()
    engines.served.set.start()
    stack.push_async_callback(engines.served.set.stop)
    stop_s = ground.settings.stop_timeout_s
    stack.push_async_callback(_drain, engines, lambda: drain_s() + stop_s / 2)
    engines.served.start_watchers(engines.applier)
    stack.push_async_callback(engines.served.stop_watchers)
    if fleet is not None:
        stack.push_async_callback(fleet.leave)


async def _drain(engines: EngineBundle, longest_s: Callable[[], float]) -> None:
    # An apply that waits for long requests would outlive the drain; its pause is a lease, so
    # the engine goes on without this server. Half of the rest is for what comes after it.
    try:
        async with asyncio.timeout(longest_s()):
            await engines.transactions.drain()
            await engines.applier.drain()
    except TimeoutError:
        logger.warning(
            "an apply is still running after the drain timeout; the engine resumes by itself"
        )


async def listen(
    ground: GroundBundle,
    doors: DoorBundle,
    stack: contextlib.AsyncExitStack,
    drain_s: Callable[[], float],
) -> None:
    """Serve callers from now on; `drain_s` returns how long they get to finish at the end."""
    settings = ground.settings
    await ground.listeners.start()

    async def stop() -> None:
        await ground.health.enter_graceful_shutdown()
        seconds = drain_s()
        drains = [ground.listeners.close(seconds), ground.ingesters.drain(seconds)]
        if doors.http is not None:
            drains.append(doors.http.drain(seconds))
        await asyncio.gather(*drains)

    stack.push_async_callback(stop)
    if not settings.replica.url:
        ground.push_health.let_in()
    addresses = ", ".join(doors.addresses)
    logger.info("listening on %s", addresses, extra=event("server.listening", addresses=addresses))
    if doors.metrics_port:
        host = settings.metrics.rpartition(":")[0]
        logger.info("metrics on http://%s:%d/metrics", host, doors.metrics_port)
    if doors.http is not None:
        logger.info("status page on %s/", doors.http.url)
