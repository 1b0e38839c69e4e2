"""spaced as root: two children that are started again, that die with it, and nothing left after an orderly end."""
import os
import signal
import socket
import subprocess
import time

import pytest

import daemon as daemon_module
import hostside


def wait_for(condition, timeout=15):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def spaced():
    daemon = daemon_module.Daemon("supervisor", hostside.DAEMONS_MAX - 2, {"storage_size": "1G"})
    yield daemon
    daemon.destroy()


def answers(daemon):
    try:
        return daemon.client().call("GET", "/healthz").status == 200
    except OSError:
        return False


def test_children_are_started_again(spaced):
    spaced.start()
    supervisor = spaced.process.pid
    for role in ("helper", "worker", "helper", "worker"):
        (pid,) = spaced.role_pids(role)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: spaced.role_pids(role) not in ([pid], []))
        wait_for(lambda: answers(spaced))
    assert spaced.process.poll() is None and spaced.process.pid == supervisor


def test_worker_has_no_privileges(spaced):
    (pid,) = spaced.role_pids("worker")
    facts = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines())
    assert "0" not in facts["Uid"].split() + facts["Gid"].split()
    assert facts["Groups"].strip() == "" and facts["NoNewPrivs"].strip() == "1"
    assert all(int(facts[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))


def test_only_one(spaced):
    done = subprocess.run([spaced.programs / "spaced"], env=spaced.environment(), check=False, timeout=20,
                          stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert f"runs already (process {spaced.process.pid})" in done.stderr
    assert answers(spaced)


def test_children_die_with_it(spaced):
    children = spaced.role_pids("helper") + spaced.role_pids("worker")
    assert len(children) == 2
    spaced.process.kill()
    spaced.process.wait(5)
    wait_for(lambda: all(hostside.is_zombie(pid) for pid in children), 5)
    # The socket of the killed worker may even be another user's.
    spaced.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(spaced.socket))
    os.chown(spaced.socket, 65534, 65534)
    spaced.start()


def test_environment_of_the_starter_stays_outside(spaced):
    spaced.stop()
    os.environ["AWS_SECRET_ACCESS_KEY"] = "hunter2"
    try:
        spaced.start()
    finally:
        del os.environ["AWS_SECRET_ACCESS_KEY"]
    for pid in spaced.role_pids("helper") + spaced.role_pids("worker"):
        assert b"hunter2" not in open(f"/proc/{pid}/environ", "rb").read()


def test_orderly_end_leaves_nothing(spaced):
    spaced.stop()
    assert spaced.process.returncode == 0
    assert not spaced.pids()
    assert not hostside.cgroups(spaced.instance)
    assert not [point for point, _, _ in hostside.mounts() if hostside.below(point, spaced.home)]
    # Somebody else who looks at loop devices may hold it a moment longer.
    wait_for(lambda: not [backing for backing in hostside.loop_devices().values()
                          if hostside.below(backing, spaced.home)], 5)
    assert not [name for name in os.listdir(spaced.runtime_dir) if name.endswith((".sock", ".pid"))]


def test_configuration_that_cannot_work(spaced):
    for settings, reason in (({"user": "nobody-here"}, 'user "nobody-here" does not exist'),
                             ({"user": "root", "group": "root"}, "must not be root"),
                             ({"pool_size": "many"}, "SPACE_POOL_SIZE: pool_size must be a whole number"),
                             ({"helper_path": "/nonexistent/space-helper"}, "giving up")):
        environment = {**spaced.environment(), **{f"SPACE_{key.upper()}": value for key, value in settings.items()}}
        done = subprocess.run([spaced.programs / "spaced"], env=environment, check=False, timeout=30,
                              stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert done.returncode in (1, 2), settings
        assert reason in done.stderr, (settings, done.stderr)
