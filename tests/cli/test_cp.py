"""cp in both directions, and what a hostile guest may send."""
import io
import json
import os
import pty
import signal
import stat
import subprocess
import tarfile
import time

import pytest

import fake as fake_module


@pytest.fixture
def web(server):
    server.add("sweb", name="web")
    return "web"


def make_tree(root):
    root.mkdir()
    (root / "plain").write_bytes(bytes(range(256)) * 300)
    (root / "empty").touch()
    (root / "script").write_text("#!/bin/sh\n")
    (root / "script").chmod(0o755)
    (root / "link").symlink_to("plain")
    (root / "dangling").symlink_to("/no/such")
    (root / "loop").symlink_to("loop")
    (root / "hollow").mkdir()
    (root / "closed").mkdir()
    (root / "closed" / "inside").write_text("x")
    (root / "closed").chmod(0o555)
    long = root / ("d" * 120) / ("e" * 120)
    long.mkdir(parents=True)
    (long / ("f" * 200)).write_text("far")
    (root / "ümläut \n \t 'x' $y").write_text("odd")
    (root / "-leading").write_text("dash")
    os.utime(root / "plain", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    os.utime(root / "hollow", (1_500_000_000, 1_500_000_000))


def listing(root):
    found = {}
    for top, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(top, name)
            st = os.lstat(path)
            content = os.readlink(path) if stat.S_ISLNK(st.st_mode) else open(path, "rb").read() if stat.S_ISREG(
                st.st_mode) else None
            found[os.path.relpath(path, root)] = (stat.S_IFMT(st.st_mode), stat.S_IMODE(st.st_mode),
                                                  st.st_mtime_ns if not stat.S_ISLNK(st.st_mode) else 0, content)
    return found


def test_tree_there_and_back(cli, server, web, tmp_path):
    make_tree(tmp_path / "tree")
    cli.ok("cp", tmp_path / "tree", "web:")
    assert listing(server.root + "/tree") == listing(tmp_path / "tree")
    cli.ok("cp", "web:tree", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(tmp_path / "tree")
    (tmp_path / "into").mkdir()
    cli.ok("cp", "web:tree/", tmp_path / "into")
    assert listing(tmp_path / "into" / "tree") == listing(tmp_path / "tree")


def test_where_a_copy_goes(cli, server, web, tmp_path):
    (tmp_path / "f").write_text("1")
    root = server.root
    cli.ok("cp", tmp_path / "f", "web:g")
    cli.ok("cp", tmp_path / "f", "web:new/deep/h")
    cli.ok("cp", tmp_path / "f", "web:folder/")
    cli.ok("cp", tmp_path / "f", "web:new")
    for path in ("g", "new/deep/h", "folder/f", "new/f"):
        assert open(os.path.join(root, path)).read() == "1", path
    (tmp_path / "f").write_text("22")
    cli.ok("cp", tmp_path / "f", "web:g")
    assert open(root + "/g").read() == "22"
    cli.ok("cp", "web:g", tmp_path)
    cli.ok("cp", "web:g", tmp_path / "h")
    assert (tmp_path / "g").read_text() == (tmp_path / "h").read_text() == "22"
    done = subprocess.run([cli.program, "cp", ".", "web:copied"], cwd=tmp_path, env=cli.environment(), timeout=20, check=False)
    assert done.returncode == 0 and open(root + "/copied/h").read() == "22"
    for words in (["cp", "web:nothing", str(tmp_path)], ["cp", str(tmp_path / "nothing"), "web:x"],
                  ["cp", "web:new", str(tmp_path / "h")], ["cp", str(tmp_path), "web:g"], ["cp", "web:/", str(tmp_path)],
                  ["cp", "web:g", str(tmp_path / "no" / "where")], ["cp", "nobody:g", str(tmp_path)]):
        done = cli(*words)
        assert done.returncode == 125 and done.stderr.startswith("space: cannot copy"), words
    assert (tmp_path / "h").read_text() == "22"


def test_link_on_the_command_line_is_followed(cli, server, web, tmp_path):
    (tmp_path / "f").write_text("1")
    (tmp_path / "l").symlink_to("f")
    cli.ok("cp", tmp_path / "l", "web:a")
    assert open(server.root + "/a").read() == "1" and not os.path.islink(server.root + "/a")
    os.symlink("a", server.root + "/lb")
    cli.ok("cp", "web:lb", tmp_path)
    assert (tmp_path / "lb").read_text() == "1" and not (tmp_path / "lb").is_symlink()


def test_standard_streams(cli, server, web):
    data = os.urandom(300_000)
    cli.ok("cp", "-", "web:piped", input=data, text=False)
    assert open(server.root + "/piped", "rb").read() == data
    assert cli.ok("cp", "web:piped", "-", text=False) == data
    assert cli.ok("cp", "web:piped", "-", "--json", text=False) == data
    os.mkdir(server.root + "/folder")
    done = cli("cp", "-", "web:folder", input=b"x", text=False)
    assert done.returncode == 125 and b"is a directory" in done.stderr
    assert cli("cp", "web:folder", "-").returncode == 125


def test_what_cannot_be_copied_is_told(cli, server, web, tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_text("1")
    os.mkfifo(tmp_path / "t" / "fifo")
    done = cli("cp", tmp_path / "t", "web:")
    assert done.returncode == 125 and "t/fifo" in done.stderr and "FIFO" in done.stderr
    assert os.listdir(server.root + "/t") == ["f"]
    os.mkfifo(server.root + "/t/fifo")
    done = cli("cp", "web:t", tmp_path / "back")
    assert done.returncode == 125 and (tmp_path / "back" / "f").read_text() == "1"
    summary = json.loads(cli("cp", "web:t/f", tmp_path / "one", "--json").stdout)
    assert summary["bytes"] == 1 and summary["entries"] == 1 and summary["skipped"] == 0


def test_large_file(cli, server, web, tmp_path):
    size = 200 << 20
    with open(tmp_path / "big", "wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 20))
    cli.ok("cp", tmp_path / "big", "web:")
    assert subprocess.run(["cmp", tmp_path / "big", server.root + "/big"], check=False).returncode == 0
    cli.ok("cp", "web:big", tmp_path / "back")
    assert subprocess.run(["cmp", tmp_path / "big", tmp_path / "back"], check=False).returncode == 0


def test_full_disk_in_the_guest(cli, server, web, tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(os.urandom(5_000_000))
    program = server.root + "/tar"
    with open(program, "w") as file:
        file.write("#!/bin/sh\nhead -c 100000 >/dev/null\necho 'tar: f: Cannot write: No space left on device' >&2\nexit 2\n")
    os.chmod(program, 0o755)
    monkeypatch.setenv("PATH", server.root + ":" + os.environ["PATH"])
    done = cli("cp", tmp_path / "f", "web:")
    assert done.returncode == 125 and "No space left on device" in done.stderr


def test_progress_on_a_terminal_only(cli, server, web, tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    assert cli("cp", tmp_path / "f", "web:").stderr == ""
    master, slave = pty.openpty()
    process = cli.start("cp", str(tmp_path / "f"), "web:", stderr=slave, stdin=slave)
    os.close(slave)
    text = b""
    while True:
        try:
            text += os.read(master, 4096)
        except OSError:
            break
    assert process.wait(20) == 0
    assert b"100 %" in text and b"2.9 MiB" in text and b"/s" in text
    os.close(master)


class Archive:
    """What a hostile guest answers in place of its tar."""

    def __init__(self, monkeypatch):
        self.buffer = io.BytesIO()
        self.tar = tarfile.open(fileobj=self.buffer, mode="w", format=tarfile.PAX_FORMAT)
        self.cut = None
        archive = self

        class Sender(fake_module.Process):
            def __init__(self, message, cwd, keep_log):
                message["process"] = {**message["process"], "cmd": "cat", "args": [archive.path]}
                super().__init__(message, cwd, keep_log)

        monkeypatch.setattr(fake_module, "Process", Sender)

    def add(self, name, data=b"", **fields):
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for key, value in fields.items():
            setattr(info, key, value)
        self.tar.addfile(info, io.BytesIO(data))

    def send(self, cli, server, target):
        self.tar.close()
        self.path = server.root + "/archive"
        data = self.buffer.getvalue()
        with open(self.path, "wb") as file:
            file.write(data[:self.cut])
        os.makedirs(server.root + "/t", exist_ok=True)
        return cli("cp", "web:t", target)


@pytest.fixture
def archive(monkeypatch, web):
    return Archive(monkeypatch)


@pytest.mark.parametrize("name", ["t/../../escape", "../escape", "/escape", "other/escape", "t/../escape"])
def test_names_that_lead_out(cli, server, archive, tmp_path, name):
    archive.add("t", type=tarfile.DIRTYPE, mode=0o755)
    archive.add(name, b"bad")
    done = archive.send(cli, server, tmp_path / "safe" if (tmp_path / "safe").mkdir() else tmp_path / "safe")
    assert done.returncode == 125, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.name == "escape"]
    assert not os.path.exists("/escape")


def test_links_that_lead_out(cli, server, archive, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "safe").mkdir()
    archive.add("t", type=tarfile.DIRTYPE, mode=0o755)
    archive.add("t/link", type=tarfile.SYMTYPE, linkname=str(tmp_path / "victim"))
    archive.add("t/link/file", b"bad")
    done = archive.send(cli, server, tmp_path / "safe")
    assert done.returncode == 125 and "symbolic link" in done.stderr
    assert not list((tmp_path / "victim").iterdir())
    assert (tmp_path / "safe" / "t" / "link").is_symlink()


def test_file_over_a_link_replaces_the_link(cli, server, archive, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "safe").mkdir()
    archive.add("t", type=tarfile.DIRTYPE, mode=0o755)
    archive.add("t/f", type=tarfile.SYMTYPE, linkname=str(tmp_path / "victim"))
    archive.add("t/f", b"theirs")
    assert archive.send(cli, server, tmp_path / "safe").returncode == 0
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "safe/t/f").read_text() == "theirs"


def test_hard_links_stay_inside(cli, server, archive, tmp_path):
    (tmp_path / "safe").mkdir()
    archive.add("t", type=tarfile.DIRTYPE, mode=0o755)
    archive.add("t/f", b"data")
    archive.add("t/g", type=tarfile.LNKTYPE, linkname="t/f")
    archive.add("t/h", type=tarfile.LNKTYPE, linkname="/etc/passwd")
    done = archive.send(cli, server, tmp_path / "safe")
    assert done.returncode == 125 and not (tmp_path / "safe/t/h").exists()
    assert (tmp_path / "safe/t/g").read_text() == "data"


def test_special_files_and_modes(cli, server, archive, tmp_path):
    (tmp_path / "safe").mkdir()
    archive.add("t", type=tarfile.DIRTYPE, mode=0o7755)
    archive.add("t/setuid", b"x", mode=0o6755, uid=12345)
    archive.add("t/device", type=tarfile.CHRTYPE, devmajor=1, devminor=5)
    done = archive.send(cli, server, tmp_path / "safe")
    assert done.returncode == 125 and "devices" in done.stderr
    st = (tmp_path / "safe/t/setuid").stat()
    assert stat.S_IMODE(st.st_mode) == 0o755 and st.st_uid == os.getuid()
    assert not (tmp_path / "safe/t/device").exists()


def test_cut_archive_leaves_no_half_file(cli, server, archive, tmp_path):
    (tmp_path / "safe" / "t").mkdir(parents=True)
    (tmp_path / "safe" / "t" / "f").write_text("old")
    archive.add("t", type=tarfile.DIRTYPE, mode=0o755)
    archive.add("t/f", b"n" * 5000)
    archive.cut = 512 * 3 + 1000
    done = archive.send(cli, server, tmp_path / "safe")
    assert done.returncode == 125 and "too early" in done.stderr
    assert os.listdir(tmp_path / "safe" / "t") == ["f"] and (tmp_path / "safe/t/f").read_text() == "old"


def test_a_file_named_like_a_session(cli, server, web, tmp_path):
    """The word in a file's name must not be taken for a missing session."""
    (tmp_path / "f").write_text("1")
    cli.ok("cp", tmp_path / "f", "web:session.log")
    done = cli("cp", "web:no-such-session", tmp_path / "x")
    assert 'there is no "no-such-session" in web' in done.stderr and "space ls" not in done.stderr
    assert "space ls" in cli("cp", "nobody:x", tmp_path / "x").stderr


def test_interrupted_copy(cli, server, web, tmp_path):
    os.mkfifo(server.root + "/slow")
    os.mkdir(server.root + "/t")
    with open(tmp_path / "big", "wb") as file:
        file.truncate(4 << 30)
    process = cli.start("cp", str(tmp_path / "big"), "web:t", stderr=subprocess.PIPE)
    while not server.processes:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and b"interrupted" in errors
    assert all(tar.child.wait(5) is not None for tar in server.processes.values())
