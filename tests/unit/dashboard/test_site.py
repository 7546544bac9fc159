"""The pages over real HTTP: access, policy, live changes, limits, hostile names."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from ravnest.coordinator import events as on
from ravnest.dashboard import stream
from ravnest.dashboard.live import ACCESS_FILE
from ravnest.dashboard.site import static_files
from tests.unit.coordinator.attacks import anonymous_context, run
from tests.unit.dashboard.served import Messages, Served, served

HOSTILE = [
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(1)</script>",
    "\u202egnirts",
    "узел-7",
    "節点",
    "a/b c?#",
]


async def first_message(server: Served, headers: dict[str, str] | None = None) -> Any:
    async with server.client.get(f"{server.origin}/v1/stream", headers=headers or server.headers) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return await Messages(answer).next()


def test_pages_are_public_and_data_needs_a_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            status, page = await server.get("/", headers={})
            assert status == 200
            assert server.token not in page
            for name in static_files():
                if name != "index.html":
                    assert (await server.get(f"/assets/{name}", headers={}))[0] == 200
            for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {server.token}"}):
                for path in ("/v1/stream", "/v1/nodes/ann", "/v1/access"):
                    status, answer = await server.get(path, headers=wrong)
                    assert (status, list(answer)) == (401, ["error"])
            assert (await server.get(f"/v1/nodes/ann?token={server.token}", headers={}))[0] == 401
            for path in ("/assets/../site.py", "/assets/site.py", "/v1/status", "/assets/%2e%2e/live.js"):
                assert (await server.get(path))[0] == 404
            async with server.client.post(f"{server.origin}/v1/access", headers=server.headers) as answer:
                assert answer.status == 405

    run(test())


def test_a_viewer_may_not_open_the_page_of_the_requester(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            server.connect("ann")
            assert (await server.get("/v1/access"))[0] == 200
            viewer = await server.viewer_headers()
            assert viewer != server.headers
            status, answer = await server.get("/v1/access", headers=viewer)
            assert (status, "requester" in answer["error"]) == (403, True)
            message = await first_message(server, viewer)
            assert "node/ann" in message["set"]
            assert "192.0.2.9" not in json.dumps(message), "addresses are for the requester"

    run(test())


def test_every_answer_has_a_strict_policy(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            for path in ("/", "/assets/main.js", "/v1/nodes/ann", "/v1/access", "/nothing"):
                async with server.client.get(server.origin + path, headers=server.headers) as answer:
                    policy = answer.headers["Content-Security-Policy"]
                    assert policy.startswith("default-src 'none'; script-src 'self';")
                    assert "unsafe" not in policy
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert "Set-Cookie" not in answer.headers
                    assert "Access-Control-Allow-Origin" not in answer.headers
            for headers, status in (
                ({"Host": "evil.example"}, 421),
                ({"Sec-Fetch-Site": "cross-site"}, 403),
                ({"Sec-Fetch-Site": "same-origin"}, 200),
            ):
                assert (await server.get("/v1/access", headers={**server.headers, **headers}))[0] == status

    run(test())


def test_changes_are_pushed_as_deltas(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            server.connect("ann", "bob")
            async with server.client.get(f"{server.origin}/v1/stream", headers=server.headers) as answer:
                messages = Messages(answer)
                message = await messages.next()
                assert message["reset"]
                assert message["set"]["node/ann"]["state"] == "free"
                server.plan("c1", "ann", "bob")
                server.record(on.LeaseGranted(server.now_s, "c1", 0, 8))
                server.record(on.LeaseSettled(server.now_s, "c1", 0, 8))
                server.dashboard.history.add_line({"step": 1, "cluster": "c1", "loss": 2.5, "seconds": 1, "samples": 8})
                message = await messages.next()
                assert "reset" not in message
                assert message["set"]["node/ann"]["state"] == "training"
                assert message["set"]["cluster/c1"]["members"] == ["ann", "bob"]
                assert message["steps"] == {"from": 0, "points": [[1, 1, 8, 2.5]]}
                server.record(on.NodeLost(server.now_s, "bob", "silent", is_voluntary=False))
                server.record(on.ClusterEnded(server.now_s, "c1", "bob is gone", is_lost=True))
                message = await messages.next()
                assert message["set"]["node/bob"]["state"] == "gone"
                assert "cluster/c1" in message["drop"]
                assert [row["text"] for key, row in message["set"].items() if key.startswith("event/")] == [
                    "bob is lost: silent", "cluster c1 failed: bob is gone",
                ]  # fmt: skip
                while "given/ann" not in message.get("set", {}):
                    message = await messages.next()
                assert message["set"]["given/ann"]["work"] == message["set"]["given/bob"]["work"] == 4.0
                assert message["set"]["given-total"] == {"batches": 1, "samples": 8, "settled": 1, "repeated": 0}

    run(test())


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_data(name: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            server.connect(name)
            message = await first_message(server)
            assert message["set"][f"node/{name}"]["name"] == name
            path = f"/v1/nodes/{quote(name, safe='')}"
            async with server.client.get(URL(server.origin + path, encoded=True), headers=server.headers) as answer:
                assert (await answer.json())["name"] == name

    run(test())


def test_a_viewer_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, interval_s=0.005) as server:
            host, viewers = server.origin.partition("//")[2], server.dashboard.viewers
            idle = socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])))
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            request = f"GET /v1/stream HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.token}\r\n\r\n"
            idle.sendall(request.encode())
            stream = server.client.get(f"{server.origin}/v1/stream", headers=server.headers)
            async with asyncio.timeout(60), stream as answer:
                messages, number = Messages(answer), 0
                while not viewers.num_dropped:
                    server.dashboard.history.add_plan(f"c{number}", ["ann"], [1.0], {"reason": "x" * 100_000})
                    number += 1
                    await messages.next()
                assert viewers.num_viewers == 1, "the other viewer stays"
            idle.close()

    run(test())


def test_events_arrive_while_a_large_fleet_is_not_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_SHARE", 1e-9)  # all values are sent once, and then not for years

    async def test() -> None:
        async with (
            served(tmp_path) as server,
            server.client.get(f"{server.origin}/v1/stream", headers=server.headers) as answer,
        ):
            messages = Messages(answer)
            assert (await messages.next())["reset"]
            await asyncio.sleep(0.2)  # the first values after the snapshot
            server.connect("newcomer")
            while not (new := [key for key in (await messages.next()).get("set", {}) if key.startswith("event/")]):
                pass
            server.record(on.NoteAdded(server.now_s, "another"))
            message = await messages.next()
            assert [row["text"] for row in message["set"].values()] == ["another"]
            assert set(message["set"]).isdisjoint(new), "each event is sent once"

    run(test())


def test_an_event_is_sent_at_once(tmp_path: Path) -> None:
    """Also with an interval of years between two messages of values."""

    async def test() -> None:
        async with (
            served(tmp_path, interval_s=1e9) as server,
            server.client.get(f"{server.origin}/v1/stream", headers=server.headers) as answer,
        ):
            messages = Messages(answer)
            assert (await messages.next())["reset"]
            for text in ("one", "another"):
                server.record(on.NoteAdded(server.now_s, text))
                rows: list[Any] = []
                while text not in [row["text"] for row in rows]:
                    rows = [row for key, row in (await messages.next())["set"].items() if key.startswith("event/")]

    run(test())


def test_viewers_and_requests_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_VIEWERS", 2)

    async def test() -> None:
        async with served(tmp_path) as server:
            url = f"{server.origin}/v1/stream"
            async with (
                server.client.get(url, headers=server.headers) as one,
                server.client.get(url, headers=server.headers) as two,
            ):
                assert (one.status, two.status) == (200, 200)
                status, answer = await server.get("/v1/stream")
                assert (status, "2 viewers" in answer["error"]) == (503, True)
            assert (await server.get("/v1/nodes/ann"))[0] == 200
            began_s = time.monotonic()
            many = [asyncio.create_task(server.get("/v1/nodes/ann")) for _ in range(450)]
            answers = await asyncio.gather(*many, return_exceptions=True)
            others = [answer for answer in answers if not isinstance(answer, tuple)]
            assert {answer[0] for answer in answers if isinstance(answer, tuple)} == {200, 429}
            assert others, "not all wait for an answer"
            assert all(isinstance(answer, aiohttp.ClientError) for answer in others)
            assert time.monotonic() - began_s >= 2.0, "a rejection is sent after two seconds"

    run(test())


def test_a_restarted_coordinator_keeps_port_and_tokens(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            link = server.dashboard.link
            mode = (tmp_path / "coordinator" / ACCESS_FILE).stat().st_mode
            assert stat.S_IMODE(mode) == 0o600
        async with served(tmp_path) as server:
            assert server.dashboard.link == link
            assert (await first_message(server))["reset"]
        taken = socket.create_server(("127.0.0.1", int(link.partition("/#")[0].rpartition(":")[2])))
        async with served(tmp_path) as server:
            assert server.dashboard.link != link, "another program has the port now"
            assert server.token == link.partition("#token=")[2]
        taken.close()

    run(test())


def test_the_listener_can_be_left_out_or_fail_without_ending_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, dashboard_port=0) as server:
            assert (server.dashboard.link, server.dashboard.problem) == ("", "")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            async with served(tmp_path, dashboard_port=taken.getsockname()[1]) as server:
                assert server.dashboard.link == ""
                assert "no dashboard: cannot listen at 127.0.0.1" in server.dashboard.problem

    run(test())


def test_the_port_of_a_fleet_serves_holders_of_a_ticket(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, host="127.0.0.1", port=0, sockets=None) as server:
            server.service.ticket()
            server.connect("ann")
            assert (await server.get("/v1/access"))[1]["addresses"] == {"ann": "192.0.2.9"}
            token = next(iter(server.service.coordinator.state.tokens))
            origin = f"https://127.0.0.1:{server.service.port}/dashboard"
            options: dict[str, Any] = {"ssl": anonymous_context()}
            for path, headers, status in (
                ("/", {}, 200),
                ("/v1/stream", {}, 401),
                ("/v1/stream", {"Authorization": f"Bearer {token}"}, 200),
                ("/v1/access", {"Authorization": f"Bearer {token}"}, 403),
                ("/v1/access", server.headers, 200),
                ("/metrics", {}, 401),
                ("/metrics", {"Authorization": f"Bearer {token}"}, 200),
            ):
                async with server.client.get(origin + path, headers=headers, **options) as answer:
                    assert answer.status == status, path

    run(test())
