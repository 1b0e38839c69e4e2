"""The helper's socket in the hands of a daemon that has been taken over: raw messages, not the client library."""
import array
import os
import socket
import struct
import subprocess
import threading
import time

import pytest

MAGIC, VERSION = 0x48435053, 1
START, KILL, LIST, SOCKETS, OUTPUT, COPY, BUILD, STORAGE, DOCTOR = range(1, 10)
ID = b"b" + b"a" * 19 + b"\0" * 4


def header(kind, size, magic=MAGIC, version=VERSION):
    return struct.pack("=IHHII", magic, version, kind, size, 0)


def message(kind, body=b""):
    return header(kind, 16 + len(body)) + body


def start_body(identity=ID, program=b"qemu", preload=b"", arguments=(b"-S",), count=None, size=None):
    text = b"".join(word + b"\0" for word in arguments)
    return (identity + struct.pack("=16s16sQQIIII", program, preload, 0, 64 << 20, 0, 10,
                                   len(arguments) if count is None else count, len(text) if size is None else size)
            + text)


class Raw:
    def __init__(self, helper):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self.sock.connect(str(helper.socket))

    def ask(self, data, fds=()):
        """(error code, text) of the answer; None if the helper hung up."""
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], control)
        reply, ancillary, _, _ = self.sock.recvmsg(65536, socket.CMSG_SPACE(64))
        for _, _, raw in ancillary:
            got = array.array("i")
            got.frombytes(raw[:len(raw) - len(raw) % 4])
            for fd in got:
                os.close(fd)
        if not reply:
            return None
        assert struct.unpack_from("=IHHI", reply) == (MAGIC, VERSION, 100, len(reply))
        return struct.unpack_from("=I", reply, 16)[0], reply[32:].decode(errors="replace")


@pytest.fixture
def raw(helper):
    before = helper.fds()
    client = Raw(helper)
    yield client
    # Still serves, and holds nothing that was sent to it.
    assert client.ask(message(LIST))[0] == 0
    client.sock.close()
    end = time.monotonic() + 10  # a start whose client has gone is undone by and by
    while helper.fds() > before + 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert helper.fds() <= before + 2


def test_headers(raw):
    for data, reason in ((b"x", "shorter"), (header(LIST, 16)[:15], "shorter"), (header(LIST, 17), "foreign"),
                         (header(LIST, 16, magic=1), "foreign"), (header(LIST, 16, version=9), "foreign"),
                         (header(LIST, 0), "foreign"), (header(LIST, 0xffffffff), "foreign"),
                         (header(0, 16), "unknown"), (header(10, 16), "unknown"), (header(100, 16), "unknown"),
                         (header(0xffff, 16), "unknown")):
        code, text = raw.ask(data)
        assert code and reason in text


def test_sizes_of_every_request(raw):
    for kind in range(1, 10):
        for size in (0, 1, 7, 23, 24, 33, 100, 60000):
            code, text = raw.ask(message(kind, b"\xff" * size))
            if not (kind in (LIST, STORAGE, DOCTOR) and size == 0):
                assert code, (kind, size, text)


def test_too_long(raw):
    code, text = raw.ask(header(LIST, 70000) + b"x" * (70000 - 16))
    assert code and "larger" in text


def test_descriptors(raw):
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        for kind, body, count in ((LIST, b"", 1), (KILL, ID + bytes(8), 2), (COPY, ID + bytes(8), 2),
                                  (COPY, ID + bytes(8), 4), (BUILD, bytes(48), 3), (START, start_body(), 13),
                                  (START, start_body(), 16), (DOCTOR, b"", 16)):
            code, text = raw.ask(message(kind, body), [null] * count)
            assert code and "descriptors" in text, (kind, count, text)
        for count in (17, 100, 250):
            code, text = raw.ask(message(LIST), [null] * count)
            assert code and "descriptors" in text
        # Right in number, wrong in kind.
        code, text = raw.ask(message(COPY, ID + struct.pack("=Q", 4096)), [null] * 3)
        assert code and "no sandbox" in text
    finally:
        os.close(null)


def test_strings_that_are_not_terminated(raw):
    for identity in (b"b" + b"a" * 23, b"\xff" * 24, b"../../../../etc/passwd\0\0", b"/" * 23 + b"\0", bytes(24),
                     b"b" + b"a" * 18 + b"/" + bytes(4), b"b" + b"a" * 18 + b"\n" + bytes(4)):
        for kind, body in ((KILL, identity + bytes(8)), (SOCKETS, identity + struct.pack("=II", 1, 0)),
                           (OUTPUT, identity + bytes(8)), (START, start_body(identity=identity))):
            code, text = raw.ask(message(kind, body))
            assert code, (kind, identity)
    for body in (start_body(program=b"q" * 16), start_body(preload=b"p" * 16), start_body(program=b"/bin/sh"),
                 start_body(program=b""), start_body(preload=b"/tmp/evil.so"), start_body(count=2),
                 start_body(count=0), start_body(size=1), start_body(size=0xffffffff), start_body(count=0xffffffff),
                 start_body(count=97, arguments=(b"x",)), start_body(arguments=(b"x",) * 97),
                 start_body(arguments=(b"x" * 40000,))):
        code, text = raw.ask(message(START, body))
        assert code, text


def test_sockets_count(raw):
    for count in (0, 9, 0x7fffffff, 0xffffffff):
        code, text = raw.ask(message(SOCKETS, ID + struct.pack("=II", count, 0)))
        assert code and "1 to 8" in text


def test_many_connections(helper, raw):
    crowd = []
    for _ in range(100):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(helper.socket))
        crowd.append(sock)
    assert raw.ask(message(STORAGE))[0] == 0
    for sock in crowd:
        sock.close()
    # A new one finds its place again.
    for _ in range(100):
        try:
            assert Raw(helper).ask(message(LIST))[0] == 0
            break
        except (OSError, AssertionError):
            threading.Event().wait(0.05)
    else:
        pytest.fail("no place for a new connection")


def test_peer_that_hangs_up_during_a_start(helper, raw):
    for index in range(10):
        identity = b"b" + b"%019d" % index + bytes(4)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(helper.socket))
        sock.send(message(START, start_body(identity=identity)))
        sock.close()
    for index in range(10):
        helper.tool("kill", f"b{index:019d}")
    end = threading.Event()
    for _ in range(100):
        if not helper.list():
            break
        for name in helper.list():
            helper.tool("kill", name)
        end.wait(0.05)
    assert helper.list() == {} and helper.vmms() == []


def test_other_users_are_refused(helper):
    """Another user's process, even one of the group that may open the socket."""
    program = ("import socket,sys\ns=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n"
               "try:\n s.connect(sys.argv[1])\n s.send(bytes.fromhex(sys.argv[2]))\n print(len(s.recv(16)))\n"
               "except OSError as e: print(type(e).__name__)")
    group = os.stat(helper.socket).st_gid

    def ask(uid, gid):
        return subprocess.run(["/usr/bin/python3", "-c", program, str(helper.socket), message(LIST).hex()],
                              user=uid, group=gid, extra_groups=[], cwd="/", check=True, stdout=subprocess.PIPE,
                              text=True).stdout.strip()

    assert ask(65534, 65534) == "PermissionError"
    assert ask(65534, group) in ("0", "ConnectionResetError", "BrokenPipeError")
    assert ask(helper.uid_first, helper.uid_first) == "PermissionError"
    assert ask(0, 0) == "16"
