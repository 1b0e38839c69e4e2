"""The HTTP server itself: framing, limits, clients of bad manners, errors, events, builds."""
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time

import pytest

from conftest import ADMIN, BLUE, RED, Server, wait_for
from rest import Connection

AUTH = f"X-API-Key: {ADMIN}\r\n"


def status_of(answer):
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


# -- framing

@pytest.mark.parametrize("text, status", [
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ("\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ("GET /healthz HTTP/1.0\r\n\r\n", 200),
    ("HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ("GET /healthz HTTP/1.1\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\nHost: x\n\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nX: a\x01b\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nX : a\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\n: a\r\n\r\n", 400),
    ("GET /healthz HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
    (" GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("GET  /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("GET /healthz\r\n\r\n", (400, 505)),
    ("GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n", (400, 505)),
    ("GET /healthz HTTP/3.7\r\nHost: x\r\n\r\n", (400, 505)),
    ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    ("FROBNICATE / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: 2\r\nContent-Length: 2\r\n\r\n{{}}", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: 2, 2\r\n\r\n{{}}", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: +2\r\n\r\n{{}}", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: -1\r\n\r\n{{}}", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: 99999999999999999999\r\n\r\n{{}}", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (400, 501)),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    (f"POST /v1/sessions HTTP/1.0\r\nHost: x\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}xx\r\n", 400),
    (f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
    ("GET http://x/healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("GET /" + "a" * 70000 + " HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    ("GET / HTTP/1.1\r\nHost: x\r\n" + "X: y\r\n" * 200 + "\r\n", 431),
], ids=range(40))
def test_framing(server, text, status):
    answer = server.exchange(text.encode("latin-1"), timeout=4)
    assert status_of(answer) in (status if isinstance(status, tuple) else (status,)), answer[:300]
    if status_of(answer) >= 400:
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert set(body) == {"code", "message", "details"} and body["message"]
    assert answer.count(b"HTTP/1.1 ") == 1
    if text.startswith("HEAD"):
        assert answer.endswith(b"\r\n\r\n")


def test_byte_by_byte(server):
    text = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n3\r\n{{ }}\r\n0\r\nT: x\r\n\r\n"
    with server.connect() as sock:
        for byte in text.encode():
            sock.sendall(bytes([byte]))
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 201
        server.local.delete(json.loads(answer.read())["id"])


def test_pipelined_requests_are_answered_in_order(server):
    one = f"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = server.exchange(one * 500 + "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", timeout=20)
    assert answer.count(b"HTTP/1.1 200 ") == 501 and answer.count(b"HTTP/1.1 404 ") == 500
    assert answer.rstrip().endswith(b'{"status":"ok"}')


def test_keep_alive(server):
    connection = Connection(("127.0.0.1", server.port), 10)
    connection.connect()
    port = connection.sock.getsockname()
    for _ in range(100):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        assert connection.sock.getsockname() == port
    connection.close()
    answer = server.exchange("GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2 + "GET /healthz HTTP/1.0\r\n\r\n")
    assert answer.count(b"200 OK") == 3


# -- limits

def test_bodies_over_the_limit(server):
    client = server.tcp(ADMIN)
    for size in ((1 << 20) + 1, 50_000_000):
        answer = server.exchange(f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: {size}\r\n\r\n", timeout=4)
        assert status_of(answer) == 413 and b"connection: close" in answer
        assert client.call("POST", "/v1/sessions", raw=b" " * size).status == 413 if size < 2 << 20 else True
    with server.connect() as sock:
        sock.sendall(f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(40):
                sock.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        except OSError:
            pass
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert server.local.call("POST", "/v1/sessions", raw=b" " * ((1 << 20) - 2) + b"{}").status == 201
    for one in server.local.list():
        server.local.delete(one["id"])
    assert server.metric("space_api_body_bytes") == 0


def test_body_without_a_key_is_not_read(server):
    answer = server.exchange("POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", timeout=4)
    assert status_of(answer) == 401


def test_many_idle_and_half_open_connections(server):
    memory = server.rss()
    held = []
    for number in range(1000):
        sock = server.connect()
        if number % 4 == 1:
            sock.sendall(b"GET /heal")
        elif number % 4 == 2:
            sock.sendall(f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: 9\r\n\r\n{{".encode())
        elif number % 4 == 3:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        held.append(sock)
    started = time.monotonic()
    assert server.tcp().call("GET", "/healthz").status == 200
    assert time.monotonic() - started < 0.5
    assert server.metric("space_http_connections") >= 1000
    assert not server.grew(memory, 20 << 20)
    for sock in held:
        sock.close()
    wait_for(lambda: server.metric("space_http_connections") < 10)


@pytest.mark.limit(60)
def test_slow_heads_and_silent_connections_are_ended(server):
    """Head: 10 s in all, however busily it trickles."""
    slow, silent = server.connect(30), server.connect(30)
    started = time.monotonic()
    slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.5):
            try:
                slow.sendall(b"X: y\r\n")
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    answer = slow.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ") and 9 < time.monotonic() - started < 12
    stop.set()
    thread.join()
    try:
        assert silent.recv(10) == b""
    except ConnectionResetError:
        pass
    assert time.monotonic() - started < 13
    slow.close()
    silent.close()


def test_connection_limit(agent):
    """4096 in all (descriptors permitting): the next one is told so and closed."""
    server = Server(agent)
    held = []
    try:
        for _ in range(4096):
            held.append(server.connect())
        extra = server.connect()
        answer = extra.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"exhausted"' in answer
        extra.close()
        for sock in held:
            sock.close()
        wait_for(lambda: server.local.call("GET", "/healthz").status == 200)
    finally:
        for sock in held:
            sock.close()
        server.stop()


# -- errors

def test_routes(server):
    client = server.local
    for path in ("/", "/v1", "/v1/", "/v1/session", "/v1/sessions/", "/v1/sessions/a/b/c", "/v1//sessions", "/v1/sessions/a/explode",
                 "/V1/sessions", "/../etc/passwd", "/%2e%2e/x", "/v1/sessions/..%2f..%2fx/snapshots/%00"):
        answer = client.call("GET", path)
        assert answer.status in (404, 405), path
        assert set(answer.json) == {"code", "message", "details"}
    answer = client.call("DELETE", "/v1/sessions")
    assert answer.status == 405 and answer.headers["allow"] == "GET, POST" and answer.json["code"] == "method_not_allowed"
    answer = client.call("GET", "/v1/sessions/x/pause")
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert client.call("GET", "/v1/sessions?limit=0").status == 400
    assert client.call("GET", "/v1/sessions?limit=1001").status == 400
    assert client.call("GET", "/v1/sessions?colour=red").status == 400
    assert client.call("GET", "/v1/sessions?state=%ff").status == 400
    assert client.call("GET", "/v1/sessions?state=running&label=a%3Db&limit=5&name=x").status == 200


@pytest.mark.parametrize("text, says", [
    ('{"name":', "line 1 column"), ('{"name":1}', '"name"'), ("[]", "object"), ('{"a":1}', '"a"'), ('{"name":"a","name":"b"}', "duplicate"),
    ('"x"', "object"), ("{}x", "line 1"), ('{"name":"\\ud800"}', "line 1"), (b'{"name":"\xff"}', "line 1"), ("[" * 100, "deeper"),
    ('{"labels":' + "[" * 100000, "deeper"), ('{"name":"\\u0000"}', "line 1"), ("\n\n  {\n x}", "line 4")])
def test_bad_json(server, text, says):
    answer = server.tcp(ADMIN).call("POST", "/v1/sessions", raw=text if isinstance(text, bytes) else text.encode())
    assert answer.status == 400 and says in answer.json["message"], answer.json
    assert server.local.list() == []


def test_inside_matters_stay_inside(server):
    id = server.tcp(RED).create()["id"]
    theirs = server.tcp(RED).call("POST", f"/v1/sessions/{id}/pause", {"test_internal": True})
    assert theirs.status == 500 and "secret" not in theirs.body.decode()
    assert theirs.headers["x-request-id"] in theirs.json["message"]
    ours = server.local.call("POST", f"/v1/sessions/{id}/pause", {"test_internal": True})
    assert ours.status == 500 and "/secret/path" in ours.json["message"]
    assert theirs.headers["x-request-id"] in server.log.read_text()
    server.tcp(RED).delete(id)


def test_keys_in_all_forms(server):
    for headers, status in (({"X-API-Key": ADMIN}, 200), ({"Authorization": f"Bearer {ADMIN}"}, 200),
                            ({"Authorization": f"bearer  {ADMIN}"}, 200), ({"X-API-Key": ADMIN.upper()}, 401), ({}, 401),
                            ({"Authorization": f"Basic {ADMIN}"}, 401), ({"X-API-Key": "x" * 5000}, 401), ({"X-API-Key": ""}, 401)):
        answer = server.tcp().call("GET", "/v1/sessions", headers=headers)
        assert answer.status == status, headers
        assert status != 401 or answer.headers["www-authenticate"]
    for path in ("/metrics", "/v1/keys", "/v1/doctor"):
        assert server.tcp(RED).call("GET", path).status == 403
        assert server.tcp(ADMIN).call("GET", path).status == 200
    # A key counts on the local socket, too.
    assert server.local.call("GET", "/metrics", headers={"X-API-Key": RED}).status == 403
    for path in ("/healthz", "/v1/openapi"):
        assert server.tcp().call("GET", path).status == 200


# -- streams of ours

def test_events(server):
    red, blue, everything = [], [], []

    def follow(client, into, query=""):
        try:
            for event in client.events(timeout=20, query=query):
                into.append(event)
        except (OSError, http.client.HTTPException):
            pass

    threads = [threading.Thread(target=follow, args=arguments, daemon=True) for arguments in
               ((server.tcp(RED), red), (server.tcp(BLUE), blue), (server.local, everything))]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.metric("space_events_followers") == 3)
    one, two = server.tcp(RED).create()["id"], server.tcp(RED).create()["id"]
    server.tcp(RED).verb(one, "pause")
    wait_for(lambda: len(red) >= 5 and len(everything) >= 5)
    assert [e["type"] for e in red if e["session_id"] == one] == ["session.creating", "session.running", "session.paused"]
    assert blue == []
    numbers = [e["id"] for e in everything]
    assert numbers == list(range(numbers[0], numbers[0] + 5))
    # Come back: exactly what was missed.
    for last in (numbers[0], numbers[2]):
        again = server.tcp(RED).events(timeout=5, last_id=last)
        assert [next(again)["id"] for _ in range(numbers[-1] - last)] == list(range(last + 1, numbers[-1] + 1))
    only = server.tcp(RED).events(timeout=5, last_id=numbers[0] - 1, query=f"?session={two}&type=session.running")
    assert next(only)["session_id"] == two
    gap = next(server.tcp(RED).events(timeout=5, last_id=10**9))
    assert gap["type"] == "gap"
    assert server.tcp(RED).call("GET", "/v1/events", headers={"Last-Event-ID": "x"}).status == 400
    server.tcp(RED).delete(one)
    server.tcp(RED).delete(two)


def test_follower_that_reads_nothing_is_cut(server):
    client = server.tcp(RED)
    id = client.create()["id"]
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(f"GET /v1/events HTTP/1.1\r\nHost: x\r\nX-API-Key: {RED}\r\n\r\n".encode())
    wait_for(lambda: server.metric("space_events_followers") >= 1)
    before = server.metric("space_events_followers")
    memory = server.rss()

    def churn():
        for _ in range(3000):
            client.verb(id, "pause")

    churn()
    # Kernel buffers of a loopback connection are large: keep going until the daemon's own bound is reached.
    for _ in range(10):
        if server.metric("space_events_followers") < before:
            break
        churn()
    assert server.metric("space_events_followers") < before and not server.grew(memory, 16 << 20)
    sock.close()
    client.delete(id)


def test_gap_is_told(server):
    client = server.tcp(RED)
    id = client.create()["id"]
    for _ in range(4200):
        client.verb(id, "pause")
    first = next(client.events(timeout=5, last_id=1))
    assert first["type"] == "gap" and first["after"] == 1 and first["kept_after"] > 1
    client.delete(id)


def read_lines(server, body, headers=None):
    connection = Connection(server.local.address, 30)
    connection.request("POST", "/v1/templates", json.dumps(body), headers or {})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def test_template_build_progress(server):
    response, text = read_lines(server, {"name": "t"})
    assert response.status == 200 and response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [{"line": f"step {n}"} for n in range(3)] + [{"template": {"name": "t"}}]
    response, text = read_lines(server, {"name": "t"}, {"Accept": "text/event-stream"})
    assert response.headers["content-type"] == "text/event-stream"
    assert text.count("event: progress\ndata: {") == 3 and text.endswith('event: done\ndata: {"template":{"name":"t"}}\n\n')
    response, text = read_lines(server, {"name": "t", "test_fails": True})
    assert response.status == 200 and json.loads(text.splitlines()[-1])["error"]["code"] == "internal"
    for body, status in (({}, 400), ({"name": 1}, 400), ({"name": "t", "test_lines": 0, "test_fails": True}, 500)):
        response, text = read_lines(server, body)
        assert response.status == status and json.loads(text)["code"]
    response, text = read_lines(server, {"name": "t", "test_lines": 100000})
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1] == {"template": {"name": "t"}}


def test_build_goes_on_without_its_client(server):
    sock = server.connect()
    sock.sendall(f'POST /v1/templates HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: 16\r\n\r\n{{"name":"alone"}}'.encode())
    sock.recv(100)
    sock.close()
    wait_for(lambda: server.local.call("GET", "/v1/templates/alone").status == 200)
    server.local.ask("DELETE", "/v1/templates/alone")


# -- work

def test_slow_verbs_do_not_keep_others_waiting(server):
    client = server.tcp(RED)
    id = client.create()["id"]
    threads = [threading.Thread(target=server.tcp(RED).verb, args=(id, "pause"), kwargs={"test_delay_ms": 500}) for _ in range(60)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for _ in range(20):
        started = time.monotonic()
        assert client.get(id)["id"] == id
        assert time.monotonic() - started < 0.2
    for thread in threads:
        thread.join()
    client.delete(id)


def test_verb_goes_on_without_its_client(server):
    id = server.local.create()["id"]
    sock = server.connect()
    body = '{"test_delay_ms":300}'
    sock.sendall(f"POST /v1/sessions/{id}/pause HTTP/1.1\r\nHost: x\r\n{AUTH}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    time.sleep(0.1)
    sock.close()
    server.local.wait_state(id, "paused")
    server.local.delete(id)


def test_stop_lets_answers_end(agent):
    server = Server(agent)
    id = server.local.create()["id"]
    events = server.tcp(ADMIN).events(timeout=10, last_id=0)
    next(events)
    result = []
    thread = threading.Thread(target=lambda: result.append(
        server.tcp(ADMIN).call("POST", f"/v1/sessions/{id}/pause", {"test_delay_ms": 1000})))
    thread.start()
    time.sleep(0.3)
    server.stop()
    thread.join()
    assert result[0].status == 200
    for _ in events:
        pass


def test_listeners(agent, tmp_path):
    """A stale socket is replaced, a live one is not; the mode keeps others out."""
    server = Server(agent)
    path = server.dir / "space.sock"
    assert path.stat().st_mode & 0o777 == 0o660
    second = subprocess.run([server.process.args[0], "--data-dir", server.dir, "--runtime-dir", server.dir, "--listen", "none"],
                            capture_output=True, text=True, timeout=20, check=False)
    assert second.returncode == 1 and "another process listens" in second.stderr
    taken = subprocess.run([server.process.args[0], "--data-dir", tmp_path, "--runtime-dir", tmp_path, "--listen",
                            f"127.0.0.1:{server.port}"], capture_output=True, text=True, timeout=20, check=False)
    assert taken.returncode == 1 and "address already in use" in taken.stderr
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert path.exists()
    directory, server.dir = server.dir, None
    again = subprocess.Popen([server.process.args[0], "--data-dir", directory, "--runtime-dir", directory, "--listen", "none"],
                             stderr=subprocess.DEVNULL)
    wait_for(lambda: _healthy(server.local))
    again.terminate()
    assert again.wait(10) == 0 and not path.exists()
    for file in pathlib.Path(directory).iterdir():
        file.unlink()
    directory.rmdir()


def _healthy(client):
    try:
        return client.call("GET", "/healthz").status == 200
    except OSError:
        return False
