"""Changes a run while it trains: ends it, and adds or crashes nodes of this machine."""

from __future__ import annotations

from collections.abc import Callable

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import NodeEnrolled
from ravnest.run.coordinator_thread import CoordinatorThread
from ravnest.run.local import LocalNode, LocalNodes

__all__ = ["RunControl"]


class RunControl:
    """The controls of one run, for the thread of the run."""

    def __init__(self, thread: CoordinatorThread, nodes: LocalNodes | None, stop: Callable[[str], None]) -> None:
        self._thread, self._nodes, self._stop = thread, nodes, stop

    def stop(self, reason: str) -> None:
        """End the run as Ctrl-C does: after the batches in flight, with its model."""
        self._stop(reason)

    def add_node(self, node: LocalNode) -> None:
        """Start another node of a local run."""
        nodes = self._local_nodes

        def add(coordinator: Coordinator) -> None:
            coordinator.record(NodeEnrolled(coordinator.now_s(), node.name, key="", token=""))
            nodes.add(node)

        self._thread.call(add)

    def crash_node(self, name: str) -> float:
        """End a node of a local run without warning; return the coordinator's time."""
        nodes = self._local_nodes

        def crash(coordinator: Coordinator) -> float:
            nodes.crash(name)
            return coordinator.now_s()

        return self._thread.call(crash)

    @property
    def _local_nodes(self) -> LocalNodes:
        assert self._nodes is not None, "the nodes of a fleet are not in this process"
        return self._nodes
