"""A host helper of one's own, without daemon, and the census around it."""
import os
import pathlib
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "lib"))
import daemon as daemon_module  # noqa: E402
import hostside  # noqa: E402

INDEX = hostside.DAEMONS_MAX - 1
BUILD = pathlib.Path(os.environ.get("SPACE_TEST_BUILD", hostside.ROOT / "build-gcc"))
# A QEMU that sits there: no kernel, not running.
QEMU = ["-M", "microvm,acpi=on", "-nodefaults", "-nographic", "-S", "-m", "64",
        "-netdev", "tap,id=n,fd=@TAP@", "-device", "virtio-net-device,netdev=n"]


class Failed(Exception):
    pass


class Helper:
    def __init__(self, name="helper", settings=None):
        self.instance = f"{hostside.INSTANCE_PREFIX}{name}"[:23]
        self.home = hostside.BASE_DIR / name
        self.data_dir = self.home / "data"
        self.runtime_dir = pathlib.Path(f"{hostside.RUN_DIR}-{name}")
        self.socket = self.runtime_dir / "helper.sock"
        self.log = self.home / "helper.log"
        self.uid_first = hostside.UID_FIRST + INDEX * hostside.UIDS_PER_DAEMON
        self.settings = settings or {}
        self.process = None

    def start(self):
        daemon_module.ensure_user()
        hostside.BASE_DIR.mkdir(mode=0o755, exist_ok=True)
        for folder in (self.home, self.data_dir, self.runtime_dir):
            folder.mkdir(mode=0o755, exist_ok=True)
        (self.home / "space.conf").write_text("")
        keys = {"data_dir": self.data_dir, "runtime_dir": self.runtime_dir, "instance": self.instance,
                "vmm_uid_base": self.uid_first, "storage_size": "1G", **self.settings}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPACE_")}
        environment.update({f"SPACE_{key.upper()}": str(value) for key, value in keys.items()})
        environment["SPACE_CONFIG"] = str(self.home / "space.conf")
        self.socket.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([daemon_module.reachable_programs() / "space-helper"], env=environment,
                                            stdin=subprocess.DEVNULL, stderr=log, start_new_session=True, cwd="/")
        end = time.monotonic() + 20
        while not self.socket.exists():
            assert self.process.poll() is None, self.log_tail()
            assert time.monotonic() < end, self.log_tail()
            time.sleep(0.005)
        return self

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def stop(self):
        self.process.terminate()
        self.process.wait(20)

    def destroy(self):
        if self.process and self.process.poll() is None:
            for line in self.tool("list").splitlines():
                self.tool("kill", line.split()[0])
            self.stop()
        hostside.kill_hard(self.vmms())
        for point in reversed([point for point, _, _ in hostside.mounts() if hostside.below(point, self.home)]):
            hostside.unmount(point)
        for path in reversed(hostside.cgroups(self.instance)):
            if os.path.isdir(path):
                os.rmdir(path)
        hostside.remove_tree(self.home)
        hostside.remove_tree(self.runtime_dir)

    def log_tail(self):
        return self.log.read_text(errors="replace")[-3000:]

    def tool(self, *words):
        done = subprocess.run([BUILD / "src/host/host-tool", self.socket, *map(str, words)], check=False, timeout=90,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise Failed(done.stderr.strip())
        return done.stdout.strip()

    def run(self, sandbox, *arguments, options=()):
        """Starts one; returns the pid of its VMM."""
        return int(self.tool("start", sandbox, *options, "--", *(arguments or QEMU)))

    def list(self):
        """id → (pid, alive, exit known, status)"""
        found = {}
        for line in self.tool("list").splitlines():
            word = line.split()
            assert word[4] == word[6], "a pidfd comes with what is alive"
            found[word[0]] = (int(word[2]), word[4] == "1", word[8] == "1", int(word[9]))
        return found

    def vmms(self):
        return hostside.vmm_pids(self.uid_first, self.uid_first + hostside.UIDS_PER_DAEMON)

    def census(self):
        return {
            "vmms": self.vmms(),
            "groups": [path for path in hostside.cgroups(self.instance)
                       if os.path.basename(path).startswith("b") and len(os.path.basename(path)) == 20],
            "mounts": sorted(point for point, _, _ in hostside.mounts() if hostside.below(point, self.home)),
            "records": sorted(os.listdir(self.runtime_dir / "helper")),
            "links": sorted(os.listdir("/sys/class/net")),
            "children": sorted(int(pid) for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir()
                               for pid in (task / "children").read_text().split()),
        }

    def fds(self):
        return hostside.open_fds(self.process.pid)


@pytest.fixture(scope="module")
def shared():
    helper = Helper().start()
    yield helper
    helper.destroy()


@pytest.fixture
def helper(shared):
    """The module's helper; what a case leaves behind is a failure of that case."""
    if shared.process.poll() is not None:
        shared.start()
    before = shared.census()
    yield shared
    assert shared.process.poll() is None, shared.log_tail()
    left = list(shared.list())
    for sandbox in left:
        shared.tool("kill", sandbox)
    assert shared.census() == before
    assert not left
