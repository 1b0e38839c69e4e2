"""Guest ports from outside: every listener is found, WebSockets and redirects pass unchanged, tokens stay outside."""
import os
import struct
import threading
import time

import pytest

import guests
import websocket
from rest import Connection


@pytest.mark.parametrize("address, v6only", [("127.0.0.1", 1), ("::1", 1), ("0.0.0.0", 1), ("::", 1), ("::", 0),
                                             ("169.254.77.2", 1), ("127.0.0.2", 1)])
def test_every_kind_of_listener(api, session, address, v6only):
    guests.start_web(api, session, 8000, address, v6only)
    started = time.monotonic()
    assert api.preview(session, 8000, "/").status == 200
    assert time.monotonic() - started < guests.patient(1)


def test_listener_that_moves(api, session):
    """Stopped and bound again in another family on the same port: the new one answers."""
    guests.start_web(api, session, 8000, "127.0.0.1")
    api.out(session, "pkill -f '[w]eb8000'; sleep 0.3")
    answer = api.preview(session, 8000, "/")
    assert answer.status == 502
    guests.start_web(api, session, 8000, "::1")
    assert api.preview(session, 8000, "/").status == 200


def test_closed_and_bad_ports(api, session):
    started = time.monotonic()
    answer = api.preview(session, 8111, "/")
    assert answer.status == 502 and answer.body
    assert time.monotonic() - started < guests.patient(1)
    for port in ("0", "65536", "99999999", "-1", "x", "80x"):
        answer = api.call("GET", f"/v1/sessions/{session}/ports/{port}/")
        assert answer.status in (400, 404), (port, answer.status)
    assert api.preview(session, 65535, "/").status == 502
    answer = api.call("GET", "/", headers={"Host": "8000-snotthere00000000000.localhost"})
    assert answer.status == 404


def test_agents_port_needs_its_token(api, daemon, session):
    """Reached as a port the agent wants its own token, also from those who may use the API."""
    for path in ("/files?path=/etc/passwd", "/envs", "/metrics", "/space/v1/status"):
        answer = api.preview(session, 49983, path)
        assert answer.status in (401, 403), (path, answer.status)
    answer = api.preview(session, 49983, "/process.Process/List", method="POST", body=b"{}",
                         headers={"Content-Type": "application/json"})
    assert answer.status in (401, 403)


def test_bodies_and_streams(api, session):
    guests.start_web(api, session)
    assert api.port(session, 8000, "/bytes/3000000").body == b"x" * 3_000_000
    assert api.port(session, 8000, "/chunked").body == b"chunk0chunk1chunk2chunk3chunk4"
    import hashlib
    data = os.urandom(2_000_000)
    answer = api.port(session, 8000, "/", method="POST", body=data)
    assert answer.body.decode() == hashlib.sha256(data).hexdigest()
    answer = api.port(session, 8000, "/bytes/100", method="HEAD")
    assert answer.status == 200 and answer.body == b"" and answer.headers["content-length"] == "100"


def test_headers_towards_the_guest(api, daemon, session):
    guests.start_web(api, session)
    key = api.ask("POST", "/v1/keys", {"name": "ports", "admin": True})
    tcp = daemon.tcp_client(key["key"])
    text = tcp.port(session, 8000, "/headers", headers={"Cookie": "a=1; space_token=secret; b=2", "X-Own": "1"}).body.decode()
    assert key["key"] not in text and "secret" not in text
    assert "X-Own: 1" in text and "a=1" in text and "b=2" in text
    text = tcp.preview(session, 8000, "/headers").body.decode().lower()
    assert "x-forwarded-host:" in text and "x-forwarded-proto:" in text
    api.ask("DELETE", f"/v1/keys/{key['id']}")


def test_redirects_are_passed_on(api, session):
    """Status and target reach the client as they are; the proxy fetches nothing by itself."""
    guests.start_web(api, session)
    for status in (301, 302, 303, 307, 308):
        for target in ("//evil.example/", "http://169.254.169.254/", "http://127.0.0.1:1/", "other", ""):
            answer = api.preview(session, 8000, f"/redirect/{status}/{target.encode().hex()}")
            assert answer.status == status and answer.headers.get("location", "") == target, (status, target)
    answer = api.preview(session, 8000, f"/redirect/302/{b'/login'.hex()}")
    assert answer.headers["location"] == "/login"
    answer = api.port(session, 8000, f"/redirect/302/{b'/login'.hex()}")
    assert answer.headers["location"].endswith("/login") and "/ports/8000/login" in answer.headers["location"]
    before = int(api.port(session, 8000, "/count").body)
    api.port(session, 8000, f"/redirect/302/{b'/count'.hex()}", method="POST", body=b"x")
    assert int(api.port(session, 8000, "/count").body) == before + 2


def open_echo(api, session):
    guests.background(api, session, guests.WEBSOCKET, "echo", (8765,))
    guests.wait_for(lambda: api.exec(session, "grep -q ':223D ' /proc/net/tcp").code == 0)


@pytest.mark.limit(150)
def test_websocket_messages(api, session):
    open_echo(api, session)
    socket = api.websocket(session, 8765, "/echo", timeout=60)
    for size in (0, 1, 125, 126, 65535, 65536, 8 << 20):
        data = os.urandom(size)
        sender = threading.Thread(target=socket.send, args=(data,))
        sender.start()
        assert socket.receive() == (websocket.BINARY, data), size
        sender.join()
    for byte in b"fragments":
        socket.send(bytes([byte]), websocket.BINARY if byte == ord("f") else 0, final=False)
    socket.send(b"!", 0)
    assert socket.receive() == (websocket.BINARY, b"fragments!")
    socket.send(b"are you there", websocket.PING)
    opcode, _, data = socket.receive_frame()
    assert (opcode, data) == (websocket.PONG, b"are you there")
    time.sleep(5)
    socket.send(b"after a while", websocket.TEXT)
    assert socket.receive() == (websocket.TEXT, b"after a while")
    socket.close()
    socket = api.websocket(session, 8765, "/close-4001")
    opcode, data = socket.receive()
    assert opcode == websocket.CLOSE and struct.unpack(">H", data[:2])[0] == 4001 and data[2:] == b"bye"
    socket.close()


def test_many_websockets(api, session):
    open_echo(api, session)

    def one(number):
        socket = api.websocket(session, 8765, "/echo", timeout=60)
        socket.send(str(number).encode())
        assert socket.receive() == (websocket.BINARY, str(number).encode())
        socket.close()

    guests.all_good(guests.parallel([lambda number=number: one(number) for number in range(60)]))


def test_tokens_of_private_sessions(daemon, api, session):
    """Over TCP: with the session's token it opens, with a wrong one or none it is 401, never a redirect."""
    open_echo(api, session)
    guests.start_web(api, session)
    token = api.get(session)["access_token"]
    host = f"8765-{session}.localhost"
    tcp = daemon.tcp_client()
    for headers, path, good in (([("X-Access-Token", token)], "/echo", True),
                                ([], f"/echo?space_token={token}", True),
                                ([("Cookie", f"space_token={token}")], "/echo", True),
                                ([("X-Access-Token", "wrong")], "/echo", False), ([], "/echo", False),
                                ([], "/echo?space_token=wrong", False)):
        connection = Connection(tcp.address, 20)
        connection.connect()
        try:
            socket = websocket.WebSocket(connection.sock, host, path, headers)
        except websocket.Refused as refused:
            assert not good and refused.status == 401, (headers, path, refused.status)
        else:
            assert good, (headers, path)
            socket.send(b"x")
            assert socket.receive() == (websocket.BINARY, b"x")
        connection.close()
    assert tcp.preview(session, 8000, "/", headers={"X-Access-Token": token}).status == 200
    for headers in ({}, {"X-Access-Token": "wrong"}, {"X-Access-Token": token[:-1]}, {"X-Access-Token": ""}):
        answer = tcp.preview(session, 8000, "/", headers=headers)
        assert answer.status == 401 and "location" not in answer.headers
    text = tcp.preview(session, 8000, f"/headers?space_token={token}").body.decode()
    assert token not in text  # the guest's server does not see it


def test_header_form(api, session):
    guests.start_web(api, session)
    answer = api.call("GET", "/", headers={"E2b-Sandbox-Id": session, "E2b-Sandbox-Port": "8000"})
    assert answer.status == 200
    assert api.call("GET", "/", headers={"E2b-Sandbox-Id": session}).status == 400


def test_port_command(daemon, api, session):
    guests.start_web(api, session)
    url = daemon.cli("port", session, "8000", check=0).stdout.strip()
    assert url.startswith("http://") and session in url and "8000" in url
    assert daemon.cli("port", session, "70000").returncode == 125


def test_smuggling_is_refused(daemon, api, session):
    """Requests that two parsers could read in two ways never get through."""
    import socket as sockets
    guests.start_web(api, session)
    before = int(api.port(session, 8000, "/count").body)
    start = f"Host: 8000-{session}.localhost\r\n"
    for text in (f"GET / HTTP/1.1\r\n{start}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                 f"GET / HTTP/1.1\r\n{start}Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
                 f"GET / HTTP/1.1\r\n{start}Content-Length: +5\r\n\r\n12345",
                 f"GET / HTTP/1.1\r\n{start}Transfer-Encoding: xchunked\r\n\r\n",
                 f"GET / HTTP/1.1\r\n{start}X: a\n Y: b\r\n\r\n",
                 f"GET / HTTP/1.1\r\n{start}X : a\r\n\r\n",
                 f"GET / HTTP/1.1\r\n{start}{start}\r\n",
                 f"GET /\0 HTTP/1.1\r\n{start}\r\n",
                 f"GET / HTTP/1.1\n{start}\n"):
        raw = sockets.socket(sockets.AF_UNIX)
        raw.settimeout(10)
        raw.connect(str(daemon.socket))
        raw.sendall(text.encode())
        answer = raw.recv(65536)
        raw.close()
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 501")) or not answer, (text, answer[:100])
    assert int(api.port(session, 8000, "/count").body) == before + 1


def test_half_open_connections_do_no_harm(daemon, api, session):
    import socket as sockets
    held = []
    for number in range(60):
        raw = sockets.socket(sockets.AF_UNIX)
        raw.connect(str(daemon.socket))
        raw.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" if number % 2 else b"GET / HT")
        held.append(raw)
    assert api.exec(session, ["true"]).code == 0
    assert api.state(session) == "running"
    for raw in held:
        raw.close()
