"""Tenants see, use and change only what is theirs; guests reach nothing of the host."""
import base64
import hashlib
import json
import time

import pytest

import guests
from rest import ApiError


@pytest.fixture
def tenants(api, daemon):
    """Clients of two tenants, over TCP with keys of their own."""
    keys = [api.ask("POST", "/v1/keys", {"name": name, "tenant": name}) for name in ("red", "blue")]
    yield [daemon.tcp_client(key["key"]) for key in keys]
    for key in keys:
        api.ask("DELETE", f"/v1/keys/{key['id']}")


def routes(session, snapshot):
    base = f"/v1/sessions/{session}"
    return [("GET", base, None), ("PATCH", base, {"timeout_s": 1}), ("DELETE", base, None),
            *[("POST", f"{base}/{verb}", {}) for verb in ("pause", "resume", "suspend", "wake", "connect", "snapshot",
                                                          "branch")],
            ("POST", f"{base}/rewind", {"snapshot": snapshot}), ("POST", f"{base}/branch", {"snapshot": snapshot}),
            ("GET", f"{base}/snapshots", None), ("DELETE", f"{base}/snapshots/{snapshot}", None),
            ("GET", f"{base}/agent/envs", None), ("POST", f"{base}/agent/process.Process/List", {}),
            ("GET", f"{base}/agent/files?path=/etc/passwd", None), ("GET", f"{base}/ports/8000/", None)]


def test_every_route_of_another_tenants_session(tenants):
    red, blue = tenants
    session = red.create(template="default", name="reds-own", snapshot_interval_s=0, timeout_s=900)["id"]
    snapshot = red.verb(session, "snapshot")["id"]
    before = red.get(session)
    for state in ("running", "suspended"):
        if state == "suspended":
            red.verb(session, "suspend")
            before = red.get(session)
        for method, path, body in routes(session, snapshot):
            theirs = blue.call(method, path, body)
            unknown = blue.call(method, path.replace(session, "s" + "a" * 19), body)
            assert theirs.status == unknown.status == 404, (method, path, theirs.status, unknown.status)
            assert theirs.body.decode().replace(session, "s" + "a" * 19) == unknown.body.decode(), (method, path)
        assert red.get(session) == before
    assert blue.call("GET", "/v1/sessions/reds-own").status == 404
    assert blue.list() == []
    assert [entry["id"] for entry in red.list()] == [session]
    # The same name is free for another tenant.
    own = blue.create(template="default", name="reds-own", snapshot_interval_s=0)["id"]
    answer = blue.call("POST", f"/v1/sessions/{own}/rewind", {"snapshot": snapshot})
    assert answer.status == 404
    answer = blue.call("POST", f"/v1/sessions/{own}/branch", {"snapshot": snapshot})
    assert answer.status == 404
    red.delete(session)
    blue.delete(own)


def test_credentials_of_others_open_no_port(tenants, daemon):
    """By host name and by headers, running and suspended: another session's token, another tenant's key."""
    red, blue = tenants
    session = red.create(template="default", snapshot_interval_s=0, timeout_s=900)["id"]
    other = blue.create(template="default", snapshot_interval_s=0)["id"]
    foreign, own = blue.get(other)["access_token"], red.get(session)["access_token"]
    guests.start_web(red, session)
    nobody = daemon.tcp_client()
    for state in ("running", "suspended"):
        if state == "suspended":
            red.verb(session, "suspend")
        for port, path in ((8000, "/"), (49983, "/envs")):
            for where in ({"Host": f"{port}-{session}.localhost"},
                          {"E2b-Sandbox-Id": session, "E2b-Sandbox-Port": str(port)}):
                answer = nobody.call("GET", path, headers={**where, "X-Access-Token": foreign})
                assert answer.status == 401, (state, port, where, answer.status)
                answer = blue.call("GET", path, headers=where)
                assert answer.status in (401, 404), (state, port, where, answer.status)
            answer = nobody.call("GET", f"{path}?space_token={foreign}", headers={"Host": f"{port}-{session}.localhost"})
            assert answer.status == 401
            answer = nobody.call("GET", path, headers={"Host": f"{port}-{session}.localhost",
                                                       "Cookie": f"space_token={foreign}"})
            assert answer.status == 401
        assert red.get(session)["state"] == state
    assert nobody.call("GET", "/", headers={"Host": f"8000-{session}.localhost", "X-Access-Token": own}).status == 200
    red.delete(session)
    blue.delete(other)


def test_without_a_valid_key(daemon, api, session):
    key = api.ask("POST", "/v1/keys", {"name": "gone", "tenant": "red"})
    api.ask("DELETE", f"/v1/keys/{key['id']}")
    for value in (None, "wrong", "e2b_" + "0" * 40, key["key"], key["key"].upper(), "", "e2b_", "x" * 5000):
        client = daemon.tcp_client(value)
        for method, path, body in [("GET", "/v1/sessions", None), ("POST", "/v1/sessions", {"template": "default"}),
                                   ("GET", "/v1/templates", None), ("GET", "/v1/keys", None), ("GET", "/v1/events", None),
                                   ("GET", "/v1/doctor", None), ("GET", f"/v1/sessions/{session}", None),
                                   ("POST", f"/v1/sessions/{session}/agent/process.Process/List", {})]:
            answer = client.call(method, path, body)
            assert answer.status in (401, 431) and (answer.status == 431 or answer.json["code"] == "unauthenticated"), \
                (value, path, answer.status)
    assert daemon.tcp_client().call("GET", "/healthz").status == 200


def test_operators_matters_are_not_tenants(tenants):
    red, _ = tenants
    for method, path, body in (("GET", "/v1/keys", None), ("POST", "/v1/keys", {"name": "x", "admin": True}),
                               ("POST", "/v1/templates", {"name": "x"}), ("DELETE", "/v1/templates/default", None),
                               ("GET", "/metrics", None)):
        answer = red.call(method, path, body)
        if path == "/v1/keys" and method == "GET":
            assert answer.status in (200, 403)
            if answer.status == 200:
                assert all(key["tenant"] == "red" for key in answer.json["keys"])
            continue
        assert answer.status in (401, 403), (method, path, answer.status)
    for path in ("/debug", "/debug/pprof/", "/v1/debug", "/nodes", "/admin", "/v1/sandboxes-all", "/.env", "/v1"):
        answer = red.call("GET", path)
        assert answer.status in (401, 403, 404), (path, answer.status)
    red.create(template="default", snapshot_interval_s=0)
    for session in red.list():
        red.delete(session["id"])


def test_keys_are_not_kept(daemon, api):
    key = api.ask("POST", "/v1/keys", {"name": "hidden", "tenant": "red"})
    assert key["key"].startswith("e2b_") and len(key["key"]) == 44
    listed = api.ask("GET", "/v1/keys")["keys"]
    assert key["key"] not in json.dumps(listed)
    for path in daemon.data_dir.glob("space.db*"):
        assert key["key"].encode() not in path.read_bytes()
    assert key["key"] not in daemon.log.read_text(errors="replace")
    api.ask("DELETE", f"/v1/keys/{key['id']}")


def test_events_are_ones_own(tenants, api):
    import threading
    red, blue = tenants
    seen = []

    def read():
        try:
            for event in blue.events(timeout=8):
                seen.append(event)
        except (OSError, ApiError):
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.3)
    session = red.create(template="default", snapshot_interval_s=0)["id"]
    red.delete(session)
    own = blue.create(template="default", snapshot_interval_s=0)["id"]
    guests.wait_for(lambda: any(event.get("session_id") == own for event in seen), timeout=8)
    blue.delete(own)
    assert not [event for event in seen if event.get("session_id") == session]


def test_errors_tell_nothing_of_the_host(tenants, daemon):
    red, _ = tenants
    for method, path, body in (("GET", "/v1/sessions/snone", None), ("POST", "/v1/sessions", {"template": "none"}),
                               ("POST", "/v1/sessions", {"x": 1})):
        answer = red.call(method, path, body)
        text = answer.body.decode() + json.dumps(answer.headers)
        assert answer.status >= 400
        for secret in (str(daemon.data_dir), str(daemon.runtime_dir), "/src/", "sqlite"):
            assert secret not in text


def test_a_guest_reaches_nothing(api, make, daemon):
    """From inside: no route out, no daemon, no other guest, no metadata address."""
    session, other = make(), make()
    guests.start_web(api, other)
    probe = r'''
import socket, sys
def tries(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    s = socket.socket(family); s.settimeout(0.7)
    try: s.connect((host, port)); return True
    except OSError: return False
open_ones = []
for host in ("169.254.169.254", "10.0.0.1", "192.168.0.1", "8.8.8.8", "fe80::1%eth0", "2001:4860:4860::8888"):
    for port in (80, 443):
        if tries(host, port): open_ones.append((host, port))
for port in (22, 53, 80, 443, 7700, 49983, 8000, int(sys.argv[1])):
    if tries("169.254.77.1", port): open_ones.append(("gateway", port))
print(open_ones)
'''
    api.write(session, "/tmp/probe.py", probe.encode())
    assert api.out(session, ["python3", "/tmp/probe.py", str(daemon.port)], timeout=60) == "[]"


def signature(path, operation, user, token, expiration=None):
    text = f"{path}:{operation}:{user}:{token}" + (f":{expiration}" if expiration is not None else "")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


AGENT_PROBE = r"""
import http.client, json, sys
own = sys.argv[1]
calls = [("GET", "/envs"), ("GET", "/files?path=/etc/shadow&username=root"), ("POST", "/init"),
         ("POST", "/process.Process/List"), ("GET", "/space/v1/status"), ("POST", "/space/v1/quiesce"),
         ("POST", "/space/v1/poweroff"), ("POST", "/space/v1/resume-as"), ("GET", "/space/v1/tunnel?port=22")]
sources = [("127.0.0.1", None), ("169.254.77.2", None), ("::1", None), ("127.0.0.1", ("169.254.77.2", 0)),
           ("169.254.77.2", ("127.0.0.1", 0))]
for host, source in sources:
    for method, path in calls:
        tokens = ["", "wrong"] + ([own] if path.startswith("/space") else [])
        for token in tokens:
            try:
                c = http.client.HTTPConnection(host, 49983, timeout=10, source_address=source)
                c.request(method, path, "{}", {"X-Access-Token": token, "X-Space-Control": token,
                                               "Content-Type": "application/json"})
                print(c.getresponse().status, path, host, source, token[:5])
                c.close()
            except OSError as error:
                print("none", path, host, source, type(error).__name__)
"""


@pytest.mark.limit(300)
def test_the_agent_is_closed_to_its_own_guest(api, session):
    """From inside, whatever address is used and whoever asks: no call without the token, none of the host's at all."""
    api.write(session, "/tmp/probe.py", AGENT_PROBE.encode())
    token = api.get(session)["access_token"]
    for user in ("user", "root"):
        lines = api.out(session, ["python3", "/tmp/probe.py", token], user=user, timeout=140).splitlines()
        assert len(lines) == 5 * (4 * 2 + 5 * 3)
        answered = [line for line in lines if not line.startswith("none")]
        assert len(answered) >= 3 * (4 * 2 + 5 * 3), lines
        for line in answered:
            status, path = line.split()[:2]
            assert status in (("401", "403") if path.startswith("/space") else ("401",)), line
    assert api.get(session)["access_token"] == token
    assert api.out(session, "echo alive") == "alive"


def test_nobody_wakes_a_session_without_a_credential(api, session, daemon):
    """Through the agent's port, whose calls the agent itself would refuse: it is not even started for them."""
    tcp = daemon.tcp_client()
    token = api.get(session)["access_token"]
    api.verb(session, "suspend")
    for headers in ({}, {"X-Access-Token": "wrong"}):
        for path in ("/health", "/envs", "/files?path=/etc/passwd"):
            answer = tcp.preview(session, 49983, path, headers=headers)
            assert answer.status == 401, (path, headers, answer.status)
    assert api.state(session) == "suspended"
    assert tcp.preview(session, 49983, "/envs", headers={"X-Access-Token": token}).status == 200
    assert api.state(session) == "running"


def test_signed_file_links(api, session, daemon):
    """A link is for one file, one way, one user, until its time; the agent's port asks for nothing else."""
    import urllib.parse
    token = api.get(session)["access_token"]
    api.write(session, "/home/user/f", b"content")
    now = int(time.time())

    def fetch(path="/home/user/f", operation="read", user="user", expires=now + 600, sign_path=None, sign_user=None,
              method="GET", change=lambda text: text):
        signed = change(signature(sign_path or path, operation, sign_user or user, token, expires))
        query = {"path": path, "username": user, "signature": signed}
        if expires is not None:
            query["signature_expiration"] = expires
        answer = api.preview(session, 49983, "/files?" + urllib.parse.urlencode(query), method=method,
                             body=b"new" if method == "POST" else None)
        return answer

    good = fetch()
    assert good.status == 200 and good.body == b"content", (good.status, good.body)
    assert fetch(expires=None).status == 200
    for wrong in (dict(expires=0), dict(expires=now - 1), dict(expires=-1), dict(method="POST"),
                  dict(sign_path="/home/user/g"), dict(path="/home/user/../user/f", sign_path="/home/user/f"),
                  dict(sign_user="root"), dict(change=lambda text: ""), dict(change=lambda text: text[:-1]),
                  dict(change=lambda text: text[:-1] + ("A" if text[-1] != "A" else "B"))):
        answer = fetch(**wrong)
        assert answer.status == 401, (wrong, answer.status, answer.body)
    assert api.read(session, "/home/user/f") == b"content"
    branch = api.branch(session)[0]["id"]
    query = urllib.parse.urlencode({"path": "/home/user/f", "username": "user", "signature_expiration": now + 600,
                                    "signature": signature("/home/user/f", "read", "user", token, now + 600)})
    assert api.preview(branch, 49983, f"/files?{query}").status == 401


def test_socket_is_for_root_and_the_group(daemon):
    import grp
    status = daemon.socket.stat()
    assert status.st_mode & 0o007 == 0
    assert grp.getgrgid(status.st_gid).gr_name == "space"
    helper = daemon.runtime_dir / "helper.sock"
    assert helper.stat().st_mode & 0o007 == 0


def test_processes_run_as_they_should(daemon, session):
    """Worker without root and capabilities, VMM with its own uid, namespaces and no new privileges."""
    import pwd
    space = pwd.getpwnam("space").pw_uid
    for pid in daemon.role_pids("worker"):
        fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines())
        assert fields["Uid"].split() == [str(space)] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
        assert fields["NoNewPrivs"].strip() == "1"
    vmms = daemon.vmms()
    assert len(vmms) == 1
    fields = dict(line.split(":", 1) for line in open(f"/proc/{vmms[0]}/status").read().splitlines())
    assert int(fields["Uid"].split()[0]) >= daemon.uid_first
    assert int(fields["CapEff"], 16) == 0 and fields["NoNewPrivs"].strip() == "1"
    import os
    for kind in ("net", "mnt", "ipc"):
        assert os.readlink(f"/proc/{vmms[0]}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
