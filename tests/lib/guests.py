"""Programs that tests run inside guests, and how to talk to them."""
import json
import os
import threading
import time

# Counts in memory and in a file at once, never syncs; answers on a unix socket with what it has in memory.
COUNTER = r'''
import os, socket, threading, time, json
state = {"n": 0, "pid": os.getpid(), "token": os.urandom(8).hex()}
lock = threading.Lock()
try: os.unlink("/tmp/counter.sock")
except OSError: pass
server = socket.socket(socket.AF_UNIX)
server.bind("/tmp/counter.sock")
os.chmod("/tmp/counter.sock", 0o777)
server.listen(64)
def answer():
    while True:
        peer, _ = server.accept()
        with lock:
            peer.sendall(json.dumps(dict(state, time=time.time())).encode())
        peer.close()
threading.Thread(target=answer, daemon=True).start()
log = open("/home/user/counter.log", "a", buffering=1)
while True:
    with lock:
        state["n"] += 1
        log.write("%d %.6f\n" % (state["n"], time.time()))
    time.sleep(0.01)
'''

ASK_COUNTER = r'''
import json, socket
def ask():
    s = socket.socket(socket.AF_UNIX)
    s.connect("/tmp/counter.sock")
    return json.loads(s.makefile().read())
data = ask()
lines = open("/home/user/counter.log").read().split("\n")
assert lines[-1] == "", "torn last line: %r" % lines[-1]
numbers = [int(line.split()[0]) for line in lines[:-1]]
data["file"] = numbers[-1]
data["last_time"] = float(lines[-2].split()[1])
data["gaps"] = [n for n, m in zip(numbers, numbers[1:]) if m != n + 1]
data["first"] = numbers[0]
data["after"] = ask()["n"]
print(json.dumps(data))
'''

# Draws random numbers from the kernel; prints those it has, with number and the time before each draw, on a connection.
RANDOM = r'''
import os, socket, threading, time, json
values = []
server = socket.socket(socket.AF_UNIX)
server.bind("/tmp/random.sock")
os.chmod("/tmp/random.sock", 0o777)
server.listen(8)
def answer():
    while True:
        peer, _ = server.accept()
        peer.sendall(json.dumps(values[-20000:]).encode())
        peer.close()
threading.Thread(target=answer, daemon=True).start()
while True:
    now = time.time()
    values.append((len(values), os.getrandom(16).hex(), now))
    time.sleep(0.01)
'''

ASK_RANDOM = r'''
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect("/tmp/random.sock")
sys.stdout.write(s.makefile().read())
'''

# Numbered lines, steadily.
TICKER = ["python3", "-u", "-c", "import time\nn = 0\nwhile True: n += 1; print(n); time.sleep(0.02)"]

# A web server that tells which guest it runs in; /count counts its requests; echoes bodies; redirects.
WEB = r'''
import http.server, os, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    count = 0
    def send(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers: self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)
    def do_GET(self):
        Handler.count += 1
        if self.path.startswith("/redirect/"):
            _, _, status, target = self.path.split("/", 3)
            return self.send(int(status), b"moved", [("Location", bytes.fromhex(target).decode())])
        if self.path == "/headers":
            text = "".join("%s: %s\n" % item for item in self.headers.items())
            return self.send(200, text.encode())
        if self.path == "/count":
            return self.send(200, str(Handler.count).encode())
        if self.path.startswith("/bytes/"):
            return self.send(200, b"x" * int(self.path.split("/")[2]))
        if self.path == "/chunked":
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            for n in range(5):
                self.wfile.write(b"6\r\nchunk%d\r\n" % n); self.wfile.flush()
            return self.wfile.write(b"0\r\n\r\n")
        self.send(200, socket.gethostname().encode())
    do_HEAD = do_GET
    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        if self.path.startswith("/redirect/"): self.rfile.read(size); return self.do_GET()
        Handler.count += 1
        import hashlib
        digest = hashlib.sha256()
        while size:
            data = self.rfile.read(min(size, 65536)); size -= len(data); digest.update(data)
        self.send(200, digest.hexdigest().encode())
    def log_message(self, *args): pass
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
    def server_bind(self):
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        http.server.HTTPServer.server_bind(self)
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
'''

# WebSocket echo: answers each message with it; /ticks sends numbered messages; /close-4001 closes with that code.
WEBSOCKET = r'''
import base64, hashlib, socket, struct, sys, threading, time
def take(sock, size):
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more: raise ConnectionError
        data += more
    return data
def frame(opcode, data, final=True):
    head = bytes([(128 if final else 0) | opcode])
    if len(data) < 126: head += bytes([len(data)])
    elif len(data) < 65536: head += bytes([126]) + struct.pack(">H", len(data))
    else: head += bytes([127]) + struct.pack(">Q", len(data))
    return head + data
def receive(sock):
    first, second = take(sock, 2)
    size = second & 127
    if size == 126: size = struct.unpack(">H", take(sock, 2))[0]
    elif size == 127: size = struct.unpack(">Q", take(sock, 8))[0]
    mask = take(sock, 4)
    data = take(sock, size)
    repeated = (mask * (size // 4 + 1))[:size]
    return first, (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big") if size else b""
def serve(sock):
    head = b""
    while b"\r\n\r\n" not in head: head += sock.recv(65536)
    lines = head.decode().split("\r\n")
    headers = {l.split(":", 1)[0].lower(): l.split(":", 1)[1].strip() for l in lines[1:] if ":" in l}
    accept = base64.b64encode(hashlib.sha1((headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
    sock.sendall(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n" % accept).encode())
    path = lines[0].split()[1]
    if path == "/headers":
        sock.sendall(frame(1, "\n".join("%s: %s" % item for item in headers.items()).encode()))
    if path == "/close-4001":
        sock.sendall(frame(8, struct.pack(">H", 4001) + b"bye"))
        return
    if path == "/ticks":
        n = 0
        while True:
            n += 1
            sock.sendall(frame(1, b"%d" % n))
            time.sleep(0.02)
    message, kind = b"", 0
    while True:
        first, data = receive(sock)
        opcode = first & 15
        if opcode == 8: sock.sendall(frame(8, data)); return
        if opcode == 9: sock.sendall(frame(10, data)); continue
        kind = opcode or kind
        message += data
        if first & 128:
            sock.sendall(frame(kind, message)); message = b""
def guard(sock):
    try: serve(sock)
    except Exception: pass
    sock.close()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=256)
while True:
    threading.Thread(target=guard, args=(server.accept()[0],), daemon=True).start()
'''

# Four writers that never sync on purpose, except SQLite as it sees fit.
WRITERS = {
    "direct": r'''
import mmap, os, time
fd = os.open("/home/user/direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
n = 0
while True:
    n += 1
    page.seek(0); page.write((b"%020d" % n) * 204); os.pwrite(fd, page, (n % 512) * 4096)
    time.sleep(0.02)
''',
    "buffered": r'''
import time
out = open("/home/user/buffered", "a")
n = 0
while True:
    n += 1
    out.write("%d\n" % n)
    if n % 50 == 0: out.flush(); time.sleep(0.02)
''',
    "sqlite": r'''
import sqlite3, time
db = sqlite3.connect("/home/user/db.sqlite", isolation_level=None)
db.execute("PRAGMA journal_mode=WAL"); db.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, v BLOB)")
n = db.execute("SELECT COALESCE(MAX(n), 0) FROM t").fetchone()[0]
while True:
    n += 1
    db.execute("INSERT INTO t VALUES (?, randomblob(200))", (n,))
    time.sleep(0.03)
''',
}
GIT_WRITER = r'''
mkdir -p /home/user/repo && cd /home/user/repo && git init -q . && git config user.email a@b && git config user.name n &&
git config gc.auto 0
n=0
while :; do n=$((n+1)); echo $n > f; git add f; git commit -q -m $n; sleep 0.3; done
'''
CHECK_WRITERS = r'''
set -e
test "$(sqlite3 /home/user/db.sqlite 'PRAGMA integrity_check')" = ok
cd /home/user/repo
# fsck must not race with the writer: it would miss what a commit adds meanwhile.
pkill -f '[/]tmp/git.sh' || true
for i in 1 2 3 4 5 6 7 8 9 10; do pgrep -x git >/dev/null || break; sleep 0.2; done
rm -f .git/index.lock
# Objects and references have to be sound.
git fsck --no-progress --no-dangling >/dev/null 2>&1
python3 - <<'END'
data = open("/home/user/buffered").read()
numbers = [int(x) for x in data.split("\n")[:-1]]
assert numbers == list(range(1, len(numbers) + 1)), "buffered file has a gap"
import os
for at in range(0, os.path.getsize("/home/user/direct"), 4096):
    with open("/home/user/direct", "rb") as f:
        f.seek(at); page = f.read(4080)
    assert len(set(page[i:i + 20] for i in range(0, 4080, 20))) == 1, "torn direct write at %d" % at
END
sudo -n dmesg | grep -i -E 'ext4.*(error|corrupt|warning)|i/o error' && exit 9
true
'''


def background(api, session, program, name, arguments=(), user=None):
    """Leaves a Python program running in the guest."""
    path = f"/tmp/{name}.py"
    api.write(session, path, program.encode())
    words = " ".join(str(word) for word in arguments)
    api.out(session, f"nohup python3 {path} {words} >/tmp/{name}.out 2>&1 </dev/null &", user=user)


def start_counter(api, session):
    background(api, session, COUNTER, "counter")
    try:
        wait_for(lambda: api.exec(session, "test -S /tmp/counter.sock && test -s /home/user/counter.log").code == 0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {api.exec(session, 'cat /tmp/counter.out; ls -l /tmp /home/user; ps ax')}") \
            from error
    api.write(session, "/tmp/ask.py", ASK_COUNTER.encode())


def ask_counter(api, session):
    """What it has in memory, checked against its file."""
    answer = json.loads(api.out(session, ["python3", "/tmp/ask.py"]))
    assert answer["gaps"] == [], f"the file has gaps after {answer['gaps'][:3]}"
    assert answer["first"] == 1
    return answer


def check_counter(api, session, at_least, token=None):
    """The counter goes on from at least that number, memory and file agree. Returns what it says."""
    answer = ask_counter(api, session)
    assert answer["n"] >= at_least, f"went back from {at_least} to {answer['n']}"
    assert answer["n"] - 1 <= answer["file"] <= answer["after"], \
        f"memory {answer['n']} and then {answer['after']}, file in between {answer['file']}"
    if token:
        assert answer["token"] == token, "another process answers"
    later = ask_counter(api, session)
    assert later["n"] > answer["n"], "the counter stands still"
    return later


def start_web(api, session, port=8000, address="0.0.0.0", v6only=1):
    background(api, session, WEB, f"web{port}", (address, port, v6only))
    wait_for(lambda: api.port(session, port, "/").status == 200)


def wait_for(condition, timeout=20, pause=0.05):
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not true after {timeout} s"
        time.sleep(pause)


def patient(seconds):
    """A bound for an idle host, stretched by how much more than its processors can do is wanted of it now."""
    return seconds * max(1.0, os.getloadavg()[0] / os.cpu_count())


def parallel(functions):
    """Runs them all at once; results in order, exceptions as values."""
    results = [None] * len(functions)

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:  # pylint: disable=broad-except
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_good(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
