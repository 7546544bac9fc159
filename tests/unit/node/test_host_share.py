"""Agents of one PC share its cores and memory; a dead one leaves its share to the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ravnest.node.host_share import Claim, HostShares, Share, share_of

GB = 10**9


def shares(*claims: Claim, cores: float = 8, free: int = 16 * GB, used: tuple[int, ...] | None = None) -> list[Share]:
    used = used or (0,) * len(claims)
    return [
        share_of(claims, i, cores=cores, free_bytes=free, agents_bytes=used) for i in range(len(claims))
    ]  # fmt: skip


def claim(threads: int | None = None, memory_bytes: int | None = None) -> Claim:
    return Claim(pid=1, threads=threads, memory_bytes=memory_bytes)


def test_an_agent_alone_has_all_that_is_free() -> None:
    assert shares(claim()) == [Share(threads=8, memory_bytes=16 * GB)]
    assert shares(claim(), cores=0.5)[0].threads == 1


def test_agents_share_cores_and_memory() -> None:
    three = shares(claim(), claim(), claim(), free=15 * GB)
    assert [share.threads for share in three] == [3, 3, 2]
    assert {share.memory_bytes for share in three} == {5 * GB}
    five = shares(claim(), claim(), claim(), claim(), claim(), cores=2)
    assert {(share.threads, share.speed_factor) for share in five} == {(1, 2 / 5)}


def test_limits_of_owners_are_kept_and_the_others_share_the_rest() -> None:
    mine, other, third = shares(claim(threads=5, memory_bytes=4 * GB), claim(), claim(memory_bytes=2 * GB))
    assert (mine.threads, mine.memory_bytes) == (5, 4 * GB)
    assert (other.threads, other.memory_bytes) == (2, 10 * GB)
    assert (third.threads, third.memory_bytes) == (1, 2 * GB)
    greedy = shares(claim(threads=8), claim(threads=8))
    assert [(share.threads, share.speed_factor) for share in greedy] == [(8, 0.5)] * 2


def test_memory_that_agents_use_counts_as_theirs_but_is_not_free() -> None:
    first, second = shares(claim(), claim(), free=4 * GB, used=(12 * GB, 0))
    assert (first.memory_bytes, second.memory_bytes) == (8 * GB, 4 * GB)


claims = st.lists(st.builds(claim, st.none() | st.integers(1, 8), st.none() | st.integers(GB, 8 * GB)), min_size=1)


@given(claims, st.integers(1, 64), st.integers(0, 64 * GB))
def test_shares_do_not_exceed_the_pc(owners: list[Claim], cores: int, free: int) -> None:
    found = shares(*owners, cores=cores, free=free)
    without_limit = [share for share, owner in zip(found, owners, strict=True) if owner.threads is None]
    limited = sum(owner.threads or 0 for owner in owners)
    assert sum(share.threads for share in without_limit) <= max(cores - limited, len(without_limit))
    assert sum(share.threads * share.speed_factor for share in found) <= cores + 1e-9
    unlimited = [s.memory_bytes for s, owner in zip(found, owners, strict=True) if owner.memory_bytes is None]
    assert sum(unlimited) <= max(0, free - sum(owner.memory_bytes or 0 for owner in owners))
    assert max(share.threads for share in without_limit or found) - min(
        share.threads for share in without_limit or found
    ) <= (1 if without_limit else 8)


_OTHER = """
import sys
from pathlib import Path
from ravnest.node.host_share import Claim, HostShares

shares = HostShares(Path(sys.argv[1]))
with shares.claimed(Claim(pid=7, threads=3)):
    print(len(shares.claims()[0]), flush=True)
    sys.stdin.read()
"""


def test_claims_are_seen_by_other_processes_until_they_die(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        other = subprocess.Popen(
            [sys.executable, "-c", _OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "2\n"
        return other

    mine = HostShares(tmp_path)
    with mine.claimed(Claim(pid=1)):
        assert mine.claims() == ((Claim(pid=1),), 0)
        with start() as other:
            assert mine.claims() == ((Claim(pid=1), Claim(pid=7, threads=3)), 0)
            other.kill()  # leaves its file behind
            other.wait(30)
        assert mine.claims() == ((Claim(pid=1),), 0)
        assert len(list(tmp_path.iterdir())) == 1
        with start() as other:
            assert other.stdin is not None
            other.stdin.close()  # ends in good order
            other.wait(30)
        assert mine.claims() == ((Claim(pid=1),), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_a_claim_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("nonsense")
    (tmp_path / "note").write_text("of somebody else")
    mine = HostShares(tmp_path)
    with mine.claimed(Claim(pid=1)):
        assert mine.claims() == ((Claim(pid=1),), 0)
    assert (tmp_path / "note").exists()


def test_without_a_directory_an_agent_is_alone() -> None:
    mine = HostShares(None)
    with mine.claimed(Claim(pid=1, threads=2)):
        assert mine.claims() == ((Claim(pid=1, threads=2),), 0)
