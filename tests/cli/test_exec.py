"""exec, run and attach: bytes, exit statuses, signals, broken streams."""
import hashlib
import json
import os
import signal
import subprocess
import threading
import time

import pytest

import fake as fake_module

EVERYTHING = bytes(range(256)) * 4096


@pytest.fixture
def web(server):
    server.add("sweb", name="web")
    return "web"


@pytest.mark.parametrize("script, status", [
    ("exit 0", 0), ("exit 1", 1), ("exit 2", 2), ("exit 125", 125), ("exit 137", 137), ("exit 255", 255),
    ("kill -9 $$", 137), ("kill -TERM $$", 143), ("nosuchcommand", 127)])
def test_exit_status(cli, web, script, status):
    assert cli("exec", web, "--", "sh", "-c", script).returncode == status


def test_programs_that_cannot_be_run(cli, web):
    done = cli("exec", web, "nosuchprogram")
    assert done.returncode == 127 and "nosuchprogram" in done.stderr and "space ls" not in done.stderr
    assert cli("exec", web, "/etc/passwd").returncode == 126


def test_own_failures(cli, server, web):
    done = cli("exec", "nobody", "true")
    assert done.returncode == 125
    assert done.stderr == ('space: cannot run true in nobody: there is no session "nobody"\n'
                           "hint: see the sessions with: space ls\n")
    assert cli("exec", web).returncode == 125
    server.start_failure = {"code": "invalid_argument", "message": "cwd '/x' does not exist"}
    done = cli("exec", "-w", "/x", web, "true")
    assert done.returncode == 125 and "cwd '/x' does not exist" in done.stderr


def test_daemon_not_running(cli):
    done = cli("--socket", "/nowhere/s", "exec", "x", "true")
    assert done.returncode == 125
    assert "nothing listens on /nowhere/s" in done.stderr and "space serve" in done.stderr


def test_bytes_both_ways(cli, web):
    assert cli.ok("exec", web, "cat", input=EVERYTHING, text=False) == EVERYTHING
    done = cli("exec", web, "--", "sh", "-c", "cat >&2; echo out", input=EVERYTHING, text=False)
    assert done.stderr == EVERYTHING and done.stdout == b"out\n"


def test_large_input(cli, web):
    data = os.urandom(20_000_000)
    text = cli.ok("exec", web, "sha256sum", input=data, text=False)
    assert text.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_input_that_is_not_read(cli, web):
    assert cli.ok("exec", web, "--", "sh", "-c", "exec <&-; echo done", input=os.urandom(3_000_000), text=False) == b"done\n"


def test_no_input(cli, server, web):
    assert cli.ok("exec", "-n", web, "cat", input="lost") == ""
    assert server.calls[0][2]["stdin"] is False


def test_closed_stdin(cli, web):
    done = subprocess.run(["sh", "-c", 'exec "$0" exec web cat <&-', cli.program], env=cli.environment(), timeout=20,
                          check=False, stdout=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout == b""


def test_arguments_and_environment(cli, server, web):
    cli.ok("exec", "-e", "A=x y=z", "-e", "EMPTY=", "-e", "FROM_HERE", "-e", "NOT_HERE", "-w", "/tmp", "-u", "root", web,
           "--", "printf", "[%s]", "a b", "--", "-x", "", env={"FROM_HERE": "there"})
    method, _, body = server.calls[0]
    assert method == "POST"
    assert body["process"] == {"cmd": "printf", "args": ["[%s]", "a b", "--", "-x", ""],
                               "envs": {"A": "x y=z", "EMPTY": "", "FROM_HERE": "there"}, "cwd": "/tmp"}
    assert body["group"] is True
    # Options behind the session's id belong to the command.
    assert cli.ok("exec", web, "echo", "-n", "-e", "x") == "x"


def test_timeout(cli, web):
    started = time.monotonic()
    done = cli("exec", "--timeout", "1", web, "--", "sh", "-c", "echo begun; sleep 60")
    assert done.returncode == 124 and done.stdout == "begun\n"
    assert "time limit of 1 s" in done.stderr
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_group(cli, web, number):
    process = cli.start("exec", web, "--", "sh", "-c", "echo ready; sleep 100", stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    process.communicate()


def test_command_that_handles_a_signal(cli, web):
    process = cli.start("exec", web, "--", "sh", "-c", "trap 'echo got; exit 7' INT; echo ready; while :; do sleep 0.1; done",
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == b"got\n"
    assert process.returncode == 7


def test_command_that_ignores_signals_can_be_left(cli, web):
    process = cli.start("exec", web, "--", "sh", "-c", "trap '' INT; echo ready; sleep 100", stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130 and b"may still run" in errors


def test_broken_stream_is_taken_up_again(cli, server, web):
    """Cut in mid-output, several times: no byte is lost or doubled."""
    server.keep_log = True
    script = "import sys\nfor i in range(200000): sys.stdout.write(f'{i}\\n')"
    wanted = "".join(f"{i}\n" for i in range(200000))
    server.cut_after = 300_000
    assert cli.ok("exec", web, "--", "python3", "-c", script) == wanted
    connects = [body for _, path, body in server.calls if path.endswith("/Connect")]
    assert len(connects) == 1 and connects[0]["offset"] >= 300_000

    server.cut_after = None
    process = cli.start("exec", web, "--", "sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done; exit 9",
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    for _ in range(3):
        time.sleep(0.45)
        server.cut_streams()
    assert process.communicate(timeout=20)[0] == b"1\n2\n3\n4\n5\n6\n"
    assert process.returncode == 9


def test_daemon_restarts_in_between(cli, server, web, tmp_path):
    server.keep_log = True
    process = cli.start("exec", web, "--", "sh", "-c", "echo a; sleep 1.5; echo b", stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"a\n"
    # The name goes first, as with a daemon that has ended; then the connections.
    os.rename(server.path, server.path + ".away")
    server.cut_streams()
    time.sleep(1)
    os.rename(server.path + ".away", server.path)
    assert process.communicate(timeout=20)[0] == b"b\n"
    assert process.returncode == 0


def test_suspended_session_is_waited_for(cli, server, web):
    server.keep_log = True
    process = cli.start("exec", web, "--", "sh", "-c", "echo a; sleep 1; echo b", stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"a\n"
    server.sessions["sweb"]["state"] = "suspended"
    server.cut_streams()
    time.sleep(1.5)
    assert process.poll() is None
    assert not [path for _, path, _ in server.calls if path.endswith("/Connect")]  # it would wake the session
    server.sessions["sweb"]["state"] = "running"
    out, errors = process.communicate(timeout=20)
    assert out == b"b\n" and process.returncode == 0 and b"space wake web" in errors


def test_session_removed_in_between(cli, server, web):
    process = cli.start("exec", web, "--", "sh", "-c", "echo a; sleep 20", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"a\n"
    del server.sessions["sweb"]
    server.cut_streams()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 125 and b"re-attaching" in errors


def test_lost_output_is_told(cli, server, web):
    process = cli.start("exec", web, "--", "sh", "-c", "echo a; sleep 0.5; printf 0123456789; sleep 1",
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"a\n"
    with next(iter(server.processes.values())).condition:
        next(iter(server.processes.values())).dropped = 7
    server.cut_streams()
    out, errors = process.communicate(timeout=20)
    assert out == b"56789" and process.returncode == 125
    assert b"5 bytes of output were not kept" in errors


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff\xff", b"\0\xff\xff\xff\xff", b"\0\0\0\0\3{}}", b"\1\0\0\0\2{}",
                                      b"\0\0\0\0\x2c" + b'{"event":{"data":{"stdout":"!!!!"},"offset":0}}'[:44]])
def test_streams_that_break_the_protocol(cli, server, web, monkeypatch, nonsense):
    def follow(self, process, offset):
        self.envelope({"event": {"start": {"pid": process.pid}}})
        self.chunk(nonsense)
        self.chunk(b"")
    monkeypatch.setattr(fake_module.Handler, "follow", follow)
    done = cli("exec", web, "true")
    assert done.returncode == 125 and "process stream" in done.stderr


def test_stream_without_an_end_is_never_success(cli, server, web, monkeypatch):
    def follow(self, process, offset):
        self.envelope({}, 2)
        self.chunk(b"")
    monkeypatch.setattr(fake_module.Handler, "follow", follow)
    assert cli("exec", web, "true").returncode == 125


def test_reader_that_leaves(cli, web):
    done = subprocess.run(["bash", "-c", 'set -o pipefail; "$0" exec web yes | head -n 1', cli.program], timeout=20,
                          env=cli.environment(), check=False, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert done.stdout == b"y\n" and done.returncode == 141


def test_full_disk_at_stdout(cli, web):
    with open("/dev/full", "wb") as full:
        process = cli.start("exec", web, "--", "echo", "x", stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 125 and b"No space left" in errors


def test_detach_and_attach(cli, server, web):
    server.keep_log = True
    pid = int(cli.ok("exec", "-d", web, "--", "sh", "-c", "echo early; sleep 1; echo late; exit 4"))
    done = cli("attach", web, pid, "--offset", "0")
    assert done.stdout == "early\nlate\n" and done.returncode == 4
    done = cli("attach", web, pid, "--offset", "6")
    assert done.stdout == "late\n" and done.returncode == 4
    done = cli("attach", web, 999999)
    assert done.returncode == 125 and "space ps" in done.stderr


def test_json_stream(cli, web):
    lines = [json.loads(line) for line in cli("exec", "--json", web, "--", "sh", "-c", "echo hi; kill -9 $$").stdout.splitlines()]
    assert [line["event"] for line in lines] == ["start", "stdout", "end"]
    assert lines[1]["base64"] == "aGkK" and lines[1]["offset"] == 0
    assert lines[2]["signal"] == 9 and lines[2]["signal_name"] == "SIGKILL" and lines[2]["exit_status"] == 137
    line = json.loads(cli("exec", "--json", web, "--", "sh", "-c", "exit 137").stdout.splitlines()[-1])
    assert line["signal"] == 0 and line["exit_code"] == 137


def test_run_removes_its_session(cli, server):
    assert cli.ok("run", "--", "sh", "-c", "echo hi") == "hi\n"
    assert server.deleted == ["s1made"] and not server.sessions
    assert cli("run", "--", "sh", "-c", "exit 3").returncode == 3
    assert cli("run", "nosuchprogram").returncode == 127
    assert not server.sessions
    done = cli("run", "-t", "missing", "--", "true")
    assert done.returncode == 125 and "space template ls" in done.stderr
    done = cli("run", "--keep", "--", "true")
    assert done.returncode == 0 and "is kept" in done.stderr and len(server.sessions) == 1


def test_run_removes_its_session_on_a_signal(cli, server):
    process = cli.start("run", "--", "sh", "-c", "echo ready; sleep 100", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    process.stdout.close()
    assert not server.sessions


@pytest.mark.limit(180)
def test_much_output_in_little_memory(cli, web):
    size = 500_000_000
    process = cli.start("exec", web, "--", "head", "-c", size, "/dev/zero", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    peak = 0
    total = 0
    started = time.monotonic()
    while data := process.stdout.read1(1 << 20):
        total += len(data)
        if total % 64 == 0:
            with open(f"/proc/{process.pid}/status") as status:
                peak = max(peak, *(int(line.split()[1]) for line in status if line.startswith("VmHWM")), 0)
    process.stdout.close()
    assert process.wait(10) == 0 and total == size
    assert 0 < peak < 20_000, f"{peak} KiB"
    print(f"{total / (time.monotonic() - started) / 1e6:.0f} MB/s, {peak} KiB")


def test_both_directions_at_once(cli, web):
    """100 MB in while reading out: neither waits for the other."""
    block = os.urandom(1 << 20)
    process = cli.start("exec", web, "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def feed():
        for _ in range(100):
            process.stdin.write(block)
        process.stdin.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    digest = hashlib.sha256()
    while data := process.stdout.read(1 << 20):
        digest.update(data)
    feeder.join()
    process.stdout.close()
    assert process.wait(10) == 0
    assert digest.hexdigest() == hashlib.sha256(block * 100).hexdigest()
