"""Terminals: a real controlling terminal, sizes, job control, bytes; the client's shell."""
import os
import pty
import select
import signal
import struct
import fcntl
import subprocess
import termios
import time

import guests


def open_terminal(api, session, command=("/bin/bash", "--norc", "--noprofile"), size=(80, 24)):
    pid, stream = api.start(session, list(command), pty=size, stdin=True, env={"PS1": "$ ", "TERM": "xterm"})
    return pid, stream


def type_in(api, session, pid, stream, text, until, result=None):
    api.send_input(session, pid, text, channel="pty")
    return api.collect(stream, result, until=lambda result: until in result.pty)


def test_size_and_resize(api, session):
    pid, stream = open_terminal(api, session, size=(101, 37))
    result = type_in(api, session, pid, stream, b"stty size\n", b"37 101")
    api.rpc(session, "process.Process/Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 120, "rows": 50}}})
    type_in(api, session, pid, stream, b"stty size\n", b"50 120", result)
    api.send_input(session, pid, b"exit 7\n", channel="pty")
    assert api.collect(stream, result).code == 7


def test_controlling_terminal_and_job_control(api, session):
    pid, stream = open_terminal(api, session)
    result = type_in(api, session, pid, stream, b"tty; echo tty-is-$?\n", b"tty-is-0")
    assert b"/dev/pts/" in result.pty
    assert b"no job control" not in result.pty
    result = type_in(api, session, pid, stream, b"sleep 100\n", b"sleep 100")
    time.sleep(0.5)
    result = type_in(api, session, pid, stream, b"\x03", b"^C")
    result = type_in(api, session, pid, stream, b"echo after-$?\n", b"after-130")
    result = type_in(api, session, pid, stream, b"echo -n x > /dev/tty && echo wrote-$((1+1))\n", b"wrote-2")
    api.send_input(session, pid, b"exit 3\n", channel="pty")
    assert api.collect(stream).code == 3
    # End of input, where the terminal itself reads lines, ends the reader.
    pid, stream = open_terminal(api, session, ("/bin/sh", "-c", "echo ready; cat; echo end-$?"))
    api.collect(stream, until=lambda result: b"ready" in result.pty)
    api.send_input(session, pid, b"\x04", channel="pty")
    assert b"end-0" in api.collect(stream).pty


def test_user_is_the_same_as_of_commands(api, session):
    pid, stream = open_terminal(api, session, ("/bin/sh", "-c", "id -un; echo $HOME; umask; pwd; exit"))
    result = api.collect(stream)
    assert result.pty.replace(b"\r\n", b"\n") == b"user\n/home/user\n" + api.out(session, "umask").encode() + b"\n/home/user\n"
    assert pid


def test_raw_bytes(api, session):
    program = "import os, tty; tty.setraw(0); os.write(1, bytes(range(256)) * 64)"
    _, stream = open_terminal(api, session, ("python3", "-c", program))
    assert api.collect(stream).pty == bytes(range(256)) * 64


def test_terminal_of_the_client(daemon, session):
    """`space shell` on a real terminal: prompt, resize, ctrl-C, exit status."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))

    def own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "SPACE_SOCKET": str(daemon.socket), "TERM": "xterm"}
    process = subprocess.Popen([daemon.programs / "space", "shell", session], stdin=slave, stdout=slave, stderr=slave,
                               env=environment, preexec_fn=own_terminal)
    os.close(slave)
    screen = b""

    def expect(text, timeout=15):
        nonlocal screen
        end = time.monotonic() + timeout
        while text not in screen:
            assert time.monotonic() < end, (text, screen[-1500:])
            if select.select([master], [], [], 0.2)[0]:
                try:
                    screen += os.read(master, 65536)
                except OSError:
                    break
        assert text in screen, (text, screen[-1500:])

    try:
        os.write(master, b"echo size-$(stty size | tr ' ' x)\n")
        expect(b"size-33x99")
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 111, 0, 0))
        process.send_signal(signal.SIGWINCH)
        time.sleep(0.5)
        os.write(master, b"echo size-$(stty size | tr ' ' x)\n")
        expect(b"size-40x111")
        os.write(master, b"sleep 100\n")
        time.sleep(0.7)
        os.write(master, b"\x03")
        os.write(master, b"echo still-$((40+2))\n")
        expect(b"still-42")
        os.write(master, b"exit 9\n")
        guests.wait_for(lambda: process.poll() is not None or
                        (select.select([master], [], [], 0)[0] and not os.read(master, 65536)) or False, timeout=15)
    except OSError:
        pass  # the terminal is gone with the client
    finally:
        assert process.wait(15) == 9
        os.close(master)
