"""A spaced of one's own: started, killed, started again; the host census around it; the command line client."""
import contextlib
import grp
import hashlib
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import time

import hostside
import rest

BIN = pathlib.Path(os.environ.get("SPACE_TEST_BIN", hostside.ROOT / "build-gcc" / "bin"))
SANITIZED = bool(os.environ.get("SPACE_TEST_SANITIZED"))
START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 60
PROGRAMS = ("space", "spaced", "space-helper", "space-agent")


def ensure_user(name="space"):
    """The daemon's user, as `make up` makes it."""
    try:
        pwd.getpwnam(name)
        grp.getgrnam(name)
    except KeyError:
        subprocess.run(["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent",
                        "--shell", "/usr/sbin/nologin", name], check=True)


def reachable_programs():
    """BIN, or a copy of it where the daemon's user and the VMMs' users may go (a home folder is often closed)."""
    path = BIN.resolve()
    if SANITIZED:
        # QEMU loads the shim and the guest runs the agent: neither has a sanitizer's run-time.
        copy = hostside.BASE_DIR / "bin"
        if not copy.exists():
            hostside.BASE_DIR.mkdir(mode=0o755, exist_ok=True)
            shutil.copytree(path, copy)
            for name in ("space-agent", "libspace-vmm-shim.so"):
                shutil.copy2(hostside.ROOT / "build-gcc" / "bin" / name, copy / name)
        return copy
    if all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents]):
        return path
    copy = hostside.BASE_DIR / "bin"
    if not copy.exists():
        hostside.BASE_DIR.mkdir(mode=0o755, exist_ok=True)
        shutil.copytree(path, copy)
    return copy


class Daemon:
    """One instance. `index` 0…DAEMONS_MAX-1 gives it ports and user ids of its own."""

    def __init__(self, name, index, settings=None, data_dir=None):
        assert index < hostside.DAEMONS_MAX
        self.name, self.index = name, index
        self.instance = f"{hostside.INSTANCE_PREFIX}{name}"[:23]
        self.home = hostside.BASE_DIR / name
        self.data_dir = pathlib.Path(data_dir) if data_dir else self.home / "data"
        self.runtime_dir = pathlib.Path(f"{hostside.RUN_DIR}-{name}")
        self.socket = self.runtime_dir / "space.sock"
        self.port = hostside.PORT_FIRST + index
        self.log = self.home / "spaced.log"
        self.uid_first = hostside.UID_FIRST + index * hostside.UIDS_PER_DAEMON
        self.settings = {"pool_size": 0, "spares": 0, "snapshot_interval": 0, "storage_size": "24G", "log_level": "debug",
                         **(settings or {})}
        self.process = None
        self.programs = None

    # -- life

    def environment(self):
        keys = {"agent_path": self.agent(), "data_dir": self.data_dir, "runtime_dir": self.runtime_dir, "listen": f"127.0.0.1:{self.port}",
                "instance": self.instance, "vmm_uid_base": self.uid_first, **self.settings}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SPACE_")}
        return {**clean, **{f"SPACE_{key.upper()}": str(value) for key, value in keys.items()},
                "SPACE_CONFIG": str(self.home / "space.conf")}

    def agent(self):
        return reachable_programs() / "space-agent"

    def prepare(self):
        ensure_user()
        hostside.BASE_DIR.mkdir(mode=0o755, exist_ok=True)
        self.home.mkdir(mode=0o755, exist_ok=True)
        self.data_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        (self.home / "space.conf").write_text("# all settings come from the environment\n")
        self.programs = reachable_programs()

    def start(self, wait=True):
        assert self.process is None or self.process.poll() is not None, "runs already"
        self.prepare()
        log = open(self.log, "ab")
        self.process = subprocess.Popen([self.programs / "spaced"], env=self.environment(), stdin=subprocess.DEVNULL,
                                        stdout=log, stderr=log, start_new_session=True, cwd="/")
        log.close()
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout=START_TIMEOUT_S):
        end = time.monotonic() + timeout
        client = rest.Client(str(self.socket), timeout=5)
        while True:
            try:
                if client.call("GET", "/healthz").status == 200:
                    return
            except (OSError, rest.http.client.HTTPException):
                pass
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"spaced ended with {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"spaced does not answer after {timeout} s:\n{self.log_tail()}")
            time.sleep(0.02)

    def stop(self):
        """In order, as a service manager does it."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"spaced does not stop within {STOP_TIMEOUT_S} s:\n{self.log_tail()}")

    def kill(self):
        """kill -9 of supervisor, worker and helper at once; VMMs go on."""
        hostside.kill_hard(self.pids())
        hostside.kill_hard(self.pids())
        if self.process is not None:
            self.process.wait(10)

    def restart(self, hard=True):
        if hard:
            self.kill()
        else:
            self.stop()
        return self.start()

    def destroy(self):
        """Ends it and everything it runs, removes all it has."""
        self.kill()
        hostside.kill_hard(self.vmms())
        for point in reversed([point for point, _, _ in hostside.mounts()
                               if hostside.below(point, self.home, self.data_dir, self.runtime_dir)]):
            hostside.unmount(point)
        for device, backing in hostside.loop_devices().items():
            if hostside.below(backing.removesuffix(" (deleted)"), self.home, self.data_dir):
                subprocess.run(["losetup", "-d", device], check=False, stderr=subprocess.DEVNULL)
        for path in reversed(hostside.cgroups(self.instance)):
            try:
                os.rmdir(path)
            except OSError:
                pass
        if not os.environ.get("SPACE_TEST_KEEP"):
            hostside.remove_tree(self.home)
        hostside.remove_tree(self.runtime_dir)

    # -- a template that an earlier run has built (SPACE_TEST_CACHE: a folder, for development)

    def cache_folder(self):
        folder = os.environ.get("SPACE_TEST_CACHE")
        if not folder:
            return None
        digest = hashlib.sha256()
        for path in [self.agent(), *sorted((hostside.ROOT / "src" / "image").glob("*.[ch]")),
                     *sorted((hostside.ROOT / "src" / "vmm").glob("qemu_arguments.[ch]")),
                     *sorted((hostside.ROOT / "src" / "store").glob("*.c"))]:
            digest.update(pathlib.Path(path).read_bytes())
        return pathlib.Path(folder) / digest.hexdigest()[:16]

    def load_cache(self):
        """Before the first start. True if there is a template then."""
        folder = self.cache_folder()
        if not folder or not (folder / "whole").exists():
            return False
        self.prepare()
        subprocess.run(["cp", "-a", "--sparse=always", f"{folder}/data/.", self.data_dir], check=True)
        image = self.data_dir / "pool.xfs"
        if image.exists():  # two copies of one XFS can only be mounted together if they differ in their ids
            point = self.home / "replay"
            point.mkdir(exist_ok=True)
            subprocess.run(["mount", "-o", "loop,nouuid", image, point], check=True)
            subprocess.run(["umount", point], check=True)
            subprocess.run(["xfs_admin", "-U", "generate", image], check=True, stdout=subprocess.DEVNULL)
        return True

    def save_cache(self):
        folder = self.cache_folder()
        if not folder:
            return
        self.stop()
        for point in reversed([point for point, _, _ in hostside.mounts() if hostside.below(point, self.data_dir)]):
            hostside.unmount(point)
        # Two runs may do this at the same time: the first one's stays.
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        subprocess.run(["cp", "-a", "--sparse=always", self.data_dir, fresh / "data"], check=True)
        (fresh / "whole").write_text("")
        with contextlib.suppress(OSError):
            os.rename(fresh, folder)
        shutil.rmtree(fresh, ignore_errors=True)
        self.start()

    # -- looking at it

    def pids(self):
        return hostside.own_daemon_pids(self.instance + "\0")

    def role_pids(self, role):
        """worker, helper or supervisor."""
        found = []
        for pid in self.pids():
            try:
                words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
            except OSError:
                continue
            program = os.path.basename(words[0]).decode()
            is_worker = b"--worker" in words
            if b"--build-image" in words:
                continue
            kind = "helper" if "helper" in program else "worker" if is_worker else "supervisor"
            if kind == role and not hostside.is_zombie(pid):
                found.append(pid)
        return found

    def vmms(self):
        return hostside.vmm_pids(self.uid_first, self.uid_first + hostside.UIDS_PER_DAEMON)

    def log_tail(self, lines=40):
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def client(self, **options):
        return rest.Client(str(self.socket), **options)

    def tcp_client(self, key=None, **options):
        return rest.Client(("127.0.0.1", self.port), key, **options)

    def census(self):
        """What a session must not leave behind."""
        vmms = self.vmms()
        files = []
        for folder in (self.data_dir, self.runtime_dir):
            for top, folders, names in os.walk(folder):
                files += [os.path.relpath(os.path.join(top, name), folder) for name in folders + names]
        # Databases come and go with their helpers, and say nothing of sessions.
        files = sorted(name for name in files if not name.endswith(("-wal", "-shm", "-journal")))
        return {
            "vmms": len(vmms),
            "network namespaces": len(hostside.netns_of(vmms)) + len(hostside.named_netns(self.instance)),
            # The helper keeps a few places ready for sandboxes to come.
            "cgroups": [path for path in hostside.cgroups(self.instance) if "/ready-" not in path],
            "mounts": sorted(point for point, _, _ in hostside.mounts()
                             if hostside.below(point, self.home, self.data_dir, self.runtime_dir)),
            "loop devices": sorted(device for device, backing in hostside.loop_devices().items()
                                   if hostside.below(backing, self.home, self.data_dir)),
            "files": files,
            "worker descriptors": sum(hostside.open_fds(pid) for pid in self.role_pids("worker")),
            "helper descriptors": sum(hostside.open_fds(pid) for pid in self.role_pids("helper")),
        }

    # -- the command line client

    def cli(self, *arguments, input=None, timeout=60, check=None, env=None, text=True):
        """Runs `space ARGUMENTS`; `check` is the exit status that is wanted (None: any)."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPACE_")}
        environment.update({"SPACE_SOCKET": str(self.socket), **(env or {})})
        done = subprocess.run([self.programs / "space", *map(str, arguments)], env=environment, timeout=timeout,
                              check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=text,
                              **({"input": input} if input is not None else {"stdin": subprocess.DEVNULL}))
        if check is not None:
            assert done.returncode == check, (f"space {' '.join(map(str, arguments))}: {done.returncode}\n"
                                              f"{done.stdout[-2000:]!r}\n{done.stderr[-2000:]!r}")
        return done


# The worker keeps up to 32 connections to the helper (CLIENT_CONNECTIONS_MAX), and a few to the database.
FD_SLACK = 36


def census_difference(before, after, fd_slack=FD_SLACK):
    """What is in `after` and was not in `before`, as text; "" if nothing."""
    texts = []
    for key, old in before.items():
        new = after[key]
        if isinstance(old, list):
            more = sorted(set(new) - set(old))
            if more:
                texts.append(f"{key}: {len(more)} more: {', '.join(more[:6])}")
        elif "descriptors" in key:
            # Kept connections vary; a case that opens hundreds of streams finds what leaks.
            if new > old + fd_slack:
                texts.append(f"{key}: {new}, not {old}")
        elif new > old:
            texts.append(f"{key}: {new}, not {old}")
    return "; ".join(texts)
