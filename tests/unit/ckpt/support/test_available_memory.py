"""The memory that a process can use, below the limits of its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.saving.staging_memory import background_arena_bytes
from ckpt.support.available_memory import available_memory
from ckpt.support.control_groups import memory_groups

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
HYBRID_V2 = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"


def make_host(root: Path, cgroup: str, *mounts: str, available: int = 1000 * GIB) -> Path:
    """Write the files of /proc into a folder, and return it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {available >> 10} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    (root / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    return root


def make_group(folder: Path, **values: int | str) -> None:
    """Write the files of a control group, which are named without `memory.`; `inactive` is in its `memory.stat`."""
    folder.mkdir(parents=True, exist_ok=True)
    inactive = values.pop("inactive", 0)
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\ntotal_inactive_file {inactive}\n")
    for name, value in values.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def v2(limit: int | str = "max", used: int = 0, high: int | str = "max", inactive: int = 0) -> dict[str, int | str]:
    return {"max": limit, "current": used, "high": high, "inactive": inactive}


def test_without_control_groups_it_is_that_of_the_host(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 8 * GIB, "nothing can be read"
    assert available_memory(make_host(tmp_path, "", available=5 * GIB)) == 5 * GIB


def test_the_group_with_the_least_memory_counts(tmp_path: Path) -> None:
    root, top = make_host(tmp_path, "0::/pods/one", V2), tmp_path / "sys/fs/cgroup"
    make_group(top / "pods/one", **v2())
    assert available_memory(root) == 1000 * GIB
    make_group(top / "pods", **v2(limit=40 * GIB, used=10 * GIB))
    assert available_memory(root) == 30 * GIB
    make_group(top / "pods/one", **v2(limit=32 * GIB, used=12 * GIB))
    assert available_memory(root) == 20 * GIB
    make_group(top / "pods/one", **v2(limit=32 * GIB, used=12 * GIB, high=28 * GIB, inactive=GIB))
    assert available_memory(root) == 17 * GIB
    make_group(top / "pods/one", **v2(limit=32 * GIB, used=33 * GIB))
    assert available_memory(root) == 0
    make_group(top / "pods/two", **v2(limit=GIB))
    make_group(top / "pods/one", **v2())
    assert available_memory(root) == 30 * GIB, "another pod does not count"


@pytest.mark.parametrize("path", ["/kubepods/pod7", "/../pod7", "/"])
def test_a_container_that_does_not_see_its_own_path_has_the_limit_of_the_mount(tmp_path: Path, path: str) -> None:
    root = make_host(tmp_path, f"0::{path}", V2)
    make_group(tmp_path / "sys/fs/cgroup", **v2(limit=32 * GIB, used=2 * GIB))
    assert available_memory(root) == 30 * GIB


def test_limits_of_version_1_count(tmp_path: Path) -> None:
    host = make_host(tmp_path, "5:cpu:/a\n4:memory,x:/a/b:c\n0::/z", V1_CPU, V1, HYBRID_V2)
    top = tmp_path / "sys/fs/cgroup/memory"
    make_group(top / "a/b:c", limit_in_bytes=9223372036854771712, usage_in_bytes=GIB)
    assert available_memory(host) == 1000 * GIB
    make_group(top / "a", limit_in_bytes=32 * GIB, usage_in_bytes=3 * GIB, inactive=GIB)
    assert available_memory(host) == 30 * GIB
    assert memory_groups(host)[:3] == [top / "a/b:c", top / "a", top]


def test_a_part_of_the_groups_is_mounted(tmp_path: Path) -> None:
    mount = r"35 31 0:32 /docker/7f /sys/fs/my\040groups rw - cgroup cgroup rw,memory"
    host, top = make_host(tmp_path, "4:memory:/docker/7f/job", mount), tmp_path / "sys/fs/my groups"
    make_group(top / "job", limit_in_bytes=2 * GIB, usage_in_bytes=0)
    assert memory_groups(host) == [top / "job", top]
    assert available_memory(host) == 2 * GIB


@pytest.mark.parametrize("odd", ["", "none", "12 kB", "1.5"])
def test_an_odd_file_is_no_limit(tmp_path: Path, odd: str) -> None:
    root, group = make_host(tmp_path, "0::/", V2), tmp_path / "sys/fs/cgroup"
    for name in ("max", "current"):
        make_group(group, **{**v2(limit=GIB), name: odd})
        assert available_memory(root) == 1000 * GIB
    make_group(group, **v2(limit=GIB))
    (group / "memory.stat").unlink()
    (root / "proc/self/mountinfo").write_text("\n- \nx - cgroup\n1 2 3 - cgroup2\n" + V2)
    (root / "proc/meminfo").write_text(f"MemAvailable: {'' if odd == 'none' else 'x'}\n")
    assert available_memory(root) == 8 * GIB


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group of this host with a limit of 256 MiB."""
    groups = memory_groups()
    if not groups:
        pytest.skip("this host has no control groups for memory")
    group, limit = groups[0] / f"ckpt-test-{os.getpid()}", 256 << 20
    is_v1 = (groups[0] / "memory.limit_in_bytes").exists()
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield group
    group.rmdir()


def test_a_real_limit_counts(limited_group: Path) -> None:
    """The real kernel, in a process that has joined the group."""
    code = (
        "import sys; from ckpt.saving.staging_memory import background_arena_bytes as arena; print(arena(1 << 50, None)); "
        "from ckpt.tiers.tier_spec import _free_bytes as free; print(free('/dev/shm'))"
    )
    command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(limited_group), sys.executable, "-c", code]
    arena, free = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300).stdout.split())
    assert 0 < arena <= 0.8 * (256 << 20) < background_arena_bytes(1 << 50, None)
    assert 0 < free <= 256 << 20
