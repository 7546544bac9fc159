"""Copies on disk: complete or not there, the newest of each stage, and not too many."""

from __future__ import annotations

import os
from pathlib import Path

from ravnest.core.control import MOST_COPIES, Copy
from ravnest.node.shelf import Shelf


def put(shelf: Shelf, copy: Copy, at_s: float, content: bytes = b"learnt") -> None:
    with shelf.writing() as path:
        path.write_bytes(content)
        shelf.put(path, copy)
    os.utime(shelf.path(copy), (at_s, at_s))


def test_the_newest_of_each_stage_is_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "copies")
    assert shelf.copies() == ()
    put(shelf, Copy("c1", 0, 10), 1.0)
    put(shelf, Copy("c1", 1, 10), 2.0)
    put(shelf, Copy("c1", 0, 20), 3.0, b"more")
    assert shelf.copies() == (Copy("c1", 1, 10), Copy("c1", 0, 20))
    assert shelf.find("c1", 0) == Copy("c1", 0, 20)
    assert shelf.find("c2", 0) is None
    assert shelf.path(Copy("c1", 0, 20)).read_bytes() == b"more"
    assert Shelf(tmp_path / "copies").copies() == shelf.copies()  # another process finds them


def test_what_was_not_finished_is_not_there(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "copies")
    with shelf.writing() as path:
        path.write_bytes(b"half")
    assert list((tmp_path / "copies").iterdir()) == []
    with shelf.writing() as path:
        path.write_bytes(b"half")
        killed = path.with_name(path.name + "-killed")
        path.rename(killed)
    (tmp_path / "copies" / "notes.txt").write_text("the owner's")
    shelf.clear_drafts()
    assert [p.name for p in (tmp_path / "copies").iterdir()] == ["notes.txt"]
    assert shelf.copies() == ()


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "copies")
    for number in range(MOST_COPIES + 2):
        put(shelf, Copy(f"c{number}", 0, 5), float(number))
    assert shelf.copies() == tuple(Copy(f"c{number}", 0, 5) for number in range(2, MOST_COPIES + 2))
    shelf.clear()
    assert shelf.copies() == ()
