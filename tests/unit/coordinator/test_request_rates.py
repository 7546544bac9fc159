"""Rates of requests, on a clock of the test."""

from __future__ import annotations

from ravnest.coordinator.http.limits import RequestRates, TokenBucket


def test_a_bucket_fills_with_its_rate_up_to_its_burst() -> None:
    bucket = TokenBucket(2.0, 3.0, now_s=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s(10.0) == 0.5
    assert [bucket.take(now_s) for now_s in (10.4, 10.5, 10.5)] == [False, True, False]
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_a_flood_from_one_network_leaves_the_requests_of_others_alone() -> None:
    rates = RequestRates(8.0, 40.0, lambda: 0.0)
    flood = [rates.take(f"2001:db8:1:2::{i % 7:x}") for i in range(30)]
    assert sum(flood) == 10
    assert not flood[-1]
    assert rates.take("2001:db8:1:3::1")
    assert rates.take("")


def test_floods_from_many_networks_share_one_rate() -> None:
    rates = RequestRates(8.0, 40.0, lambda: 0.0)
    admitted = [rates.take(f"198.51.{i // 200}.{i % 200}") for i in range(2000)]
    assert sum(admitted) == 40
