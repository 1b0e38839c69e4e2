"""Processes, terminals and their output, against an agent in test mode."""
import base64
import concurrent.futures
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import pwd
import re
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from agent_process import ProcessAgent, RpcError, Result, Stream, envelope

KEEPALIVE = {"Keepalive-Ping-Interval": "1"}
SANITIZED = bool(os.environ.get("SPACE_TEST_SANITIZED"))


@pytest.fixture(scope="module")
def agent():
    a = ProcessAgent()
    yield a
    a.stop()


@pytest.fixture
def own_agent():
    a = ProcessAgent()
    yield a
    a.stop()


def wait_for(condition, seconds=5, step=0.02):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(step)


def alive(pid):
    try:
        state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children_states(pid):
    """State letters of all processes whose parent is the agent."""
    states = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()
                if int(fields[1]) == pid:
                    states.append(fields[0])
    return states


# Ends of processes

def test_exit_code_and_streams(agent):
    r = agent.sh("echo out; echo err >&2; exit 7")
    assert (r.out, r.err) == (b"out\n", b"err\n")
    assert r.end == {"exitCode": 7, "exited": True, "status": "exit status 7", "error": "exit status 7", "signal": 0,
                     "signalName": ""}
    assert agent.run("true").end["status"] == "exit status 0"
    assert "error" not in agent.run("true").end


@pytest.mark.parametrize("script,number,name,words", [
    ("echo a; kill -9 $$", 9, "SIGKILL", "killed"),
    ("echo a; kill -TERM $$", 15, "SIGTERM", "terminated"),
    ("echo a; kill -SEGV $$", 11, "SIGSEGV", "segmentation fault"),
])
def test_death_by_signal_is_told(agent, script, number, name, words):
    r = agent.sh(script)
    assert r.out == b"a\n"
    assert (r.end["exitCode"], r.end["exited"], r.end["signal"], r.end["signalName"]) == (-1, False, number, name)
    assert words in r.end["status"] and words in r.end["error"]


def test_exit_137_is_not_a_signal(agent):
    r = agent.sh("exit 137")
    assert (r.end["exitCode"], r.end["exited"], r.end["signal"]) == (137, True, 0)
    r = agent.sh("sh -c 'kill -9 $$'; exit 3")
    assert (r.code, r.end["signal"]) == (3, 0)


def test_program_that_cannot_run(agent, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    bare = tmp_path / "bare"
    bare.write_text("echo bare $1\n")
    bare.chmod(0o755)
    for program, code, status in (("nosuchcmd", "not_found", 127), ("/no/such/program", "not_found", 127),
                                  (str(plain), "permission_denied", 126), (str(script), "not_found", 127),
                                  (str(tmp_path), "permission_denied", 126)):
        began = time.monotonic()
        with pytest.raises(RpcError) as e:
            agent.run(program)
        assert e.value.code == code and program in e.value.message and e.value.detail["exitStatus"] == status
        assert time.monotonic() - began < 1
    assert "interpreter" in str(pytest.raises(RpcError, agent.run, str(script)).value)
    # As a shell and execvp() do it: a script without "#!" is run by sh.
    assert agent.run(str(bare), "x").out == b"bare x\n"
    r = agent.sh("nosuchcmd")
    assert r.code == 127 and b"not found" in r.err


def test_program_that_cannot_run_many_times(agent):
    def one(i):
        with pytest.raises(RpcError):
            agent.run("nosuchcmd")
        return agent.sh("nosuchcmd").code
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert set(pool.map(one, range(150))) == {127}
    wait_for(lambda: "Z" not in children_states(agent.process.pid))


def test_background_child_does_not_hold_the_call(agent, tmp_path):
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    r = agent.sh(f"sleep 30 & echo $! > {pid_file}; echo started")
    assert time.monotonic() - began < 2 and r.out == b"started\n" and r.code == 0
    child = int(pid_file.read_text())
    assert alive(child)
    # A child that goes on writing gets no SIGPIPE and is not held up by a full pipe.
    count = tmp_path / "count"
    r = agent.sh(f"setsid sh -c 'while :; do head -c 50000 /dev/zero; echo x >> {count}; done' & echo $! > {pid_file}; "
                 f"while [ ! -s {count} ]; do :; done; echo started")
    writer = int(pid_file.read_text())
    before = count.stat().st_size
    wait_for(lambda: count.stat().st_size > before + 20)
    os.kill(child, signal.SIGKILL)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if int(open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()[3]) == writer:
                    os.kill(int(entry), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(writer, signal.SIGKILL)
    assert agent.run("true").code == 0


def test_last_output_is_complete(agent):
    # All of a full pipe that the leader leaves behind, while a child holds it open.
    for _ in range(20):
        r = agent.sh("sleep 5 & head -c 60000 /dev/zero; echo end >&2")
        assert len(r.out) == 60000 and r.err == b"end\n"


def test_thousand_exit_codes_in_parallel(agent):
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        codes = list(pool.map(lambda n: agent.sh(f"exit {n % 256}").code, range(1000)))
    assert codes == [n % 256 for n in range(1000)]


@pytest.mark.limit(180)
def test_orphans_leave_no_zombies(agent):
    stop = threading.Event()
    bad = []

    def checker():
        n = 0
        while not stop.is_set():
            n = (n + 1) % 256
            code = agent.sh(f"exit {n}").code
            if code != n:
                bad.append((n, code))
    watcher = threading.Thread(target=checker)
    watcher.start()
    script = "i=0; while [ $i -lt 100 ]; do (sleep 0.05 & ); i=$((i+1)); done"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert {r.code for r in pool.map(lambda _: agent.sh(script), range(20))} == {0}
    stop.set()
    watcher.join()
    assert not bad
    wait_for(lambda: children_states(agent.process.pid) == [], seconds=10)


# Input

def test_stdin_in_odd_pieces(agent):
    data = os.urandom(5_000_011)
    stream = agent.start("sha256sum", stdin=True)
    result = Result().take(stream.message()[1]["event"])
    for at in range(0, len(data), 333_337):
        agent.send(result.pid, data[at:at + 333_337])
    agent.close_stdin(result.pid)
    agent.close_stdin(result.pid)  # twice is no error
    for event in stream:
        result.take(event)
    assert result.out.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_stdin_closed_or_absent(agent):
    assert agent.run("cat").code == 0  # stdin: false is an empty file
    stream = agent.start("sh", "-c", "for i in 1 2 3; do echo $i; echo $i >&2; sleep 0.3; done", stdin=True)
    result = Result().take(stream.message()[1]["event"])
    agent.close_stdin(result.pid)
    for event in stream:
        result.take(event)
    assert result.out == result.err == b"1\n2\n3\n"


def test_input_errors(agent):
    stream = agent.start("sleep", "5", stdin=True)
    pid = stream.message()[1]["event"]["start"]["pid"]
    agent.close_stdin(pid)
    with pytest.raises(RpcError) as e:
        agent.send(pid, b"x")
    assert e.value.code == "failed_precondition" and "closed" in e.value.message
    with pytest.raises(RpcError) as e:
        agent.send(pid, b"x", kind="pty")
    assert e.value.code == "failed_precondition"
    with pytest.raises(RpcError) as e:
        agent.rpc("SendInput", {"process": {"pid": pid}, "input": {"stdin": "!!"}})
    assert e.value.code == "invalid_argument"
    agent.signal(pid, "SIGNAL_SIGKILL")
    for _ in stream:
        pass
    with pytest.raises(RpcError) as e:
        agent.send(pid, b"x")
    assert e.value.code in ("not_found", "failed_precondition")
    with pytest.raises(RpcError) as e:
        agent.send(4194000, b"x")
    assert e.value.code == "not_found"


def test_stream_input(agent):
    stream = agent.start("cat", stdin=True)
    result = Result().take(stream.message()[1]["event"])
    pieces = [os.urandom(10_000 + i) for i in range(40)]
    body = envelope({"start": {"process": {"pid": result.pid}}}) + envelope({"keepalive": {}})
    for piece in pieces:
        body += envelope({"data": {"input": {"stdin": base64.b64encode(piece).decode()}}})

    def feed():
        answer = agent.request("POST", "/process.Process/StreamInput", body,
                               {"Content-Type": "application/connect+json", **agent.auth()})
        assert answer.status == 200 and answer.body[0] == 0 and b"error" not in answer.body
        agent.close_stdin(result.pid)
    feeder = threading.Thread(target=feed)
    feeder.start()
    for event in stream:
        result.take(event)
    feeder.join()
    assert result.out == b"".join(pieces)


def test_input_and_output_at_once(agent):
    size = 20_000_000 if not SANITIZED else 3_000_000
    stream = agent.start("cat", stdin=True)
    result = Result().take(stream.message()[1]["event"])
    sent = hashlib.sha256()

    def feed():
        for _ in range(size // 1_000_000):
            piece = os.urandom(1_000_000)
            sent.update(piece)
            agent.send(result.pid, piece)
        agent.close_stdin(result.pid)
    feeder = threading.Thread(target=feed)
    feeder.start()
    got = hashlib.sha256()
    for event in stream:
        if "data" in event:
            got.update(base64.b64decode(event["data"]["stdout"]))
    feeder.join()
    assert got.digest() == sent.digest()


# Output

def test_all_bytes_both_streams(agent):
    script = ("import sys,os\nb=bytes(range(256))*4096\n"
              "for i in range(0,len(b),50000): os.write(1,b[i:i+50000]); os.write(2,b[i:i+50000])")
    r = agent.run("python3", "-c", script)
    assert r.out == r.err == bytes(range(256)) * 4096
    # Offsets count all bytes of both streams in the order they were read.
    at = 0
    for offset, size in r.order:
        assert offset == at
        at += size
    assert at == 2 * 256 * 4096


def test_split_character(agent):
    r = agent.sh(r"printf '\344\270'; sleep 0.4; printf '\255'")
    assert r.out == "中".encode()


@pytest.mark.limit(240)
def test_large_output_is_exact_and_memory_bounded(own_agent):
    size = 300_000_000 if not SANITIZED else 20_000_000
    stream = own_agent.start("sh", "-c", f"head -c {size} /dev/zero & head -c {size} /dev/zero | tr '\\0' 'e' >&2; wait")
    counts = {"stdout": 0, "stderr": 0}
    peak = 0
    began = time.monotonic()
    for n, event in enumerate(stream):
        for name, data in event.get("data", {}).items():
            if name in counts:
                raw = base64.b64decode(data)
                assert raw.count(b"\0" if name == "stdout" else b"e") == len(raw)
                counts[name] += len(raw)
        if n % 500 == 0:
            peak = max(peak, own_agent.rss_kb())
    assert counts == {"stdout": size, "stderr": size}
    assert peak < 16 * 1024
    print(f"{2 * size / 1e6 / (time.monotonic() - began):.0f} MB/s, {peak} KiB")


def test_silent_stdout_while_stderr_is_large(agent):
    r = agent.sh("head -c 5000000 /dev/zero >&2")
    assert (len(r.out), len(r.err)) == (0, 5000000)


@pytest.mark.limit(180)
def test_reader_that_reads_nothing(own_agent):
    """It holds the process back for the stated time, with bounded memory, then loses its hold; others are not affected."""
    stream = own_agent.start("yes")
    pid = stream.message()[1]["event"]["start"]["pid"]
    time.sleep(3)

    def cpu():
        return sum(map(int, open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13]))
    held = cpu()
    began = time.monotonic()
    time.sleep(2)
    assert cpu() == held, "the process was not held back"
    for _ in range(20):
        assert own_agent.run("true").code == 0
    assert own_agent.rss_kb() < 16 * 1024
    wait_for(lambda: cpu() > held, seconds=40, step=0.5)
    assert time.monotonic() - began > 15
    assert own_agent.rss_kb() < 16 * 1024
    # The reader wakes up: it gets what was on its way, then is told.
    with pytest.raises(RpcError) as e:
        for _ in stream:
            pass
    assert e.value.code == "resource_exhausted" and "offset" in e.value.message
    own_agent.signal(pid, "SIGKILL")


def test_fast_reader_beside_one_that_left(agent):
    stream = agent.start("sh", "-c", "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; sleep 0.2")
    pid = stream.message()[1]["event"]["start"]["pid"]
    other = agent.attach(pid, offset=0)
    stream.close()
    result = Result()
    for event in other:
        result.take(event)
    assert result.out == b"".join(b"line %d\n" % i for i in range(2000))


def test_output_without_reader_is_kept_to_the_bound(own_agent):
    pid = own_agent.background("sh", "-c", "head -c 3000000 /dev/zero; echo tail")
    wait_for(lambda: not [p for p in own_agent.list() if p["pid"] == pid], seconds=20)
    r = own_agent.follow(pid, offset=0)
    assert r.gap["from"] == 0 and r.gap["to"] == 3000005 - len(r.out)
    assert len(r.out) == 1024 * 1024 and r.out.endswith(b"\0tail\n") and r.code == 0
    assert own_agent.follow(pid, offset=3000000).out == b"tail\n"
    with pytest.raises(RpcError) as e:
        own_agent.follow(pid, offset=3000006)
    assert e.value.code == "invalid_argument"


def test_reattach_with_offset_misses_nothing(agent):
    stream = agent.start("sh", "-c", "i=0; while [ $i -lt 300 ]; do echo $i; i=$((i+1)); sleep 0.005; done")
    text = b""
    pid = stream.message()[1]["event"]["start"]["pid"]
    offset = 0
    reads = 0
    while True:
        done = False
        taken = 0
        for event in stream:
            if "data" in event:
                assert event["data"]["offset"] == offset
                raw = base64.b64decode(event["data"]["stdout"])
                text += raw
                offset += len(raw)
                taken += 1
                if taken == 20:
                    break
            if "end" in event:
                done = True
        stream.close()
        if done:
            break
        reads += 1
        stream = agent.attach(pid, offset=offset)
    assert text == b"".join(b"%d\n" % i for i in range(300)) and reads > 3


def test_many_readers_get_the_same(agent):
    first = agent.start("sh", "-c", "sleep 0.5; for i in 1 2 3 4 5; do head -c 200000 /dev/zero; done")
    pid = first.message()[1]["event"]["start"]["pid"]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        sizes = list(pool.map(lambda _: len(agent.follow(pid, offset=0).out), range(10)))
    assert sizes == [1000000] * 10


def test_result_is_kept_for_late_readers(agent):
    pid = agent.background("sh", "-c", "echo x; exit 5")
    time.sleep(0.5)
    r = agent.follow(pid)
    assert (r.pid, r.out, r.code) == (pid, b"", 5)
    assert agent.follow(pid, offset=0).out == b"x\n"
    tagged = agent.start("sh", "-c", "exit 6", tag="job")
    list(tagged)
    assert [e["end"]["exitCode"] for e in Stream(agent, "Connect", {"process": {"tag": "job"}}) if "end" in e] == [6]
    with pytest.raises(RpcError) as e:
        agent.follow(4194001)
    assert e.value.code == "not_found"


def test_list(agent):
    pid = agent.background("sleep", "20", tag="sleeper", envs={"A": "1"})
    entry = [p for p in agent.list() if p["pid"] == pid][0]
    assert entry["config"] == {"cmd": "sleep", "args": ["20"], "envs": {"A": "1"}}
    assert entry["tag"] == "sleeper" and entry["running"] is True and re.match(r"\d{4}-.*Z$", entry["startedAt"])
    agent.signal(pid, "SIGNAL_SIGTERM")
    wait_for(lambda: not [p for p in agent.list() if p["pid"] == pid])
    entry = [p for p in agent.list(all=True) if p["pid"] == pid][0]
    assert (entry["running"], entry["exitCode"], entry["signal"]) == (False, -1, 15)
    with pytest.raises(RpcError) as e:
        agent.signal(pid, "SIGNAL_SIGKILL")
    assert e.value.code == "not_found"


def test_keepalive(agent):
    stream = agent.start("sleep", "2.5", headers=KEEPALIVE)
    assert sum("keepalive" in event for event in stream) == 2


# Timeouts and signals

def group_is_gone(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return not any(alive(int(e)) for e in os.listdir("/proc") if e.isdigit() and process_group(e) == pid)


def process_group(entry):
    with contextlib.suppress(OSError):
        return int(open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()[2])
    return None


@pytest.mark.parametrize("script", ["sleep 1000 & sleep 1001 & wait", "trap '' TERM; echo a; sleep 1000; sleep 1000",
                                    "trap '' TERM; (sleep 1002; sleep 1003) & exec sleep 1004"])
def test_timeout_ends_the_group(agent, script):
    began = time.monotonic()
    stream = agent.start("sh", "-c", f"echo out; {script}", group=True, timeoutMs=1000)
    result = Result()
    with pytest.raises(RpcError) as e:
        for event in stream:
            result.take(event)
    assert e.value.code == "deadline_exceeded"
    assert 1 <= time.monotonic() - began < 2.2 and result.out.startswith(b"out\n")
    wait_for(lambda: group_is_gone(result.pid), seconds=1)


def test_timeout_from_header_and_zero(agent):
    with pytest.raises(RpcError) as e:
        agent.run("sleep", "10", headers={"Connect-Timeout-Ms": "500"})
    assert e.value.code == "deadline_exceeded"
    assert agent.run("sleep", "0.3", headers={"Connect-Timeout-Ms": "0"}).code == 0
    with pytest.raises(RpcError) as e:
        agent.run("true", headers={"Connect-Timeout-Ms": "soon"})
    assert e.value.code == "invalid_argument"
    # A reader's own timeout ends its stream, not the process.
    pid = agent.background("sleep", "20")
    with pytest.raises(RpcError) as e:
        list(agent.attach(pid, headers={"Connect-Timeout-Ms": "300"}))
    assert e.value.code == "deadline_exceeded" and alive(pid)
    agent.signal(pid, 9)


def test_group_kill(agent):
    pid = agent.background("sh", "-c", "sleep 1000 & sleep 1001 & wait", group=True)
    time.sleep(0.3)
    agent.signal(pid, "SIGNAL_SIGKILL")
    wait_for(lambda: group_is_gone(pid))
    pid = agent.background("sh", "-c", "sleep 1000 & echo; wait")
    time.sleep(0.3)
    agent.signal(pid, "SIGNAL_SIGKILL")  # as E2B: the leader only
    wait_for(lambda: not alive(pid))
    assert not group_is_gone(pid)
    agent.signal(pid, "SIGTERM", group=True)
    wait_for(lambda: group_is_gone(pid))
    with pytest.raises(RpcError) as e:
        agent.signal(pid, "SIGNOSUCH")
    assert e.value.code in ("invalid_argument", "not_found")


def test_a_client_that_leaves_kills_nothing(agent):
    pid = agent.background("sleep", "20", group=True)
    time.sleep(1)
    assert alive(pid)
    agent.signal(pid, "SIGNAL_SIGKILL")


# Directory, user, environment

def test_workdir(agent, tmp_path):
    home = pathlib_home()
    plain = tmp_path / "file"
    plain.write_text("")
    spaced = tmp_path / "a b ü"
    spaced.mkdir()
    link = tmp_path / "link"
    link.symlink_to(spaced)
    gone = tmp_path / "gone"
    for cwd, words in ((str(gone), "does not exist"), (str(plain), "not a directory"), ("~other/x", "home")):
        with pytest.raises(RpcError) as e:
            agent.run("true", cwd=cwd)
        assert e.value.code == "invalid_argument" and words in e.value.message and cwd in e.value.message
    assert agent.run("pwd", cwd=str(spaced)).out.decode() == f"{spaced}\n"
    assert agent.run("pwd", "-P", cwd=str(link)).out.decode() == f"{spaced}\n"
    assert agent.run("pwd", cwd="").out.decode() == f"{home}\n"
    assert agent.run("pwd", cwd="~").out.decode() == f"{home}\n"
    with pytest.raises(RpcError):
        agent.run("true", cwd="no-such-folder-in-home")


def pathlib_home():
    return pwd.getpwuid(os.geteuid()).pw_dir


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")
def test_workdir_without_access(agent, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    with pytest.raises(RpcError) as e:
        agent.run("true", cwd=str(closed), headers=agent.basic("nobody"))
    assert e.value.code == "invalid_argument" and "permission denied" in e.value.message


def test_bad_default_workdir_is_survived(own_agent):
    assert own_agent.request("POST", "/init", json.dumps({"defaultWorkdir": "/no/such"})).status == 204
    assert own_agent.run("pwd").out.decode().strip() in (pathlib_home(), "/")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")
def test_user(agent):
    account = pwd.getpwnam("nobody")
    r = agent.sh("id -u; id -g; echo $USER $LOGNAME $HOME; umask; ulimit -c; cat /proc/self/oom_score_adj; echo x > /dev/stdout; "
                 "echo y > /dev/stderr", headers=agent.basic("nobody"), cwd="/")
    assert r.out.decode().split("\n")[:4] == [str(account.pw_uid), str(account.pw_gid), f"nobody nobody {account.pw_dir}",
                                              "0022"]
    assert r.out.endswith(b"\nx\n") and r.err == b"y\n"
    assert agent.run("id", "-u", headers=agent.basic(str(account.pw_uid)), cwd="/").out == b"%d\n" % account.pw_uid
    expected = subprocess.run(["id", "-G", "nobody"], capture_output=True, text=True).stdout
    assert sorted(agent.run("id", "-G", headers=agent.basic("nobody"), cwd="/").out.decode().split()) == sorted(expected.split())
    with pytest.raises(RpcError) as e:
        agent.run("true", headers=agent.basic("no-such-user"))
    assert "no-such-user" in e.value.message


def ignore_all_signals():
    """Also those that the C library keeps to itself (32, 33), so by the system call; rt_sigaction of x86-64."""
    libc = ctypes.CDLL(None)
    ignore = (ctypes.c_uint64 * 4)(1)
    for number in range(1, 65):
        libc.syscall(13, number, ignore, None, 8)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the system call numbers of x86-64 only")
def test_ignored_signals_are_not_inherited():
    agent = ProcessAgent(prepare=ignore_all_signals)
    try:
        lines = agent.sh("grep -E 'Sig(Blk|Ign)' /proc/self/status").out.decode().split()
        assert lines == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
    finally:
        agent.stop()


def test_nothing_of_the_agent_leaks(agent):
    r = agent.sh("ls /proc/self/fd; tr '\\0' '\\n' < /proc/self/environ; grep -E 'Sig(Blk|Ign)' /proc/self/status; ulimit -n")
    lines = r.out.decode().split("\n")
    assert lines[:3] == ["0", "1", "2"] and lines[4].isdigit() is False
    assert "SigBlk:\t0000000000000000" in lines and "SigIgn:\t0000000000000000" in lines
    names = {line.split("=")[0] for line in lines if "=" in line}
    assert names <= {"E2B_SANDBOX", "USER", "HOME", "LOGNAME", "PATH", "SHELL", "PWD"}


def test_environment(own_agent):
    values = {"A": "1", "EMPTY": "", "EQ": "a=b", "NL": "x\ny", "Q": "'\"", "D": "$HOME", "U": "äö中", "BIG": "b" * 61440}
    assert own_agent.request("POST", "/init", json.dumps({"envVars": values})).status == 204
    assert json.loads(own_agent.request("GET", "/envs").body).items() >= values.items()
    dump = "import os,sys,json; sys.stdout.write(json.dumps(dict(os.environ)))"
    got = json.loads(own_agent.run("python3", "-c", dump).out)
    assert got.items() >= values.items()
    got = json.loads(own_agent.run("/usr/bin/python3", "-c", dump, envs={"A": "2", "PATH": "/nowhere"}).out)
    assert (got["A"], got["PATH"]) == ("2", "/nowhere")
    assert json.loads(own_agent.run("python3", "-c", dump).out)["A"] == "1"
    for bad in ({"A=B": "x"}, {"": "x"}, {"A": 1}, {"A": "x\0y"}):
        with pytest.raises(RpcError) as e:
            own_agent.run("true", envs=bad)
        assert e.value.code == "invalid_argument"
        if "x\0y" not in bad.values():
            assert own_agent.request("POST", "/init", json.dumps({"envVars": bad})).status == 400
    with pytest.raises(RpcError) as e:
        own_agent.run("nosuchcmd", envs={"PATH": "/usr/bin"})
    assert e.value.code == "not_found"


def test_argument_above_the_kernels_limit(agent):
    assert len(agent.run("echo", "x" * 131000).out) == 131001
    with pytest.raises(RpcError) as e:
        agent.run("echo", "x" * 140000)
    assert e.value.code == "invalid_argument" and "too long" in e.value.message


@pytest.mark.parametrize("script,code,out", [
    ("cat <<'EOF'\na $x\nEOF\n", 0, b"a $x\n"),
    ("exit 3", 3, b""),
    ("set -e; false; echo no", 1, b""),
    ("echo a # comment", 0, b"a\n"),
    ("echo a \\", 0, b"a"),
    ("'", 2, b""),
    ("read x; echo \"[$x]\"", 0, b"[]\n"),
    ("exec echo x", 0, b"x\n"),
    (": " + "y" * 100_000 + "\necho long", 0, b"long\n"),
])
def test_shell_text(agent, script, code, out):
    r = agent.sh(script)
    assert r.code == code and r.out.startswith(out)
    assert agent.sh("echo alive").out == b"alive\n"


# Terminals

def terminal(agent, *command, **fields):
    return agent.start(*command, pty={"size": {"cols": 80, "rows": 24}}, **fields)


def read_until(stream, result, text, seconds=10):
    end = time.monotonic() + seconds
    while text not in result.pty:
        assert time.monotonic() < end
        result.take(stream.message()[1]["event"])


def test_terminal(agent):
    r = Result()
    for event in terminal(agent, "sh", "-c", "tty; stty size; test -t 0 -a -t 1 -a -t 2 && echo yes; echo $TERM; ps -o tty= -p $$"):
        r.take(event)
    lines = r.pty.decode().split("\r\n")
    assert lines[0].startswith("/dev/pts/") and lines[1:4] == ["24 80", "yes", "xterm-256color"]
    assert lines[4].strip() == lines[0][5:]
    assert r.end["exitCode"] == 0


def test_terminal_resize_input_and_interrupt(agent):
    stream = terminal(agent, "bash", "--norc", "--noprofile", "-i")
    r = Result().take(stream.message()[1]["event"])
    agent.rpc("Update", {"process": {"pid": r.pid}, "pty": {"size": {"cols": 133, "rows": 51}}})
    agent.send(r.pid, b"stty size; echo ready\n", kind="pty")
    read_until(stream, r, b"51 133")
    agent.send(r.pid, b"trap 'echo changed' WINCH; sleep 100\n", kind="pty")
    time.sleep(0.5)
    agent.rpc("Update", {"process": {"pid": r.pid}, "pty": {"size": {"cols": 99, "rows": 33}}})
    agent.send(r.pid, b"\x03", kind="pty")
    agent.send(r.pid, b"stty size; kill -WINCH $$; echo d''one\n", kind="pty")
    read_until(stream, r, b"33 99")
    read_until(stream, r, b"done")
    with pytest.raises(RpcError) as e:
        agent.close_stdin(r.pid)
    assert "Ctrl+D" in e.value.message
    # Not Ctrl+D: typed while the shell still runs the command, it would end an empty line of that and be gone.
    agent.send(r.pid, b"exit 3\n", kind="pty")
    for event in stream:
        r.take(event)
    assert r.code == 3


def test_terminal_bytes(agent):
    data = bytes(range(256)) * 2000
    r = Result()
    script = "import os,sys\nb=bytes(range(256))*2000\nwhile b: b=b[os.write(1,b):]"
    for event in terminal(agent, "sh", "-c", f"stty raw -echo; exec python3 -c '{script}'"):
        r.take(event)
    assert r.pty == data


def test_terminal_output_is_complete_at_exit(agent):
    for _ in range(30):
        r = Result()
        for event in terminal(agent, "sh", "-c", "seq 1 500"):
            r.take(event)
        assert r.pty == b"".join(b"%d\r\n" % i for i in range(1, 501))


def test_terminal_hangs_up(agent, tmp_path):
    mark = tmp_path / "hup"
    stream = terminal(agent, "bash", "-c", f"(trap 'echo h > {mark}; exit' HUP; while :; do sleep 0.1; done) & sleep 0.5; kill -9 $$")
    r = Result()
    for event in stream:
        r.take(event)
    assert r.end["signal"] == 9
    wait_for(mark.exists)


def test_terminals_closed_in_mid_command(agent):
    def one(_):
        stream = terminal(agent, "bash", "-c", "sleep 1000")
        pid = stream.message()[1]["event"]["start"]["pid"]
        stream.close()
        agent.signal(pid, "SIGNAL_SIGKILL")
        return pid
    before = agent.descriptors()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(60)))
    wait_for(lambda: not [p for p in agent.list() if p["config"]["cmd"] == "bash"])
    wait_for(lambda: "Z" not in children_states(agent.process.pid))
    wait_for(lambda: agent.descriptors() <= before + 10)


def test_reattach_to_a_terminal(agent):
    stream = terminal(agent, "sh", "-c", "echo one; read x; echo got $x")
    r = Result().take(stream.message()[1]["event"])
    read_until(stream, r, b"one\r\n")
    seen = len(r.pty)
    stream.close()
    agent.send(r.pid, b"hello\n", kind="pty")
    rest = agent.follow(r.pid, offset=seen)
    assert rest.pty.endswith(b"got hello\r\n") and rest.code == 0


# Tokens, set-up, protocol

def test_access_token():
    a = ProcessAgent(token="secret-token")
    try:
        assert a.run("true").code == 0
        for method, path in (("GET", "/metrics"), ("GET", "/envs"), ("POST", "/process.Process/List"),
                             ("POST", "/process.Process/Start"), ("POST", "/filesystem.Filesystem/Stat"), ("GET", "/nosuch")):
            for headers in ({}, {"X-Access-Token": "wrong"}, {"X-Access-Token": ""}, {"X-Access-Token": "secret-toke"}):
                connection = a.connect()
                connection.request(method, path, "{}" if method == "POST" else None, {"Content-Type": "application/json", **headers})
                assert connection.getresponse().status == 401
                connection.close()
        assert a.request("GET", "/health", headers={"X-Access-Token": "wrong"}).status == 204

        def init(body, headers):
            connection = a.connect()
            connection.request("POST", "/init", json.dumps(body), headers)
            return connection.getresponse().status
        assert init({"accessToken": "mine"}, {}) == 401
        assert init({}, {}) == 401
        assert init({"envVars": {"X": "1"}}, {"X-Access-Token": "wrong"}) == 401
        assert init({"accessToken": "secret-token", "envVars": {"X": "1"}}, {}) == 204
        assert init({"accessToken": "next"}, {"X-Access-Token": "secret-token"}) == 204
        a.token = "next"
        assert a.sh("echo $X").out == b"1\n"
        for body in ('{"timestamp":"yesterday"}', '{"envVars":[]}', "[", '{"a":1,"a":2}', '{"defaultUser":5}'):
            assert a.request("POST", "/init", body).status == 400
    finally:
        a.stop()


def test_metrics(agent):
    m = agent.request("GET", "/metrics").json
    assert set(m) == {"ts", "cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "mem_total", "mem_used", "mem_cache",
                      "disk_used", "disk_total"}
    assert abs(m["ts"] - time.time()) < 5 and m["cpu_count"] == os.cpu_count() and 0 <= m["cpu_used_pct"] <= 100
    assert 0 < m["mem_used"] < m["mem_total"] and 0 < m["disk_used"] < m["disk_total"]


def raw(agent, data, wait=True, seconds=5):
    s = socket.create_connection(("127.0.0.1", agent.port), timeout=seconds)
    s.sendall(data)
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while piece := s.recv(65536):
            answer += piece
            if not wait:
                break
    s.close()
    return answer


HOST = b"Host: x\r\n"


@pytest.mark.parametrize("head,status", [
    (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\nX: y\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nA\0B: x\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nA : x\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nA: x\ry\r\n\r\n", 400),
    (b"POST /init HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    (b"POST /init HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}", 400),
    (b"POST /init HTTP/1.1\r\nContent-Length: 0x2\r\n\r\n{}", 400),
    (b"POST /init HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    (b"POST /init HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", None),
    (b"POST /init HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", None),
    (b"GET health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/3.0\r\n\r\n", None),
    (b"NONSENSE\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
    (b"GET /health HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", 431),
])
def test_malformed_heads(agent, head, status):
    answer = raw(agent, head)
    got = int(answer.split()[1])
    assert got == status if status else 400 <= got < 600
    assert answer.count(b"HTTP/1.1 ") == 1


def test_keep_alive_pipelining_and_chunks(agent):
    two = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    answer = raw(agent, two * 3 + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 204") == 4
    body = b'{"envVars":{"K":"v"}}'
    chunks = b"".join(b"%x;ext=1\r\n%c\r\n" % (1, c) for c in body) + b"0\r\nTrailer: x\r\n\r\n"
    answer = raw(agent, b"POST /init HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks +
                 b"GET /envs HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 204") == 1 and b'"K":"v"' in answer
    # Byte by byte.
    s = socket.create_connection(("127.0.0.1", agent.port))
    for byte in b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n":
        s.send(bytes([byte]))
    assert s.recv(100).startswith(b"HTTP/1.1 204")
    s.close()
    assert raw(agent, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 204")
    expect = raw(agent, b"POST /init HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    assert expect.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204")


def test_connect_protocol_errors(agent):
    def start(body, content="application/connect+json"):
        return agent.request("POST", "/process.Process/Start", body, {"Content-Type": content})
    def error(body):
        answer = start(body)
        assert answer.status == 200 and answer.body[0] == 2
        return json.loads(answer.body[5:])["error"]
    assert start(envelope({}), "application/proto").status == 415
    assert agent.request("GET", "/process.Process/Start").status == 405
    assert agent.request("POST", "/process.Process/NoSuch", "{}", {"Content-Type": "application/json"}).status == 404
    assert error(b"")["code"] == "invalid_argument"
    assert error(b"\0\0\0")["code"] == "invalid_argument"
    assert error(struct.pack(">BI", 1, 2) + b"{}")["code"] == "unimplemented"
    assert error(struct.pack(">BI", 8, 2) + b"{}")["code"] == "invalid_argument"
    assert error(struct.pack(">BI", 0, 0x7fffffff) + b"{}")["code"] == "resource_exhausted"
    assert error(struct.pack(">BI", 0, 100) + b"{}")["code"] == "canceled"
    for message in ({}, {"process": {}}, {"process": {"cmd": ""}}, {"process": {"cmd": 5}}, {"process": {"cmd": "a", "args": "b"}},
                    {"process": {"cmd": "a", "args": [1]}}, {"process": {"cmd": "true"}, "pty": {"size": {"cols": -1}}},
                    {"process": {"cmd": "true"}, "timeoutMs": -5}, {"process": {"cmd": "true"}, "stdin": "yes"}):
        assert error(envelope(message))["code"] == "invalid_argument", message
    deep = b"[" * 100_000
    assert error(struct.pack(">BI", 0, len(deep)) + deep)["code"] == "invalid_argument"
    assert agent.request("POST", "/process.Process/List", b" " * 5_000_000, {"Content-Type": "application/json"}).json["code"] == \
        "resource_exhausted"
    assert agent.run("true").code == 0


def test_preflight(agent):
    answer = agent.request("OPTIONS", "/files", headers={"Origin": "https://a.test", "Access-Control-Request-Method": "POST"})
    assert answer.status == 204 and "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert agent.request("GET", "/health", headers={"Origin": "https://a.test"}).headers["Access-Control-Allow-Origin"] == "*"


def test_too_many_connections_are_refused_and_recovered_from(own_agent):
    held = [socket.create_connection(("127.0.0.1", own_agent.port), timeout=5) for _ in range(560)]
    for s in held:
        with contextlib.suppress(OSError):
            s.sendall(b"GET /hea")
    time.sleep(1)
    refused = 0
    for s in held:
        s.setblocking(False)
        with contextlib.suppress(OSError):
            refused += s.recv(100).startswith(b"HTTP/1.1 503")
    assert 20 <= refused <= 80
    for s in held:
        s.close()
    wait_for(lambda: own_agent.request("GET", "/health").status == 204)
    assert own_agent.run("true").code == 0


def test_idle_memory_and_descriptors(own_agent):
    if SANITIZED:
        pytest.skip("a sanitizer's own memory counts")
    for _ in range(200):
        own_agent.run("true")
    assert own_agent.rss_kb() < 8 * 1024
    assert own_agent.descriptors() < 20
