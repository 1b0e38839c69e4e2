"""Files through the guest agent: upload, download, directories, names, rights."""
import concurrent.futures
import gzip
import hashlib
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
import urllib.parse

import pytest
from agent_files import Agent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")

USER = "spacefiles"
SIZES = [0, 1, 4095, 16384, 18432, 65535, 65536, 65537, 1 << 20]


@pytest.fixture(scope="module")
def agent():
    agent = Agent()
    yield agent
    agent.stop()


@pytest.fixture(scope="module")
def home():
    subprocess.run(["useradd", "--create-home", "--home-dir", f"/tmp/{USER}", USER], check=True, capture_output=True)
    yield f"/tmp/{USER}"
    subprocess.run(["userdel", "--remove", "--force", USER], check=False, capture_output=True)
    shutil.rmtree(f"/tmp/{USER}", ignore_errors=True)


@pytest.fixture
def folder():
    path = tempfile.mkdtemp(prefix="space-files-")
    os.chmod(path, 0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def small_disk(folder):
    place = f"{folder}/small"
    os.mkdir(place)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def content(size, seed=0):
    block = hashlib.sha512(str(seed).encode()).digest() * 1024
    return (block * (size // len(block) + 1))[:size]


# ---- contents ----

@pytest.mark.parametrize("kind", ["raw", "chunked", "form", "gzip", "gzip form"])
def test_every_size_comes_back_whole(agent, folder, kind):
    for size in SIZES:
        path, data = f"{folder}/f{size}", content(size, size)
        if kind == "form":
            answer = agent.put_form([("ignored", data)], path)
        elif kind == "gzip form":
            body = (b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + data + b"\r\n--B--\r\n")
            answer = agent.request("POST", agent.target(path), gzip.compress(body),
                                   {"Content-Type": "multipart/form-data; boundary=B", "Content-Encoding": "gzip"})
        elif kind == "gzip":
            answer = agent.put(path, gzip.compress(data), headers={"Content-Encoding": "gzip"})
        else:
            answer = agent.put(path, data, chunked=kind == "chunked")
        assert answer.status == 200, answer.body
        assert answer.json == [{"name": f"f{size}", "type": "file", "path": path}]
        assert open(path, "rb").read() == data
        got = agent.get(path)
        assert got.status == 200 and got.body == data
        assert got.headers["Content-Length"] == str(size)
        packed = agent.get(path, headers={"Accept-Encoding": "gzip"})
        assert (gzip.decompress(packed.body) if packed.headers["Content-Encoding"] else packed.body) == data
        assert agent.stat(path)["size"] == str(size)


def test_ranges(agent, folder):
    data = content(200000, 7)
    agent.put(f"{folder}/f", data)
    for value, part in [("bytes=0-0", data[:1]), ("bytes=100-70000", data[100:70001]), ("bytes=199999-", data[-1:]),
                        ("bytes=-5", data[-5:]), ("bytes=5-999999999", data[5:])]:
        got = agent.get(f"{folder}/f", headers={"Range": value})
        assert got.status == 206 and got.body == part
        first = len(data) - len(part) if value.startswith("bytes=-") else int(value[6:].split("-")[0])
        assert got.headers["Content-Range"] == f"bytes {first}-{first + len(part) - 1}/{len(data)}"
    got = agent.get(f"{folder}/f", headers={"Range": "bytes=200000-"})
    assert got.status == 416 and got.headers["Content-Range"] == "bytes */200000"
    assert agent.get(f"{folder}/f", headers={"Range": "bytes=0-1,5-6"}).status == 200
    etag = agent.get(f"{folder}/f").headers["ETag"]
    assert agent.get(f"{folder}/f", headers={"Range": "bytes=0-0", "If-Range": etag}).status == 206
    assert agent.get(f"{folder}/f", headers={"Range": "bytes=0-0", "If-Range": '"other"'}).status == 200
    assert agent.get(f"{folder}/f", headers={"If-None-Match": etag}).status == 304
    assert agent.get(f"{folder}/f", headers={"Accept-Encoding": "identity;q=0, br"}).status == 406


def test_several_files_in_one_form(agent, folder):
    answer = agent.put_form([(f"{folder}/a/1", b"one"), (f"{folder}/b/2", b""), (f"{folder}/c", b"three")])
    assert answer.status == 200
    assert [entry["path"] for entry in answer.json] == [f"{folder}/a/1", f"{folder}/b/2", f"{folder}/c"]
    assert open(f"{folder}/a/1").read() == "one" and os.path.getsize(f"{folder}/b/2") == 0
    answer = agent.put_form([(f"{folder}/same", b"first"), (f"{folder}/./same", b"second")])
    assert answer.status == 400 and open(f"{folder}/same").read() == "first"


@pytest.mark.limit(600)
def test_three_gigabytes_need_no_memory(agent, folder):
    if shutil.disk_usage(folder).free < 8 << 30:
        pytest.skip("needs 8 GiB of disk")
    size, block = (256 << 20 if os.environ.get("SPACE_TEST_SANITIZED") else 3 << 30), content(1 << 20, 1)
    before = agent.rss_kb()
    peak = [0]
    ended = threading.Event()

    def observe():
        while not ended.wait(0.1):
            peak[0] = max(peak[0], agent.rss_kb())
    observer = threading.Thread(target=observe)
    observer.start()
    try:
        want = hashlib.sha256()

        def blocks():
            for _ in range(size // len(block)):
                want.update(block)
                yield block
        answer = agent.put(f"{folder}/big", blocks(), headers={"Content-Length": str(size)})
        assert answer.status == 200, answer.body
        connection = agent.connect()
        connection.request("GET", agent.target(f"{folder}/big"))
        response = connection.getresponse()
        assert response.headers["Content-Length"] == str(size)
        got = hashlib.sha256()
        while piece := response.read(1 << 20):
            got.update(piece)
        connection.close()
        assert got.digest() == want.digest()
    finally:
        ended.set()
        observer.join()
    assert peak[0] - before < 32 * 1024 and agent.rss_kb() < 16 * 1024


def test_a_cut_upload_leaves_the_old_content(agent, folder):
    path = f"{folder}/f"
    agent.put(path, b"old")
    for headers in ["Content-Length: 100000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\nffff\r\n"]:
        with socket.create_connection(("127.0.0.1", agent.port)) as s:
            s.sendall(f"POST {agent.target(path)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
                      f"{headers}".encode() + b"n" * 50000)
    broken = gzip.compress(content(100000))[:-20]
    answer = agent.put(path, broken, headers={"Content-Encoding": "gzip"})
    assert answer.status == 400 and "gzip" in answer.message
    answer = agent.request("POST", agent.target(path), b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nnew',
                           {"Content-Type": "multipart/form-data; boundary=B"})
    assert answer.status == 400
    time.sleep(0.3)
    assert open(path).read() == "old" and os.listdir(folder) == ["f"]


def test_a_full_disk_is_told_and_changes_nothing(agent, small_disk):
    path = f"{small_disk}/f"
    agent.put(path, b"old")
    for options in [{}, {"chunked": True}]:
        answer = agent.put(path, content(3 << 20), **options)
        assert answer.status == 507 and answer.code == 507 and "disk space" in answer.message
        answer = agent.put(f"{small_disk}/other", content(3 << 20), **options)
        assert answer.status == 507
        assert os.listdir(small_disk) == ["f"] and open(path).read() == "old"
    answer = agent.put_form([(f"{small_disk}/form", content(3 << 20))])
    assert answer.status == 507 and os.listdir(small_disk) == ["f"]
    assert agent.put(path, content(700000)).status == 200


def test_parallel_uploads_do_not_mix(agent, folder):
    path = f"{folder}/f"
    contents = [content(300000 + i, i) for i in range(8)]
    agent.put(path, contents[0])
    stop = threading.Event()
    bad = []

    def look():
        while not stop.is_set():
            data = open(path, "rb").read()
            if data not in contents:
                bad.append(len(data))
    thread = threading.Thread(target=look)
    thread.start()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(a.status == 200 for a in pool.map(lambda i: agent.put(path, contents[i % 8], chunked=i % 2 == 0),
                                                     range(64)))
    stop.set()
    thread.join()
    assert not bad and os.listdir(folder) == ["f"]


def test_a_running_program_can_be_replaced(agent, folder):
    program = f"{folder}/sleeper"
    shutil.copy("/bin/sleep", program)
    os.link(program, f"{folder}/twin")
    running = subprocess.Popen([program, "60"])
    try:
        for name in [program, f"{folder}/twin"]:
            assert agent.put(name, b"#!/bin/sh\necho new\n").status == 200
            assert stat.S_IMODE(os.stat(name).st_mode) == 0o755
            assert subprocess.run([name], capture_output=True, text=True).stdout == "new\n"
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()


def test_what_cannot_be_read_or_written(agent, folder):
    assert agent.get(f"{folder}/missing").status == 404
    assert agent.get(f"{folder}/missing/x").status == 404
    answer = agent.get(folder)
    assert answer.status == 400 and "directory" in answer.message
    for path in [folder, folder + "/", f"{folder}/new/"]:
        answer = agent.put(path, b"x")
        assert answer.status == 400 and "directory" in answer.message, answer.body
    open(f"{folder}/file", "w").close()
    assert agent.put(f"{folder}/file/below", b"x").status == 400
    os.mkfifo(f"{folder}/fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    os.mknod(f"{folder}/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.symlink("fifo", f"{folder}/to-fifo")
    for name, word in [("fifo", "FIFO"), ("socket", "socket"), ("null", "device"), ("to-fifo", "FIFO")]:
        start = time.monotonic()
        for answer in [agent.get(f"{folder}/{name}"), agent.put(f"{folder}/{name}", b"x")]:
            assert answer.status == 400 and word in answer.message
        assert time.monotonic() - start < 1
    listener.close()
    assert agent.put(None, b"x").status == 400
    answer = agent.request("POST", agent.target(f"{folder}/x"), b"x", {"Content-Type": "text/plain"})
    assert answer.status == 400 and "content type" in answer.message
    answer = agent.put(f"{folder}/x", b"x", headers={"Content-Encoding": "br"})
    assert answer.status == 400
    assert agent.request("GET", "/files?path=%00").status == 400
    assert agent.request("GET", "/files?path=%zz").status == 400
    assert "x" not in os.listdir(folder)


def test_files_without_a_size(agent):
    got = agent.get("/proc/self/status")
    assert got.status == 200 and b"Name:" in got.body
    answer = agent.put("/proc/sys/kernel/nothing", b"1")
    assert answer.status in (403, 404, 500)


# ---- owners and rights ----

def test_new_files_and_folders_belong_to_the_user(agent, home):
    answer = agent.put("a/b/c/f", b"x", user=USER)
    assert answer.status == 200 and answer.json[0]["path"] == f"{home}/a/b/c/f"
    uid = pwd.getpwnam(USER).pw_uid
    for path, mode in [("a", 0o755), ("a/b", 0o755), ("a/b/c", 0o755), ("a/b/c/f", 0o644)]:
        info = os.stat(f"{home}/{path}")
        assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (uid, mode)
    entry = agent.stat("a/b/c/f", USER)
    assert entry["owner"] == USER and entry["permissions"] == "-rw-r--r--" and entry["mode"] == 0o644
    assert entry["type"] == "FILE_TYPE_FILE" and entry["name"] == "f" and entry["modifiedTime"].endswith("Z")
    subprocess.run(["su", USER, "-c", f"rm -rf {home}/a"], check=True)
    assert agent.put("~/t", b"", user=USER).json[0]["path"] == f"{home}/t"
    assert agent.put("", b"", user=USER).status == 400
    assert agent.put("~root/t", b"", user=USER).status == 400


def test_a_user_has_no_more_rights_than_elsewhere(agent, home, folder):
    os.mkdir(f"{folder}/roots")
    open(f"{folder}/roots/secret", "w").write("secret")
    os.chmod(f"{folder}/roots/secret", 0o600)
    for answer in [agent.put(f"{folder}/roots/new/f", b"x", user=USER), agent.put(f"{folder}/roots/f", b"x", user=USER),
                   agent.put(f"{folder}/roots/secret", b"x", user=USER), agent.get(f"{folder}/roots/secret", user=USER),
                   agent.get("/etc/shadow", user=USER)]:
        assert answer.status == 403 and "EACCES" in answer.message
    for method, body in [("MakeDir", {"path": f"{folder}/roots/d"}), ("Remove", {"path": f"{folder}/roots"}),
                         ("Move", {"source": f"{folder}/roots", "destination": f"{home}/roots"}),
                         ("Move", {"source": "/etc/hostname", "destination": f"{home}/h"})]:
        answer = agent.call(method, body, USER)
        assert answer.code == "permission_denied", (method, answer.body)
    assert sorted(os.listdir(f"{folder}/roots")) == ["secret"]
    os.chmod(f"{folder}/roots", 0o700)
    assert agent.call("ListDir", {"path": f"{folder}/roots"}, USER).code == "permission_denied"
    assert agent.call("Stat", {"path": f"{folder}/roots/secret"}, USER).code == "permission_denied"
    # Groups count too: a file that only a supplementary group may read.
    os.chmod(f"{folder}/roots", 0o755)
    subprocess.run(["groupadd", "spacefilesgroup"], check=True)
    try:
        shutil.chown(f"{folder}/roots/secret", "root", "spacefilesgroup")
        os.chmod(f"{folder}/roots/secret", 0o640)
        assert agent.get(f"{folder}/roots/secret", user=USER).status == 403
        subprocess.run(["usermod", "-aG", "spacefilesgroup", USER], check=True)
        assert agent.get(f"{folder}/roots/secret", user=USER).body == b"secret"
        assert agent.stat(f"{folder}/roots/secret", USER)["group"] == "spacefilesgroup"
    finally:
        subprocess.run(["groupdel", "spacefilesgroup"], check=False)


def test_the_agent_itself_cannot_be_looked_at(agent, home):
    me = agent.process.pid
    for path in ["/proc/self/environ", "/proc/self/mem", "/proc/self/maps", "/proc/thread-self/maps", f"/proc/{me}/maps",
                 f"/proc/{me}/environ", "/proc/self/fd/0", "/proc/self/root/etc/shadow", "/proc/self/cwd/x"]:
        assert agent.get(path, user=USER).status in (403, 404, 409), path
        assert agent.put(path, b"x", user=USER).status in (400, 403, 404, 409), path
    assert agent.call("ListDir", {"path": "/proc/self/fd"}, USER).status in (400, 403)


def test_an_existing_file_keeps_what_it_is(agent, home, folder):
    uid = pwd.getpwnam(USER).pw_uid
    path = f"{home}/kept"
    agent.put("kept", b"1", user=USER)
    os.chmod(path, 0o4750)
    os.setxattr(path, "user.mine", b"attribute")
    agent.put(path, b"2", user="root")
    info = os.stat(path)
    assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (uid, 0o4750) and open(path).read() == "2"
    assert os.getxattr(path, "user.mine") == b"attribute"
    agent.put(path, b"3", user=USER)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o750
    # Writable file of another owner, in the user's folder and in one where the user cannot make files.
    for place in [f"{home}/roots", f"{folder}/roots"]:
        open(place, "w").write("root's, and long")
        os.chmod(place, 0o666)
        inode = os.stat(place).st_ino
        assert agent.put(place, b"user's", user=USER).status == 200
        info = os.stat(place)
        assert (info.st_uid, info.st_ino, stat.S_IMODE(info.st_mode)) == (0, inode, 0o666)
        assert open(place).read() == "user's"
    os.symlink(f"{folder}/roots", f"{home}/link")
    assert agent.put("link", b"through", user=USER).status == 200
    assert os.path.islink(f"{home}/link") and open(f"{folder}/roots").read() == "through"


def test_mode_can_be_asked_for(agent, home):
    assert agent.put("tool", b"x", user=USER, mode="755").status == 200
    assert stat.S_IMODE(os.stat(f"{home}/tool").st_mode) == 0o755
    assert agent.put("tool", b"x", user=USER, mode="4711").status == 200
    assert stat.S_IMODE(os.stat(f"{home}/tool").st_mode) == 0o4711
    for bad in ["8", "0x1", "77777", "-1", ""]:
        assert agent.put("tool", b"x", user=USER, mode=bad).status == 400, bad


def test_parallel_uploads_into_one_new_tree(agent, home):
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda i: agent.put(f"p/q/r/f{i}", b"x", user=USER), range(20)))
    assert [answer.status for answer in answers] == [200] * 20
    assert len(os.listdir(f"{home}/p/q/r")) == 20
    assert os.stat(f"{home}/p/q").st_uid == pwd.getpwnam(USER).pw_uid


def test_users_that_do_not_exist(agent, folder):
    answer = agent.put(f"{folder}/f", b"x", user="nobody-here")
    assert answer.status in (400, 401, 404) and "nobody-here" in answer.message
    answer = agent.call("ListDir", {"path": folder}, "nobody-here")
    assert answer.status != 200 and "nobody-here" in answer.message
    assert os.listdir(folder) == []


# ---- names ----

NAMES = ["😀.txt", "ü-nfc".encode().decode(), "u\u0308-nfd", "ü-nfc-other", "a b", " leading", "a%2Fb", "a?b#c&d+e", '"quote"',
         "back\\slash", "new\nline", "carriage\r\nX-Evil: 1", "tab\tulator", "-rf", "..x", "x" * 255, "%", "a;b=c", "'", "~"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("kind", ["raw", "form", "form without path"])
def test_names_are_kept_byte_by_byte(agent, folder, name, kind):
    path = f"{folder}/{name}"
    if kind == "raw":
        answer = agent.put(path, b"data")
    elif kind == "form":
        answer = agent.put_form([("x", b"data")], path)
    else:
        answer = agent.put_form([(path, b"data")])
    assert answer.status == 200, answer.body
    assert answer.json[0]["path"] == path and answer.json[0]["name"] == name
    assert os.listdir(os.fsencode(folder)) == [name.encode()]
    assert agent.names(folder) == [name]
    assert agent.stat(path)["name"] == name
    got = agent.get(path)
    assert got.body == b"data" and "X-Evil" not in got.headers
    disposition = got.headers["Content-Disposition"]
    assert disposition.isascii()
    if "filename*" in disposition:
        assert urllib.parse.unquote(disposition.split("UTF-8''")[1]) == name
    else:
        assert disposition == f'inline; filename="{name}"'
    answer = agent.call("Move", {"source": path, "destination": f"{folder}/moved"})
    assert answer.status == 200
    answer = agent.call("Move", {"source": f"{folder}/moved", "destination": path})
    assert answer.json["entry"]["path"] == path
    assert agent.call("Remove", {"path": path}).status == 200
    assert os.listdir(folder) == []


def test_normal_forms_are_two_files(agent, folder):
    agent.put(f"{folder}/\u00fc", b"composed")
    agent.put(f"{folder}/u\u0308", b"decomposed")
    assert agent.get(f"{folder}/\u00fc").body == b"composed" and len(agent.names(folder)) == 2


def test_names_that_are_too_long(agent, folder):
    for path in [f"{folder}/{'x' * 256}", folder + "/x" * 2100, f"{folder}/{'y' * 300}/f"]:
        for answer in [agent.put(path, b"x"), agent.put_form([(path, b"x")]), agent.get(path)]:
            assert answer.status == 400 and "ENAMETOOLONG" in answer.message, answer.body
        for method in ["Stat", "MakeDir", "Remove", "ListDir"]:
            answer = agent.call(method, {"path": path})
            assert answer.code == "invalid_argument" and "ENAMETOOLONG" in answer.message, (method, answer.body)
    assert os.listdir(folder) == []


def test_names_that_are_not_utf8(agent, folder):
    import base64
    raw = os.fsencode(folder) + b"/bad\xff\xc3name"
    answer = agent.request("POST", "/files?username=root&path=" + urllib.parse.quote(raw), b"x",
                           {"Content-Type": "application/octet-stream"})
    assert answer.status == 200 and base64.b64decode(answer.json[0]["pathBytes"]) == raw
    assert os.listdir(os.fsencode(folder)) == [b"bad\xff\xc3name"]
    entry = agent.call("ListDir", {"path": folder}).json["entries"][0]
    assert entry["name"] == "bad\ufffd\ufffdname" and base64.b64decode(entry["nameBytes"]) == b"bad\xff\xc3name"
    assert agent.call("Stat", {"pathBytes": entry["pathBytes"]}).json["entry"]["pathBytes"] == entry["pathBytes"]
    got = agent.request("GET", "/files?username=root&path=" + urllib.parse.quote(raw))
    assert got.body == b"x" and got.headers["Content-Disposition"].endswith("UTF-8''bad%FF%C3name")
    answer = agent.call("Move", {"sourceBytes": entry["pathBytes"], "destination": f"{folder}/good"})
    assert answer.status == 200 and os.listdir(folder) == ["good"]
    for bad in ["%%%", "AA==", 5]:
        assert agent.call("Stat", {"pathBytes": bad}).code == "invalid_argument"


# ---- links and directories ----

@pytest.fixture
def zoo(folder):
    os.mkdir(f"{folder}/dir")
    open(f"{folder}/dir/inside", "w").close()
    open(f"{folder}/file", "w").write("12345")
    for name, target in [("dangling", "nowhere"), ("self", "self"), ("a", "b"), ("b", "a"), ("parent", ".."),
                         ("to-dir", "dir"), ("to-file", "file"), ("absolute", f"{folder}/file")]:
        os.symlink(target, f"{folder}/{name}")
    os.mkfifo(f"{folder}/fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(f"{folder}/socket")
    os.mknod(f"{folder}/device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    return folder


def test_links_are_listed_and_not_followed(agent, zoo):
    for depth in [1, 2, 10]:
        answer = agent.call("ListDir", {"path": zoo, "depth": depth})
        entries = {entry["path"]: entry for entry in answer.json["entries"]}
        assert len(entries) == 13 + (depth > 1)
        assert (f"{zoo}/dir/inside" in entries) == (depth > 1)
        assert not any(path.startswith((f"{zoo}/to-dir/", f"{zoo}/parent/")) for path in entries)
        by_name = {entry["name"]: entry for entry in entries.values()}
        assert by_name["dangling"]["type"] == "FILE_TYPE_SYMLINK" and by_name["dangling"]["symlinkTarget"] == "nowhere"
        assert by_name["self"]["symlinkTarget"] == "self" and by_name["a"]["type"] == "FILE_TYPE_SYMLINK"
        assert by_name["to-dir"]["type"] == "FILE_TYPE_DIRECTORY"
        assert by_name["to-dir"]["symlinkTarget"] == f"{zoo}/dir"
        assert by_name["to-file"]["type"] == "FILE_TYPE_FILE" and by_name["to-file"]["permissions"] == "Lrwxrwxrwx"
        assert by_name["parent"]["symlinkTarget"] == os.path.dirname(zoo)
        assert by_name["fifo"]["permissions"].startswith("p") and by_name["fifo"]["type"] == "FILE_TYPE_UNSPECIFIED"
        assert by_name["socket"]["permissions"].startswith("S") and by_name["device"]["permissions"].startswith("Dc")
        assert "symlinkTarget" not in by_name["file"]
    assert agent.names(f"{zoo}/to-dir") == ["inside"]
    assert agent.call("ListDir", {"path": f"{zoo}/to-dir"}).json["entries"][0]["path"] == f"{zoo}/to-dir/inside"


def test_links_one_by_one(agent, zoo):
    for name in ["self", "a", "b"]:
        answer = agent.call("Stat", {"path": f"{zoo}/{name}"})
        assert answer.code == "failed_precondition" and "ELOOP" in answer.message
        assert agent.get(f"{zoo}/{name}").status in (400, 409)
        assert agent.put(f"{zoo}/{name}", b"x").status in (400, 409)
        assert agent.call("ListDir", {"path": f"{zoo}/{name}"}).code == "failed_precondition"
    assert agent.stat(f"{zoo}/dangling")["symlinkTarget"] == "nowhere"
    assert agent.get(f"{zoo}/dangling").status == 404
    assert agent.get(f"{zoo}/to-file").body == b"12345"
    for name in ["dangling", "self", "a", "parent", "to-dir", "to-file", "absolute", "fifo", "socket", "device"]:
        assert agent.call("Remove", {"path": f"{zoo}/{name}"}).status == 200
    assert sorted(os.listdir(zoo)) == ["b", "dir", "file"] and os.listdir(f"{zoo}/dir") == ["inside"]


def test_stat_of_special_places(agent, folder):
    assert agent.stat("/")["path"] == "/" and agent.stat("/")["type"] == "FILE_TYPE_DIRECTORY"
    assert agent.stat(f"{folder}/../")["type"] == "FILE_TYPE_DIRECTORY"
    assert agent.stat(f"{folder}//.//")["path"] == folder
    assert agent.call("Stat", {"path": f"{folder}/missing"}).code == "not_found"
    assert agent.call("Stat", {"path": 7}).code == "invalid_argument"
    assert agent.call("Stat", {"path": "/etc/hostname/x"}).code == "invalid_argument"


def test_list_arguments(agent, folder):
    os.makedirs(f"{folder}/a/b/c")
    assert agent.names(folder, depth=0) == ["a"]
    assert agent.names(folder, depth=2) == ["a", "a/b"]
    assert agent.names(folder, depth=256) == ["a", "a/b", "a/b/c"]
    assert agent.call("ListDir", {"path": folder, "depth": "2"}).status == 200
    for bad in [257, -1, "x", 1.5, [1]]:
        assert agent.call("ListDir", {"path": folder, "depth": bad}).code == "invalid_argument"
    assert agent.call("ListDir", {"path": f"{folder}/missing"}).code == "not_found"
    assert agent.call("ListDir", {"path": "/etc/hostname"}).code == "invalid_argument"


@pytest.mark.limit(300)
def test_a_hundred_thousand_entries(agent, folder):
    for i in range(100000):
        os.close(os.open(f"{folder}/entry-{i:06}", os.O_CREAT | os.O_WRONLY))
    before = agent.rss_kb()
    for _ in range(2):
        names = agent.names(folder)
        assert len(names) == 100000 and names == sorted(names)
    assert agent.rss_kb() - before < 4096
    # Entries that go while they are listed.
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for i in range(0, 100000, 50):
                os.unlink(f"{folder}/entry-{i:06}")
            for i in range(0, 100000, 50):
                os.close(os.open(f"{folder}/entry-{i:06}", os.O_CREAT | os.O_WRONLY))
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(3):
            assert 98000 <= len(agent.names(folder)) <= 100000
    finally:
        stop.set()
        thread.join()
    assert agent.call("Remove", {"path": folder}).status == 200
    assert not os.path.exists(folder)


def test_make_dir(agent, home, folder):
    answer = agent.call("MakeDir", {"path": "m/n/o"}, USER)
    assert answer.status == 200 and answer.json["entry"]["path"] == f"{home}/m/n/o"
    assert answer.json["entry"]["owner"] == USER and answer.json["entry"]["name"] == "o"
    answer = agent.call("MakeDir", {"path": "m/n"}, USER)
    assert answer.status == 409 and answer.code == "already_exists"
    open(f"{folder}/f", "w").close()
    assert agent.call("MakeDir", {"path": f"{folder}/f"}).code == "invalid_argument"
    assert agent.call("MakeDir", {"path": f"{folder}/f/g"}).code == "invalid_argument"


def test_move(agent, folder, small_disk):
    agent.put(f"{folder}/a", b"a")
    answer = agent.call("Move", {"source": f"{folder}/a", "destination": f"{folder}/new/sub/b"})
    assert answer.status == 200 and answer.json["entry"]["path"] == f"{folder}/new/sub/b"
    agent.put(f"{folder}/c", b"c")
    assert agent.call("Move", {"source": f"{folder}/c", "destination": f"{folder}/new/sub/b"}).status == 200
    assert open(f"{folder}/new/sub/b").read() == "c"
    assert agent.call("Move", {"source": f"{folder}/c", "destination": f"{folder}/never/d"}).code == "not_found"
    assert not os.path.exists(f"{folder}/never")
    answer = agent.call("Move", {"source": f"{folder}/new", "destination": f"{small_disk}/new"})
    assert answer.code == "failed_precondition" and "file systems" in answer.message
    assert agent.call("Move", {"source": f"{folder}/new", "destination": f"{folder}/new/sub/x"}).code == "invalid_argument"
    os.symlink("new", f"{folder}/link")
    assert agent.call("Move", {"source": f"{folder}/link", "destination": f"{folder}/link2"}).status == 200
    assert os.readlink(f"{folder}/link2") == "new"


def test_remove(agent, folder):
    os.makedirs(f"{folder}/t/a/b")
    os.makedirs(f"{folder}/kept")
    open(f"{folder}/kept/f", "w").close()
    os.symlink(f"{folder}/kept", f"{folder}/t/a/link")
    assert agent.call("Remove", {"path": f"{folder}/t"}).status == 200
    assert os.listdir(folder) == ["kept"] and os.listdir(f"{folder}/kept") == ["f"]
    assert agent.call("Remove", {"path": f"{folder}/t"}).status == 200
    assert agent.call("Remove", {"path": "/"}).code == "invalid_argument"


# ---- metadata, compose ----

def test_metadata_is_kept_with_the_file(agent, folder):
    path = f"{folder}/f"
    answer = agent.put(path, b"1", headers={"X-Metadata-Color": "blue", "x-metadata-n": "1"})
    assert answer.json[0]["metadata"] == {"color": "blue", "n": "1"}
    assert agent.stat(path)["metadata"] == {"color": "blue", "n": "1"}
    assert os.getxattr(path, "user.e2b.color") == b"blue"
    assert agent.call("ListDir", {"path": folder}).json["entries"][0]["metadata"]["n"] == "1"
    agent.put(path, b"2", headers={"X-Metadata-Other": "x"})
    assert agent.stat(path)["metadata"] == {"other": "x"}
    agent.put(path, b"3")
    assert "metadata" not in agent.stat(path)
    assert agent.put(path, b"4", headers={"X-Metadata-Big": "x" * 5000}).status == 400
    assert agent.put(path, b"4", headers={"X-Metadata-Bad": "\x80"}).status == 400
    assert open(path).read() == "3"


def test_compose(agent, folder):
    parts = [content(1 << 20, 1), b"", b"tail"]
    for i, part in enumerate(parts):
        agent.put(f"{folder}/part{i}", part)

    def compose(body):
        return agent.request("POST", "/files/compose", json.dumps({"username": "root", **body}),
                             {"Content-Type": "application/json"})
    sources = [f"{folder}/part{i}" for i in range(3)]
    assert compose({"source_paths": sources + [f"{folder}/missing"], "destination": f"{folder}/whole"}).status == 404
    assert compose({"source_paths": [folder], "destination": f"{folder}/whole"}).status == 400
    assert compose({"source_paths": sources, "destination": sources[0]}).status == 400
    assert compose({"source_paths": [], "destination": f"{folder}/whole"}).status == 400
    assert sorted(os.listdir(folder)) == ["part0", "part1", "part2"]
    answer = compose({"source_paths": sources, "destination": f"{folder}/whole"})
    assert answer.status == 200 and answer.json == {"name": "whole", "type": "file", "path": f"{folder}/whole"}
    assert os.listdir(folder) == ["whole"] and open(f"{folder}/whole", "rb").read() == b"".join(parts)


# ---- signed links ----

TOKEN = "token-of-this-test"


def sign(path, operation, user, expiry=None, token=TOKEN):
    import base64
    text = f"{path}:{operation}:{user}:{token}" + ("" if expiry is None else f":{expiry}")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture(scope="module")
def secured():
    agent = Agent(token=TOKEN)
    yield agent
    agent.stop()


def test_signed_links(secured, home, folder):
    path = f"{folder}/f"
    open(path, "w").write("data")
    now = int(time.time())

    def fetch(method, query, headers=None):
        connection = secured.connect()
        connection.request(method, "/files?" + urllib.parse.urlencode(query), b"new" if method == "POST" else None,
                           {"Content-Type": "application/octet-stream", **(headers or {})})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body
    good = {"path": path, "username": "root", "signature": sign(path, "read", "root", now + 60),
            "signature_expiration": now + 60}
    assert fetch("GET", good) == (200, b"data")
    assert fetch("GET", {"path": path, "username": "root", "signature": sign(path, "read", "root")})[0] == 200
    assert fetch("GET", {"path": path, "username": "root"})[0] == 401
    assert fetch("GET", {"path": path, "username": "root"}, {"X-Access-Token": TOKEN})[0] == 200
    assert fetch("GET", good, {"X-Access-Token": "wrong"})[0] == 401
    # Each thing a link binds, changed.
    assert fetch("POST", good)[0] == 401
    for change in [{"path": f"{folder}/./f"}, {"path": f"{folder}/x/../f"}, {"path": path.upper()}, {"username": USER},
                   {"signature_expiration": now + 61}, {"signature": ""}, {"signature": good["signature"] * 2},
                   {"signature": good["signature"][:-1]}, {"signature": "v1_" + good["signature"][3:].swapcase()},
                   {"signature_expiration": f"0{now + 60}"}, {"signature_expiration": ""}]:
        assert fetch("GET", {**good, **change})[0] == 401, change
    assert fetch("GET", {k: v for k, v in good.items() if k != "signature_expiration"})[0] == 401
    assert fetch("GET", {**good, "signature": sign(path, "read", "root", now + 60, "other-session")})[0] == 401
    # Expiry.
    for expiry, status in [(now, 401), (now - 1, 401), (0, 401), (-1, 401), (now + 5, 200), (1 << 31, 200),
                           ((1 << 63) - 1, 200), (1 << 63, 401)]:
        got, body = fetch("GET", {**good, "signature": sign(path, "read", "root", expiry), "signature_expiration": expiry})
        assert got == status, (expiry, body)
    _, body = fetch("GET", {**good, "signature": sign(path, "read", "root", now - 5), "signature_expiration": now - 5})
    assert "signature_expired" in json.loads(body)["message"]
    # Writing; without a user; mode bits are not covered by a link.
    write = {"path": path, "username": "root", "signature": sign(path, "write", "root")}
    assert fetch("POST", {**write, "mode": "4777"})[0] == 400
    assert fetch("POST", write)[0] == 200 and open(path).read() == "new"
    assert fetch("GET", write)[0] == 401
    assert fetch("GET", {"path": path, "signature": sign(path, "read", "")})[0] in (200, 400, 401, 403)


def test_links_expire_by_the_time_that_the_host_told(folder):
    path = f"{folder}/f"
    open(path, "w").close()
    agent = Agent(token=TOKEN)
    try:
        for offset in [86400, -86400]:
            now = int(time.time()) + offset
            told = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
            assert agent.request("POST", "/init", json.dumps({"timestamp": told, "accessToken": TOKEN}),
                                 {"Content-Type": "application/json"}).status == 204
            agent.token = None
            for expiry, status in [(now - 5, 401), (now + 5, 200)]:
                assert agent.get(path, signature=sign(path, "read", "root", expiry),
                                 signature_expiration=expiry).status == status, (offset, expiry - now)
            agent.token = TOKEN
    finally:
        agent.stop()


def test_every_call_needs_the_token(secured, folder):
    connection = secured.connect()
    for method in ["Stat", "ListDir", "Remove", "CreateWatcher", "GetWatcherEvents", "RemoveWatcher", "MakeDir", "Move"]:
        connection.request("POST", f"/filesystem.Filesystem/{method}", json.dumps({"path": folder}),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.status == 401, method
    connection.request("POST", "/files/compose", "{}", {"Content-Type": "application/json"})
    assert connection.getresponse().status == 401
    connection.close()


def test_nothing_stays_open(agent, folder):
    agent.put(f"{folder}/f", b"x")
    before = agent.descriptors()
    for _ in range(50):
        agent.get(f"{folder}/f")
        agent.get(f"{folder}/missing")
        agent.put(f"{folder}/f/x", b"x")
        agent.put(f"{folder}/f", b"y")
        agent.names(folder)
        agent.call("Stat", {"path": f"{folder}/f"})
    time.sleep(0.2)
    assert agent.descriptors() <= before + 2
