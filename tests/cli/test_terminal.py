"""shell and exec -t on a real terminal: it is given back as it was, whatever happens."""
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

import pytest


class Screen:
    """A terminal with a program on it."""

    def __init__(self, cli, *words):
        self.master, self.slave = pty.openpty()
        self.resize(33, 99)
        self.before = termios.tcgetattr(self.slave)
        slave = self.slave

        def own_terminal():
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = cli.start(*words, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal)
        self.text = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text)

    def expect(self, text, timeout=10):
        end = time.monotonic() + timeout
        while text not in self.text:
            assert time.monotonic() < end, (text, self.text[-1000:])
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536)

    def end(self, timeout=10):
        """Exit status; the terminal must be as it was."""
        limit = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < limit, self.text[-1000:]
            if select.select([self.master], [], [], 0.05)[0]:
                self.text += os.read(self.master, 65536)
        after = termios.tcgetattr(self.slave)
        os.close(self.master)
        os.close(self.slave)
        assert after == self.before
        return self.process.returncode


@pytest.fixture
def web(server):
    server.add("sweb", name="web")
    return "web"


SHELL = ["--", "bash", "--norc", "--noprofile"]


def test_shell(cli, web):
    screen = Screen(cli, "shell", web, *SHELL)
    screen.type(b"stty size; echo $TERM\n")
    screen.expect(b"33 99")
    screen.expect(b"xterm")
    screen.resize(40, 111)
    screen.process.send_signal(signal.SIGWINCH)
    time.sleep(0.5)
    screen.type(b"stty size\n")
    screen.expect(b"40 111")
    screen.type(b"sleep 100\n")
    time.sleep(0.5)
    screen.type(b"\x03")
    screen.type(b"echo still-$((40+2))\n")
    screen.expect(b"still-42")
    screen.type(b"exit 9\n")
    assert screen.end() == 9


def test_login_shell(cli, web):
    screen = Screen(cli, "shell", web)
    time.sleep(0.5)
    screen.type(b"shopt -q login_shell && echo login-$((1+1)); exit 3\n")
    screen.expect(b"login-2")
    assert screen.end() == 3


def test_escape_hangs_up(cli, web):
    screen = Screen(cli, "shell", web, *SHELL)
    screen.type(b"echo a~.b\n")
    screen.expect(b"\ra~.b")
    screen.type(b"~.")
    assert screen.end() != 0


def test_without_escape(cli, web):
    screen = Screen(cli, "shell", "--no-escape", web, "--", "cat")
    screen.type(b"~.\n")
    screen.expect(b"~.\r\n~.")
    screen.type(b"\x04")
    assert screen.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_gives_the_terminal_back(cli, web, number):
    screen = Screen(cli, "exec", "-t", web, "--", "sleep", "100")
    time.sleep(0.7)
    screen.process.send_signal(number)
    assert screen.end() == 128 + number


def test_lost_session_gives_the_terminal_back(cli, server, web):
    screen = Screen(cli, "shell", web, *SHELL)
    screen.type(b"echo ready-$((1+1))\n")
    screen.expect(b"ready-2")
    del server.sessions["sweb"]
    server.cut_streams()
    assert screen.end() == 125


def test_refused_start_gives_the_terminal_back(cli, server, web):
    assert Screen(cli, "shell", "nobody").end() == 125
    server.start_failure = {"code": "invalid_argument", "message": "no"}
    assert Screen(cli, "shell", web).end() == 125


def test_shell_survives_a_restart(cli, server, web):
    server.keep_log = True
    screen = Screen(cli, "shell", web, *SHELL)
    screen.type(b"echo one-$((1+1))\n")
    screen.expect(b"one-2")
    server.cut_streams()
    time.sleep(0.5)
    screen.type(b"echo two-$((1+1))\n")
    screen.expect(b"two-2")
    screen.type(b"exit 0\n")
    assert screen.end() == 0


def test_terminal_stdin_is_not_read_without_i(cli, server, web):
    screen = Screen(cli, "exec", web, "cat")
    assert screen.end() == 0
    assert server.calls[0][2]["stdin"] is False
    screen = Screen(cli, "exec", "-i", web, "cat")
    screen.type(b"typed\n\x04")
    assert screen.end() == 0
    assert screen.text.count(b"typed") == 2  # echo of the terminal, and cat's answer
