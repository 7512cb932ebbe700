"""What the system says is free, read from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlstore.engine.disk.files import free_disk
from rlstore.engine.memory.capacity import free_device, free_ram


def lay_out(root: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return {"proc": root / "proc", "cgroups": root / "cgroups"}


MEMINFO = "MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:   2000 kB\nBuffers: 1 kB\n"


def test_what_the_system_has_available(tmp_path):
    assert free_ram(**lay_out(tmp_path, {"proc/meminfo": MEMINFO})) == (2_048_000, "the system's available memory")


def test_nothing_tells(tmp_path):
    assert free_ram(**lay_out(tmp_path, {})) is None
    assert free_ram(**lay_out(tmp_path, {"proc/meminfo": "MemTotal: 4 kB\n"})) is None


def test_a_group_of_version_2(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/jobs/mine\n",
        "cgroups/jobs/mine/memory.max": "1000000\n",
        "cgroups/jobs/mine/memory.current": "700000\n",
        "cgroups/jobs/mine/memory.stat": "anon 1\ninactive_file 50000\nactive_file 60000\nshmem 5\n",
    }
    free, where = free_ram(**lay_out(tmp_path, files))
    assert free == 1_000_000 - (700_000 - 110_000)
    assert where == "the limit of the control group, 1,000,000 bytes"


def test_the_tightest_group_around_the_process_counts(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/jobs/mine\n",
        "cgroups/jobs/mine/memory.max": "max\n",
        "cgroups/jobs/mine/memory.current": "700\n",
        "cgroups/jobs/memory.max": "1000\n",
        "cgroups/jobs/memory.current": "800\n",
    }
    assert free_ram(**lay_out(tmp_path, files))[0] == 200


@pytest.mark.parametrize("own", ["/docker/abc", "/"])
def test_a_group_of_version_1_seen_from_a_container(own, tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": f"12:cpu,cpuacct:/other\n4:memory:{own}\n0::/\n",
        "cgroups/memory/memory.limit_in_bytes": "1000\n",
        "cgroups/memory/memory.usage_in_bytes": "900\n",
        "cgroups/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 5\n",
    }
    assert free_ram(**lay_out(tmp_path, files))[0] == 125


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "cgroups/memory.max": "1000\n",
        "cgroups/memory.current": "1200\n",
    }
    assert free_ram(**lay_out(tmp_path, files))[0] == 0


def test_a_disk_is_found_for_a_folder_that_is_not_there_yet(tmp_path):
    assert free_disk(tmp_path / "not" / "yet") > 0


def test_other_devices_do_not_tell():
    assert free_device(torch.device("cpu")) is None
