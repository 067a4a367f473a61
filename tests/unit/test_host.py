"""How much memory and how many processors a process may use, with control groups of either version around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.device.host import available_memory, usable_cpus

MIB, GIB = 1 << 20, 1 << 30
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """Fake `/proc` and `/sys/fs/cgroup` of a machine with 32 GiB available and 16 processors."""

    def __init__(self, folder: Path, own_groups: str) -> None:
        self.cgroups, self.proc = folder / "cgroup", folder / "proc"
        self.write(self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB")
        self.write(self.proc / "self" / "cgroup", own_groups)

    @staticmethod
    def write(path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def memory(self, group: str, limit: object, used: int, cache: int = 0) -> None:
        """A group of version 2; `cache` of what it uses is page cache that can be dropped."""
        self.write(self.cgroups / group / "memory.max", limit)
        self.write(self.cgroups / group / "memory.current", used)
        self.write(self.cgroups / group / "memory.stat", f"anon 77\nfile 99\ninactive_file {cache}\nactive_file 5")

    def memory_v1(self, group: str, limit: int, used: int, cache: int = 0) -> None:
        folder = self.cgroups / "memory" / group
        self.write(folder / "memory.limit_in_bytes", limit)
        self.write(folder / "memory.usage_in_bytes", used)
        self.write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}")

    def cpu(self, group: str, text: str) -> None:
        self.write(self.cgroups / group / "cpu.max", text)

    def cpu_v1(self, mount: str, group: str, quota: int) -> None:
        self.write(self.cgroups / mount / group / "cpu.cfs_quota_us", quota)
        self.write(self.cgroups / mount / group / "cpu.cfs_period_us", 100_000)

    @property
    def left(self) -> int:
        return available_memory(self.cgroups, self.proc)

    @property
    def cpus(self) -> int:
        return usable_cpus(self.cgroups, self.proc)


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_without_control_groups_the_machine_is_all_there_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/")
    assert (machine.left, machine.cpus) == (32 * GIB, 16)


def test_a_container_that_is_its_own_root_is_bounded_by_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/")
    machine.memory("", 8 * GIB, GIB)
    machine.cpu("", "250000 100000")
    assert (machine.left, machine.cpus) == (7 * GIB, 2)


def test_page_cache_that_can_be_dropped_does_not_count_as_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/")
    machine.memory("", 8 * GIB, 6 * GIB + 300 * MIB, cache=6 * GIB)
    assert machine.left == 8 * GIB - 300 * MIB


def test_more_cache_than_use_is_no_more_than_the_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/")
    machine.memory("", 8 * GIB, GIB, cache=2 * GIB)  # both are read at different moments
    assert machine.left == 8 * GIB


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/work.slice/pod/own")
    machine.memory("work.slice", 20 * GIB, 2 * GIB)
    machine.memory("work.slice/pod", 6 * GIB, GIB)
    machine.memory("work.slice/pod/own", "max", GIB)
    machine.memory("work.slice/other", MIB, MIB)
    machine.cpu("work.slice", "300000 100000")
    machine.cpu("work.slice/pod", "max 100000")
    machine.cpu("work.slice/pod/own", "400000 100000")
    assert (machine.left, machine.cpus) == (5 * GIB, 3)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/own")
    machine.memory("own", "max", GIB)
    machine.cpu("own", "max 100000")
    assert (machine.left, machine.cpus) == (32 * GIB, 16)


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/own")
    machine.memory("own", GIB, 2 * GIB)
    assert machine.left == 0


def test_less_than_one_processor_is_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/own")
    machine.cpu("own", "50000 100000")
    assert machine.cpus == 1


def test_affinity_may_leave_less_than_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "0::/own")
    machine.cpu("own", "800000 100000")
    assert machine.cpus == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.cpus == 2


def test_the_first_version_has_a_tree_per_controller(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/b/c\n3:cpuset:/d\n1:name=systemd:/e\n0::/")
    machine.memory_v1("", NO_LIMIT_V1, 40 * GIB)
    machine.memory_v1("b", 6 * GIB, 5 * GIB, cache=3 * GIB)
    machine.memory_v1("b/c", NO_LIMIT_V1, GIB)
    machine.cpu_v1("cpu,cpuacct", "", -1)
    machine.cpu_v1("cpu,cpuacct", "a", 350_000)
    assert (machine.left, machine.cpus) == (4 * GIB, 3)


def test_a_controller_may_be_mounted_under_its_own_name(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "2:cpuacct,cpu:/a")
    machine.cpu_v1("cpu", "a", 200_000)
    assert machine.cpus == 2


def test_beside_the_first_version_the_second_is_mounted_apart(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:cpu:/\n0::/own")
    machine.memory("unified/own", 3 * GIB, GIB)
    assert machine.left == 2 * GIB


@pytest.mark.parametrize("mounted", ["", "nested", "id/nested"])
def test_a_container_may_see_only_the_end_of_its_path(mounted: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/docker/id/nested\n0::/")
    machine.memory_v1(mounted, 3 * GIB, GIB)
    assert machine.left == 2 * GIB


def test_a_group_outside_of_what_is_visible_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/../own")
    machine.memory("own", MIB, MIB)  # another of that name
    machine.memory("", 3 * GIB, GIB)
    assert machine.left == 2 * GIB


def test_where_the_own_group_is_unknown_the_root_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    (machine.proc / "self" / "cgroup").unlink()
    machine.memory_v1("", 3 * GIB, GIB)
    machine.cpu("", "200000 100000")
    assert (machine.left, machine.cpus) == (2 * GIB, 2)


def test_this_machine_has_memory_and_processors() -> None:
    assert available_memory() > 0
    assert 1 <= usable_cpus() <= 16
