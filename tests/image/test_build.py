"""Root file systems: the same inputs give the same bytes, a failure says why and leaves nothing."""
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "lib"))
import hostside  # noqa: E402
import images  # noqa: E402

# Machines of continuous builds are slow and shared.
pytestmark = pytest.mark.limit(1500)


@pytest.fixture(scope="module")
def image():
    return images.shared()


def debugfs(disk, command):
    return subprocess.run(["debugfs", "-R", command, disk], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True).stdout


def test_same_inputs_same_bytes(image):
    again = hostside.BASE_DIR / "image-again"
    try:
        images.build(again)
        for name in images.FILES:
            assert images.sha256(image / name) == images.sha256(again / name), name
    finally:
        hostside.remove_tree(again)


def test_disk_is_whole_and_sparse(image):
    disk = image / "disk"
    assert subprocess.run(["e2fsck", "-fn", disk], check=False, stdout=subprocess.DEVNULL).returncode == 0
    status = os.stat(disk)
    assert status.st_size == 4 << 30
    assert status.st_blocks * 512 < 700 << 20


def test_what_the_guest_finds(image):
    disk = image / "disk"
    assert "user:x:1000:1000:" in debugfs(disk, "cat /etc/passwd")
    shadow = dict(line.split(":", 2)[:2] for line in debugfs(disk, "cat /etc/shadow").splitlines())
    assert shadow["root"] in ("*", "!", "!*") and shadow["user"] in ("!", "*", "!*")
    assert "NOPASSWD" in debugfs(disk, "cat /etc/sudoers.d/user")
    assert debugfs(disk, "cat /etc/machine-id") == ""
    assert "Mode:  0755" in debugfs(disk, "stat /usr/sbin/space-agent")
    for program in ("python3", "git", "curl", "jq", "sqlite3", "sudo", "zip", "unzip", "less", "nano", "find", "ps"):
        assert "Inode:" in debugfs(disk, f"stat /usr/bin/{program}"), program
    # No trace of the build, and no compiler.
    for path in ("/usr/bin/gcc", "/var/log/dpkg.log", "/etc/apt/apt.conf.d/99mmdebstrap", "/etc/passwd-"):
        assert "Inode:" not in debugfs(disk, f"stat {path}"), path


def test_initrd_is_an_archive_the_kernel_reads(image):
    names = subprocess.run(["cpio", "-t", "--quiet"], check=True, stdin=open(image / "initrd", "rb"),
                           stdout=subprocess.PIPE, text=True).stdout.split()
    assert names[-1] == "modules/order" and "init" in names and "dev/console" in names
    order = subprocess.run(["cpio", "-i", "--quiet", "--to-stdout", "modules/order"], check=True,
                           stdin=open(image / "initrd", "rb"), stdout=subprocess.PIPE, text=True).stdout.split()
    assert {f"modules/{name}" for name in order} == {name for name in names if name.endswith(".ko")}
    assert order.index("virtio_ring.ko") < order.index("virtio.ko") < order.index("virtio_blk.ko")
    assert order.index("net_failover.ko") < order.index("virtio_net.ko")


@pytest.mark.parametrize("words, message", [
    (["-", "No Such Package"], "is not the name of a Debian package"),
    (["-", "--option"], "is not the name of a Debian package"),
    (["Bookworm;"], "is not the name of a Debian suite"),
    (["-", "space-has-no-such-package"], "space-has-no-such-package"),
])
def test_failure_says_why_and_leaves_nothing(words, message):
    folder = hostside.BASE_DIR / "image-failed"
    hostside.BASE_DIR.mkdir(mode=0o755, exist_ok=True)
    try:
        with pytest.raises(subprocess.CalledProcessError) as failed:
            images.build(folder, *words)
        assert message in failed.value.stderr
        work = hostside.BASE_DIR / "image-work"
        assert not work.exists() or [name for name in os.listdir(work) if name != "packages"] == []
    finally:
        hostside.remove_tree(folder)
