"""Unix sockets by path: only this user gets in, and a killed process leaves nothing that bars the way."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from ravnest.core.errors import LinkClosed, LinkError, LinkTimeout
from ravnest.net.unix import connect_unix, listen_unix
from tests.net.kinds import CONFIG, DEADLINE_S, Note, receive, run

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine" / "link"


def test_listen_and_connect(path: Path) -> None:
    with listen_unix(path, CONFIG) as listener, connect_unix(path, CONFIG, deadline_s=DEADLINE_S) as near:
        with listener.accept(deadline_s=DEADLINE_S) as far:
            near.send(Note(1), [b"hello"], deadline_s=DEADLINE_S)
            assert receive(far) == (Note(1), [b"hello"])
            assert near.peer == str(path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert listener.address == str(path)
    assert not path.exists()


def test_a_directory_that_others_may_enter_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    with pytest.raises(LinkError, match="chmod 700"):
        listen_unix(path, CONFIG)


def test_a_socket_left_by_the_dead_is_replaced_and_one_in_use_is_not(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with listen_unix(path, CONFIG):
        with pytest.raises(LinkError, match="another process listens"):
            listen_unix(path, CONFIG)
        with connect_unix(path, CONFIG, deadline_s=DEADLINE_S):
            pass


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("somebody's")
    with pytest.raises(LinkError, match="cannot listen"):
        listen_unix(path, CONFIG)
    assert path.read_text() == "somebody's"


def test_nobody_there(path: Path) -> None:
    with pytest.raises(LinkClosed, match="nobody listens"):
        connect_unix(path, CONFIG, deadline_s=DEADLINE_S)
    with listen_unix(path, CONFIG) as listener, pytest.raises(LinkTimeout, match="nobody connected"):
        listener.accept(deadline_s=0.02)


def test_a_path_too_long_for_the_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="shorter"):
        listen_unix(tmp_path / ("x" * 200), CONFIG)


def test_closing_the_listener_wakes_accept(path: Path) -> None:
    listener = listen_unix(path, CONFIG)
    accepting = run(listener.accept, deadline_s=60)
    listener.close()
    listener.close()
    with pytest.raises(LinkClosed, match="the listener was closed"):
        accepting.result(DEADLINE_S)
    with pytest.raises(LinkClosed, match="the listener was closed"):
        listener.accept(deadline_s=1)
