"""Plays the guest behind spaced-protocol: an agent with its tunnel, and apps of every good and bad manner behind it."""
import hashlib
import socket
import socketserver
import threading
import time
import urllib.parse

CLOSED_PORT = 9999
SILENT_PORT = 9998


class Request:
    def __init__(self, reader):
        self.lines = []
        while True:
            line = reader.readline()
            if not line:
                raise EOFError
            if line == b"\r\n":
                break
            self.lines.append(line.decode("latin-1").rstrip("\r\n"))
        self.method, self.target, _ = self.lines[0].split(" ", 2)
        self.path, _, self.query = self.target.partition("?")
        self.pairs = [tuple(part.strip() for part in line.split(":", 1)) for line in self.lines[1:]]
        self.headers = {name.lower(): value for name, value in self.pairs}


class Handler(socketserver.StreamRequestHandler):
    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = 49983
        with self.server.lock:
            self.server.connections += 1
            self.server.open.add(self.connection)

    def finish(self):
        with self.server.lock:
            self.server.open.discard(self.connection)
            self.server.ended += 1
        try:
            super().finish()
        except OSError:
            pass

    def handle(self):
        try:
            while self.one():
                pass
        except (EOFError, OSError, ValueError):
            pass

    # -- sending

    def send(self, data):
        self.connection.sendall(data)

    def answer(self, status, body=b"", headers=()):
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"] + [f"{n}: {v}" for n, v in headers]
        self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    def chunk(self, data):
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    # -- receiving

    def body(self, request, sink=None):
        sink = sink or (lambda data: None)
        size = 0
        if request.headers.get("transfer-encoding") == "chunked":
            while True:
                n = int(self.rfile.readline(), 16)
                if n == 0:
                    while self.rfile.readline() != b"\r\n":
                        pass
                    return size
                left = n
                while left:
                    data = self.rfile.read(min(left, 65536))
                    if not data:
                        raise EOFError
                    sink(data)
                    left -= len(data)
                    size += len(data)
                self.rfile.readline()
        left = int(request.headers.get("content-length", 0))
        while left:
            data = self.rfile.read1(min(left, 65536))
            if not data:
                raise EOFError
            sink(data)
            left -= len(data)
            size += len(data)
        return size

    # -- what each path does; True to go on with the connection

    def one(self):
        request = Request(self.rfile)
        request.port = self.port
        with self.server.lock:
            self.server.requests.append(request)
        if request.path == "/space/v1/tunnel":
            return self.tunnel(request)
        if request.headers.get("upgrade") == "websocket":
            return self.echo_raw(request)
        name = "do_" + request.path.split("/")[1].replace("-", "_")
        return getattr(self, name, self.not_found)(request, request.path.split("/")[2:])

    def tunnel(self, request):
        port = int(urllib.parse.parse_qs(request.query)["port"][0])
        if port == CLOSED_PORT:
            self.answer(502, b'{"code":"port_closed"}')
            return True
        if port == SILENT_PORT:
            time.sleep(30)
            return False
        self.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: space-tunnel\r\n\r\n")
        self.port = port
        return True

    def echo_raw(self, request):
        import base64
        accept = base64.b64encode(hashlib.sha1((request.headers["sec-websocket-key"]
                                                + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        self.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
                  b"Sec-WebSocket-Accept: " + accept.encode() + b"\r\n\r\n")
        if request.path == "/ws-greeting":
            self.send(b"\x82\x05hello")
        while True:
            data = self.rfile.read1(65536)
            if not data:
                self.send(b"bye")  # only after the client's half-close
                return False
            # A client's frames come back as they are, mask and all: the test looks at bytes.
            self.send(data)

    def not_found(self, request, words):
        self.body(request)
        self.answer(404, b"no such path")
        return True

    def do_health(self, request, words):
        self.answer(204)
        return True

    def do_hello(self, request, words):
        self.body(request)
        self.answer(200, b"hello", [("X-Own", "1"), ("Connection", "X-Hop"), ("X-Hop", "1")])
        return True

    def do_echo(self, request, words):
        data = []
        self.body(request, data.append)
        self.answer(200, b"".join(data))
        return True

    def do_hash(self, request, words):
        digest = hashlib.sha256()
        self.body(request, digest.update)
        self.answer(200, digest.hexdigest().encode())
        return True

    def do_slow_reader(self, request, words):
        time.sleep(float(words[0]))
        return self.do_hash(request, words)

    def do_both(self, request, words):
        """Streams back each piece as it comes."""
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.body(request, self.chunk)
        self.send(b"0\r\n\r\n")
        return True

    def do_length(self, request, words):
        size = int(words[0])
        self.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        if request.method != "HEAD":
            block = bytes(range(256)) * 1024
            while size:
                n = self.connection.send(block[:min(size, len(block))])
                with self.server.lock:
                    self.server.sent += n
                # Whole blocks keep the pattern; a short send goes on within it.
                block = block[n:] + block[:n]
                size -= n
        return True

    def do_stream(self, request, words):
        size, piece = int(words[0]), int(words[1])
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        data = b"%x\r\n%s\r\n" % (piece, b"z" * piece)
        many = max(1, 65536 // piece)
        for at in range(0, size // piece, many):
            self.send(data * min(many, size // piece - at))
        self.send(b"0\r\nTrailer: dropped\r\n\r\n")
        return True

    def do_ticks(self, request, words):
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(int(words[0])):
            self.chunk(b"tick%d\n" % number)
            time.sleep(0.2)
        self.send(b"0\r\n\r\n")
        return True

    def do_until_close(self, request, words):
        self.send(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
        return False

    def do_early(self, request, words):
        self.answer(401, b"not with me")
        return False

    def do_continue(self, request, words):
        self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self.do_hash(request, words)

    def do_interim(self, request, words):
        self.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        self.answer(200, b"late")
        return True

    def do_hang(self, request, words):
        time.sleep(60)
        return False

    def do_cut_length(self, request, words):
        self.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n0123456789")
        time.sleep(0.2)
        return False

    def do_cut_chunked(self, request, words):
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n")
        time.sleep(0.2)
        return False

    def do_cut_head(self, request, words):
        self.send(b"HTTP/1.1 200 O")
        return False

    def do_raw(self, request, words):
        self.send(bytes.fromhex(words[0]))
        time.sleep(0.2)
        return False

    def do_redirect(self, request, words):
        target = bytes.fromhex(words[1]).decode() if len(words) > 1 else ""
        self.body(request)
        self.answer(int(words[0]), b"", [("Location", target)])
        return True


class Agent(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.requests, self.open = [], set()
        self.connections = self.ended = self.sent = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass

    @property
    def port(self):
        return self.server_address[1]

    def last(self, path=None):
        with self.lock:
            return next(r for r in reversed(self.requests) if path is None or r.path == path)

    def count(self, path):
        with self.lock:
            return sum(r.path == path for r in self.requests)
