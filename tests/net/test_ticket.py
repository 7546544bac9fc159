"""A ticket is read as it was written, and a ticket with a mistake in it is refused with a sentence."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.net.ticket import Ticket, new_token

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
WRITTEN = string.ascii_lowercase + "234567"


@given(TICKETS, st.sampled_from(["", " ", "\n", "\t \r\n"]))
def test_what_is_written_is_read(ticket: Ticket, space: str) -> None:
    text = str(ticket)
    assert set(text.removeprefix("rav1-")) <= set(WRITTEN)
    assert Ticket.parse(space + text + space) == ticket
    assert Ticket.parse(text.upper()) == ticket


@given(TICKETS, st.data())
def test_one_wrong_letter_is_found(ticket: Ticket, data: st.DataObject) -> None:
    text = str(ticket)
    at = data.draw(st.integers(5, len(text) - 1))
    other = data.draw(st.sampled_from(sorted(set(WRITTEN) - {text[at]})))
    with pytest.raises(ValueError, match="Copy it again"):
        Ticket.parse(text[:at] + other + text[at + 1 :])


@given(TICKETS, st.data())
def test_a_part_of_a_ticket_is_none(ticket: Ticket, data: st.DataObject) -> None:
    text = str(ticket)
    with pytest.raises(ValueError, match=r"Copy it again|begins with"):
        Ticket.parse(text[: data.draw(st.integers(0, len(text) - 1))])


@given(st.text(max_size=300))
def test_any_text_is_refused_with_a_sentence(text: str) -> None:
    for asked in (text, "rav1-" + text):
        with pytest.raises(ValueError, match="ticket"):
            Ticket.parse(asked)


def test_another_version_is_named() -> None:
    with pytest.raises(ValueError, match="another version"):
        Ticket.parse(str(ONE).replace("rav1", "rav2"))
    with pytest.raises(ValueError, match="begins with rav1-"):
        Ticket.parse("https://example.org")


def test_a_ticket_for_one_address_is_short() -> None:
    assert len(str(ONE)) == 101


@pytest.mark.parametrize(
    ("change", "complaint"),
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
def test_a_ticket_that_cannot_work_is_not_made(change: dict[str, object], complaint: str) -> None:
    given: dict[str, object] = {"addresses": ONE.addresses, "fingerprint": ONE.fingerprint, "token": ONE.token}
    with pytest.raises(ValueError, match=complaint):
        Ticket(**{**given, **change})  # type: ignore[arg-type]


def test_tokens_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 32 for token in tokens)
