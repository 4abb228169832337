"""Host resources that a process may use, read from simulated kernel files."""

import os
from pathlib import Path

from hpu.host import has_fast_bfloat16, usable_cores, usable_memory

GIB = 1024**3


def _lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_without_limits_is_the_machines_memory(tmp_path: Path) -> None:
    _lay_out(tmp_path, {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n"})

    assert usable_memory(tmp_path) == (4 * GIB, 8 * GIB)


def test_a_cgroup_limits_memory_and_its_reclaimable_cache_counts_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b"
    _lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            f"{group}/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        },
    )

    assert usable_memory(tmp_path) == (2 * GIB - GIB // 2, 2 * GIB)


def test_cgroup_v1_limits_memory(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    _lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n",
            "proc/self/cgroup": "5:memory:/job\n3:cpu,cpuacct:/job\n",
            f"{group}/memory.limit_in_bytes": f"{GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB // 4}\n",
        },
    )

    assert usable_memory(tmp_path) == (GIB - GIB // 4, GIB)


def test_a_container_that_sees_only_its_own_cgroup_is_limited_by_the_mounted_root(
    tmp_path: Path,
) -> None:
    _lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n",
            "proc/self/cgroup": "0::/docker/0123\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )

    assert usable_memory(tmp_path)[1] == GIB


def test_a_cpu_quota_of_half_a_core_allows_a_single_core(tmp_path: Path) -> None:
    _lay_out(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
    )

    assert usable_cores(tmp_path) == 1


def test_without_a_quota_the_affinity_mask_counts(tmp_path: Path) -> None:
    _lay_out(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})

    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_bfloat16_is_fast_only_with_bfloat16_instructions(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _lay_out(old, {"proc/cpuinfo": "flags : avx2 avx512f\n"})
    _lay_out(new, {"proc/cpuinfo": "model : x\nflags : avx2 avx512_bf16\n"})

    found = has_fast_bfloat16(old), has_fast_bfloat16(new), has_fast_bfloat16(tmp_path)

    assert found == (False, True, False)


def test_a_size_that_is_not_a_decimal_number_is_left_out(tmp_path: Path) -> None:
    text = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nOther: \u00b2 kB\n"
    _lay_out(tmp_path, {"proc/meminfo": text})

    assert usable_memory(tmp_path) == (4 * GIB, 8 * GIB)
