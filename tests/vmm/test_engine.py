"""The engine on a real helper and real guests, by way of vmm-tool."""
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "lib"))
import hostside  # noqa: E402
import images  # noqa: E402

spec = importlib.util.spec_from_file_location("host_conftest", TESTS / "host" / "conftest.py")
host_conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(host_conftest)


class Engine:
    def __init__(self, helper, folder):
        self.helper = helper
        self.folder = folder
        self.runtime = folder / "run"
        self.runtime.mkdir()

    def tool(self, command, *words):
        """Figures: name → numbers of its line."""
        words = [] if command == "probe" else [self.folder, *map(str, words)]
        done = subprocess.run([images.BUILD / "src/vmm/vmm-tool", self.helper.socket, self.runtime, command, *words],
                              check=False, timeout=600, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert not self.helper.vmms(), "a VMM is left"
        return done.stdout

# Machines of continuous builds are slow and shared.
pytestmark = pytest.mark.limit(600)


@pytest.fixture(scope="module")
def engine():
    helper = host_conftest.Helper("vmm", {"storage_size": "16G"}).start()
    # Where the helper keeps its storage files can be cloned: each start takes a disk of its own.
    folder = helper.data_dir / "pool" / "engine"
    folder.mkdir(parents=True)
    image = images.shared()
    for name in images.FILES:
        subprocess.run(["cp", "--reflink=auto", "--sparse=always", image / name, folder / name], check=True)
    made = Engine(helper, folder)
    boot = made.tool("boot")
    made.boot_figures = boot
    yield made
    helper.destroy()


def figure(text, name):
    return int(re.search(rf"^{name} (?:p50 )?(\d+)", text, re.M).group(1))


def test_probe_tells_what_and_why(engine):
    text = engine.tool("probe")
    flags = open("/proc/cpuinfo").read().split()
    accel = "KVM" if {"vmx", "svm"} & set(flags) and os.path.exists("/dev/kvm") else "TCG"
    assert re.match(rf"QEMU \d+\.\d+\.\d+ with {accel}\b.*: .+", text)


def test_twenty_restores(engine):
    figures = engine.tool("restore", 20)
    # A restored VMM has not read the guest's memory, only mapped it.
    assert figure(figures, "rss_anonymous_kib") < 64 * 1024


def test_chain_of_snapshots(engine):
    """Each snapshot is taken of a guest restored from the one before; e2fsck likes all their disks."""
    kept = engine.folder / "kept"
    kept.mkdir()
    for name in ("memory", "disk", "state"):
        shutil.copy2(engine.folder / f"snapshot.{name}", kept)
    engine.tool("chain", 6)
    for name in ("memory", "disk", "state"):
        os.replace(kept / f"snapshot.{name}", engine.folder / f"snapshot.{name}")


def test_adoption(engine):
    assert engine.tool("adopt").startswith("adopted 3 times")


def test_killed_vmm_is_a_crash(engine):
    assert "crash ok" in engine.tool("exits")


def test_damaged_state_is_refused(engine):
    state = engine.folder / "snapshot.state"
    whole = state.read_bytes()
    for damage in (b"", whole[:8], whole[:len(whole) // 2], b"\0" * len(whole)):
        state.write_bytes(damage)
        done = subprocess.run([images.BUILD / "src/vmm/vmm-tool", engine.helper.socket, engine.runtime, "restore",
                               engine.folder, "1"], check=False, timeout=120, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1 and "device state" in done.stderr, done.stderr
        assert not engine.helper.vmms()
    state.write_bytes(whole)
    engine.tool("restore", 1)


def test_memory_file_of_another_size_is_refused(engine):
    memory = engine.folder / "snapshot.memory"
    size = memory.stat().st_size
    with open(memory, "rb") as file:
        file.seek(size - 4096)
        last = file.read()
    os.truncate(memory, size - 4096)
    done = subprocess.run([images.BUILD / "src/vmm/vmm-tool", engine.helper.socket, engine.runtime, "restore",
                           engine.folder, "1"], check=False, timeout=120, stderr=subprocess.PIPE, text=True)
    with open(memory, "r+b") as file:
        file.seek(size - 4096)
        file.write(last)
    assert done.returncode == 1 and "memory file" in done.stderr
    engine.tool("restore", 1)


def test_base_memory_is_never_written(engine):
    before = images.sha256(engine.folder / "snapshot.memory")
    engine.tool("restore", 3)
    assert images.sha256(engine.folder / "snapshot.memory") == before
