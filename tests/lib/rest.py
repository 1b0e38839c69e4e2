"""Client of the REST interface and, through it, of the guest agent: plain HTTP and Connect with JSON."""
import base64
import contextlib
import http.client
import json
import signal as signals
import socket
import struct
import threading
import time
import urllib.parse

import websocket

CALL_TIMEOUT_S = 60


class ApiError(Exception):
    """An answer of 400 and above."""

    def __init__(self, status, body, what):
        code = body.get("code") if isinstance(body, dict) else None
        message = body.get("message") if isinstance(body, dict) else repr(body)[:300]
        super().__init__(f"{what}: {status} {code}: {message}")
        self.status, self.code, self.message, self.body = status, code, message, body


class StreamError(Exception):
    """A Connect stream that ended with an error message."""

    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class Connection(http.client.HTTPConnection):
    def __init__(self, address, timeout):
        super().__init__("localhost" if isinstance(address, str) else address[0],
                         None if isinstance(address, str) else address[1], timeout=timeout)
        self.address = address

    def connect(self):
        if isinstance(self.address, str):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.address)
        else:
            self.sock = socket.create_connection(self.address, self.timeout)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Answer:
    def __init__(self, response):
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body) if self.body else None


class Result:
    """What came of a process."""

    def __init__(self):
        self.pid = None
        self.parts = {"out": bytearray(), "err": bytearray(), "pty": bytearray()}
        self.end = None
        self.events = []

    @property
    def out(self):
        return bytes(self.parts["out"])

    @property
    def err(self):
        return bytes(self.parts["err"])

    @property
    def pty(self):
        return bytes(self.parts["pty"])

    @property
    def code(self):
        return None if self.end is None else self.end.get("exitCode", 0)

    @property
    def signal(self):
        return 0 if self.end is None else self.end.get("signal", 0)

    @property
    def text(self):
        return self.out.decode(errors="replace").rstrip("\n")

    def __repr__(self):
        return f"<code {self.code} signal {self.signal} out {self.out[-300:]!r} err {self.err[-300:]!r} end {self.end}>"


def envelope(message, flags=0):
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


class Stream:
    """A Connect server stream that is being read: iterate over its messages."""

    def __init__(self, connection, response):
        self.connection, self.response = connection, response

    def __iter__(self):
        return self

    def _read(self, size):
        data = b""
        while len(data) < size:
            try:
                more = self.response.read(size - len(data))
            except http.client.HTTPException as error:
                raise ConnectionError(f"the stream was cut: {error}") from error
            if not more:
                raise ConnectionError("the stream was cut")
            data += more
        return data

    def __next__(self):
        flags, size = struct.unpack(">BI", self._read(5))
        message = json.loads(self._read(size) or b"{}")
        if flags & 2:
            error = message.get("error")
            self.close()
            if error:
                raise StreamError(error.get("code"), error.get("message"))
            raise StopIteration
        return message

    def close(self):
        # Shut down first: close() alone would wait for what the response object still holds.
        with contextlib.suppress(OSError, AttributeError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()


class Client:
    def __init__(self, address, key=None, timeout=CALL_TIMEOUT_S):
        self.address, self.key, self.timeout = address, key, timeout
        self.local = threading.local()

    # -- plain calls

    def headers(self, extra=None):
        headers = {"X-API-Key": self.key} if self.key else {}
        headers.update(extra or {})
        return headers

    def call(self, method, path, body=None, headers=None, timeout=None, raw=None):
        """One exchange on a kept connection of this thread. Any status is an answer here."""
        data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
        headers = self.headers(headers)
        if raw is None and body is not None:
            headers.setdefault("Content-Type", "application/json")
        kept = getattr(self.local, "connection", None)
        self.local.connection = None
        for connection, last in ((kept, False), (Connection(self.address, self.timeout), True)):
            if connection is None:
                continue
            try:
                connection.timeout = timeout or self.timeout
                if connection.sock:
                    connection.sock.settimeout(connection.timeout)
                connection.request(method, path, data, headers)
                response = connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine) as error:
                connection.close()
                # A kept connection may have been closed by the server meanwhile; an answer cut short is told.
                if last or not isinstance(error, (http.client.RemoteDisconnected, BrokenPipeError,
                                                  ConnectionResetError)):
                    raise
                continue
            answer = Answer(response)
            if not response.will_close:
                self.local.connection = connection
            return answer
        raise AssertionError("not reached")

    def ask(self, method, path, body=None, **options):
        answer = self.call(method, path, body, **options)
        if answer.status >= 400:
            try:
                parsed = answer.json
            except ValueError:
                parsed = answer.body
            raise ApiError(answer.status, parsed, f"{method} {path}")
        return answer.json

    # -- sessions

    def create(self, **params):
        return self.ask("POST", "/v1/sessions", params)

    def get(self, session):
        return self.ask("GET", f"/v1/sessions/{session}")

    def verb(self, session, verb, _timeout=None, **params):
        return self.ask("POST", f"/v1/sessions/{session}/{verb}", params, timeout=_timeout)

    def update(self, session, **params):
        return self.ask("PATCH", f"/v1/sessions/{session}", params)

    def delete(self, session):
        return self.ask("DELETE", f"/v1/sessions/{session}")

    def list(self, **query):
        """All pages."""
        found, cursor = [], None
        while True:
            page = dict(query, **({"cursor": cursor} if cursor else {}))
            page = {key: ",".join(value) if isinstance(value, list) else value for key, value in page.items()}
            answer = self.ask("GET", "/v1/sessions" + ("?" + urllib.parse.urlencode(page) if page else ""))
            found += answer["sessions"]
            cursor = answer.get("next_cursor")
            if not cursor:
                return found

    def history(self, session):
        return self.ask("GET", f"/v1/sessions/{session}/snapshots")

    def branch(self, session, count=1, **params):
        """Sessions that came of it."""
        answer = self.verb(session, "branch", count=count, **params)
        return answer["sessions"]

    def state(self, session):
        return self.get(session)["state"]

    def wait_state(self, session, *states, timeout=20):
        end = time.monotonic() + timeout
        while True:
            now = self.get(session)
            if now["state"] in states:
                return now
            if time.monotonic() > end:
                raise AssertionError(f"{session} is {now['state']}, not {' or '.join(states)}, after {timeout} s")
            time.sleep(0.05)

    # -- agent

    def agent_path(self, session, method):
        return f"/v1/sessions/{session}/agent/{method}"

    @staticmethod
    def user_headers(user):
        if user is None:
            return {}
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}

    def rpc(self, session, method, message=None, user=None, headers=None, timeout=None):
        """A unary Connect call."""
        answer = self.call("POST", self.agent_path(session, method), message or {}, timeout=timeout,
                           headers={"Connect-Protocol-Version": "1", **self.user_headers(user), **(headers or {})})
        body = answer.json
        if answer.status != 200:
            raise ApiError(answer.status, body, method)
        return body

    def stream(self, session, method, message, user=None, headers=None, timeout=None):
        connection = Connection(self.address, timeout or self.timeout)
        connection.request("POST", self.agent_path(session, method), envelope(message), self.headers(
            {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", **self.user_headers(user),
             **(headers or {})}))
        response = connection.getresponse()
        if response.status != 200:
            body = response.read()
            connection.close()
            with contextlib.suppress(ValueError):
                body = json.loads(body)
            raise ApiError(response.status, body, method)
        return Stream(connection, response)

    @staticmethod
    def start_message(command, env=None, cwd=None, stdin=False, pty=None, tag=None, timeout_ms=None, group=True):
        if isinstance(command, str):
            command = ["/bin/sh", "-c", command]
        process = {"cmd": command[0], "args": list(command[1:]), "envs": env or {}}
        if cwd is not None:
            process["cwd"] = cwd
        message = {"process": process, "stdin": stdin}
        if pty:
            message["pty"] = {"size": {"cols": pty[0], "rows": pty[1]}}
        if tag:
            message["tag"] = tag
        if timeout_ms is not None:
            message["timeoutMs"] = timeout_ms
        if group is not None:
            message["group"] = group
        return message

    def start(self, session, command, user=None, timeout=None, headers=None, **options):
        """Starts a process and returns (pid, stream)."""
        stream = self.stream(session, "process.Process/Start", self.start_message(command, **options), user=user,
                             timeout=timeout, headers=headers)
        for message in stream:
            start = message.get("event", {}).get("start")
            if start is not None:
                return start["pid"], stream
        raise AssertionError("the stream ended without a start event")

    def attach(self, session, pid, offset=None, timeout=None):
        message = {"process": {"pid": pid}}
        if offset is not None:
            message["offset"] = offset
        return self.stream(session, "process.Process/Connect", message, timeout=timeout)

    @staticmethod
    def collect(stream, result=None, until=None, keep_events=False):
        """Reads events into a Result until the end, or until `until(result)` holds."""
        result = result or Result()
        for message in stream:
            event = message.get("event", {})
            if keep_events:
                result.events.append(event)
            if "start" in event:
                result.pid = event["start"]["pid"]
            elif "data" in event:
                for channel, name in (("stdout", "out"), ("stderr", "err"), ("pty", "pty")):
                    if channel in event["data"]:
                        result.parts[name] += base64.b64decode(event["data"][channel])
            elif "end" in event:
                result.end = event["end"]
            if until and until(result):
                return result
        return result

    def exec(self, session, command, user=None, timeout=None, headers=None, input=None, keep_events=False, **options):
        """Runs a command to its end. `command`: list, or text for sh -c."""
        options["stdin"] = input is not None
        pid, stream = self.start(session, command, user=user, timeout=timeout, headers=headers, **options)
        feeder = None
        if input is not None:
            feeder = threading.Thread(target=self.feed, args=(session, pid, input), daemon=True)
            feeder.start()
        result = Result()
        result.pid = pid
        self.collect(stream, result, keep_events=keep_events)
        if feeder:
            feeder.join(10)
        return result

    def out(self, session, command, **options):
        """Its stdout as text; it must end with 0."""
        result = self.exec(session, command, **options)
        assert result.code == 0, f"{command!r}: {result!r}"
        return result.text

    def feed(self, session, pid, data, chunk=1 << 20):
        for at in range(0, len(data), chunk):
            self.send_input(session, pid, data[at:at + chunk])
        self.close_stdin(session, pid)

    def send_input(self, session, pid, data, channel="stdin"):
        return self.rpc(session, "process.Process/SendInput", {
            "process": {"pid": pid}, "input": {channel: base64.b64encode(data).decode()}})

    def close_stdin(self, session, pid):
        return self.rpc(session, "process.Process/CloseStdin", {"process": {"pid": pid}})

    def kill(self, session, pid, signal="SIGKILL", group=True):
        return self.rpc(session, "process.Process/SendSignal", {
            "process": {"pid": pid}, "signal": f"SIGNAL_{signal}", "group": group})

    def processes(self, session, **options):
        return self.rpc(session, "process.Process/List", options).get("processes", [])

    def write(self, session, path, data, user=None, headers=None, timeout=None):
        query = {"path": path}
        if user:
            query["username"] = user
        return self.ask("POST", self.agent_path(session, "files?" + urllib.parse.urlencode(query)), raw=data,
                        timeout=timeout, headers={"Content-Type": "application/octet-stream", **(headers or {})})

    def read(self, session, path, user=None, headers=None, timeout=None):
        query = {"path": path}
        if user:
            query["username"] = user
        answer = self.call("GET", self.agent_path(session, "files?" + urllib.parse.urlencode(query)), headers=headers,
                           timeout=timeout)
        if answer.status >= 400:
            with contextlib.suppress(ValueError):
                raise ApiError(answer.status, answer.json, f"read {path}")
            raise ApiError(answer.status, answer.body, f"read {path}")
        return answer.body

    def filesystem(self, session, method, user=None, **message):
        return self.rpc(session, f"filesystem.Filesystem/{method}", message, user=user)

    # -- ports

    def port(self, session, port, path="/", method="GET", body=None, headers=None, timeout=None):
        """Through the path form of the port proxy."""
        return self.call(method, f"/v1/sessions/{session}/ports/{port}{path}", raw=body, headers=headers,
                         timeout=timeout)

    def preview(self, session, port, path="/", method="GET", body=None, headers=None, timeout=None):
        """Through the PORT-ID.localhost form."""
        return self.call(method, path, raw=body, timeout=timeout,
                         headers={"Host": f"{port}-{session}.localhost", **(headers or {})})

    def websocket(self, session, port, path="/", headers=(), timeout=None):
        connection = Connection(self.address, timeout or self.timeout)
        connection.connect()
        extra = list(self.headers().items()) + list(headers)
        return websocket.WebSocket(connection.sock, f"{port}-{session}.localhost", path, extra)

    # -- events

    def events(self, timeout=None, last_id=None, query=""):
        """Yields the events of /v1/events until the connection ends."""
        connection = Connection(self.address, timeout or self.timeout)
        headers = {"Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = str(last_id)
        connection.request("GET", "/v1/events" + query, headers=self.headers(headers))
        response = connection.getresponse()
        if response.status != 200:
            raise ApiError(response.status, response.read(), "GET /v1/events")
        data = []
        for line in response:
            line = line.decode().rstrip("\r\n")
            if line.startswith("data:"):
                data.append(line[5:].lstrip())
            elif not line and data:
                yield json.loads("\n".join(data))
                data = []


def signal_name(number):
    return signals.Signals(number).name
