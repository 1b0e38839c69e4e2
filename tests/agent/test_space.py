"""The space service against an agent in test mode: freezing (with a cgroup2 mount of our own), identity, tunnel."""
import base64
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import socket
import socketserver
import subprocess
import threading
import time

import pytest

from agent_files import free_port
from agent_process import ProcessAgent, Result

CONTROL = "control-token"


class SpaceAgent(ProcessAgent):
    """Started with a control token and, if there is one, a cgroup folder."""

    def __init__(self, cgroup=None):
        self.extra = ["--control", CONTROL] + (["--cgroup", str(cgroup)] if cgroup else [])
        popen = subprocess.Popen

        def start(command, **options):
            return popen(command + self.extra, **options)
        subprocess.Popen = start
        try:
            super().__init__()
        finally:
            subprocess.Popen = popen

    def space(self, method, call, body=None, token=CONTROL, timeout=60):
        headers = {"X-Space-Control": token} if token else {}
        return self.request(method, "/space/v1/" + call, None if body is None else json.dumps(body), headers, timeout)


@pytest.fixture(scope="module")
def agent():
    a = SpaceAgent()
    yield a
    a.stop()


@pytest.fixture(scope="module")
def cgroup():
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a cgroup2 file system")
    folder = pathlib.Path(f"/tmp/space-agent-cgroup-{os.getpid()}")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "cgroup2", "none", folder], capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("no cgroup2 here")
    root = folder / f"test-{os.getpid()}"
    root.mkdir()
    yield root
    for _ in range(50):
        (root / "user/cgroup.kill").write_text("1") if (root / "user").exists() else None
        for name in ("agent", "user"):
            with contextlib.suppress(OSError):
                (root / name).rmdir()
        with contextlib.suppress(OSError):
            root.rmdir()
            break
        time.sleep(0.1)
    subprocess.run(["umount", folder], check=False)
    folder.rmdir()


@pytest.fixture(scope="module")
def frozen_agent(cgroup):
    a = SpaceAgent(cgroup)
    yield a
    a.space("POST", "thaw", {})
    a.stop()


def test_control_token(agent):
    for token in (None, "", "wrong", CONTROL[:-1], CONTROL + "x"):
        assert agent.space("GET", "status", token=token).status == 401
    status = agent.space("GET", "status").json
    assert status["state"] == "running" and status["processes"] == 0 and len(status["boot_id"]) == 36
    before = status["writes"]
    agent.run("true")
    agent.list()
    assert agent.space("GET", "status").json["writes"] == before + 1


def test_users_run_in_their_cgroup(frozen_agent, cgroup):
    assert frozen_agent.run("cat", "/proc/self/cgroup").out.decode().strip().endswith("/user")
    assert str(frozen_agent.process.pid) in (cgroup / "agent/cgroup.procs").read_text().split()
    frozen_agent.sh("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
    assert frozen_agent.space("GET", "status").json["user_cpu_us"] > 10_000


def test_quiesce_stops_and_thaw_goes_on(frozen_agent):
    stream = frozen_agent.start("sh", "-c", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.01; done")
    result = Result()
    for event in stream:
        result.take(event)
        if len(result.order) > 20:
            break
    answer = frozen_agent.space("POST", "quiesce", {}).json
    assert answer["state"] == "frozen" and answer["confirmed"] is True
    stream.connection.sock.settimeout(1) if stream.connection.sock else stream.response.fp.raw._sock.settimeout(1)
    with pytest.raises(TimeoutError):
        while True:
            result.take(stream.message()[1]["event"])
    cpu = frozen_agent.space("GET", "status").json["user_cpu_us"]
    time.sleep(0.3)
    assert frozen_agent.space("GET", "status").json["user_cpu_us"] == cpu
    # Files and health are served meanwhile; a start waits for the thaw.
    assert frozen_agent.request("GET", "/health").status == 204
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(frozen_agent.run, "echo", "late")
        time.sleep(0.5)
        assert not waiting.done()
        assert frozen_agent.space("POST", "thaw", {"time_ns": str(time.time_ns())}).json["state"] == "running"
        assert waiting.result(timeout=5).out == b"late\n"
    more = frozen_agent.attach(result.pid, offset=sum(size for _, size in result.order))
    for event in more:
        result.take(event)
        if len(result.order) > 60:
            break
    more.close()
    frozen_agent.signal(result.pid, "SIGKILL")
    lines = result.out.split(b"\n")[:-1]
    assert lines == [b"%d" % i for i in range(len(lines))]


def test_a_start_whose_client_left_while_frozen_does_not_run(frozen_agent, tmp_path):
    mark = tmp_path / "ran"
    frozen_agent.space("POST", "quiesce", {})
    s = socket.create_connection(("127.0.0.1", frozen_agent.port))
    body = json.dumps({"process": {"cmd": "touch", "args": [str(mark)]}}).encode()
    s.sendall(b"POST /process.Process/Start HTTP/1.1\r\nContent-Type: application/connect+json\r\nContent-Length: %d\r\n\r\n"
              % (len(body) + 5) + b"\0" + len(body).to_bytes(4, "big") + body)
    time.sleep(0.3)
    s.close()
    frozen_agent.space("POST", "thaw", {})
    time.sleep(0.5)
    assert not mark.exists()


@pytest.mark.limit(180)
def test_quiesce_amid_starts(frozen_agent):
    stop = threading.Event()
    codes = []

    def starter():
        while not stop.is_set():
            codes.append(frozen_agent.run("true").code)
    threads = [threading.Thread(target=starter) for _ in range(6)]
    for t in threads:
        t.start()
    slowest = 0
    for _ in range(100):
        began = time.monotonic()
        assert frozen_agent.space("POST", "quiesce", {}).json["confirmed"] is True
        slowest = max(slowest, time.monotonic() - began)
        assert frozen_agent.space("POST", "thaw", {}).status == 200
    stop.set()
    for t in threads:
        t.join()
    assert set(codes) == {0} and len(codes) > 20
    assert slowest < 2


def test_quiesce_without_cgroup_is_refused(agent):
    answer = agent.space("POST", "quiesce", {})
    assert answer.status == 501 and answer.json["code"] == "unsupported"
    assert agent.run("true").code == 0


def test_resume_as(frozen_agent):
    stream = frozen_agent.start("sleep", "30")
    pid = stream.message()[1]["event"]["start"]["pid"]
    idle = frozen_agent.connect()
    idle.request("GET", "/health")
    idle.getresponse().read()
    frozen_agent.space("POST", "quiesce", {})
    body = {"session_id": "s1", "sandbox_id": "b1", "template_id": "t1", "hostname": "host-1", "machine_id": "0" * 31 + "a",
            "time_ns": str(time.time_ns()), "entropy": base64.b64encode(os.urandom(64)).decode(), "environment": {"A": "1"},
            "default_user": "root", "default_workdir": "/tmp", "access_token": "acc", "control_token": "next", "thaw": True}
    for field, bad in (("hostname", "-x"), ("machine_id", "xyz"), ("entropy", "AAAA"), ("environment", {"A=": "1"}),
                       ("time_ns", "now"), ("thaw", "yes"), ("session_id", 5), ("access_token", "x" * 600)):
        answer = frozen_agent.space("POST", "resume-as", {**body, field: bad})
        assert answer.status == 400 and field in answer.json["message"].replace(" ", "_"), answer.json
    assert frozen_agent.space("GET", "status").json["state"] == "frozen"
    for _ in range(2):  # idempotent
        answer = frozen_agent.space("POST", "resume-as", body)
        assert answer.status == 200 and answer.json["state"] == "running"
        body["control_token"], used = "next", CONTROL
        answer = frozen_agent.space("POST", "resume-as", {**body, "control_token": CONTROL}, token="next")
        assert answer.status == 200
    with pytest.raises((AssertionError, http.client.HTTPException, OSError)):
        stream.message()
    with pytest.raises((ConnectionError, OSError)):
        idle.sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        if not idle.sock.recv(100):
            raise ConnectionResetError
    assert frozen_agent.request("GET", "/envs").status == 401
    frozen_agent.token = "acc"
    r = frozen_agent.sh("echo $A $SPACE_SESSION_ID $SPACE_SANDBOX_ID $E2B_SANDBOX_ID $E2B_TEMPLATE_ID; pwd")
    assert r.out == b"1 s1 b1 s1 t1\n/tmp\n"
    assert [p for p in frozen_agent.list() if p["pid"] == pid]
    frozen_agent.signal(pid, "SIGKILL")


def test_warm_and_sync(agent):
    assert agent.space("POST", "warm", {}).json == {}
    assert not [p for p in agent.list(all=True) if p["config"]["cmd"] == "/bin/sh"]
    assert agent.space("POST", "sync", {}).json == {}
    assert agent.space("POST", "poweroff", {}).status == 501


# Tunnel

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
        self.request.sendall(b"<end>")


@contextlib.contextmanager
def server(address, port=0, handler=Echo, v6only=None):
    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 512

        def server_bind(self):
            if v6only is not None:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
            super().server_bind()
    s = Server((address, port), handler)
    t = threading.Thread(target=s.serve_forever, daemon=True)
    t.start()
    try:
        yield s.server_address[1]
    finally:
        s.shutdown()
        s.server_close()


def tunnel(agent, port, token=CONTROL, early=b"", headers=b"Connection: Upgrade\r\nUpgrade: space-tunnel\r\n"):
    s = socket.create_connection(("127.0.0.1", agent.port), timeout=20)
    s.sendall(b"GET /space/v1/tunnel?port=%s HTTP/1.1\r\nHost: x\r\nX-Space-Control: %s\r\n%s\r\n" %
              (str(port).encode(), token.encode(), headers) + early)
    head = b""
    while b"\r\n\r\n" not in head:
        piece = s.recv(4096)
        if not piece:
            break
        head += piece
    head, _, rest = head.partition(b"\r\n\r\n")
    return s, int(head.split()[1]), rest


def read_all(s, rest=b""):
    while piece := s.recv(65536):
        rest += piece
    return rest


@pytest.mark.parametrize("address,v6only", [("127.0.0.1", None), ("0.0.0.0", None), ("127.0.0.2", None), ("::1", None),
                                            ("::", 0), ("::", 1)])
def test_tunnel_reaches_every_listener(agent, address, v6only):
    if ":" in address and not socket.has_ipv6:
        pytest.skip("no IPv6")
    with server(address, v6only=v6only) as port:
        s, status, rest = tunnel(agent, port, early=b"early ")
        assert status == 101
        s.sendall(b"late")
        s.shutdown(socket.SHUT_WR)  # the half-close arrives, and the answer still comes back
        assert read_all(s, rest) == b"early late<end>"
        s.close()


def test_tunnel_prefers_127_0_0_1(agent):
    class Six(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"six")

    class Four(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"four")
    with server("127.0.0.1", handler=Four) as port, server("::1", port, Six):
        for _ in range(5):
            s, status, rest = tunnel(agent, port)
            assert read_all(s, rest) == b"four"
            s.close()


def test_tunnel_errors(agent):
    s, status, rest = tunnel(agent, free_port())
    assert status == 502 and json.loads(rest or s.recv(1000))["code"] == "port_closed"
    for port in (0, 65536, -1, "x", ""):
        assert tunnel(agent, port)[1] == 400
    assert tunnel(agent, 80, headers=b"")[1] == 400
    assert tunnel(agent, 80, token="wrong")[1] == 401
    assert tunnel(agent, agent.port)[1] == 403


def test_tunnel_bulk_and_many(agent):
    with server("127.0.0.1") as port:
        def one(i):
            data = os.urandom(200_000 + i)
            s, status, rest = tunnel(agent, port)
            assert status == 101

            def feed():
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
            t = threading.Thread(target=feed)
            t.start()
            got = read_all(s, rest)
            t.join()
            s.close()
            return got == data + b"<end>"
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert all(pool.map(one, range(64)))
        held = [tunnel(agent, port) for _ in range(200)]
        assert {status for _, status, _ in held} == {101}
        for s, _, _ in held:
            s.sendall(b"ping")
        assert all(s.recv(4) == b"ping" for s, _, _ in held)
        if not os.environ.get("SPACE_TEST_SANITIZED"):
            assert agent.rss_kb() < 16 * 1024
        for s, _, _ in held:
            s.close()
    assert agent.request("GET", "/health").status == 204


def test_tunnel_passes_a_reset_on(agent):
    class Reset(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"partial")
            time.sleep(0.2)
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.request.close()
    with server("127.0.0.1", handler=Reset) as port:
        s, status, rest = tunnel(agent, port)
        with pytest.raises(ConnectionResetError):
            read_all(s, rest)
        s.close()
