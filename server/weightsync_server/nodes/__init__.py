"""The other nodes of an engine, as the server that drives it sees them."""

from __future__ import annotations

from weightsync_server.nodes.engine_nodes import EngineNodes
from weightsync_server.nodes.node_group import NodeGroup
from weightsync_server.nodes.node_servicer import NodeServicer, add_node_service

__all__ = ["EngineNodes", "NodeGroup", "NodeServicer", "add_node_service"]
