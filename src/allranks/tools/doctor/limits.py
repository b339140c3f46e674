"""Checks of the resources that the host, its container or its batch system gives to a process.

If it is inexpensive, a check uses the resource instead of reading its limit.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from allranks._cluster.env import read_int
from allranks._cluster.host import cores, usable_cpus
from allranks.tools.doctor.check import Finding, fail, ok, warn
from allranks.tools.doctor.job import job_here
from allranks.tools.quiet import READING, Conditions, MeasurementWindow, current_conditions, noise_reasons

__all__ = ["CHECKS", "judge_cpus", "judge_memory", "judge_quiet", "judge_shm", "memory_limit"]

_MB, _GB = 1 << 20, 1 << 30
_TRIED = 64 * _MB
_SLOW_S = 5.0
_LOOK_S = 0.2  # interval over which the steal time is measured
_SHM = Path("/dev/shm")
_LOW_SHM = _GB  # the default of Docker is 64 MB, which a few data loader workers use up
_LOW_MEMORY = _GB
_LOW_FILES = 4096
_UNLIMITED = 1 << 60  # cgroup version 1 reports at least this number if there is no limit


def cpus() -> Finding:
    """Compare the CPUs with the threads that the ranks of this host start."""
    ranks, threads = job_here().local_world_size or 1, read_int(os.environ, "OMP_NUM_THREADS", 1)
    return judge_cpus(usable_cpus(), os.cpu_count() or 1, ranks, threads, cores(os.sched_getaffinity(0)))


def quiet() -> Finding:
    """Check whether other processes leave the CPUs idle. Without this, measurements mean little."""
    window = MeasurementWindow()
    time.sleep(_LOOK_S)
    steal = window.end(0.0).steal  # another rank may be busy now, so only the steal time is used
    return judge_quiet(replace(current_conditions(), steal=steal))


def judge_quiet(found: Conditions) -> Finding:
    """Check whether measurements on this host are reliable."""
    waited = "" if found.waited is None else f", processes waited for a CPU in {_share(found.waited)} of it"
    described = f"load {_round(found.load)} in the last minute{waited}; steal {_share(found.steal or 0.0)}"
    described += f"; governor {found.governor}" if found.governor else ""
    if noise_reasons(found):
        return warn(described, f"Not quiet. In allranks bench, {READING}. Measure again, or on another host.")
    return ok(described)


def _round(load: float) -> str:
    return f"{load:.0f}" if load >= 1 else "below 1"


def _share(part: float) -> str:
    """Format a share coarsely, so that the ranks of one host report the same text."""
    return "less than 5%" if part < 0.05 else f"{round(part * 10) * 10}%"


def judge_cpus(usable: int, all_cpus: int, ranks: int, threads: int | None, whole: int | None = None) -> Finding:
    """Check whether ranks times threads exceeds the number of CPUs.

    Args:
        usable: The number of CPUs that this process may keep busy.
        all_cpus: The number of CPUs of the host.
        ranks: The number of ranks on this host.
        threads: The number of threads of each rank. None if it is not known.
        whole: The number of cores of these CPUs. None: each CPU is a core.
    """
    described = f"{usable} of {all_cpus} usable" if usable != all_cpus else f"{usable}"
    described += f", ranks here {ranks}, OMP_NUM_THREADS {threads or 'not set'}"
    if ranks > usable:
        return warn(described, "Ranks share CPUs. Start at most one rank for each CPU, or request more CPUs.")
    if whole is not None and ranks > whole:
        return warn(
            f"{described}, {whole} cores", "Ranks share cores (hyperthreads) and are slower. Start fewer ranks."
        )
    if ranks > 1 and threads is None:
        return warn(described, f"Each rank starts a thread per CPU. Set OMP_NUM_THREADS={max(1, usable // ranks)}.")
    if ranks * (threads or 1) > usable:
        advice = f"{ranks} ranks x {threads} threads are too many. Set OMP_NUM_THREADS={max(1, usable // ranks)}."
        return warn(described, advice)
    return ok(described)


def memory() -> Finding:
    """Check the available memory of the host, and of the cgroup, which kills processes beyond its limit."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) << 10
    total = int(facts["MemTotal"].split()[0]) << 10
    return judge_memory(total, free, memory_limit(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))


def judge_memory(total: int, free: int, limit: tuple[int, int] | None) -> Finding:
    """Check whether the memory is sufficient to import torch and work.

    Args:
        total: Bytes of the host.
        free: Available bytes of the host.
        limit: The limit and the usage of the cgroup, in bytes. None if there is no limit.
    """
    described = f"{_size(free)} of {_size(total)} available"
    left = free
    if limit is not None:
        described += f"; the cgroup may use {_size(limit[0])} and uses {_size(limit[1])}"
        left = min(free, limit[0] - limit[1])
    if left < _LOW_MEMORY:
        return warn(
            described,
            "The kernel kills ranks if memory runs out (exit 137). A rank that imports torch needs 0.3 GB or more: "
            "start fewer ranks, or request more memory.",
        )
    return ok(described)


def memory_limit(root: Path, membership: Path) -> tuple[int, int] | None:
    """Return the memory limit with the least room on the path up from this process's cgroup, and its usage."""
    found: list[tuple[int, int]] = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = (
            (root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"))
            if controllers
            else (root, ("memory.max", "memory.current"))
        )
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(base):
                break
            files = [each / name for name in names]
            if all(file.exists() for file in files):
                limit, used = (file.read_text().strip() for file in files)
                if limit != "max" and int(limit) < _UNLIMITED:
                    found.append((int(limit), int(used)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def shared_memory() -> Finding:
    """Map and write anonymous shared memory, as the ranks of the native engine do."""
    began = time.perf_counter()
    try:
        # The same system call as in the native engine, which does not use /dev/shm.
        descriptor = os.memfd_create("allranks-doctor")
    except OSError as error:
        return fail(f"memfd_create: {error.strerror}", "Allow this system call (seccomp profile of the container).")
    try:
        _fill(descriptor, _TRIED)
    finally:
        os.close(descriptor)
    took = time.perf_counter() - began
    described = f"{_TRIED // _MB} MiB mapped and written"
    if took > _SLOW_S:
        return warn(
            f"{described} in {took:.1f} s", "The host is short of memory and swaps. Check `free -m` and `vmstat 1`."
        )
    return ok(described)


def dev_shm() -> Finding:
    """Check /dev/shm, which workers of torch's DataLoader, NCCL and MPI use."""
    if not _SHM.is_dir():
        return warn("no /dev/shm", "Run `mount -t tmpfs tmpfs /dev/shm`. allranks itself does not need it.")
    space = os.statvfs(_SHM)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    # A nearly full file system is not tested, because a program that writes to it while it is full gets a bus error.
    if free >= _TRIED // 4:
        # O_TMPFILE: the file has no name, so nothing remains if this process is killed.
        descriptor = os.open(_SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            _fill(descriptor, _TRIED // 4)
        finally:
            os.close(descriptor)
    return judge_shm(total, free)


def judge_shm(total: int, free: int) -> Finding:
    """Check whether a shared memory file system of this size is sufficient."""
    described = f"{_size(free)} of {_size(total)} free"
    if total < _LOW_SHM:
        return warn(
            described,
            "DataLoader workers and NCCL crash if it is full (bus error). Use docker run --shm-size=8g; in Kubernetes "
            "an emptyDir with medium: Memory at /dev/shm. allranks itself does not need it.",
        )
    if free < total / 10:
        return warn(described, "Files fill it. Check ls -l /dev/shm, and remove files that no process uses.")
    return ok(described)


def locked_memory() -> Finding:
    """Check the limit of locked memory. Only networks with direct memory access (InfiniBand) need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    described = f"limit {_limit(soft)}; InfiniBand: {', '.join(devices) or 'none here'}"
    if devices and soft != resource.RLIM_INFINITY:
        return warn(
            f"{described} (hard limit {_limit(hard)})",
            "NCCL and MPI cannot register memory with this limit. Set ulimit -l unlimited; under SLURM, "
            "PropagateResourceLimits and LimitMEMLOCK=infinity of slurmd.",
        )
    return ok(described)


def open_files() -> Finding:
    """Open as many files as a rank of a medium-sized job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    null = os.open(os.devnull, os.O_RDONLY)
    taken = [null]
    wanted = 512
    try:
        while len(taken) < wanted:
            taken.append(os.dup(null))
    except OSError as error:
        opened = len(taken)
        return fail(
            f"after {opened} more: {error.strerror}; limit {_limit(soft, '')}", f"Run `ulimit -n {_LOW_FILES}`."
        )
    finally:
        for descriptor in taken:
            os.close(descriptor)
    described = f"limit {_limit(soft, '')} (hard limit {_limit(hard, '')}); {wanted} opened"
    if soft != resource.RLIM_INFINITY and soft < _LOW_FILES:
        return warn(
            described, f"Jobs of hundreds of ranks, and DataLoader's workers, need more. Run `ulimit -n {_LOW_FILES}`."
        )
    return ok(described)


def processes() -> Finding:
    """Check how many more processes and threads can be started."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit, current = Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids.current")
    described = f"limit {_limit(soft, '')}"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        left = int(most) - int(current.read_text())
        described += f"; limit of the container {most}, {left} left"
        if left < 256:
            return warn(
                described, "Every rank starts threads. Use docker run --pids-limit=-1; in systemd, TasksMax=infinity."
            )
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return warn(described, "Every rank starts threads. Run `ulimit -u 4096`.")
    return ok(described)


def temporary_files() -> Finding:
    """Check whether a file can be written in Python's folder for temporary files."""
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_MB))
        file.flush()
    free = shutil.disk_usage(folder).free
    described = f"{folder}, {_size(free)} free"
    if free < _GB:
        return warn(described, "Make room, or set TMPDIR to another folder.")
    return ok(described)


def _fill(descriptor: int, size: int) -> None:
    """Extend the file to this size, and write to every page so that it is allocated."""
    # Reports missing space as an error. Without it, the write to a page raises SIGBUS.
    os.posix_fallocate(descriptor, 0, size)
    with mmap.mmap(descriptor, size) as mapped:
        page = bytes(range(256)) * (mmap.PAGESIZE // 256)
        for start in range(0, size, mmap.PAGESIZE):
            mapped[start : start + mmap.PAGESIZE] = page
        last = mapped[size - mmap.PAGESIZE :]
    if last != page:
        raise OSError(f"the last of {size} bytes of shared memory does not have the written value")


def _limit(value: int, unit: str = "bytes") -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return _size(value) if unit == "bytes" and value >= _MB else str(value)


def _size(nbytes: int) -> str:
    """Format bytes with two or three digits, so that the ranks of one host report the same text."""
    value, unit = (nbytes / _GB, "GiB") if nbytes >= _GB else (nbytes / _MB, "MiB")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


CHECKS: tuple[Callable[[], Finding], ...] = (
    cpus,
    quiet,
    memory,
    shared_memory,
    dev_shm,
    locked_memory,
    open_files,
    processes,
    temporary_files,
)
