"""Tickets round-trip, and damaged tickets are rejected with a clear error."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.transport.ticket import Ticket, new_token

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,40}[A-Za-z0-9])?", fullmatch=True)
HOSTS = NAMES | st.ip_addresses().map(str)
ADDRESSES = st.tuples(HOSTS, st.integers(1, 65535))
TICKETS = st.builds(
    lambda addresses, fingerprint, token: Ticket(
        addresses=tuple(addresses), fingerprint=fingerprint.hex(), token=token.hex()
    ),
    st.lists(ADDRESSES, min_size=1, max_size=16),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16),
)
ONE = Ticket(addresses=(("192.0.2.7", 7700),), fingerprint="ab" * 32, token="cd" * 16)
ALPHABET = string.ascii_lowercase + "234567"


@given(TICKETS, st.sampled_from(["", " ", "\n", "\t \r\n"]))
def test_tickets_round_trip(ticket: Ticket, space: str) -> None:
    text = str(ticket)
    assert set(text.removeprefix("rav1-")) <= set(ALPHABET)
    assert Ticket.parse(space + text + space) == ticket
    assert Ticket.parse(text.upper()) == ticket


@given(TICKETS, st.data())
def test_one_wrong_character_is_detected(ticket: Ticket, data: st.DataObject) -> None:
    text = str(ticket)
    at = data.draw(st.integers(5, len(text) - 1))
    other = data.draw(st.sampled_from(sorted(set(ALPHABET) - {text[at]})))
    with pytest.raises(ValueError, match="copy all of it again"):
        Ticket.parse(text[:at] + other + text[at + 1 :])


@given(TICKETS, st.data())
def test_a_truncated_ticket_is_rejected(ticket: Ticket, data: st.DataObject) -> None:
    text = str(ticket)
    with pytest.raises(ValueError, match=r"copy all of it again|begins with"):
        Ticket.parse(text[: data.draw(st.integers(0, len(text) - 1))])


@given(st.text(max_size=300))
def test_any_other_text_is_rejected(text: str) -> None:
    for changed in (text, "rav1-" + text):
        with pytest.raises(ValueError, match="ticket"):
            Ticket.parse(changed)


def test_another_version_is_named() -> None:
    with pytest.raises(ValueError, match="another version"):
        Ticket.parse(str(ONE).replace("rav1", "rav2"))
    with pytest.raises(ValueError, match="begins with rav1-"):
        Ticket.parse("https://example.org")


def test_a_ticket_for_one_address_is_short() -> None:
    assert len(str(ONE)) == 101


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"addresses": ()}, "1 to 16 addresses"),
        ({"addresses": (("192.0.2.7", 1),) * 17}, "1 to 16 addresses"),
        ({"addresses": (("a host", 1),)}, "neither"),
        ({"addresses": (("fe80::1%eth0", 1),)}, "neither"),
        ({"addresses": (("attic", 0),)}, "port"),
        ({"addresses": (("attic", 65536),)}, "port"),
        ({"fingerprint": "ab" * 31}, "fingerprint"),
        ({"token": "XY" * 16}, "token"),
    ],
    ids=str,
)
def test_invalid_fields_are_rejected(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"addresses": ONE.addresses, "fingerprint": ONE.fingerprint, "token": ONE.token}
    with pytest.raises(ValueError, match=message):
        Ticket(**{**given, **change})  # type: ignore[arg-type]


def test_tokens_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 32 for token in tokens)
