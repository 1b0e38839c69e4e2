"""Sandboxes on real namespaces, cgroups and QEMU processes, through the helper's client library."""
import concurrent.futures
import os
import pathlib
import random
import re
import signal
import string
import subprocess
import time

import pytest
from conftest import QEMU, Failed

import hostside


def new_id():
    return "b" + "".join(random.choices(string.ascii_lowercase + string.digits, k=19))


def status(pid):
    return dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines())


def wait_for(condition, timeout=5):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_network(pid, *command):
    return subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, stdout=subprocess.PIPE,
                          text=True).stdout


def test_vmm_has_no_privileges_and_sees_nothing_of_the_host(helper):
    sandbox = new_id()
    pid = helper.run(sandbox)
    facts = status(pid)
    uid = helper.uid_first
    assert uid <= int(facts["Uid"].split()[0]) < uid + 1024
    assert len(set(facts["Uid"].split() + facts["Gid"].split())) == 1
    assert facts["Groups"].strip() == ""
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[name], 16) == 0
    assert facts["NoNewPrivs"].strip() == "1"
    assert facts["NSpid"].split()[-1] == "1"
    root = pathlib.Path(f"/proc/{pid}/root")
    assert set(os.listdir(root)) <= {"usr", "bin", "sbin", "lib", "lib32", "lib64", "dev", "etc", "space"}
    assert set(os.listdir(root / "dev")) <= {"null", "zero", "urandom", "kvm"}
    assert set(os.listdir(root / "etc")) <= {"ld.so.cache"}
    for line in open(f"/proc/{pid}/mounts"):
        assert line.split()[3].split(",")[0] == "ro", line
    for kind in ("net", "pid", "mnt", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    assert re.search(r"^Max core file size +0 +0", open(f"/proc/{pid}/limits").read(), re.M)
    fds = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert fds[0] == fds[1] == "/dev/null" and "vmm-output" in fds[2] and fds[3] == "/dev/net/tun"
    assert not [name for name in fds.values() if "socket" in name]
    helper.tool("kill", sandbox)


def test_network_leads_nowhere(helper):
    sandbox = new_id()
    pid = helper.run(sandbox)
    assert in_network(pid, "ip", "route").split("\n")[0].startswith("169.254.77.0/30 dev tap0")
    assert len(in_network(pid, "ip", "route").strip().splitlines()) == 1
    assert in_network(pid, "ip", "-6", "address").strip() == ""
    assert "169.254.77.2 dev tap0 lladdr 06:53:50:41:00:02 PERMANENT" in in_network(pid, "ip", "neigh")
    links = in_network(pid, "ip", "-o", "link")
    assert len(links.strip().splitlines()) == 2 and "06:53:50:41:00:01" in links
    # Sockets are made there: nobody answers, but the address is reachable by ARP.
    assert helper.tool("connect", sandbox, 49983) == "Operation now in progress"
    with pytest.raises(Failed, match="1 to 8"):
        helper.tool("sockets", sandbox, 9, 1)
    helper.tool("kill", sandbox)
    with pytest.raises(Failed, match="not_found"):
        helper.tool("sockets", sandbox, 1, 1)


def test_limits_are_set(helper):
    sandbox = new_id()
    pid = helper.run(sandbox, options=("-m", "128"))
    memory = [line.split(":") for line in open(f"/proc/{pid}/cgroup").read().split()]
    places = {controller: path for _, controller, path in memory}
    if "memory" in places:
        file = f"/sys/fs/cgroup/memory{places['memory']}/memory.limit_in_bytes"
    else:
        file = f"/sys/fs/cgroup{places['']}/memory.max"
    assert sandbox in file
    assert int(open(file).read()) == 128 * 1024 * 1024
    helper.tool("kill", sandbox)


def test_stopped_vmm_is_killed(helper):
    sandbox = new_id()
    pid = helper.run(sandbox)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "T" in status(pid)["State"])
    started = time.monotonic()
    helper.tool("kill", sandbox)
    assert time.monotonic() - started < 2
    assert not os.path.exists(f"/proc/{pid}")
    helper.tool("kill", sandbox)


def test_vmm_that_ends_by_itself(helper):
    sandbox = new_id()
    pid = helper.run(sandbox)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not helper.list()[sandbox][1])
    assert helper.list()[sandbox] == (pid, False, True, signal.SIGKILL)
    with pytest.raises(Failed, match="has ended"):
        helper.tool("sockets", sandbox, 1, 1)
    with pytest.raises(Failed, match="exists already"):
        helper.run(sandbox)
    helper.tool("kill", sandbox)
    helper.run(sandbox)
    helper.tool("kill", sandbox)


def test_reason_of_a_failed_start(helper):
    sandbox = new_id()
    helper.run(sandbox, "-M", "no-such-machine")
    wait_for(lambda: not helper.list()[sandbox][1])
    assert helper.list()[sandbox][2:] == (True, 256)
    assert "unsupported machine type" in helper.tool("output", sandbox)
    helper.tool("kill", sandbox)
    for options, reason in ((("-P", "sh"), 'no VMM program "sh"'), (("-P", "../../bin/sh"), "no VMM program"),
                            (("-p", "libc"), "no preload library"), (("-m", "1"), "too low")):
        with pytest.raises(Failed, match=reason):
            helper.run(new_id(), options=options)
    for bad in ("../../../etc/passwd", "b/../../../../tmpx1", "", "b", "s" * 20, "b" + "A" * 19, "b" * 24):
        with pytest.raises(Failed, match="not a sandbox id"):
            helper.run(bad)
        with pytest.raises(Failed, match="not a sandbox id"):
            helper.tool("kill", bad)


def test_output_cannot_grow_or_block(helper):
    """A VMM that says very much on stderr: what fits is kept, the VMM goes on."""
    sandbox = new_id()
    # Prints several hundred KiB about instructions as soon as it runs its firmware.
    arguments = [word for word in QEMU if word != "-S"] + ["-d", "in_asm,op"]
    pid = helper.run(sandbox, *arguments)
    time.sleep(1.5)
    assert helper.list()[sandbox][1], helper.tool("output", sandbox)[-500:]
    text = helper.tool("output", sandbox)
    assert 8000 < len(text) <= 16384
    assert os.stat(f"/proc/{pid}/fd/2").st_size == 16384
    helper.tool("kill", sandbox)


def test_many_at_once(helper):
    before = helper.fds()
    ids = [new_id() for _ in range(24)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        pids = list(threads.map(helper.run, ids))
        uids = {status(pid)["Uid"].split()[0] for pid in pids}
        networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(uids) == len(networks) == len(ids)
        assert set(helper.list()) == set(ids)
        list(threads.map(lambda name: helper.tool("kill", name), ids))
    assert helper.list() == {}
    # Places for the next ones are made anew in the background.
    wait_for(lambda: helper.fds() <= before + 2)


def test_same_id_twice_at_once(helper):
    for _ in range(5):
        sandbox = new_id()
        results = []

        def start():
            try:
                results.append(helper.run(sandbox))
            except Failed as error:
                results.append(str(error))

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(start)
        assert sum(isinstance(result, int) for result in results) == 1
        assert sum("exists already" in str(result) for result in results) == 3
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(helper.tool, "kill", sandbox)
        assert helper.list() == {}


def test_killed_helper_takes_sandboxes_over(helper):
    kept, ended = new_id(), new_id()
    pid, other = helper.run(kept), helper.run(ended)
    boot = status(pid)["Uid"]
    helper.kill()
    hostside.kill_hard([other])
    helper.start()
    found = helper.list()
    assert found[kept] == (pid, True, False, 0)
    wait_for(lambda: helper.list()[ended][1:] == (False, False, 0))  # on a busy host an end takes its time
    assert status(pid)["Uid"] == boot
    assert helper.tool("connect", kept, 49983) == "Operation now in progress"
    fresh = new_id()
    assert status(helper.run(fresh))["Uid"] != boot
    for sandbox in (kept, ended, fresh):
        helper.tool("kill", sandbox)


def test_kill_helper_at_any_moment(helper):
    """Callers see nothing of it: every start and kill is carried out once, and nothing else is left."""
    dice = random.Random(20)
    told = {}
    for _ in range(15):
        wanted = {new_id() for _ in range(3)}
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            running = {name: threads.submit(helper.run, name) for name in wanted}
            ending = {name: threads.submit(helper.tool, "kill", name) for name in list(told)[:2]}
            time.sleep(dice.uniform(0, 0.03))
            helper.kill()
            helper.start()
            for name, future in running.items():
                told[name] = future.result()
            for name, future in ending.items():
                future.result()
                del told[name]
        found = helper.list()
        for name, pid in told.items():
            assert found[name][0] == pid and found[name][1]
        assert set(found) == set(told)
        assert helper.vmms() == sorted(told.values())
    for name in told:
        helper.tool("kill", name)


def test_damaged_records(helper):
    sandbox = new_id()
    pid = helper.run(sandbox)
    records = helper.runtime_dir / "helper"
    helper.kill()
    whole = (records / sandbox).read_text()
    (records / sandbox).write_text(whole[:30])
    (records / ".half").write_text("x")
    (records / new_id()).write_bytes(os.urandom(100))
    # A record whose pid now is another process's.
    stranger = new_id()
    (records / stranger).write_text(f"{stranger} pid {os.getpid()} start 5 index 900 nonce 77\n")
    helper.start()
    assert helper.list() == {stranger: (os.getpid(), False, False, 0)}
    assert hostside.is_zombie(pid), "without a record its group is swept"
    helper.tool("kill", stranger)


def test_storage_is_found_again(helper):
    first = helper.tool("storage")
    assert "reflink 1" in first, first
    pool = helper.data_dir / "pool"
    (pool / "file").write_text("kept")
    helper.kill()
    helper.start()
    assert helper.tool("storage") == first
    assert (pool / "file").read_text() == "kept"
    if "loop 1" not in first:
        return
    loops = [device for device, backing in hostside.loop_devices().items()
             if hostside.below(backing, helper.home)]
    assert len(loops) == 1
    # Unmounted while a file is open, as a VMM's disk would be: the same device must be used again.
    with open(pool / "file") as held:
        helper.kill()
        subprocess.run(["umount", "-l", pool], check=True)
        helper.start()
        assert [device for device, backing in hostside.loop_devices().items()
                if hostside.below(backing, helper.home)] == loops
        assert held.read() == "kept"
    assert (pool / "file").read_text() == "kept"
    # In order, and idle: unmounted.
    helper.stop()
    assert not [point for point, _, _ in hostside.mounts() if hostside.below(point, helper.home)]
    helper.start()
    assert (pool / "file").read_text() == "kept"
    assert pool.stat().st_mode & 0o777 == 0o700


def test_doctor_says_what_there_is(helper):
    lines = [line.split("\t") for line in helper.tool("doctor").splitlines()]
    assert all(len(line) == 3 and line[1] in ("ok", "warn", "fail") for line in lines)
    names = {line[0] for line in lines}
    assert {"kernel", "kvm", "qemu", "cgroup", "tun", "namespaces", "storage", "disk", "user", "seccomp"} <= names
    assert not [line for line in lines if line[1] == "fail"]


def test_speed(helper):
    """Figures with room for a busy machine: a start is 2 ms, sockets are 0.05 ms on an idle one."""
    text = helper.tool("cycle", 20, "--", *QEMU)
    sandbox = new_id()
    helper.run(sandbox)
    text += "\n" + helper.tool("sockets", sandbox, 1, 200)
    helper.tool("kill", sandbox)
    figures = {line.split()[0]: int(line.split()[2]) for line in text.splitlines()}
    print(text)
    assert figures["sockets"] < 1000
    assert figures["start"] < 100_000 and figures["kill"] < 100_000
