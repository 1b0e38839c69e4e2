"""Watching directories through the guest agent."""
import os
import shutil
import subprocess
import tempfile
import time

import pytest
from agent_files import Agent, Watch

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")


@pytest.fixture(scope="module")
def agent():
    agent = Agent()
    yield agent
    agent.stop()


@pytest.fixture
def folder():
    path = tempfile.mkdtemp(prefix="space-watch-")
    os.chmod(path, 0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def watch(agent, folder):
    opened = []

    def start(path=folder, recursive=True, **options):
        w = Watch(agent, {"path": path, "recursive": recursive, **options.pop("body", {})}, **options)
        opened.append(w)
        return w
    yield start
    for w in opened:
        w.close()


def test_plain_events(agent, folder, watch):
    w = watch(recursive=False)
    with open(f"{folder}/f", "w") as f:
        f.write("x")
    w.wait(("create", "f"), ("write", "f"))
    os.chmod(f"{folder}/f", 0o600)
    w.wait(("chmod", "f"))
    os.rename(f"{folder}/f", f"{folder}/g")
    w.wait(("rename", "f"), ("create", "g"))
    os.unlink(f"{folder}/g")
    w.wait(("remove", "g"))
    os.makedirs(f"{folder}/sub/inner")
    open(f"{folder}/sub/file", "w").close()
    w.wait(("create", "sub"))
    time.sleep(0.2)
    assert not any(name.startswith("sub/") for _, name in w.seen())


def test_just_created_directories(agent, folder, watch):
    w = watch()
    subprocess.run(["sh", "-c", "mkdir -p a/b/c && echo x > a/b/c/f"], cwd=folder, check=True)
    w.wait(("create", "a"), ("create", "a/b"), ("create", "a/b/c"), ("create", "a/b/c/f"))
    for round_number in range(30):
        subprocess.run(["sh", "-c", f"mkdir -p r{round_number}/x/y/z && touch r{round_number}/x/y/z/f"], cwd=folder, check=True)
    w.wait(*[("create", f"r{i}/x/y/z/f") for i in range(30)])
    created = [event for event in w.seen() if event[0] == "create"]
    assert len(created) == len(set(created))


@pytest.mark.limit(240)
def test_a_clone_of_two_thousand_files(agent, folder, watch):
    source = f"{folder}-source"
    os.mkdir(source)
    try:
        for i in range(2000):
            os.makedirs(f"{source}/d{i % 40}/e{i % 7}", exist_ok=True)
            open(f"{source}/d{i % 40}/e{i % 7}/f{i}", "w").write(str(i))
        w = watch()
        shutil.copytree(source, f"{folder}/clone")
        w.wait(*[("create", f"clone/d{i % 40}/e{i % 7}/f{i}") for i in range(2000)], seconds=30)
        assert not any(event.get("overflow") for event in w.events)
        # In, out, inside.
        shutil.move(source, f"{folder}/in")
        w.wait(("create", "in"), *[("create", f"in/d{i % 40}/e{i % 7}/f{i}") for i in range(2000)], seconds=30)
        os.rename(f"{folder}/in/d1", f"{folder}/inside")
        w.wait(("rename", "in/d1"), ("create", "inside"), ("create", "inside/e1/f1"))
        open(f"{folder}/inside/e1/late", "w").close()
        w.wait(("create", "inside/e1/late"))
        os.rename(f"{folder}/in", source)
        w.wait(("rename", "in"))
        count = len(w.events)
        open(f"{source}/d2/outside", "w").close()
        time.sleep(0.3)
        assert len(w.events) == count
    finally:
        shutil.rmtree(source, ignore_errors=True)


def test_uploads_show_as_what_they_mean(agent, folder, watch):
    w = watch()
    agent.put(f"{folder}/new/f", b"1")
    w.wait(("create", "new"), ("create", "new/f"))
    agent.put(f"{folder}/new/f", b"2")
    w.wait(("write", "new/f"))
    agent.put(f"{folder}/g", b"2")
    w.wait(("create", "g"), ("write", "g"))
    time.sleep(0.2)
    assert not [name for _, name in w.seen() if "space-upload" in name or "#" in name]


def test_entries_in_events(agent, folder, watch):
    w = watch(body={"includeEntry": True})
    os.mkdir(f"{folder}/d")
    open(f"{folder}/d/f", "w").write("123")
    w.wait(("create", "d/f"))
    event = next(e for e in w.events if e["name"] == "d/f")
    assert event["entry"]["path"] == f"{folder}/d/f" and event["entry"]["type"] == "FILE_TYPE_FILE"
    os.unlink(f"{folder}/d/f")
    w.wait(("remove", "d/f"))
    assert "entry" not in next(e for e in w.events if e["type"] == "EVENT_TYPE_REMOVE")


def test_the_end_of_the_directory_is_told(agent, folder, watch):
    for how, kind in [(lambda: shutil.rmtree(f"{folder}/w"), "remove"),
                      (lambda: os.rename(f"{folder}/w", f"{folder}/w2"), "rename")]:
        os.mkdir(f"{folder}/w")
        w = watch(path=f"{folder}/w")
        how()
        w.wait((kind, "."))
        assert w.wait_end()["end"]["error"]["code"] == "not_found"
    os.mkdir(f"{folder}/w")
    assert w.seen()[-1] == ("rename", ".")


def test_what_cannot_be_watched(agent, folder, watch):
    open(f"{folder}/file", "w").close()
    os.mkdir(f"{folder}/closed", 0o700)
    assert watch(path=f"{folder}/missing").end["end"]["error"]["code"] == "not_found"
    assert watch(path=f"{folder}/file").end["end"]["error"]["code"] == "invalid_argument"
    assert watch(path=f"{folder}/closed", user="nobody").end["end"]["error"]["code"] == "permission_denied"
    assert watch(body={"recursive": "yes"}).end["end"]["error"]["code"] == "invalid_argument"
    os.symlink(folder, f"{folder}-link")
    try:
        w = watch(path=f"{folder}-link")
        open(f"{folder}/through", "w").close()
        w.wait(("create", "through"))
    finally:
        os.unlink(f"{folder}-link")


def test_two_watches_on_one_path_and_taken_rights(agent, folder, watch):
    one, two = watch(), watch(recursive=False)
    open(f"{folder}/f", "w").close()
    one.wait(("create", "f"))
    two.wait(("create", "f"))
    one.close()
    os.chmod(folder, 0o000)
    two.wait(("chmod", "."))
    open(f"{folder}/g", "w").close()
    two.wait(("create", "g"))
    os.chmod(folder, 0o755)


def test_keepalives_and_deadlines(agent, folder, watch):
    w = watch(headers={"Keepalive-Ping-Interval": "1"})
    time.sleep(2.5)
    assert len(w.kinds) == 2
    w = watch(headers={"Connect-Timeout-Ms": "300"})
    assert w.wait_end(2)["end"]["error"]["code"] == "deadline_exceeded"


@pytest.mark.limit(240)
def test_a_client_that_does_not_read(agent, folder, watch):
    before = agent.rss_kb()
    w = watch(is_reading=False)
    for i in range(100000):
        os.close(os.open(f"{folder}/f{i % 1000}", os.O_CREAT | os.O_WRONLY))
        os.unlink(f"{folder}/f{i % 1000}")
    assert agent.rss_kb() - before < 16 * 1024
    assert agent.get("/etc/hostname").status == 200
    w.start_reading()
    deadline = time.monotonic() + 20
    while not any(event.get("overflow") for event in list(w.events)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    open(f"{folder}/after", "w").close()
    w.wait(("create", "after"), seconds=20)
    w.close()


def poll(agent, watcher, wanted, seconds=10):
    seen = []
    deadline = time.monotonic() + seconds
    while not wanted <= set(seen):
        answer = agent.call("GetWatcherEvents", {"watcherId": watcher})
        assert answer.status == 200, answer.body
        seen += [(e["type"].removeprefix("EVENT_TYPE_").lower(), e["name"]) for e in answer.json["events"]]
        assert time.monotonic() < deadline, f"missing {wanted - set(seen)}"
        time.sleep(0.01)
    return seen


def test_polled_watchers(agent, folder):
    answer = agent.call("CreateWatcher", {"path": folder, "recursive": True})
    watcher = answer.json["watcherId"]
    assert agent.call("GetWatcherEvents", {"watcherId": watcher}).json == {"events": []}
    subprocess.run(["sh", "-c", "mkdir -p a/b && echo x > a/b/f"], cwd=folder, check=True)
    poll(agent, watcher, {("create", "a"), ("create", "a/b"), ("create", "a/b/f")})
    start = time.monotonic()
    assert agent.call("RemoveWatcher", {"watcherId": watcher}).status == 200
    assert time.monotonic() - start < 1
    for method in ["RemoveWatcher", "GetWatcherEvents"]:
        assert agent.call(method, {"watcherId": watcher}).code == "not_found"
    assert agent.call("GetWatcherEvents", {"watcherId": "w" * 500}).code == "not_found"
    assert agent.call("GetWatcherEvents", {}).code == "invalid_argument"
    for path, code in [(f"{folder}/missing", "not_found"), ("/etc/hostname", "invalid_argument")]:
        assert agent.call("CreateWatcher", {"path": path}).code == code


def test_polled_watchers_are_bounded(agent, folder):
    watcher = agent.call("CreateWatcher", {"path": folder}).json["watcherId"]
    for i in range(40000):
        os.close(os.open(f"{folder}/f{i % 1000}", os.O_CREAT | os.O_WRONLY))
        os.unlink(f"{folder}/f{i % 1000}")
    time.sleep(0.5)
    events = agent.call("GetWatcherEvents", {"watcherId": watcher}).json["events"]
    assert len(events) <= 16385 and any(event.get("overflow") for event in events)
    os.mkdir(f"{folder}/after")
    poll(agent, watcher, {("create", "after")})
    shutil.rmtree(folder)
    poll(agent, watcher, {("remove", ".")})
    assert agent.call("GetWatcherEvents", {"watcherId": watcher}).code == "not_found"
    assert agent.call("RemoveWatcher", {"watcherId": watcher}).status == 200


def test_the_number_of_watchers_is_limited(agent, folder):
    watchers = []
    while True:
        answer = agent.call("CreateWatcher", {"path": folder})
        if answer.status != 200:
            break
        watchers.append(answer.json["watcherId"])
    assert answer.code == "resource_exhausted" and len(watchers) >= 32
    for watcher in watchers:
        assert agent.call("RemoveWatcher", {"watcherId": watcher}).status == 200
    time.sleep(0.3)
    watcher = agent.call("CreateWatcher", {"path": folder}).json["watcherId"]
    assert agent.call("RemoveWatcher", {"watcherId": watcher}).status == 200


def test_nothing_stays_open(agent, folder):
    time.sleep(0.3)
    before = agent.descriptors()
    for _ in range(20):
        w = Watch(agent, {"path": folder, "recursive": True})
        w.close()
        watcher = agent.call("CreateWatcher", {"path": folder}).json["watcherId"]
        agent.call("RemoveWatcher", {"watcherId": watcher})
    time.sleep(0.5)
    assert agent.descriptors() <= before + 2
