"""`space run` and `space exec`: what comes back is what the program did, byte for byte."""
import hashlib
import os
import signal
import subprocess
import threading
import time

import pytest

import daemon as daemon_module
import guests
import hostside

OUTPUT_BYTES = 500_000_000
RSS_GROWTH_MAX = 64 << 20


def test_run_prints_42(daemon):
    done = daemon.cli("run", "--", "python3", "-c", "print(6*7)", check=0)
    assert done.stdout == "42\n"
    assert daemon.client().list() == []  # gone with its command


@pytest.mark.parametrize("script, status", [
    ("exit 0", 0), ("exit 1", 1), ("exit 3", 3), ("exit 124", 124), ("exit 137", 137), ("exit 255", 255),
    ("kill -9 $$", 128 + 9), ("kill -TERM $$", 128 + 15), ("kill -SEGV $$", 128 + 11),
    ("nosuchcommand", 127), ("/etc/passwd", 126)])
def test_exit_status_comes_through(daemon, session, script, status):
    done = daemon.cli("exec", session, "--", "sh", "-c", script)
    assert done.returncode == status, done.stderr


def test_our_own_failures_differ_from_the_commands(daemon):
    done = daemon.cli("exec", "nosuchsession", "--", "true")
    assert done.returncode == 125
    assert "nosuchsession" in done.stderr
    done = daemon.cli("run", "-t", "no-such-template", "--", "true")
    assert done.returncode == 125
    assert "no-such-template" in done.stderr
    assert daemon.client().list() == []


def test_stdin_and_output_are_byte_exact(daemon, session):
    everything = bytes(range(256)) * 4096
    done = daemon.cli("exec", session, "--", "cat", input=everything, text=False, check=0)
    assert done.stdout == everything
    done = daemon.cli("exec", session, "--", "sh", "-c", "cat >&2", input=everything, text=False, check=0)
    assert done.stderr == everything and done.stdout == b""


def test_empty_stdin_ends_at_once(daemon, session):
    done = daemon.cli("exec", session, "--", "cat", check=0, timeout=15)
    assert done.stdout == ""
    done = daemon.cli("exec", session, "--", "wc", "-c", input=b"", text=False, check=0, timeout=15)
    assert done.stdout.strip() == b"0"


def test_large_stdin(daemon, session):
    data = os.urandom(12_345_678)
    done = daemon.cli("exec", session, "--", "sha256sum", input=data, text=False, check=0)
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_both_streams_stay_apart(daemon, session):
    script = "for i in 1 2 3; do echo out$i; echo err$i >&2; done"
    done = daemon.cli("exec", session, "--", "sh", "-c", script, check=0)
    assert done.stdout == "out1\nout2\nout3\n"
    assert done.stderr == "err1\nerr2\nerr3\n"


def test_environment_user_and_folder(daemon, session):
    done = daemon.cli("exec", "-e", "A=x y", "-e", "EMPTY=", "-w", "/tmp", session, "--", "sh", "-c",
                      'echo "[$A][$EMPTY]"; pwd; id -un', check=0)
    assert done.stdout == "[x y][]\n/tmp\nuser\n"
    done = daemon.cli("exec", "-u", "root", session, "--", "id", "-u", check=0)
    assert done.stdout == "0\n"


def test_arguments_are_not_a_shells(daemon, session):
    words = ["a b", "$HOME", "*", "'", '"', "", "ä\n", "--", "-x"]
    done = daemon.cli("exec", session, "--", "printf", "[%s]", *words, check=0)
    assert done.stdout == "".join(f"[{word}]" for word in words)


def test_timeout_of_a_command(daemon, session):
    started = time.monotonic()
    done = daemon.cli("exec", "--timeout", "1", session, "--", "sh", "-c", "echo begun; sleep 60", timeout=20)
    assert done.returncode == 124
    assert done.stdout == "begun\n"
    assert time.monotonic() - started < guests.patient(8)
    assert daemon.cli("exec", session, "--", "pgrep", "sleep").returncode == 1


def test_interrupt_ends_command_and_session(daemon):
    process = subprocess.Popen([daemon.programs / "space", "run", "--", "sh", "-c", "echo ready; exec sleep 100"],
                               env={**os.environ, "SPACE_SOCKET": str(daemon.socket)}, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    process.stdout.close()
    process.stderr.close()
    end = time.monotonic() + 5
    while daemon.client().list() and time.monotonic() < end:
        time.sleep(0.1)
    assert daemon.client().list() == []


@pytest.mark.limit(240)
@pytest.mark.skipif(daemon_module.SANITIZED, reason="sanitized programs need more memory and time for this")
def test_large_output_needs_bounded_memory(daemon, session):
    """500 MB: right digest, and neither daemon nor agent nor client keeps it."""
    api = daemon.client()
    agent_rss = "awk '/VmRSS/ {print $2}' /proc/1/status"
    agent_before = int(api.out(session, agent_rss, user="root"))
    workers = daemon.role_pids("worker")
    before = sum(hostside.rss_bytes(pid) for pid in workers)
    process = subprocess.Popen(
        [daemon.programs / "space", "exec", session, "--", "sh", "-c",
         f"yes 0123456789abcdefghijklmnopqrstuvwxyz | head -c {OUTPUT_BYTES}"],
        env={**os.environ, "SPACE_SOCKET": str(daemon.socket)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    peak = {"worker": 0, "client": 0}
    done = threading.Event()

    def watch():
        while not done.wait(0.1):
            try:
                peak["worker"] = max(peak["worker"], sum(hostside.rss_bytes(pid) for pid in workers))
                peak["client"] = max(peak["client"], hostside.rss_bytes(process.pid))
            except OSError:
                pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    line = b"0123456789abcdefghijklmnopqrstuvwxyz\n"
    block = line * 4096
    total = 0
    try:
        while True:
            data = process.stdout.read(1 << 20)
            if not data:
                break
            for at in range(0, len(data), 65536):
                piece = data[at:at + 65536]
                phase = (total + at) % len(line)
                assert piece == block[phase:phase + len(piece)], f"wrong bytes near {total + at}"
            total += len(data)
    finally:
        done.set()
        watcher.join()
        process.stdout.close()
        process.wait(20)
    assert total == OUTPUT_BYTES and process.returncode == 0
    assert peak["worker"] - before < RSS_GROWTH_MAX, peak
    assert peak["client"] < RSS_GROWTH_MAX, peak
    assert int(api.out(session, agent_rss, user="root")) - agent_before < RSS_GROWTH_MAX >> 10
