"""A guest agent of our own in test mode, and the calls that the file tests make on it; plain http.client."""
import base64
import http.client
import json
import os
import pathlib
import secrets
import socket
import struct
import subprocess
import threading
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("SPACE_AGENT", str(ROOT / "build/bin/space-agent"))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Answer:
    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def message(self):
        return self.json["message"]

    @property
    def code(self):
        return self.json["code"]


class Agent:
    def __init__(self, user="root", token=None, prepare=None):
        """prepare: called in the child before it becomes the agent."""
        self.port = free_port()
        self.user = user
        self.token = token
        self.log = open(f"/tmp/space-agent-{self.port}.log", "w+b")
        self.process = subprocess.Popen([PROGRAM, "--test", "--port", str(self.port)], stdout=self.log, stderr=self.log,
                                        stdin=subprocess.DEVNULL, preexec_fn=prepare)
        deadline = time.monotonic() + 10
        while True:
            try:
                if self.request("GET", "/health").status == 204:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                raise RuntimeError(f"the agent did not start: {self.log.read().decode(errors='replace')}")
            time.sleep(0.02)
        if token:
            assert self.request("POST", "/init", json.dumps({"accessToken": token}),
                                {"Content-Type": "application/json"}).status == 204

    def stop(self):
        died = self.process.poll()
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        self.log.close()
        os.unlink(f"/tmp/space-agent-{self.port}.log")
        assert died is None, text
        assert "runtime error" not in text and "Sanitizer" not in text, text

    def rss_kb(self):
        """0 with sanitizers, whose own memory says nothing of the agent's."""
        if os.environ.get("SPACE_TEST_SANITIZED"):
            return 0
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise AssertionError("no VmRSS")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def connect(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, target, body=None, headers=None, timeout=60):
        connection = self.connect(timeout)
        try:
            connection.request(method, target, body=body, headers={**self.auth(), **(headers or {})})
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def auth(self, user=None):
        return {"X-Access-Token": self.token} if self.token else {}

    @staticmethod
    def target(path, user="root", route="/files", **extra):
        query = {} if path is None else {"path": path}
        if user is not None:
            query["username"] = user
        return route + "?" + urllib.parse.urlencode({**query, **extra}, quote_via=urllib.parse.quote)

    def get(self, path, user="root", headers=None, **extra):
        return self.request("GET", self.target(path, user, **extra), headers=headers)

    def put(self, path, data, user="root", headers=None, chunked=False, **extra):
        headers = {"Content-Type": "application/octet-stream", **(headers or {})}
        # Without a length http.client sends an iterable in chunks.
        body = (data[i:i + 50000] for i in range(0, len(data), 50000)) if chunked else data
        return self.request("POST", self.target(path, user, **extra), body, headers)

    def put_form(self, files, path=None, user="root", headers=None):
        """files: (file name, data) pairs; names are written as browsers do."""
        boundary = secrets.token_hex(16)
        body = b""
        for name, data in files:
            name = name if isinstance(name, bytes) else name.encode()
            name = name.replace(b'"', b"%22").replace(b"\r", b"%0D").replace(b"\n", b"%0A")
            body += (b"--" + boundary.encode() + b'\r\nContent-Disposition: form-data; name="file"; filename="' + name +
                     b'"\r\nContent-Type: application/octet-stream\r\n\r\n' + data + b"\r\n")
        body += b"--" + boundary.encode() + b"--\r\n"
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", **(headers or {})}
        return self.request("POST", self.target(path, user), body, headers)

    @staticmethod
    def basic(user):
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}

    def call(self, method, body, user="root", headers=None, timeout=60):
        return self.request("POST", "/filesystem.Filesystem/" + method, json.dumps(body),
                            {"Content-Type": "application/json", **self.basic(user), **(headers or {})}, timeout)

    def stat(self, path, user="root"):
        answer = self.call("Stat", {"path": path}, user)
        assert answer.status == 200, answer.body
        return answer.json["entry"]

    def names(self, path, user="root", depth=1):
        answer = self.call("ListDir", {"path": path, "depth": depth}, user)
        assert answer.status == 200, answer.body
        return [entry["path"][len(path):].lstrip("/") for entry in answer.json["entries"]]


class Watch:
    """A WatchDir stream that is read by a thread into `events`; `end` is the closing message."""

    def __init__(self, agent, body, user="root", headers=None, is_reading=True):
        self.events, self.kinds, self.end = [], [], None
        text = json.dumps(body).encode()
        self.connection = agent.connect(timeout=120)
        self.connection.request("POST", "/filesystem.Filesystem/WatchDir", struct.pack(">BI", 0, len(text)) + text,
                                {"Content-Type": "application/connect+json", **agent.auth(), **agent.basic(user),
                                 **(headers or {})})
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        first = self.message()
        if "start" not in first:
            self.end = first
            return
        if is_reading:
            self.start_reading()

    def start_reading(self):
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def message(self):
        prefix = self.response.read(5)
        if len(prefix) < 5:
            return {"cut": True}
        flags, size = struct.unpack(">BI", prefix)
        message = json.loads(self.response.read(size))
        return {"end": message} if flags & 2 else message

    def read(self):
        try:
            while True:
                message = self.message()
                if "filesystem" in message:
                    self.events.append(message["filesystem"])
                elif "keepalive" in message:
                    self.kinds.append("keepalive")
                else:
                    self.end = message
                    return
        except (OSError, ValueError, http.client.HTTPException, AttributeError) as failure:
            self.end = {"failure": repr(failure)}

    def seen(self):
        return [(event["type"].removeprefix("EVENT_TYPE_").lower(), event["name"]) for event in list(self.events)]

    def wait(self, *wanted, seconds=10):
        deadline = time.monotonic() + seconds
        while not set(wanted) <= set(self.seen()):
            assert time.monotonic() < deadline, f"missing {set(wanted) - set(self.seen())} in {self.seen()[-50:]}"
            time.sleep(0.01)

    def wait_end(self, seconds=5):
        deadline = time.monotonic() + seconds
        while self.end is None:
            assert time.monotonic() < deadline, "the stream goes on"
            time.sleep(0.01)
        return self.end

    def close(self):
        self.connection.sock and self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()
