"""Traffic for guests: heads, streaming both ways, endings, upgrades, tokens."""
import contextlib
import hashlib
import http.client
import os
import socket
import threading
import time

import pytest

import fake_agent
import websocket
from conftest import ADMIN, BLUE, RED, wait_for
from rest import Connection


def agent_path(session, path):
    return f"/v1/sessions/{session['id']}/agent{path}"


def host(session, port=8000):
    return f"{port}-{session['id']}.localhost"


# -- heads

def test_agent_call_carries_its_token_only(server, agent, session):
    client = server.tcp(ADMIN)
    answer = client.call("GET", agent_path(session, "/hello?x=%2f1"), headers={
        "X-Space-User": "root", "X-Space-Control": "c", "X-Access-Token": "forged", "Cookie": "a=1", "X-Own": "2"})
    assert answer.status == 200 and answer.body == b"hello" and answer.headers["x-own"] == "1"
    assert "x-hop" not in answer.headers and "connection" not in answer.headers
    seen = agent.last("/hello")
    assert seen.target == "/hello?x=%2f1"
    assert seen.headers["x-access-token"] == session["access_token"]
    assert seen.headers["authorization"] == "Basic cm9vdDo="
    assert ("X-Own", "2") in seen.pairs
    for name in ("x-api-key", "x-space-user", "x-space-control"):
        assert name not in seen.headers
    client.call("GET", agent_path(session, "/hello"), headers={"Authorization": "Basic dXNlcjo="})
    assert agent.last("/hello").headers["authorization"] == "Basic dXNlcjo="
    bearer = server.tcp()
    assert bearer.call("GET", agent_path(session, "/hello"), headers={"Authorization": f"Bearer {ADMIN}"}).status == 200
    assert "authorization" not in agent.last("/hello").headers


def test_port_sees_localhost_and_who_asked(server, agent, session):
    for how in ({"Host": host(session)}, {"E2b-Sandbox-Id": session["id"], "E2b-Sandbox-Port": "8000"}):
        answer = server.local.call("GET", "/hello?a=1&space_token=zzz&b=2", headers={
            **how, "Cookie": "a=1; space_token=zzz; b=2", "X-Forwarded-For": "192.0.2.1", "Forwarded": "for=x",
            "Authorization": "Bearer of-the-app"})
        assert answer.status == 200
        seen = agent.last("/hello")
        assert seen.port == 8000 and seen.target == "/hello?a=1&b=2"
        assert seen.headers["host"] == "localhost:8000" and seen.headers["cookie"] == "a=1; b=2"
        assert seen.headers["x-forwarded-proto"] == "http" and seen.headers["x-forwarded-for"] == "192.0.2.1"
        assert seen.headers["authorization"] == "Bearer of-the-app"
        assert "forwarded" not in seen.headers and "x-access-token" not in seen.headers
    assert agent.last("/hello").headers["x-forwarded-host"] == "localhost"
    server.tcp(ADMIN).call("GET", "/hello", headers={"Host": host(session) + ":7700"})
    seen = agent.last("/hello")
    assert seen.headers["x-forwarded-host"] == host(session) + ":7700" and "x-api-key" not in seen.headers
    assert seen.headers["x-forwarded-for"] == "127.0.0.1"


def test_path_form(server, agent, session):
    client = server.local
    base = f"/v1/sessions/{session['id']}/ports/8000"
    for path, target in (("", "/"), ("/", "/"), ("?q=1", "/?q=1"), ("/hello", "/hello"), ("/a//b/../c%2f", "/a//b/../c%2f")):
        client.call("GET", base + path)
        with agent.lock:
            seen = agent.requests[-1]
        assert seen.target == target and seen.headers["x-forwarded-prefix"] == base
    for location, expected in (("/login", base + "/login"), ("//evil.example/", "//evil.example/"), ("", ""),
                               ("other", "other"), ("http://169.254.169.254/", "http://169.254.169.254/")):
        for status in (301, 302, 303, 307, 308):
            answer = client.call("GET", f"{base}/redirect/{status}/{location.encode().hex()}")
            assert answer.status == status and answer.headers.get("location", "") == expected
    before = agent.count("/hello")
    client.call("POST", f"{base}/redirect/302/{b'/hello'.hex()}", raw=b"body")
    assert agent.count("/hello") == before


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "999999999999", ""])
def test_bad_ports(server, session, port):
    answer = server.local.call("GET", f"/v1/sessions/{session['id']}/ports/{port}/")
    assert answer.status in (400, 404) and answer.json["code"]
    assert server.local.call("GET", "/", headers={"E2b-Sandbox-Id": session["id"], "E2b-Sandbox-Port": port}).status == 400


def test_unknown_sessions(server, session):
    for id in ("s" + "a" * 19, "tests", "s", "sA" + "a" * 18 + "x" * 200):
        assert server.local.call("GET", "/", headers={"Host": f"8000-{id}.localhost"}).status in (400, 404)
        assert server.local.call("GET", "/", headers={"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "80"}).status == 404
    assert server.local.call("GET", "/", headers={"Host": f"8000-{session['id']}.localhost.evil"}).status == 404
    assert server.local.call("GET", "/", headers={"E2b-Sandbox-Id": session["id"]}).status == 400


# -- who may

def test_agent_needs_a_key_and_the_right_tenant(server, agent, session):
    before = agent.connections
    assert server.tcp().call("GET", agent_path(session, "/hello")).status == 401
    assert server.tcp("e2b_" + "0" * 40).call("GET", agent_path(session, "/hello")).status == 401
    assert server.tcp(BLUE).call("GET", agent_path(session, "/hello")).status == 404
    assert server.tcp(BLUE).call("GET", f"/v1/sessions/{session['id']}/ports/8000/hello").status == 404
    # A token opens ports, not the agent's path.
    assert server.tcp().call("GET", agent_path(session, "/hello"),
                             headers={"X-Access-Token": session["access_token"]}).status == 401
    assert agent.connections == before


def test_private_ports(server, agent, session):
    tcp, token = server.tcp(), session["access_token"]
    good = ({"X-Access-Token": token}, {"Cookie": f"x=1; space_token={token}"}, {"X-API-Key": ADMIN})
    bad = ({}, {"X-Access-Token": "wrong"}, {"X-Access-Token": token[:-1]}, {"X-Access-Token": ""},
           {"Cookie": "space_token=wrong"}, {"X-API-Key": "e2b_" + "0" * 40}, {"Authorization": f"Bearer {ADMIN}"},
           {"X-Access-Token": "x" * 5000})
    for headers in good:
        assert tcp.preview(session["id"], 8000, "/hello", headers=headers).status == 200
        text = "\n".join(agent.last("/hello").lines)
        assert token not in text and ADMIN not in text
    before = agent.connections
    for headers in bad:
        answer = tcp.preview(session["id"], 8000, "/hello", headers=headers)
        assert answer.status == 401 and "location" not in answer.headers, headers
        page = tcp.preview(session["id"], 8000, "/hello", headers={**headers, "Accept": "text/html"})
        assert page.status == 401 and page.body.startswith(b"<!doctype html>")
    assert agent.connections == before
    answer = tcp.preview(session["id"], 8000, f"/hello?space_token={token}")
    assert answer.status == 200 and answer.headers["set-cookie"].startswith(f"space_token={token}; HttpOnly")
    assert agent.last("/hello").target == "/hello"
    open_session = server.local.create(private_ports=False)
    assert tcp.preview(open_session["id"], 8000, "/hello").status == 200
    server.local.delete(open_session["id"])


def test_agents_port_is_left_to_the_agent(server, agent, session):
    """By host, port path or header: the client's own token goes through, none is added."""
    tcp = server.tcp(ADMIN)
    for path, headers in (("/hello", {"Host": host(session, 49983)}),
                          (f"/v1/sessions/{session['id']}/ports/49983/hello", {})):
        tcp.call("GET", path, headers=headers)
        assert "x-access-token" not in agent.last("/hello").headers
        tcp.call("GET", path, headers={**headers, "X-Access-Token": "own", "Authorization": "Basic dTo="})
        assert agent.last("/hello").headers["x-access-token"] == "own"
        assert agent.last("/hello").headers["authorization"] == "Basic dTo="


# -- bodies

@pytest.mark.parametrize("path", ["agent", "ports/8000"])
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 3_000_000])
def test_bodies_both_ways(server, session, path, size):
    base = f"/v1/sessions/{session['id']}/{path}"
    data = os.urandom(size)
    assert server.local.call("POST", base + "/echo", raw=data).body == data
    expected = bytes(range(256)) * (size // 256 + 1)
    assert server.local.call("GET", f"{base}/length/{size}").body == expected[:size]
    connection = Connection(server.local.address, 20)
    connection.request("POST", base + "/echo", iter([data[:10], data[10:]]), encode_chunked=True,
                       headers={"Transfer-Encoding": "chunked"})
    assert connection.getresponse().read() == data
    connection.close()


def test_head_and_interim_answers(server, session):
    answer = server.local.call("HEAD", agent_path(session, "/length/12345"))
    assert answer.status == 200 and answer.body == b"" and answer.headers["content-length"] == "12345"
    assert server.local.call("GET", agent_path(session, "/until-close")).body == b"until the end"
    text = server.exchange(f"GET {agent_path(session, '/interim')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\n"
                           "Connection: close\r\n\r\n")
    assert text.startswith(b"HTTP/1.1 103 ") and b"\r\n\r\nHTTP/1.1 200 " in text and text.endswith(b"late")
    old = server.exchange(f"GET {agent_path(session, '/stream/100000/1000')} HTTP/1.0\r\nX-API-Key: {ADMIN}\r\n\r\n")
    head, _, body = old.partition(b"\r\n\r\n")
    assert body == b"z" * 100000 and b"chunked" not in head.lower() and b"connection: close" in head.lower()


def test_answer_comes_while_the_request_is_sent(server, session):
    """Full duplex: more than all buffers together in each direction."""
    connection = Connection(server.local.address, 30)
    connection.connect()
    sock = connection.sock
    size = 20_000_000
    block = os.urandom(1_000_000)
    sock.sendall(f"POST {agent_path(session, '/both')} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
    sender = threading.Thread(target=lambda: [sock.sendall(block) for _ in range(size // len(block))])
    sender.start()
    response = http.client.HTTPResponse(sock)
    response.begin()
    digest = hashlib.sha256()
    while data := response.read(65536):
        digest.update(data)
    sender.join()
    assert digest.digest() == hashlib.sha256(block * (size // len(block))).digest()
    connection.close()


def test_pieces_arrive_when_they_are_sent(server, session):
    connection = Connection(server.local.address, 20)
    connection.request("GET", agent_path(session, "/ticks/5"))
    response = connection.getresponse()
    times = []
    for number in range(5):
        assert response.readline() == b"tick%d\n" % number
        times.append(time.monotonic())
    assert all(0.1 < later - sooner < 0.5 for sooner, later in zip(times, times[1:]))
    connection.close()


def test_early_answer(server, session):
    """The guest refuses before it has read the body: the client reads that answer, the body is not pulled on."""
    for size in (10, 50_000_000):
        connection = Connection(server.local.address, 20)
        connection.connect()
        sock = connection.sock
        sock.sendall(f"POST {agent_path(session, '/early')} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        try:
            for _ in range(size // 1_000_000):
                sock.sendall(b"x" * 1_000_000)
        except OSError:
            pass
        response = http.client.HTTPResponse(sock)
        response.begin()
        assert response.status == 401 and response.read() == b"not with me"
        connection.close()


@pytest.mark.parametrize("path, at_most", [("/continue", 0.5), ("/hash", 1.6)])
def test_expect_continue(server, session, path, at_most):
    """100 comes from the guest, or after a second from the proxy."""
    with server.connect() as sock:
        sock.sendall(f"PUT {agent_path(session, path)} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\nContent-Length: 5\r\n"
                     "Expect: 100-continue\r\nConnection: close\r\n\r\n".encode())
        started = time.monotonic()
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert time.monotonic() - started < at_most
        sock.sendall(b"12345")
        text = b""
        while more := sock.recv(65536):
            text += more
        assert text.startswith(b"HTTP/1.1 200") and text.endswith(hashlib.sha256(b"12345").hexdigest().encode())
    with server.connect() as sock:
        sock.sendall(f"PUT {agent_path(session, '/early')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\nContent-Length: 5\r\n"
                     "Expect: 100-continue\r\n\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 401")


# -- endings

@pytest.mark.parametrize("path", ["/cut-length", "/cut-chunked"])
def test_cut_answers_are_cut(server, session, path):
    for base in (agent_path(session, ""), f"/v1/sessions/{session['id']}/ports/8000"):
        connection = Connection(server.local.address, 20)
        connection.request("GET", base + path)
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            response.read()
        connection.close()


@pytest.mark.parametrize("raw", [
    b"HTTP/1.1 200 O", b"", b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", b"SSH-2.0-x\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: \0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
], ids=lambda raw: repr(raw[:30]))
def test_malformed_answers_are_502(server, session, raw):
    answer = server.local.call("GET", agent_path(session, f"/raw/{raw.hex()}"))
    assert answer.status == 502 and answer.json["code"] == "guest_unavailable", (answer.status, answer.body)


def test_endless_interim_answers_end(server, session):
    raw = (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 40).hex()
    text = server.exchange(f"GET {agent_path(session, '/raw/' + raw)} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\n"
                           "Connection: close\r\n\r\n")
    assert text.count(b"HTTP/1.1 103 ") == 16 and b"HTTP/1.1 502 " in text


def test_closed_and_silent_ports(server, session):
    started = time.monotonic()
    answer = server.local.preview(session["id"], fake_agent.CLOSED_PORT, "/")
    assert answer.status == 502 and answer.json["code"] == "port_closed" and time.monotonic() - started < 1
    page = server.local.preview(session["id"], fake_agent.CLOSED_PORT, "/", headers={"Accept": "text/html,*/*"})
    assert page.status == 502 and page.headers["content-type"].startswith("text/html") and b"9999" in page.body
    answer = server.local.preview(session["id"], fake_agent.SILENT_PORT, "/")
    assert answer.status == 502 and time.monotonic() - started < 8


def test_client_that_leaves_is_noticed(server, agent, session):
    for path in (agent_path(session, "/hang"), f"/v1/sessions/{session['id']}/ports/8000/hang",
                 agent_path(session, "/length/1000000000"), agent_path(session, "/ticks/1000")):
        sock = server.connect()
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\n\r\n".encode())
        wait_for(lambda: server.metric("space_test_open_claims") >= 1)
        time.sleep(0.3)
        sock.close()
        wait_for(lambda: server.metric("space_proxy_requests") == 0, timeout=3, what="end of the exchange")
    wait_for(lambda: server.metric("space_test_open_claims") == 0, timeout=8, what="return of all claims")


def test_sessions_end_cuts_streams(server, agent, session):
    connection = Connection(server.local.address, 20)
    connection.request("GET", agent_path(session, "/ticks/1000"))
    response = connection.getresponse()
    assert response.readline() == b"tick0\n"
    server.local.verb(session["id"], "pause")
    assert response.readline() == b"tick1\n"
    server.local.verb(session["id"], "resume")
    started = time.monotonic()
    server.local.verb(session["id"], "suspend")
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        response.read()
    assert time.monotonic() - started < 2
    # The next use wakes it, on a connection of its own.
    assert server.local.call("GET", agent_path(session, "/hello")).status == 200
    assert server.local.get(session["id"])["state"] == "running"


def test_kept_connections(server, agent, session):
    path = agent_path(session, "/hello")
    server.local.call("GET", path)
    before, reused = agent.connections, server.metric("space_proxy_reused_total")
    for _ in range(10):
        assert server.local.call("GET", path).status == 200
    assert agent.connections == before and server.metric("space_proxy_reused_total") == reused + 10
    server.local.verb(session["id"], "suspend")
    server.local.verb(session["id"], "wake")
    assert server.local.call("GET", path).status == 200
    assert agent.connections == before + 1
    # One that the guest ends meanwhile is not used again.
    for sock in list(agent.open):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    time.sleep(0.1)
    assert server.local.call("GET", path).status == 200
    wait_for(lambda: server.metric("space_proxy_idle") == 0, timeout=8, what="end of idle connections")


# -- upgrades

def test_websocket_bytes(server, agent, session):
    token = session["access_token"]
    with server.connect(20) as sock:
        ws = websocket.WebSocket(sock, host(session), f"/ws?space_token={token}",
                                 [("Origin", "http://o"), ("Connection", "keep-alive, Upgrade")])
        seen = agent.last("/ws")
        assert seen.headers["host"] == "localhost:8000" and seen.headers["x-forwarded-host"] == host(session)
        assert seen.headers["origin"] == "http://o" and seen.target == "/ws" and token not in "\n".join(seen.lines)
        data = os.urandom(30_000_000)
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        got = bytearray()
        while len(got) < len(data):
            got += sock.recv(1 << 20)
        sender.join()
        assert bytes(got) == data
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b"bye" and sock.recv(100) == b""
    with server.connect() as sock:
        ws = websocket.WebSocket(sock, host(session), "/ws-greeting", [("X-Access-Token", token)])
        assert ws.receive() == (websocket.BINARY, b"hello")
    for headers in ([("X-Access-Token", "wrong")], []):
        with server.connect() as sock, pytest.raises(websocket.Refused) as refused:
            websocket.WebSocket(sock, host(session), "/ws", headers)
        assert refused.value.status == 401


def test_many_websockets(server, agent, session):
    sockets = []
    for number in range(200):
        sock = server.connect(20)
        websocket.WebSocket(sock, host(session), "/ws", [("X-Access-Token", session["access_token"])])
        sockets.append(sock)
    for number, sock in enumerate(sockets):
        sock.sendall(b"%d" % number)
    for number, sock in enumerate(sockets):
        assert sock.recv(100) == b"%d" % number
    server.local.verb(session["id"], "suspend")
    for sock in sockets:
        try:
            assert sock.recv(100) == b""
        except ConnectionResetError:
            pass
        sock.close()


# -- limits

def test_reader_that_reads_nothing_holds_back_the_guest(server, agent, session):
    before, memory = agent.sent, server.rss()
    sock = server.connect()
    sock.sendall(f"GET {agent_path(session, '/length/500000000')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\n\r\n".encode())
    time.sleep(2)
    held = agent.sent - before
    time.sleep(1)
    assert agent.sent - before == held < 32 << 20  # what kernel buffers take, and then no more
    assert not server.grew(memory, 4 << 20)
    assert server.local.call("GET", agent_path(session, "/hello")).status == 200
    sock.close()


def test_writer_is_held_back_by_the_guest(server, session):
    memory = server.rss()
    sock = server.connect(3)
    sock.sendall(f"POST {agent_path(session, '/slow-reader/2')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ADMIN}\r\n"
                 "Content-Length: 100000000\r\nConnection: close\r\n\r\n".encode())
    sock.settimeout(0.5)
    sent = 0
    try:
        while sent < 100_000_000:
            sent += sock.send(b"y" * 65536)
    except TimeoutError:
        pass
    assert 0 < sent < 32 << 20 and not server.grew(memory, 4 << 20)
    sock.settimeout(20)
    sock.sendall(b"y" * (100_000_000 - sent))
    text = b""
    while more := sock.recv(65536):
        text += more
    assert text.endswith(hashlib.sha256(b"y" * 100_000_000).hexdigest().encode())
    sock.close()


@pytest.mark.parametrize("path", ["length/500000000", "stream/500000000/100000", "stream/100000000/100"])
def test_half_a_gigabyte(server, session, path):
    memory, cpu, started = server.rss(), server.cpu_s(), time.monotonic()
    connection = Connection(("127.0.0.1", server.port), 60)
    connection.request("GET", f"/v1/sessions/{session['id']}/agent/{path}", headers={"X-API-Key": ADMIN})
    response = connection.getresponse()
    size = 0
    buffer = bytearray(1 << 18)
    while count := response.readinto(buffer):
        size += count
    took = time.monotonic() - started
    print(f"{path}: {size / took / 1e6:.0f} MB/s, {server.cpu_s() - cpu:.2f} s of CPU, "
          f"{(server.rss() - memory) / 1e6:.1f} MB more")
    assert size == int(path.split("/")[1]) and not server.grew(memory, 4 << 20)
    connection.close()
