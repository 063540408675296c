"""The wiring: makes the parts of a server, starts them in order and stops them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.attach import (
    Attachments,
    AttachMetrics,
    AttachServicer,
    InPlaceCalls,
    InPlaceVersions,
    OpenBlocks,
    add_attach_service,
)
from weightsync_server.auth import Endpoint
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.auth_interceptor import AuthorityInterceptor
from weightsync_server.auth.callers import caller_name
from weightsync_server.auth.listeners import Listeners
from weightsync_server.catalog.scrubber import Scrubber
from weightsync_server.engine import (
    Applier,
    HostParts,
    JournalFile,
    ModelParts,
)
from weightsync_server.engine.journal import live_in_store
from weightsync_server.engines import Engines
from weightsync_server.fleet_host.fleet_service import FleetService, watch_needs
from weightsync_server.follow.start import start_follower
from weightsync_server.gauges import track
from weightsync_server.http_api import HttpApi, InnerCalls
from weightsync_server.ingest.ingest_pool import IngestPool
from weightsync_server.invariants import InvariantMonitor, count_lost
from weightsync_server.model import open_model
from weightsync_server.nodes import NodeGroup, NodeServicer, add_node_service
from weightsync_server.ops.disk_watch import DiskWatch
from weightsync_server.ops.http_endpoint import MetricsEndpoint
from weightsync_server.ops.metrics import Metrics
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.process_tuning import tune_process
from weightsync_server.ops.state_lock import StateLock
from weightsync_server.part_options import (
    STORE,
    apply_limits,
    attach_socket,
    call_limits,
    data_folders,
    engine_options,
    fleet_options,
    follow_options,
    listener_options,
    model_limits,
    push_limits,
    train_options,
)
from weightsync_server.push import PushService, start_lending
from weightsync_server.residency.budget import SegmentBudget
from weightsync_server.residency.segments import SegmentAllocator
from weightsync_server.rpc import (
    PUSH,
    SERVING,
    Announcer,
    HealthServicer,
    PushHealth,
    WeightSyncServicer,
    add_debug_service,
    add_service,
)
from weightsync_server.rpc.rate_limits import Admission
from weightsync_server.rpc.status_interceptor import GuardInterceptor, RpcMetrics
from weightsync_server.status import Processes, StatusSource
from weightsync_server.store import open_store
from weightsync_server.store.server_identity import server_identity
from weightsync_server.train.train_servicer import TrainServicer, add_train_service
from weightsync_server.train.training import Training
from weightsync_server.workers.fetch.fetch_pool import FetcherPool
from weightsync_server.workers.fetch.gpu_pool import GpuFetchPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync_server.settings import Settings
    from weightsync_server.store.protocol import Store

__all__ = ["App"]

logger = logging.getLogger(__name__)


class App:
    """One server. `start`, then `stop`; `addresses` and the ports tell where it listens.

    Args:
        settings: Every setting.
        engine_args: For the embedded engine: flags of vLLM.
    """

    def __init__(self, settings: Settings, engine_args: Sequence[str] = ()) -> None:
        self._settings = settings
        self._engine_args = tuple(engine_args)
        self._stack = contextlib.AsyncExitStack()
        self._drained_by = 0.0
        self._doors: Listeners
        self._nodes: NodeGroup
        self.addresses: list[str] = []
        self.metrics_port = self.http_port = 0

    async def start(self) -> None:
        """Start every part; when one fails, those before it are stopped.

        Raises:
            WeightSyncError: With the remedy.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def shut(self) -> str:
        """Wait until nobody can connect any more although nobody stopped it; return why."""
        return await self._doors.shut()

    async def stop(self, drain_s: float | None = None) -> None:
        """Let calls finish, then stop everything.

        Args:
            drain_s: Seconds that calls get at most; by default the drain timeout.
        """
        longest_s = self._settings.drain_timeout_s
        seconds = longest_s if drain_s is None else min(drain_s, longest_s)
        self._drained_by = asyncio.get_running_loop().time() + seconds
        await self._stack.aclose()

    @property
    def _drain_s(self) -> float:
        """Seconds that are left of the drain; none where a start has failed."""
        return max(0.0, self._drained_by - asyncio.get_running_loop().time())

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        tune_process()
        # Before anything is made: a file that is not right changes nothing.
        self._doors = Listeners(listener_options(settings))
        lock = StateLock(settings.state_dir)
        stack.callback(lock.close)
        metrics = Metrics(settings.name)
        fetchers = FetcherPool(settings.fetchers, on_restart=metrics.count_fetcher_restart)
        # Before any channel exists: children are spawned, gRPC does not survive a fork.
        await fetchers.start()
        stack.push_async_callback(fetchers.stop)
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        segments = SegmentServer(settings.segment_socket)
        stack.callback(segments.close)
        with translate_os_errors("naming this server"):
            identity = server_identity(settings.state_dir)
        store = open_store(settings.store_url, identity)
        logger.info(
            "weightsync-server %s, model %s, store %s", __version__, settings.name, store.url
        )
        with translate_os_errors("opening the journal"):
            lasting = store.url if store.durable else ""
            journal = JournalFile(settings.state_dir / "journal", lasting)
        stack.callback(journal.close)
        budget = SegmentBudget(settings.memory_bytes)
        records = await store.open()
        allocator = SegmentAllocator(budget, segments, fetchers)
        limits = model_limits(settings)
        model = await open_model(settings.name, store, fetchers, allocator, limits, records)
        model.table.refused.open(settings.state_dir / "refused.json")
        known = {record.version for record in model.table.list()}
        for version in live_in_store(journal):
            count_lost(store, known, version, metrics)
        stack.push_async_callback(model.close)
        model.compactor.on_fold = metrics.deltas.count_fold
        ingesters = IngestPool(settings, metrics)
        allocator.mappers.append(ingesters.forget)
        pushes = PushService(model, limits=push_limits(settings), meters=metrics)
        await pushes.restore()
        # An object store checks what it keeps by itself, and every byte read from it costs.
        if store.durable and store.local and settings.scrub_bytes_per_s:
            scrubber = Scrubber(
                model.table, store, model.materializer.lock, settings.scrub_bytes_per_s
            )
            scrubbing = asyncio.create_task(scrubber.run())
            stack.callback(scrubbing.cancel)
        stack.push_async_callback(pushes.close)
        lender = None
        if settings.same_host:
            collector = GpuFetchPool(on_restart=metrics.count_fetcher_restart)
            stack.push_async_callback(collector.close)
            allocator.mappers.append(collector.forget)
            silence_s = settings.push_idle_timeout_s
            lender = start_lending(stack, pushes, settings.lending_socket, silence_s, collector)
        health_service = HealthServicer()
        for name in (PUSH, SERVING):
            await health_service.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._nodes = NodeGroup(segments)
        parts = ModelParts.of(model, self._nodes)
        takes = PushHealth(health_service)
        disks = self._watch_disks(stack, store, takes)
        announcer = Announcer(health_service, SERVING)
        host = HostParts(segments, metrics, apply_limits(settings), settings.fleet)
        options = engine_options(settings, self._engine_args)
        engines = Engines(options, parts, host, journal, announcer.tell)
        await engines.open(settings.segment_socket, stack)
        applier = Applier(engines.set, parts, host)
        attach_metrics = AttachMetrics(metrics)
        blocks = OpenBlocks()
        attachments = Attachments(
            engines.set, segments, attach_socket(settings), attach_metrics, blocks
        )
        attachments.start(stack)
        transactions = InPlaceCalls(
            parts,
            host,
            InPlaceVersions(pushes.give_up, model.collector, model.serving),
            attach_metrics,
            blocks,
        )
        of_fleet, fleet = fleet_options(settings), None
        if of_fleet is not None and settings.engine_names == ["none"]:
            model.collector.needed_elsewhere = watch_needs(of_fleet, stack).contents
        elif fleet := FleetService.of(of_fleet, engines.set, parts, host):
            stack.push_async_callback(fleet.stop)
            model.collector.needed_elsewhere = fleet.needs.contents
        processes = Processes(fetchers, ingesters)
        status = StatusSource(model, pushes, engines.set, processes, metrics, disks)
        servicer = WeightSyncServicer(
            model, pushes, applier, status, lender, ingesters.endpoints, settings.follow, fleet
        )
        track(metrics, model, processes, pushes, disks)
        census = InvariantMonitor(
            model.table,
            model.epochs,
            model.slots,
            allocator,
            metrics,
            [metrics.bounds.overdue, pushes.overdue],
        )
        census.start()
        stack.push_async_callback(census.stop)
        training = None
        if of_trainer := train_options(settings, identity):
            training = Training(of_trainer, engines.set, model, metrics)
        trainers = AttachServicer(settings.name, attachments, transactions)
        jobs = TrainServicer(settings.name, training)
        audit, interceptors = self._bind(metrics, servicer, trainers, jobs, health_service)
        # With the other addresses: one that is taken ends the start before the engine hears of it.
        self._serve_metrics(stack, metrics)
        fault = partial(metrics.violate, "only_data")
        verbs = self._serve_verbs(stack, servicer, jobs, health_service, audit, interceptors, fault)
        stack.push_async_callback(ingesters.close)
        await ingesters.serve(servicer, audit, interceptors)
        # Before the engine: what it starts on may be a version of the origin.
        if follower := await start_follower(follow_options(settings), model, pushes, metrics):
            stack.push_async_callback(follower.stop)
            if fleet is not None:
                fleet.host.source = follower
        if fleet is not None:
            # What its engines begin to serve is said by its fleet.
            await fleet.host.begin()
        engines.set.start()
        stack.push_async_callback(engines.set.stop)
        stack.push_async_callback(self._drain, applier, transactions)
        engines.start_updates(applier)
        stack.push_async_callback(engines.stop_updates)
        if fleet is not None:
            stack.push_async_callback(fleet.leave)
        await self._listen(stack, health_service, takes, ingesters, verbs)
        if fleet is not None:
            fleet.start(self.addresses[0])
        if training is not None:
            await training.start()
            stack.push_async_callback(self._end_training, training)
        # Before the drain: a watch never ends by itself, nor does a node's call.
        stack.callback(model.feed.close)
        stack.callback(self._nodes.close)

    def _watch_disks(
        self, stack: contextlib.AsyncExitStack, store: Store, takes: PushHealth
    ) -> DiskWatch:
        folders = data_folders(self._settings, store.url)

        def change(name: str, error: str) -> None:
            if name == STORE:
                takes.fill(bool(error))

        disks = DiskWatch(folders, change)
        disks.start()
        stack.callback(disks.stop)
        return disks

    def _bind(
        self,
        metrics: Metrics,
        servicer: WeightSyncServicer,
        trainers: AttachServicer,
        jobs: TrainServicer,
        health_service: HealthServicer,
    ) -> tuple[Audit, list[grpc.aio.ServerInterceptor]]:
        """Take every address; return who is told of calls, and what they go through after that."""
        rpcs = RpcMetrics(metrics.registry)
        service = pb.DESCRIPTOR.services_by_name["WeightSync"]
        rpcs.initialize(service)
        guard = GuardInterceptor(
            rpcs,
            lambda: metrics.violate("only_data"),
            self._settings.reader_timeout_s,
            metrics.bounds,
        )
        admission = Admission(call_limits(self._settings), caller_name)
        audit = Audit(self._settings.name, metrics)
        nodes = NodeServicer(self._nodes)
        for witnessed in (servicer, nodes, trainers, jobs):
            audit.witness(witnessed)

        def serve(server: grpc.aio.Server) -> None:
            add_service(servicer, server)
            add_attach_service(trainers, server)
            add_train_service(jobs, server)
            add_node_service(nodes, server)
            health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
            if add_debug_service(server):
                logger.warning("failpoints are on; this server fails on purpose")
            if self._settings.reflection:
                names = (service.full_name, HEALTH, reflection.SERVICE_NAME)
                reflection.enable_server_reflection(names, server)

        interceptors = [guard, admission]
        bound = self._doors.bind(audit, interceptors, serve)
        self.addresses = [endpoint.address for endpoint in bound]
        return audit, interceptors

    async def _listen(
        self,
        stack: contextlib.AsyncExitStack,
        health_service: HealthServicer,
        takes: PushHealth,
        ingesters: IngestPool,
        verbs: HttpApi | None,
    ) -> None:
        await self._doors.start()

        async def stop() -> None:
            await health_service.enter_graceful_shutdown()
            seconds = self._drain_s
            drains = [self._doors.close(seconds), ingesters.drain(seconds)]
            if verbs is not None:
                drains.append(verbs.drain(seconds))
            await asyncio.gather(*drains)

        stack.push_async_callback(stop)
        if not self._settings.follow:
            takes.let_in()
        logger.info("listening on %s", ", ".join(self.addresses))
        if self.metrics_port:
            host = self._settings.metrics.rpartition(":")[0]
            logger.info("metrics on http://%s:%d/metrics", host, self.metrics_port)
        if self.http_port:
            logger.info("vLLM's verbs on port %d (http)", self.http_port)

    async def _end_training(self, training: Training) -> None:
        await training.stop(self._drain_s)

    async def _drain(self, applier: Applier, transactions: InPlaceCalls) -> None:
        # An apply that waits for long requests would outlive the drain; its pause is a lease, so
        # the engine goes on without this server. Half of the rest is for what comes after it.
        seconds = self._drain_s + self._settings.stop_timeout_s / 2
        try:
            async with asyncio.timeout(seconds):
                await transactions.drain()
                await applier.drain()
        except TimeoutError:
            logger.warning("an apply is still running after the drain; the engine ends its pause")

    def _serve_metrics(self, stack: contextlib.AsyncExitStack, metrics: Metrics) -> None:
        address = self._settings.metrics
        if not address:
            return
        host, _, port = address.rpartition(":")
        with _refusing_address(address, "--metrics"):
            endpoint = MetricsEndpoint(metrics.registry, host, int(port))
        stack.callback(endpoint.close)
        self.metrics_port = endpoint.port

    def _serve_verbs(
        self,
        stack: contextlib.AsyncExitStack,
        servicer: WeightSyncServicer,
        jobs: TrainServicer,
        health_service: HealthServicer,
        audit: Audit,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        on_fault: Callable[[], None],
    ) -> HttpApi | None:
        settings = self._settings
        if not settings.http:
            return None
        host, _, port = settings.http.rpartition(":")
        gate = self._doors.authenticator(Endpoint(settings.http))
        door = AuthorityInterceptor(gate, settings.name, audit)
        calls = InnerCalls(servicer, health_service, jobs, [door, *interceptors])
        verbs = HttpApi(calls, door, settings.import_folders, on_fault)
        with _refusing_address(settings.http, "--http"):
            self.http_port = verbs.listen(host, int(port), self._doors.tls_context())
        stack.push_async_callback(verbs.drain, 0.0)
        return verbs


@contextlib.contextmanager
def _refusing_address(address: str, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"{address} is taken, or is no address that this server may use; choose another "
            f"with {flag}",
        ) from error
