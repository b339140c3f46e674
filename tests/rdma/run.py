"""Runs tests/rdma/guest.py on a virtual machine with an RDMA device: `make rdma`.

No machine with InfiniBand is needed: the kernel module rdma_rxe (soft RoCE) provides a device of the verbs provider on
an ordinary network interface. Many kernels lack the module, so the test boots Debian's kernel in QEMU, without KVM. The
guest reads the files of this machine through 9p: the repository, its environment and the libraries. It writes to memory
only.

Debian packages: qemu-system-x86 busybox-static kmod cpio rdma-core ibverbs-providers iproute2 libfabric1.
"""

from __future__ import annotations

import gzip
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "rdma"
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm")
INIT = """#!/bin/busybox sh
busybox mkdir -p /proc /sys /dev /host
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
for module in $(busybox cat /modules/order); do busybox insmod /modules/$module; done
busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host /host
for fs in proc sys dev; do busybox mount -o bind /$fs /host/$fs; done
busybox mkdir -p /dev/shm
busybox mount -t tmpfs tmpfs /host/dev/shm
busybox mount -t tmpfs tmpfs /host/run
busybox ip link set lo up
busybox ip link set eth0 up
busybox ip address add 10.0.2.15/24 dev eth0
busybox mount -t tmpfs tmpfs /host/mnt
busybox chroot /host /usr/bin/env -i PATH={bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  HOME=/run TMPDIR=/run LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 sh -c \\
  'rdma link add rxe0 type rxe netdev eth0 && cd {root} && python tests/rdma/guest.py; echo "guest exit code $?"'
busybox poweroff -f
"""


def main() -> None:
    if platform.machine() != "x86_64":
        sys.exit("tests/rdma/run.py supports x86_64 only")
    for program in ("qemu-system-x86_64", "busybox", "depmod", "modprobe", "cpio", "rdma"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is missing: {(__doc__ or '').strip().splitlines()[-1]}")
    version = _kernel()
    _initramfs(version)
    command = [
        "qemu-system-x86_64", "-machine", "pc", "-cpu", "max", "-smp", "2", "-m", "4G",
        "-kernel", str(BUILD / f"kernel/boot/vmlinuz-{version}"), "-initrd", str(BUILD / "initramfs"),
        "-append", "console=ttyS0 quiet panic=-1",
        "-virtfs", "local,path=/,mount_tag=host,security_model=passthrough,readonly=on,multidevs=remap",
        "-nic", "user,model=virtio-net-pci", "-nographic", "-no-reboot",
    ]  # fmt: skip
    guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace")
    assert guest.stdout is not None
    output = []
    for line in guest.stdout:
        print(line, end="", flush=True)
        output.append(line)
    guest.wait()
    sys.exit(0 if any("guest exit code 0" in line for line in output) else "the test in the guest failed")


def _kernel() -> str:
    """Unpack Debian's kernel, without installing it. Return its version."""
    kernel = BUILD / "kernel"
    if not kernel.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        depends = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        package = next(word for word in depends.split() if word.startswith("linux-image-") and word[12].isdigit())
        subprocess.run(["apt-get", "download", package], check=True, cwd=BUILD)
        archive = next(BUILD.glob("linux-image-*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(archive), str(kernel)], check=True)
    version = next((kernel / "lib/modules").iterdir()).name
    subprocess.run(["depmod", "-b", str(kernel), version], check=True)
    return version


def _initramfs(version: str) -> None:
    """Create the first file system of the guest: busybox, the modules in the order of their loading, and INIT."""
    folder = BUILD / "files"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    (folder / "modules").mkdir()
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, folder / "bin/busybox")
    order: list[str] = []
    for module in MODULES:
        found = subprocess.run(
            ["modprobe", "-S", version, "-d", str(BUILD / "kernel"), "--show-depends", module],
            check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        for line in found.splitlines():
            words = line.split()
            if words[0] == "insmod" and Path(words[1]).name not in order:
                shutil.copy(words[1], folder / "modules")
                order.append(Path(words[1]).name)
    (folder / "modules/order").write_text("\n".join(order) + "\n")
    init = folder / "init"
    init.write_text(INIT.format(root=ROOT, bin=Path(sys.prefix) / "bin"))
    init.chmod(0o755)
    names = "\n".join(str(path.relative_to(folder)) for path in [folder, *sorted(folder.rglob("*"))])
    archive = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=folder, input=names.encode(), check=True, stdout=subprocess.PIPE
    ).stdout
    (BUILD / "initramfs").write_bytes(gzip.compress(archive, 1))


if __name__ == "__main__":
    main()
