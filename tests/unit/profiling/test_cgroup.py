"""Limits of containers, read from file trees as kernels and container engines create them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ravnest.profiling.host import HostLimits, host_limits, host_memory

V1_NONE = "9223372036854771712\n"


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path: str = "/", part: str = "/", **files: str) -> dict[str, str]:
    """A machine with cgroup v2; files are named with __ for / and _ for ."""
    named = {f"sys/fs/cgroup/{n.replace('__', '/').replace('_', '.')}": text for n, text in files.items()}
    mount = f"30 23 0:26 {part} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mount, **named}


def test_a_container_of_cgroup_v2(tmp_path: Path) -> None:
    files = v2(memory_max="4000000000\n", memory_current="1500000000\n", cpu_max="150000 100000\n")
    files["sys/fs/cgroup/memory.stat"] = "anon 900\ninactive_file 500000000\nactive_file 7\n"
    assert host_limits(write_files(tmp_path, files)) == HostLimits(4 * 10**9, 3 * 10**9, 1.5)


def test_parent_groups_count_too(tmp_path: Path) -> None:
    files = v2(
        "/user/job",
        memory_max="max\n",
        user__memory_max="2000000000\n",
        user__memory_current="500000000\n",
        user__job__memory_max="8000000000\n",
        user__job__memory_current="0\n",
        user__cpu_max="max 100000\n",
        user__job__cpu_max="25000 50000\n",
    )
    assert host_limits(write_files(tmp_path, files)) == HostLimits(2 * 10**9, 1_500_000_000, 0.5)


def test_a_container_of_cgroup_v1(tmp_path: Path) -> None:
    """As docker shows it: the process's path is the host's, the mount shows only that part."""
    mounts = [
        "40 32 0:33 /docker/ab /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory",
        "41 32 0:34 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct",
        "42 32 0:35 /docker/ab /sys/fs/cgroup/pids ro,nosuid - cgroup cgroup rw,pids",
        "43 32 0:36 / /home rw - ext4 /dev/sda1 rw",
    ]
    files = {
        "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n3:pids:/docker/ab\n1:name=systemd:/x\n",
        "proc/self/mountinfo": "\n".join(mounts),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100000000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "5000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "20000\n",
    }
    assert host_limits(write_files(tmp_path, files)) == HostLimits(10**9, 700_000_000, 0.25)


def test_no_limits(tmp_path: Path) -> None:
    assert host_limits(tmp_path) == HostLimits(), "no control groups at all, as on other systems"
    files = {
        "proc/self/cgroup": "5:memory:/a\n4:cpu:/\n0::/\n",
        "proc/self/mountinfo": "1 2 0:3 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "1 2 0:4 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n1 2 0:5 / /unified rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": V1_NONE,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert host_limits(write_files(tmp_path, files)) == HostLimits()


def test_mount_points_with_spaces_and_paths_outside_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../elsewhere\n",
        "proc/self/mountinfo": "1 2 0:3 /box /my\\040groups rw - cgroup2 cgroup2 rw\n",
        "my groups/cpu.max": "30000 10000\n",
    }
    assert host_limits(write_files(tmp_path, files)).cores == 3.0


@pytest.mark.parametrize(
    "text", ["", "0", "::::\n\n:", "0::/\x00", "x 2 3 - cgroup", "\xff" * 9, "- - - cgroup cgroup rw"]
)
def test_malformed_files_are_no_limit(text: str, tmp_path: Path) -> None:
    files = v2(memory_max=text, memory_current=text, cpu_max=text) | {"proc/self/cgroup": text + "\n0::/"}
    found = host_limits(write_files(tmp_path, files))
    assert found.cores is None
    assert found.memory_bytes in (None, 0)
    assert host_limits(write_files(tmp_path, {"proc/self/mountinfo": text})) == HostLimits()


def test_memory_in_a_container_is_what_is_free_less_a_reserve(tmp_path: Path) -> None:
    files = v2(memory_max="800000000\n", memory_current="300000000\n")
    found = host_memory(write_files(tmp_path, files))
    assert (found.total_bytes, found.usable_bytes) == (800_000_000, 420_000_000)


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.usable_bytes < found.total_bytes
