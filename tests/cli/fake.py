"""A stand-in for spaced that needs no VM: sessions are entries of a dictionary, their processes and files are the test
machine's own. It exists for what real sessions cannot be made to do on demand: cut streams at a chosen byte, lose
output, answer nonsense, restart between two events. Everything else is tested on real microVMs (tests/system)."""
import base64
import fcntl
import http.server
import json
import os
import signal
import socket
import socketserver
import struct
import subprocess
import termios
import threading
import time
import urllib.parse

CHUNK = 65536


def set_size(terminal, size):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))


class Process:
    """One local process and the log of its output."""

    def __init__(self, message, cwd, keep_log):
        self.keep_log = keep_log
        config = message["process"]
        self.config = config
        self.pty = message.get("pty")
        self.condition = threading.Condition()
        self.log = []  # (offset, channel, bytes)
        self.size = 0
        self.dropped = 0  # offset before which nothing is kept
        self.end = None
        self.timed_out = False
        self.messages = message
        environment = {**os.environ, **config.get("envs", {})}
        master = None
        if self.pty:
            master, slave = os.openpty()
            set_size(master, self.pty["size"])
            streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        else:
            stdin = subprocess.PIPE if message.get("stdin", True) else subprocess.DEVNULL
            streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.child = subprocess.Popen([config["cmd"], *config.get("args", [])], env=environment,
                                      cwd=config.get("cwd") or cwd, start_new_session=True, **streams)
        self.pid = self.child.pid
        self.started_at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        if self.pty:
            os.close(slave)
        self.master = master
        sources = [("pty", master)] if self.pty else [("stdout", self.child.stdout.fileno()),
                                                     ("stderr", self.child.stderr.fileno())]
        self.pumps = [threading.Thread(target=self.pump, args=source, daemon=True) for source in sources]
        for pump in self.pumps:
            pump.start()
        threading.Thread(target=self.wait, daemon=True).start()
        if message.get("timeoutMs"):
            threading.Timer(message["timeoutMs"] / 1000, self.expire).start()

    def expire(self):
        if self.child.poll() is None:
            self.timed_out = True
            os.killpg(self.pid, signal.SIGKILL)

    def pump(self, channel, fd):
        while True:
            try:
                data = os.read(fd, CHUNK)
            except OSError:
                data = b""
            if not data:
                return
            with self.condition:
                while len(self.log) > 512 and not self.keep_log():  # back-pressure
                    self.condition.wait(0.05)
                self.log.append((self.size, channel, data))
                self.size += len(data)
                self.condition.notify_all()

    def wait(self):
        code = self.child.wait()
        for pump in self.pumps:
            pump.join()
        with self.condition:
            if code < 0:
                name = signal.Signals(-code).name
                self.end = {"exitCode": -1, "exited": False, "status": f"signal: {name}", "error": f"signal: {name}",
                            "signal": -code, "signalName": name}
            else:
                self.end = {"exitCode": code, "exited": True, "status": f"exit status {code}", "signal": 0,
                            "signalName": ""}
            self.condition.notify_all()

    def write(self, data):
        try:
            if self.master is not None:
                os.write(self.master, data)
            else:
                self.child.stdin.write(data)
                self.child.stdin.flush()
            return True
        except (BrokenPipeError, ValueError, OSError):
            return False


class Fake(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path, root):
        self.root = root
        self.sessions = {}
        self.snapshots = {}
        self.processes = {}
        self.calls = []  # (method, path, body)
        self.streams = set()
        self.deleted = []
        self.cut_after = None  # cut a stream once it has sent so many bytes of output
        self.keep_log = False
        self.start_failure = None
        self.checks = [{"name": "kvm", "status": "ok", "text": "works"}]
        self.build_lines = [{"line": "one"}, {"line": "two"}, {"template": {"name": "t:1", "digest": "sha256:0"}}]
        self.events = []
        self.lock = threading.Lock()
        super().__init__(path, Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def add(self, identifier, **fields):
        self.sessions[identifier] = {"id": identifier, "name": "", "state": "running", "template": "default:1",
                                     "created_at": "2020-01-01T00:00:00.000Z", "labels": {}, "timeout_s": 0,
                                     "on_timeout": "suspend", **fields}
        return self.sessions[identifier]

    def find(self, word):
        return self.sessions.get(word) or next((s for s in self.sessions.values() if s["name"] == word and word), None)

    def cut_streams(self):
        for stream in list(self.streams):
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.shutdown()
        self.cut_streams()
        self.server_close()
        for process in self.processes.values():
            if process.child.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except OSError:
                    pass

    def handle_error(self, request, client_address):
        pass  # clients that leave are part of the tests


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0

    def address_string(self):
        return "unix"

    def log_message(self, format, *args):
        pass

    # -- bodies

    def read_body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                data += self.rfile.read(size)
                self.rfile.readline()
                if size == 0:
                    return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, body=None):
        data = json.dumps(body).encode() if body is not None else b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status, code, message):
        self.answer(status, {"code": code, "message": message, "details": {}})

    def start_chunks(self, content_type):
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def envelope(self, message, flags=0):
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.chunk(struct.pack(">BI", flags, len(data)) + data)

    # -- routing

    def do_any(self):
        server = self.server
        path, _, query = self.path.partition("?")
        body = self.read_body()
        parsed = None
        if "json" in (self.headers.get("Content-Type") or ""):
            text = body[5:] if "connect" in self.headers["Content-Type"] else body
            parsed = json.loads(text) if text else None
        server.calls.append((self.command, self.path, parsed))
        parts = [urllib.parse.unquote(part) for part in path.split("/")[1:]]
        if parts[:2] == ["v1", "sessions"] and len(parts) > 2:
            session = server.find(parts[2])
            if session is None:
                return self.fail(404, "not_found", f'there is no session "{parts[2]}"')
            if len(parts) > 3 and parts[3] == "agent":
                return self.agent("/".join(parts[4:]), parsed, body, urllib.parse.parse_qs(query))
            return self.session(session, parts[3:], parsed)
        return self.other(parts, parsed, urllib.parse.parse_qs(query))

    do_GET = do_POST = do_PATCH = do_DELETE = do_any

    def other(self, parts, body, query):
        server = self.server
        if parts == ["v1", "sessions"]:
            if self.command == "POST":
                if body.get("template") == "missing":
                    return self.fail(404, "not_found", 'there is no template "missing"')
                session = server.add(f"s{len(server.sessions) + 1}made", **{
                    key: value for key, value in body.items() if key in ("name", "labels", "timeout_s", "on_timeout")})
                return self.answer(201, session)
            states = query.get("state", [])
            found = [s for s in server.sessions.values() if not states or s["state"] in states]
            return self.answer(200, {"sessions": found, "next_cursor": None})
        if parts == ["v1", "version"]:
            return self.answer(200, {"version": "9.9.9", "listen": "127.0.0.1:7777", "domain": "localhost"})
        if parts == ["v1", "doctor"]:
            return self.answer(200, {"checks": server.checks})
        if parts == ["v1", "templates"] and self.command == "POST":
            self.start_chunks("application/x-ndjson")
            for line in server.build_lines:
                self.chunk(json.dumps(line).encode() + b"\n")
            return self.chunk(b"")
        if parts == ["v1", "templates"]:
            return self.answer(200, {"templates": []})
        if parts == ["v1", "keys"]:
            return self.answer(201, {"id": "k1", "key": "e2b_0123", "name": "x"})
        if parts == ["v1", "events"]:
            last = int(self.headers.get("Last-Event-ID") or 0)
            self.start_chunks("text/event-stream")
            for event in server.events:
                if event["id"] > last:
                    self.chunk(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n".encode())
                    if event.get("then_cut"):
                        return self.connection.shutdown(socket.SHUT_RDWR)
            return self.chunk(b"")
        return self.fail(404, "not_found", "there is nothing here")

    def session(self, session, rest, body):
        server = self.server
        identifier = session["id"]
        if not rest:
            if self.command == "DELETE":
                server.deleted.append(identifier)
                del server.sessions[identifier]
                self.send_response(204)
                self.end_headers()
                return None
            if self.command == "PATCH":
                session.update(body)
            return self.answer(200, session)
        verb = rest[0]
        states = {"pause": "paused", "resume": "running", "suspend": "suspended", "wake": "running", "rewind": "running"}
        if verb in states:
            session["state"] = states[verb]
            return self.answer(200, session)
        if verb == "snapshots":
            return self.answer(200, server.snapshots.get(identifier, {"head": None, "snapshots": []}))
        if verb == "snapshot":
            return self.answer(201, {"id": "n1", "name": (body or {}).get("name")})
        if verb == "branch":
            made = [server.add(f"b{index}") for index in range((body or {}).get("count", 1))]
            return self.answer(201, {"sessions": made})
        return self.fail(404, "not_found", "there is nothing here")

    # -- the agent

    def agent(self, method, body, raw, query):
        name = method.rpartition("/")[2]
        handler = getattr(self, "agent_" + name.lower(), None)
        if method == "files":
            return self.files(query, raw)
        if handler is None:
            return self.fail(404, "not_found", "no such method")
        return handler(body)

    def find_process(self, body):
        process = self.server.processes.get(body["process"]["pid"])
        if process is None:
            self.answer(404, {"code": "not_found", "message": f"process with pid {body['process']['pid']} not found"})
        return process

    def agent_start(self, body):
        server = self.server
        self.start_chunks("application/connect+json")
        if server.start_failure:
            self.envelope({"error": server.start_failure}, 2)
            return self.chunk(b"")
        try:
            process = Process(body, server.root, lambda: server.keep_log)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            self.envelope({"error": {"code": "not_found" if missing else "permission_denied", "message": str(error),
                                     "exitStatus": 127 if missing else 126}}, 2)
            return self.chunk(b"")
        server.processes[process.pid] = process
        return self.follow(process, 0)

    def agent_connect(self, body):
        process = self.server.processes.get(body["process"]["pid"])
        self.start_chunks("application/connect+json")
        if process is None:
            self.envelope({"error": {"code": "not_found", "message": "no such process"}}, 2)
            return self.chunk(b"")
        return self.follow(process, body.get("offset", process.size))

    def follow(self, process, offset):
        server = self.server
        server.streams.add(self.connection)
        self.close_connection = True
        try:
            self.envelope({"event": {"start": {"pid": process.pid}}})
            if offset < process.dropped:
                self.envelope({"event": {"gap": {"from": offset, "to": process.dropped}}})
                offset = process.dropped
            self.send_log(process, offset)
        finally:
            server.streams.discard(self.connection)

    def send_log(self, process, offset):
        server = self.server
        while True:
            with process.condition:
                while not process.log or process.log[-1][0] + len(process.log[-1][2]) <= offset:
                    if process.end and process.size <= offset:
                        break
                    process.condition.wait(0.2)
                pieces = [piece for piece in process.log if piece[0] + len(piece[2]) > offset]
                ended = process.end if not pieces else None
            for start, channel, data in pieces:
                skip = max(0, offset - start)
                text = base64.b64encode(data[skip:])
                message = b'{"event":{"data":{"offset":%d,"%s":"%s"}}}' % (start + skip, channel.encode(), text)
                self.envelope(message)
                offset = start + len(data)
                if server.cut_after is not None and offset >= server.cut_after:
                    server.cut_after = None
                    return self.connection.shutdown(socket.SHUT_RDWR)
            if not server.keep_log:
                with process.condition:
                    process.log = [piece for piece in process.log if piece[0] + len(piece[2]) > offset]
                    process.condition.notify_all()
            if ended:
                if process.timed_out:
                    self.envelope({"error": {"code": "deadline_exceeded", "message": "process timed out"}}, 2)
                else:
                    self.envelope({"event": {"end": ended}})
                    self.envelope({}, 2)
                return self.chunk(b"")

    def agent_list(self, body):
        entries = [{"pid": p.pid, "config": p.config, "running": p.end is None, "startedAt": p.started_at,
                    **({"exitCode": p.end["exitCode"], "signal": p.end["signal"]} if p.end else {})}
                   for p in self.server.processes.values() if p.end is None or body.get("all")]
        self.answer(200, {"processes": entries})

    def agent_sendinput(self, body):
        process = self.find_process(body)
        if process is None:
            return
        data = base64.b64decode(body["input"].get("stdin") or body["input"].get("pty") or "")
        if process.write(data):
            self.answer(200, {})
        else:
            self.answer(412, {"code": "failed_precondition", "message": "stdin is closed"})

    def agent_closestdin(self, body):
        process = self.find_process(body)
        if process:
            try:
                process.child.stdin.close()
            except OSError:
                pass
            self.answer(200, {})

    def agent_sendsignal(self, body):
        process = self.find_process(body)
        if process is None:
            return
        number = getattr(signal, body["signal"].removeprefix("SIGNAL_"))
        try:
            (os.killpg if body.get("group") else os.kill)(process.pid, number)
            self.answer(200, {})
        except ProcessLookupError:
            self.answer(404, {"code": "not_found", "message": "it has ended"})

    def agent_update(self, body):
        process = self.find_process(body)
        if process:
            set_size(process.master, body["pty"]["size"])
            self.answer(200, {})

    def local(self, path):
        return path if path.startswith("/") else os.path.join(self.server.root, path)

    def agent_stat(self, body):
        path = self.local(body["path"])
        if not os.path.lexists(path):
            return self.answer(404, {"code": "not_found", "message": f"{path}: no such file or directory"})
        kind = "DIRECTORY" if os.path.isdir(path) else "FILE" if os.path.isfile(path) else "SYMLINK"
        entry = {"name": os.path.basename(path), "type": f"FILE_TYPE_{kind}", "path": os.path.abspath(path),
                 "size": os.lstat(path).st_size}
        if os.path.islink(path):
            entry["symlinkTarget"] = os.path.realpath(path)
        return self.answer(200, {"entry": entry})

    def agent_makedir(self, body):
        path = self.local(body["path"])
        if os.path.isdir(path):
            return self.answer(409, {"code": "already_exists", "message": "it exists"})
        os.makedirs(path)
        return self.answer(200, {"entry": {"path": path}})

    def files(self, query, raw):
        path = self.local(query["path"][0])
        if self.command == "POST":
            if os.path.isdir(path):
                return self.answer(400, {"code": 400, "message": "the path is a directory"})
            with open(path, "wb") as file:
                file.write(raw)
            return self.answer(200, [{"path": path}])
        with open(path, "rb") as file:
            data = file.read()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None
