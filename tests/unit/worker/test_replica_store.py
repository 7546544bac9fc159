"""Replicas on disk: complete or absent, the newest of each stage, and a bounded number."""

from __future__ import annotations

import os
from pathlib import Path

from ravnest.protocol.control import MAX_REPLICAS, ReplicaInfo
from ravnest.worker.replica_store import ReplicaStore


def put(store: ReplicaStore, replica: ReplicaInfo, at_s: float, content: bytes = b"state") -> None:
    with store.writing() as path:
        path.write_bytes(content)
        store.put(path, replica)
    os.utime(store.path(replica), (at_s, at_s))


def test_the_newest_of_each_stage_is_kept(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path / "replicas")
    assert store.replicas() == ()
    put(store, ReplicaInfo("c1", 0, 10), 1.0)
    put(store, ReplicaInfo("c1", 1, 10), 2.0)
    put(store, ReplicaInfo("c1", 0, 20), 3.0, b"more")
    assert store.replicas() == (ReplicaInfo("c1", 1, 10), ReplicaInfo("c1", 0, 20))
    assert store.find("c1", 0) == ReplicaInfo("c1", 0, 20)
    assert store.find("c2", 0) is None
    assert store.path(ReplicaInfo("c1", 0, 20)).read_bytes() == b"more"
    assert ReplicaStore(tmp_path / "replicas").replicas() == store.replicas()  # another process reads the same


def test_incomplete_files_are_no_replicas(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path / "replicas")
    with store.writing() as path:
        path.write_bytes(b"half")
    assert list((tmp_path / "replicas").iterdir()) == []
    with store.writing() as path:
        path.write_bytes(b"half")
        killed = path.with_name(path.name + "-killed")
        path.rename(killed)
    (tmp_path / "replicas" / "notes.txt").write_text("the owner's")
    store.clear_drafts()
    assert [p.name for p in (tmp_path / "replicas").iterdir()] == ["notes.txt"]
    assert store.replicas() == ()


def test_the_oldest_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path / "replicas")
    for number in range(MAX_REPLICAS + 2):
        put(store, ReplicaInfo(f"c{number}", 0, 5), float(number))
    assert store.replicas() == tuple(ReplicaInfo(f"c{number}", 0, 5) for number in range(2, MAX_REPLICAS + 2))
    store.clear()
    assert store.replicas() == ()
