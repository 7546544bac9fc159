"""Who may come in, and under which name."""

from __future__ import annotations

import hmac

from ..core.ids import check_id
from .records import State, Token

__all__ = ["choose_name", "judge_token"]

_MOST_LETTERS = 63


def choose_name(state: State, wanted: str, key: str) -> str:
    """The name of the holder of a key: the one it has, else what it wants, with a number if that is taken.

    Whoever was sent away keeps its name, so nobody else comes in under it. Raises `ValueError` for what is no name.
    """
    for name, member in state.members.items():
        if member.key == key:
            return name
    name, number = check_id(wanted), 1
    while name in state.members:
        number += 1
        name = f"{wanted[: _MOST_LETTERS - len(str(number)) - 1]}-{number}"
    return name


def judge_token(state: State, token: str, now_s: float, *, counts: bool = True) -> str | None:
    """Why a token is refused; None: it is good. Without `counts` it may be used up: its holder only wants to look.

    All tokens are compared, each in constant time, so the time taken tells nothing of them.
    """
    found: Token | None = None
    for known, its in state.tokens.items():
        if hmac.compare_digest(_bytes(known), _bytes(token)):
            found = its
    if found is None:
        return "this token is not known here: ask for a new ticket"
    if now_s >= found.expires_s:
        return "this token has expired: ask for a new ticket"
    if counts and found.uses is not None and found.used >= found.uses:
        return f"this token is used up: it was good for {found.uses} enrolments, ask for a new ticket"
    return None


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")
