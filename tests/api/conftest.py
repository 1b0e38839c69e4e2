"""The server on a session manager in memory, with a guest played by the test: for everything that needs no VM."""
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "lib"))
import fake_agent  # noqa: E402
import rest  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
SANITIZED = "asan" in os.environ.get("SPACE_TEST_BIN", "")
RED, BLUE, ADMIN = ("e2b_" + digit * 40 for digit in "123")


def program():
    bin_dir = pathlib.Path(os.environ.get("SPACE_TEST_BIN", ROOT / "build" / "bin"))
    return bin_dir.parent / "src" / "api" / "spaced-protocol"


class Server:
    def __init__(self, agent, flags=(), environment=None):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="space-api-"))
        self.log = self.dir / "log"
        self.agent = agent
        environment = {**os.environ, "TEST_AGENT": str(agent.port), **(environment or {}),
                       "TEST_KEYS": f"{RED}=red,{BLUE}=blue,{ADMIN}=default:admin"}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [program(), "--data-dir", self.dir, "--runtime-dir", self.dir, "--listen", "127.0.0.1:0", *flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + 20
        self.port = None
        while self.port is None:
            match = re.search(r"listens on http://127.0.0.1:(\d+)", self.log.read_text())
            if match and (self.dir / "space.sock").exists():
                self.port = int(match.group(1))
            elif time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(self.log.read_text())
            else:
                time.sleep(0.02)
        self.local = rest.Client(str(self.dir / "space.sock"))

    def tcp(self, key=None):
        return rest.Client(("127.0.0.1", self.port), key)

    def connect(self, timeout=10):
        sock = socket.create_connection(("127.0.0.1", self.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def exchange(self, data, timeout=10, shut=False):
        """Everything the server says to these bytes until it closes or nothing comes for a while."""
        with self.connect(timeout) as sock:
            sock.sendall(data if isinstance(data, bytes) else data.encode())
            answer = b""
            try:
                while True:
                    more = sock.recv(1 << 16)
                    if not more:
                        break
                    answer += more
            except (TimeoutError, ConnectionResetError):
                pass
            return answer

    def metric(self, name):
        text = self.local.call("GET", "/metrics").body.decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M).group(1))

    def rss(self):
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def grew(self, before, limit):
        """True if it took more memory than that; a sanitizer keeps freed memory, so there it is not looked at."""
        return not SANITIZED and self.rss() - before >= limit

    def cpu_s(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            log = self.log.read_text()
            shutil.rmtree(self.dir)
        assert code == 0, log
        assert "claims left open: 0" in log, log
        assert "Sanitizer" not in log, log


@pytest.fixture(scope="session")
def agent():
    agent = fake_agent.Agent()
    yield agent
    agent.shutdown()
    agent.server_close()


@pytest.fixture(scope="module")
def server(agent):
    server = Server(agent)
    yield server
    server.stop()


@pytest.fixture
def session(server):
    made = server.local.create(name="tests")
    yield made
    server.local.call("DELETE", f"/v1/sessions/{made['id']}")


def wait_for(condition, timeout=10, what="condition"):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {timeout} s"
        time.sleep(0.02)
