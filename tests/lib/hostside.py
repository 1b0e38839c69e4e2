"""What tests and bench need to know of the host: own names, what is left of a daemon, and how to remove that.

Every daemon of a test run has an instance name, folders, ports and user ids that follow from the slot of this tree, so
that runs of several trees, and an installed SPACE, do not meet. Whatever bears those names is ours to remove.
"""
import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SLOT = int(os.environ.get("SPACE_TEST_SLOT", zlib.crc32(str(ROOT).encode()) % 64))
SECOND_SLOT = (SLOT + 32) % 64  # for what runs beside
BASE_DIR = pathlib.Path(f"/var/tmp/space-test-{SLOT}")
RUN_DIR = pathlib.Path(f"/run/space-test-{SLOT}")
INSTANCE_PREFIX = f"spt{SLOT}-"
DAEMONS_MAX = 12
UIDS_PER_DAEMON = 1024
UID_FIRST = 1_000_000 + SLOT * DAEMONS_MAX * UIDS_PER_DAEMON
UID_END = UID_FIRST + DAEMONS_MAX * UIDS_PER_DAEMON
PORT_FIRST = 17000 + SLOT * 32
CGROUP_ROOT = pathlib.Path("/sys/fs/cgroup")


@contextlib.contextmanager
def one_run_at_a_time(slot=SLOT):
    path = pathlib.Path(f"/var/tmp/space-test-{slot}.lock")
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another test run of this tree holds {path}; wait for it, or set SPACE_TEST_SLOT")
        yield


def processes():
    """(pid, real uid, environment text) of every process that can be looked at."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            uid = os.stat(entry.path).st_uid
            for line in open(f"{entry.path}/status"):
                if line.startswith("Uid:"):
                    uid = int(line.split()[1])
                    break
            environment = open(f"{entry.path}/environ", "rb").read()
        except OSError:
            continue
        yield int(entry.name), uid, environment


def vmm_pids(uid_first, uid_end):
    return sorted(pid for pid, uid, _ in processes() if uid_first <= uid < uid_end and not is_zombie(pid))


def is_zombie(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] in ("Z", "X")
    except OSError:
        return True


def own_daemon_pids(instance_prefix):
    """Processes that were started with one of our instance names (supervisor, worker, helper)."""
    key = b"\0SPACE_INSTANCE=" + instance_prefix.encode()
    return sorted(pid for pid, _, environment in processes() if key in b"\0" + environment)


def mounts(pid="self"):
    """Mount points as (mount point, file system, source) of the process's mount namespace."""
    found = []
    try:
        lines = open(f"/proc/{pid}/mountinfo").read().splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), point)
        fstype, source = right.split()[:2]
        found.append((point, fstype, source))
    return found


def below(path, *folders):
    return any(path == str(folder) or path.startswith(f"{folder}/") for folder in folders)


def loop_devices():
    """loop device → backing file."""
    found = {}
    for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found[f"/dev/{path.parts[3]}"] = path.read_text().strip()
    return found


def cgroups(instance_prefix):
    """Folders in any cgroup hierarchy whose path has a part that starts with the instance's name."""
    found = []
    for top, folders, _ in os.walk(CGROUP_ROOT):
        depth = len(pathlib.Path(top).relative_to(CGROUP_ROOT).parts)
        for folder in list(folders):
            if folder.startswith(instance_prefix):
                found.append(os.path.join(top, folder))
                for inner, _, _ in os.walk(os.path.join(top, folder)):
                    if inner != os.path.join(top, folder):
                        found.append(inner)
                folders.remove(folder)
            elif depth > 4:
                folders.remove(folder)
    return sorted(found)


def named_netns(prefix):
    """Named network namespaces of ours (some are only held by their processes and are found through those)."""
    folder = pathlib.Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"*{prefix}*")) if folder.exists() else []


def netns_of(pids):
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def kill_hard(pids, wait_s=5):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + wait_s
    while time.monotonic() < end and any(not is_zombie(pid) for pid in pids):
        time.sleep(0.02)
    return [pid for pid in pids if not is_zombie(pid)]


def unmount(point):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(point), 0) and libc.umount2(os.fsencode(point), 2):
        return os.strerror(ctypes.get_errno())
    return None


def remove_tree(path):
    """rm -rf that does not cross into a file system that is still mounted there, and copes with modes of 0."""
    def retry(function, name, _):
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), stat.S_IRWXU)
            function(name)
    if path.exists():
        shutil.rmtree(path, onerror=retry)


def remove_leftovers():
    """Ends and removes everything of this slot; returns texts of what was found alive or could not be removed."""
    found = []
    daemons = own_daemon_pids(INSTANCE_PREFIX)
    if daemons:
        found.append(f"processes of daemons: {daemons}")
    # Supervisors first, so that nothing is started again.
    kill_hard(daemons)
    kill_hard(own_daemon_pids(INSTANCE_PREFIX))
    vmms = vmm_pids(UID_FIRST, UID_END)
    if vmms:
        found.append(f"VMMs: {vmms}")
    alive = kill_hard(vmms)
    if alive:
        found.append(f"processes that do not die: {alive}")
    for _ in range(8):
        points = [point for point, _, _ in mounts() if below(point, BASE_DIR) or below_run(point)]
        if not points:
            break
        for point in reversed(points):
            unmount(point)
    for device, backing in loop_devices().items():
        if below(backing.removesuffix(" (deleted)"), BASE_DIR):
            subprocess.run(["losetup", "-d", device], check=False, stderr=subprocess.DEVNULL)
    for name in named_netns(INSTANCE_PREFIX):
        subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
    for path in reversed(cgroups(INSTANCE_PREFIX)):
        with contextlib.suppress(OSError):
            os.rmdir(path)
    remove_tree(BASE_DIR)
    for path in pathlib.Path("/run").glob(f"space-test-{SLOT}*"):
        if below_run(str(path)):
            remove_tree(path)
    return found


def below_run(path):
    return below(path, RUN_DIR) or re.match(rf"{RUN_DIR}-", path) is not None


def free_bytes(path):
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def rss_bytes(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def open_fds(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return 0
        raise
