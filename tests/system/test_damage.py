"""Damaged, missing and unreadable snapshot files, and a full disk: a precise error, nothing harmed, a way back."""
import os
import time

import pytest

import daemon as daemon_module
import guests
import hostside
from rest import ApiError

FILES = ["memory", "disk", "state", "checksums", "manifest.json"]
WAYS = ["flip", "truncate", "empty", "remove", "unreadable"]


class Damage:
    """Spoils one file for the time of a with block and puts it back byte for byte."""

    def __init__(self, path, way):
        self.path, self.way = path, way
        self.aside = path.with_name(path.name + ".aside")

    def __enter__(self):
        status = self.path.stat()
        if self.way == "unreadable":
            self.mode = status.st_mode
            self.path.chmod(0)
        elif self.way == "remove":
            os.rename(self.path, self.aside)
        elif self.way == "flip":
            self.at = self.find_data(status.st_size)
            with open(self.path, "r+b") as file:
                file.seek(self.at)
                self.byte = file.read(1)
                file.seek(self.at)
                file.write(bytes([self.byte[0] ^ 1]))
        else:
            # A clone keeps the former content without a second copy of it.
            assert os.system(f"cp --reflink=auto --sparse=always -p {self.path} {self.aside}") == 0
            os.truncate(self.path, 0 if self.way == "empty" else max(status.st_size - 4096, 0))

    def find_data(self, size):
        """An offset in the middle of what is really stored."""
        with open(self.path, "rb") as file:
            try:
                start = os.lseek(file.fileno(), size // 2, os.SEEK_DATA)
            except OSError:
                start = os.lseek(file.fileno(), 0, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        return start + (end - start) // 2

    def __exit__(self, *_):
        if self.way == "unreadable":
            self.path.chmod(self.mode & 0o7777)
        elif self.way == "remove":
            os.rename(self.aside, self.path)
        elif self.way == "flip":
            with open(self.path, "r+b") as file:
                file.seek(self.at)
                file.write(self.byte)
        else:
            os.truncate(self.path, self.aside.stat().st_size)
            assert os.system(f"cp --reflink=auto --sparse=never {self.aside} {self.path}") == 0
            self.aside.unlink()


@pytest.fixture
def generations(api, make):
    """A suspended session with three generations, and the id of the newest two."""
    session = make()
    for number in range(3):
        api.out(session, f"echo {number} > generation")
        if number < 2:
            former = api.verb(session, "snapshot")["id"]
    api.verb(session, "suspend")
    return session, api.history(session)["head"], former


@pytest.mark.limit(300)
def test_each_file_in_each_way(daemon, api, make, generations):
    session, newest, former = generations
    healthy = make()
    folder = daemon.data_dir / "pool" / "snapshots" / newest
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    vmms = len(daemon.vmms())
    wrong = []
    for name in FILES:
        for way in WAYS:
            with Damage(folder / name, way):
                started = time.monotonic()
                answer = api.call("POST", f"/v1/sessions/{session}/wake", {}, timeout=30)
                took = time.monotonic() - started
                body = answer.json
                if answer.status < 400 or newest not in body["message"] or took > guests.patient(5):
                    wrong.append((name, way, answer.status, body.get("message"), round(took, 1)))
                state = api.state(session)
                if state != "suspended":
                    wrong.append((name, way, state))
                    api.verb(session, "suspend")
                if len(daemon.vmms()) != vmms:
                    wrong.append((name, way, "a VMM was left"))
    assert not wrong, wrong
    assert api.out(healthy, "echo fine") == "fine"
    # Put back, it is good again.
    assert api.out(session, "cat generation") == "2"
    api.verb(session, "suspend")
    newest = api.history(session)["head"]
    with Damage(daemon.data_dir / "pool" / "snapshots" / newest / "memory", "flip"):
        with pytest.raises(ApiError) as info:
            api.out(session, "true")  # wake on use tells it too
        assert newest in info.value.message
        api.verb(session, "rewind", snapshot=former)
        assert api.out(session, "cat generation") == "1"


def test_a_damaged_session_can_be_deleted(daemon, api, generations):
    session, newest, _ = generations
    folder = daemon.data_dir / "pool" / "snapshots" / newest
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(ApiError) as info:
        api.verb(session, "wake")
    assert newest in info.value.message
    started = time.monotonic()
    api.delete(session)
    assert time.monotonic() - started < guests.patient(2)


def test_damage_is_found_after_a_restart_too(daemon, api, generations):
    session, newest, _ = generations
    with Damage(daemon.data_dir / "pool" / "snapshots" / newest / "disk", "flip"):
        daemon.restart()
        with pytest.raises(ApiError) as info:
            api.verb(session, "wake")
        assert newest in info.value.message
    assert api.out(session, "cat generation") == "2"


class FullDisk:
    """Takes all space of the pool but `left` bytes."""

    def __init__(self, daemon, left):
        self.path = daemon.data_dir / "pool" / "filler"
        self.left = left

    def __enter__(self):
        with open(self.path, "wb") as file:
            size = 0
            while True:
                free = hostside.free_bytes(self.path.parent) - self.left
                if free < 1 << 20:
                    return
                # The pool may be fragmented: less than asked for is fine, the loop asks again.
                step = free
                while step >= 1 << 20:
                    try:
                        os.posix_fallocate(file.fileno(), size, step)
                        break
                    except OSError:
                        step //= 2
                else:
                    return
                size += step

    def __exit__(self, *_):
        self.path.unlink()


def refused_for_space(function):
    with pytest.raises(ApiError) as info:
        function()
    assert info.value.status == 507 and info.value.code == "no_space", str(info.value)


def test_full_disk_harms_nothing(daemon, api, make):
    session, other = make(), make()
    guests.start_counter(api, session)
    api.out(session, "echo before > f")
    kept = api.verb(session, "snapshot")["id"]
    api.out(session, "echo after > f; head -c 60000000 /dev/urandom > /dev/shm/dirty")
    counter = guests.ask_counter(api, session)
    with FullDisk(daemon, 2 << 20):
        refused_for_space(lambda: api.verb(session, "snapshot"))
        assert api.state(session) == "running"
        refused_for_space(lambda: api.verb(session, "suspend"))
        assert api.state(session) == "running"
        counter = guests.check_counter(api, session, counter["n"], counter["token"])
        assert api.out(session, "cat f") == "after"
        refused_for_space(lambda: api.branch(session, 2))
        assert len(api.list()) == 2
        assert api.out(other, "echo fine") == "fine"
        daemon.restart()
        assert api.state(session) == "running"
        guests.check_counter(api, session, counter["n"], counter["token"])
    # With space again everything works, and no half snapshot is in the way.
    api.verb(session, "suspend")
    guests.check_counter(api, session, counter["n"], counter["token"])
    api.verb(session, "rewind", snapshot=kept)
    assert api.out(session, "cat f") == "before"
    assert not list((daemon.data_dir / "pool" / "tmp").iterdir())


@pytest.mark.limit(120)
def test_rolling_snapshots_thin_out_before_the_disk_is_full(daemon, api, make):
    """With little room a rolling session goes on, older rolling snapshots make way."""
    session = make(snapshot_interval_s=1)
    with FullDisk(daemon, 400 << 20):
        for number in range(12):
            api.out(session, f"head -c 30000000 /dev/urandom > /dev/shm/dirty; echo {number} > f")
            time.sleep(1)
            assert api.state(session) == "running"
    history = api.history(session)["snapshots"]
    assert history, "none was kept"
    api.update(session, snapshot_interval_s=0)
    api.verb(session, "rewind", snapshot=history[-1]["id"])
    assert api.out(session, "cat f")


@pytest.mark.limit(60)
def test_guest_disk_full_is_the_guests_own_matter(api, session, make):
    other = make()
    # As root, with the blocks that are kept for root; it may take a few goes until nothing is left.
    api.out(session, "cd /home/user; for n in 1 2 3 4; do fallocate -l $(($(stat -f -c '%f * %S' /) - 1000000)) big$n; "
                     "sync; done 2>/dev/null; head -c 30000000 /dev/zero > rest 2>/dev/null; true", user="root")
    done = api.exec(session, "head -c 30000000 /dev/zero > own; echo code $?")
    assert b"code 1" in done.out and b"No space left" in done.err
    with pytest.raises(ApiError) as info:
        api.write(session, "/home/user/more", b"x" * 5_000_000)
    assert info.value.status == 507
    api.out(session, "sudo rm -f big* rest own")
    assert api.out(other, "echo fine") == "fine"


def test_no_half_written_folder_survives_a_start(daemon, api, session):
    api.verb(session, "suspend")
    pool = daemon.data_dir / "pool"
    daemon.kill()  # a stop in order would unmount the pool
    for area in ("tmp", "snapshots", "sandboxes"):
        stray = pool / area / ("n" + "z" * 19)
        stray.mkdir()
        (stray / "memory").write_bytes(b"half")
        owner = (pool / area).stat()  # as the daemon would have left it
        for path in (stray, stray / "memory"):
            os.chown(path, owner.st_uid, owner.st_gid)
    daemon.start()
    for area in ("tmp", "snapshots", "sandboxes"):
        assert not (pool / area / ("n" + "z" * 19)).exists(), area
    assert api.out(session, "echo fine") == "fine"
    assert daemon_module.SANITIZED or daemon.process.poll() is None
