"""Addresses as users write them."""

from __future__ import annotations

import pytest

from ravnest.transport.address import parse_address


def test_addresses() -> None:
    assert parse_address("attic:7710") == ("attic", 7710)
    assert parse_address("[::1]:7710") == ("::1", 7710)
    assert parse_address(":7710", default_host="0.0.0.0") == ("0.0.0.0", 7710)
    for wrong in ("attic", "attic:", "attic:door", ":7710", "attic:70000"):
        with pytest.raises(ValueError, match=r"HOST:PORT|65535"):
            parse_address(wrong)
