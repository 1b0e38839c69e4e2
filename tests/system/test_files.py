"""Files: what was sent is what is there, names are bytes, owners are right, watchers miss nothing."""
import gzip
import hashlib
import json
import threading
import time
import unicodedata
import urllib.parse

import pytest

import guests
import hostside
from rest import ApiError, Connection

HOME = "/home/user"


@pytest.mark.limit(150)
def test_sizes_and_forms(api, session):
    for size in (0, 1, 4095, 16384, 18432, 65535, 65536, 65537, 1 << 20, 20_000_000):
        data = (hashlib.sha256(str(size).encode()).digest() * (size // 32 + 1))[:size]
        api.write(session, f"{HOME}/f", data)
        assert api.read(session, f"{HOME}/f") == data, size
        assert api.out(session, "sha256sum f").split()[0] == hashlib.sha256(data).hexdigest()
        api.write(session, f"{HOME}/g", gzip.compress(data), headers={"Content-Encoding": "gzip"})
        assert api.read(session, f"{HOME}/g") == data, size


def multipart(parts):
    boundary = "----boundary7x"
    body = b""
    for name, filename, data in parts:
        body += (f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n'
                 "Content-Type: application/octet-stream\r\n\r\n").encode() + data + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def test_multipart_upload(api, session):
    data = bytes(range(256)) * 1000 + b"\r\n--almost\r\n--"
    body, headers = multipart([("file", f"{HOME}/m1", data), ("file", f"{HOME}/m2", b"")])
    answer = api.call("POST", api.agent_path(session, "files"), raw=body, headers=headers)
    assert answer.status == 200, answer.body
    assert api.read(session, f"{HOME}/m1") == data and api.read(session, f"{HOME}/m2") == b""
    body, headers = multipart([("file", "x", data)])
    api.call("POST", api.agent_path(session, f"files?path={HOME}/m3"), raw=body, headers=headers)
    assert api.read(session, f"{HOME}/m3") == data


def test_chunked_upload(api, session):
    connection = Connection(api.address, 30)
    connection.request("POST", api.agent_path(session, f"files?path={HOME}/c"), headers=api.headers(
        {"Content-Type": "application/octet-stream"}), body=iter([b"abc" * 1000, b"def"]), encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert api.read(session, f"{HOME}/c") == b"abc" * 1000 + b"def"


def test_range_and_conditions(api, session):
    api.write(session, f"{HOME}/r", bytes(range(200)))
    path = api.agent_path(session, f"files?path={HOME}/r")
    for header, status, data in (("bytes=0-9", 206, bytes(range(10))), ("bytes=190-", 206, bytes(range(190, 200))),
                                 ("bytes=-5", 206, bytes(range(195, 200))), ("bytes=500-", 416, None),
                                 ("bytes=5-2", 200, bytes(range(200))), ("nonsense", 200, bytes(range(200)))):
        answer = api.call("GET", path, headers={"Range": header})
        assert answer.status == status, (header, answer.status)
        if data is not None:
            assert answer.body == data, header


def test_missing_and_wrong_kinds(api, session):
    for path, status in ((f"{HOME}/nothing", 404), (HOME, 400), ("/proc/self/mem/x", 400)):
        with pytest.raises(ApiError) as info:
            api.read(session, path)
        assert info.value.status == status or (status == 400 and info.value.status == 404), str(info.value)
        assert info.value.message
    with pytest.raises(ApiError) as info:
        api.write(session, HOME, b"x")
    assert info.value.status == 400
    api.out(session, f"mkfifo {HOME}/fifo; ln -s loop {HOME}/loop")
    started = time.monotonic()
    for path in (f"{HOME}/fifo", "/dev/zero", f"{HOME}/loop"):
        with pytest.raises(ApiError):
            api.read(session, path, timeout=10)
    assert time.monotonic() - started < guests.patient(8)
    assert api.exec(session, ["true"]).code == 0


def test_cut_upload_leaves_old_or_new(api, session):
    """An upload that breaks off, and two at once: the old content or one whole new one, never a mix."""
    api.write(session, f"{HOME}/whole", b"old")
    connection = Connection(api.address, 10)
    connection.putrequest("POST", api.agent_path(session, f"files?path={HOME}/whole"))
    for name, value in api.headers({"Content-Type": "application/octet-stream", "Content-Length": "1000000"}).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(b"n" * 300000)
    time.sleep(0.3)
    connection.close()
    time.sleep(0.5)
    assert api.read(session, f"{HOME}/whole") == b"old"
    guests.all_good(guests.parallel([lambda letter=letter: api.write(session, f"{HOME}/whole", letter * 2_000_000)
                                     for letter in (b"a", b"b", b"c")]))
    content = api.read(session, f"{HOME}/whole")
    assert len(content) == 2_000_000 and len(set(content)) == 1
    assert "whole" in api.out(session, "ls -A") and ".tmp" not in api.out(session, "ls -A")


def test_running_program_can_be_replaced(api, session):
    api.out(session, "cp /bin/sleep prog; ./prog 60 >/dev/null 2>&1 &")
    api.write(session, f"{HOME}/prog", b"#!/bin/sh\necho new\n")
    assert api.out(session, "chmod +x prog; ./prog") == "new"


@pytest.mark.limit(200)
def test_large_file_in_bounded_memory(daemon, api, session):
    """300 MB up and down: neither daemon nor agent holds it."""
    size = 300_000_000
    block = hashlib.sha256(b"x").digest() * 32768
    workers = daemon.role_pids("worker")
    before = sum(hostside.rss_bytes(pid) for pid in workers)
    peak = [0]
    done = threading.Event()

    def watch():
        while not done.wait(0.2):
            peak[0] = max(peak[0], sum(hostside.rss_bytes(pid) for pid in workers))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        digest = hashlib.sha256()

        def produce():
            left = size
            while left:
                piece = block[:min(left, len(block))]
                digest.update(piece)
                left -= len(piece)
                yield piece

        connection = Connection(api.address, 150)
        connection.request("POST", api.agent_path(session, f"files?path={HOME}/big"), body=produce(),
                           headers=api.headers({"Content-Type": "application/octet-stream", "Content-Length": str(size)}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        connection.request("GET", api.agent_path(session, f"files?path={HOME}/big"), headers=api.headers())
        response = connection.getresponse()
        back = hashlib.sha256()
        while piece := response.read(1 << 20):
            back.update(piece)
        assert back.hexdigest() == digest.hexdigest()
    finally:
        done.set()
        watcher.join()
    assert peak[0] - before < 32 << 20, peak
    assert int(api.out(session, "awk '/VmHWM/ {print $2}' /proc/1/status", user="root")) < 48 << 10


def test_new_folders_belong_to_the_user(api, session):
    api.write(session, f"{HOME}/a/b/c/f", b"x")
    assert api.out(session, "stat -c '%U %a' a a/b a/b/c a/b/c/f").split("\n") == ["user 755"] * 3 + ["user 644"]
    assert api.out(session, "rm -rf a && echo gone") == "gone"
    for path in ("/root/f", "/etc/new/f"):
        with pytest.raises(ApiError) as info:
            api.write(session, path, b"x")
        assert info.value.status in (400, 403), str(info.value)
    api.write(session, "/root/f", b"x", user="root")
    assert api.out(session, "stat -c %U /root/f", user="root") == "root"
    guests.all_good(guests.parallel([lambda n=n: api.write(session, f"{HOME}/tree/x/y/{n}", b"x") for n in range(10)]))
    assert api.out(session, "ls tree/x/y | wc -l; find tree ! -user user | wc -l").split() == ["10", "0"]


NAMES = ["emoji 😀", unicodedata.normalize("NFC", "grün"), unicodedata.normalize("NFD", "grün"), " leading", "a%2Fb",
         "a?b#c&d+e", '"quote"', "back\\slash", "new\nline", "tab\t", "-dash", "..x", "x" * 255]


def test_names_are_bytes(api, session):
    for name in NAMES:
        path = f"{HOME}/names/{name}"
        data = name.encode()
        api.write(session, path, data)
        assert api.read(session, path) == data, name
        entry = api.filesystem(session, "Stat", path=path)["entry"]
        assert entry["name"] == name and entry["path"] == path
    listed = {entry["name"] for entry in api.filesystem(session, "ListDir", path=f"{HOME}/names", depth=1)["entries"]}
    assert listed == set(NAMES)
    api.filesystem(session, "Move", source=f"{HOME}/names/{NAMES[0]}", destination=f"{HOME}/names/moved\n😀")
    api.filesystem(session, "Remove", path=f"{HOME}/names/moved\n😀")
    for too_long in ("x" * 256, "/".join(["y" * 200] * 25)):
        with pytest.raises(ApiError) as info:
            api.write(session, f"{HOME}/{too_long}", b"x")
        assert info.value.status == 400 and "too long" in info.value.message.lower(), str(info.value)


def test_listing_with_strange_entries(api, session):
    api.out(session, "mkdir -p odd/sub; cd odd; ln -s nowhere dangling; ln -s self self; ln -s b a; ln -s a b; "
                     "ln -s .. parent; ln -s sub folder; ln -s /root/x closed; mkfifo fifo; touch plain")
    api.out(session, "cd /home/user/odd; mknod dev c 1 3; "
                     "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'", user="root")
    for depth in (1, 2, 10):
        entries = api.filesystem(session, "ListDir", path=f"{HOME}/odd", depth=depth)["entries"]
        names = [entry["name"] for entry in entries]
        assert set(names) == {"dangling", "self", "a", "b", "parent", "folder", "closed", "fifo", "plain", "dev", "sock",
                              "sub"}, names
        assert len(names) == len(set(names))
        targets = {entry["name"]: entry.get("symlinkTarget") for entry in entries}
        assert targets["dangling"] and targets["parent"]
    api.out(session, "touch odd/sub/inside; ln -s sub odd/again")
    api.filesystem(session, "Remove", path=f"{HOME}/odd/folder")
    assert api.out(session, "ls odd/sub") == "inside"
    with pytest.raises(ApiError):
        api.filesystem(session, "ListDir", path=f"{HOME}/odd/plain", depth=1)
    with pytest.raises(ApiError) as info:
        api.filesystem(session, "ListDir", path=f"{HOME}/none", depth=1)
    assert info.value.code == "not_found"


@pytest.mark.limit(150)
def test_large_folder(api, session):
    api.out(session, ["python3", "-c", "import os\nos.mkdir('many')\nfor n in range(6000): open('many/%d' % n, 'w').close()"],
            timeout=110)
    entries = api.filesystem(session, "ListDir", path=f"{HOME}/many", depth=1)["entries"]
    assert len(entries) == 6000


def watch(api, session, path, recursive=True):
    """(seen, stream): events gathered in the background."""
    seen = []
    stream = api.stream(session, "filesystem.Filesystem/WatchDir", {"path": path, "recursive": recursive}, timeout=60)
    started = threading.Event()

    def read():
        try:
            for message in stream:
                event = message.get("event", message)
                if "filesystem" in event:
                    seen.append(event["filesystem"])
                started.set()
        except Exception as error:  # pylint: disable=broad-except
            seen.append({"error": repr(error)})
        finally:
            seen.append({"end": True})

    threading.Thread(target=read, daemon=True).start()
    started.wait(5)
    return seen, stream


def names_seen(seen):
    return {event["name"] for event in seen if "name" in event}


def test_watching_new_folders(api, session):
    api.out(session, "mkdir w")
    seen, stream = watch(api, session, f"{HOME}/w")
    for number in range(10):
        api.out(session, f"mkdir -p w/a{number}/b/c && echo x > w/a{number}/b/c/f")
    wanted = {f"a{n}/b/c/f" for n in range(10)} | {f"a{n}" for n in range(10)}
    guests.wait_for(lambda: wanted <= names_seen(seen), timeout=10)
    api.out(session, "mv w/a0 w/renamed; rm -r w/a1")
    guests.wait_for(lambda: "renamed" in names_seen(seen), timeout=10)
    stream.close()
    seen, stream = watch(api, session, f"{HOME}/w", recursive=False)
    api.out(session, "echo x > w/renamed/b/inside; echo x > w/top")
    guests.wait_for(lambda: "top" in names_seen(seen), timeout=10)
    assert not [name for name in names_seen(seen) if "inside" in name]
    api.out(session, "rm -r w")
    guests.wait_for(lambda: any("end" in event for event in seen), timeout=10)
    for path in (f"{HOME}/none", "/etc/passwd"):
        with pytest.raises(Exception):  # refused at once, in the head or as the stream's end
            list(api.stream(session, "filesystem.Filesystem/WatchDir", {"path": path}, timeout=10))


def test_watcher_calls(api, session):
    api.out(session, "mkdir w")
    watcher = api.filesystem(session, "CreateWatcher", path=f"{HOME}/w", recursive=True)["watcherId"]
    api.out(session, "echo x > w/f")
    events = []

    def poll():
        events.extend(api.filesystem(session, "GetWatcherEvents", watcherId=watcher).get("events", []))
        return any(event["name"] == "f" for event in events)

    guests.wait_for(poll, timeout=10)
    started = time.monotonic()
    api.filesystem(session, "RemoveWatcher", watcherId=watcher)
    assert time.monotonic() - started < guests.patient(1)
    with pytest.raises(ApiError):
        api.filesystem(session, "GetWatcherEvents", watcherId=watcher)


def test_watches_over_a_cycle(api, session):
    """A watch whose connection a suspend has cut says so; one that is asked for its events has missed none silently."""
    api.out(session, "mkdir w")
    seen, stream = watch(api, session, f"{HOME}/w")
    watcher = api.filesystem(session, "CreateWatcher", path=f"{HOME}/w", recursive=False)["watcherId"]
    api.out(session, "echo x > w/before")
    guests.wait_for(lambda: "before" in names_seen(seen), timeout=10)
    api.verb(session, "pause")
    api.verb(session, "resume")
    api.out(session, "echo x > w/between")
    guests.wait_for(lambda: "between" in names_seen(seen), timeout=10)
    assert not any("end" in event for event in seen)
    api.verb(session, "suspend")
    guests.wait_for(lambda: any("end" in event for event in seen), timeout=10)
    api.verb(session, "wake")
    api.out(session, "echo x > w/after")
    names = set()

    def poll():
        events = api.filesystem(session, "GetWatcherEvents", watcherId=watcher).get("events", [])
        names.update(event["name"] for event in events)
        return names >= {"before", "between", "after"}

    guests.wait_for(poll, timeout=10)
    stream.close()
    seen, stream = watch(api, session, f"{HOME}/w")
    api.out(session, "echo x > w/anew")
    guests.wait_for(lambda: "anew" in names_seen(seen), timeout=10)
    stream.close()


def test_copies_by_the_client(daemon, session, tmp_path):
    """`space cp`: files, folders, links and modes both ways, standard streams."""
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "plain").write_bytes(bytes(range(256)) * 999)
    (source / "sub" / "ä b").write_text("x")
    (source / "script").write_text("#!/bin/sh\necho ran\n")
    (source / "script").chmod(0o755)
    (source / "empty").write_bytes(b"")
    (source / "link").symlink_to("plain")
    daemon.cli("cp", source, f"{session}:/home/user/", check=0)
    assert daemon.cli("exec", session, "--", "sh", "tree/script", check=0).stdout == "ran\n"
    assert daemon.cli("exec", session, "--", "readlink", "tree/link", check=0).stdout == "plain\n"
    back = tmp_path / "back"
    daemon.cli("cp", f"{session}:/home/user/tree", back, check=0)
    folder = back if (back / "plain").exists() else back / "tree"
    for name in ("plain", "sub/ä b", "script", "empty"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert (folder / "script").stat().st_mode & 0o111
    done = daemon.cli("cp", "-", f"{session}:/home/user/piped", input=b"\0\xff", text=False, check=0)
    done = daemon.cli("cp", f"{session}:/home/user/piped", "-", text=False, check=0)
    assert done.stdout == b"\0\xff"
    assert daemon.cli("cp", f"{session}:/no/such", str(tmp_path / "x")).returncode == 125
    assert not (tmp_path / "x").exists()


def test_query_forms(api, session):
    """Paths are decoded once; relative ones start at home; escapes that are no text are refused."""
    api.write(session, "rel.txt", b"rel")
    assert api.out(session, "cat rel.txt") == "rel"
    api.write(session, "~/tilde", b"x")
    assert api.out(session, "cat tilde") == "x"
    for query in ("path=%zz", "path=a%00b", "", "path="):
        answer = api.call("GET", api.agent_path(session, f"files?{query}"))
        assert answer.status == 400, (query, answer.status)
        assert json.loads(answer.body)["message"]
    answer = api.call("GET", api.agent_path(session, "files?path=" + urllib.parse.quote(f"{HOME}/../user/rel.txt")))
    assert answer.status in (200, 400)
