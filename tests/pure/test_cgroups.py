"""The limits of cgroups, from the files of systems of several kinds."""

import pytest

from penstock.models.cgroups import MemoryLimit, cpu_quota, memory_limits

V2_MOUNT = "31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "33 30 0:29 / /sys/fs/cgroup/memory rw shared:14 - cgroup cgroup rw,memory\n"
    "34 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:15 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
NO_LIMIT = "9223372036854771712\n"
GB = 10**9


def reader(files):
    return lambda path: files.get(path, "")


def v2(own, limits, mount=V2_MOUNT):
    """A system of v2; limits by folder: (memory.max, memory.current, inactive_file)."""
    files = {"/proc/self/cgroup": f"0::{own}\n", "/proc/self/mountinfo": mount}
    for folder, (most, used, inactive) in limits.items():
        files[f"/sys/fs/cgroup{folder}/memory.max"] = f"{most}\n"
        files[f"/sys/fs/cgroup{folder}/memory.current"] = f"{used}\n"
        files[f"/sys/fs/cgroup{folder}/memory.stat"] = f"anon 5\ninactive_file {inactive}\nactive_file 7\n"
    return reader(files)


def least(read):
    return min(limit.left for limit in memory_limits(read))


def test_a_container_with_a_namespace_of_its_own_has_its_limit_at_the_root():
    read = v2("/", {"": (4 * GB, GB, 100)})
    assert memory_limits(read) == [MemoryLimit(4 * GB, GB - 100)]


def test_the_smallest_limit_between_a_scope_of_systemd_and_the_root_counts():
    read = v2(
        "/user.slice/user-7.slice/run-u1.scope",
        {
            "/user.slice/user-7.slice/run-u1.scope": ("max", GB, 0),
            "/user.slice/user-7.slice": (2 * GB, GB, 0),
            "/user.slice": (8 * GB, 7 * GB + GB // 2, 0),
        },
    )
    assert [limit.bytes for limit in memory_limits(read)] == [2 * GB, 8 * GB]
    assert least(read) == GB // 2


def test_a_job_of_slurm_on_v1():
    own = "/slurm/uid_1000/job_42/step_0/task_0"
    files = {
        "/proc/self/cgroup": f"11:memory:{own}\n4:cpu,cpuacct:/slurm/uid_1000\n1:name=systemd:/a\n0::/b\n",
        "/proc/self/mountinfo": V1_MOUNTS,
    }
    memory = "/sys/fs/cgroup/memory"
    for folder, limit in ((own, NO_LIMIT), ("/slurm/uid_1000/job_42", f"{3 * GB}\n"), ("", NO_LIMIT)):
        files[f"{memory}{folder}/memory.limit_in_bytes"] = limit
        files[f"{memory}{folder}/memory.usage_in_bytes"] = f"{GB}\n"
        files[f"{memory}{folder}/memory.stat"] = "inactive_file 1\ntotal_inactive_file 400\n"
    files["/sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/cpu.cfs_quota_us"] = "250000\n"
    files["/sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/cpu.cfs_period_us"] = "100000\n"
    files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "-1\n"
    files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us"] = "100000\n"
    assert least(reader(files)) == 2 * GB + 400
    assert cpu_quota(reader(files)) == 2.5


def test_a_container_without_a_namespace_sees_only_its_own_part_mounted():
    mount = "40 30 0:29 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = {
        "/proc/self/cgroup": "9:memory:/docker/abc\n",
        "/proc/self/mountinfo": mount,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GB}\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
    }
    assert memory_limits(reader(files)) == [MemoryLimit(GB, 0)]


def test_a_process_outside_of_what_is_mounted_has_the_limits_of_the_mount():
    mount = "40 30 0:29 /docker/abc /sys/fs/my\\040cgroup ro - cgroup2 cgroup2 rw\n"
    files = {"/proc/self/cgroup": "0::/elsewhere\n", "/proc/self/mountinfo": mount}
    files |= {"/sys/fs/my cgroup/memory.max": "77\n", "/sys/fs/my cgroup/memory.current": "7\n"}
    assert memory_limits(reader(files)) == [MemoryLimit(77, 7)]


def test_a_cpu_quota_of_v2_at_any_depth():
    files = {"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": V2_MOUNT}
    files |= {"/sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "/sys/fs/cgroup/a/cpu.max": "150000 100000\n"}
    assert cpu_quota(reader(files)) == 1.5


@pytest.mark.parametrize("text", ["", "nonsense\n", "1:2\n", "0::/a\nx y z - cgroup2\n"])
def test_a_system_without_cgroups_or_with_odd_files_has_no_limits(text):
    read = reader({"/proc/self/cgroup": text, "/proc/self/mountinfo": text})
    assert memory_limits(read) == []
    assert cpu_quota(read) is None


def test_memory_in_use_beyond_the_limit_leaves_nothing():
    assert least(v2("/", {"": (GB, 2 * GB, 0)})) == 0
