"""The client against tests/cli/fake.py."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fake as fake_module  # noqa: E402  (needs the path above)

# Run in the background, a shell's children ignore these; the programs under test must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


class Client:
    def __init__(self, program, socket_path):
        self.program = str(program)
        self.socket = str(socket_path)

    def environment(self, extra=None):
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith("SPACE_") and name not in ("NO_COLOR",)}
        return {**kept, "SPACE_SOCKET": self.socket, "LC_ALL": "C.UTF-8", "TERM": "xterm", **(extra or {})}

    def __call__(self, *words, input=None, env=None, text=True, timeout=60):
        source = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        return subprocess.run([self.program, *map(str, words)], env=self.environment(env), timeout=timeout, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=text, **source)

    def ok(self, *words, **options):
        done = self(*words, **options)
        assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-1000:])
        return done.stdout

    def start(self, *words, env=None, **options):
        return subprocess.Popen([self.program, *map(str, words)], env=self.environment(env), **options)


@pytest.fixture
def server():
    # Short: a unix socket's path has at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="space-cli-")
    os.mkdir(folder + "/root")
    instance = fake_module.Fake(folder + "/s", folder + "/root")
    instance.path = folder + "/s"
    yield instance
    instance.close()
    shutil.rmtree(folder)


@pytest.fixture
def cli(server, programs):
    return Client(programs / "space", server.path)
