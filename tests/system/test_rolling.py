"""Rolling snapshots while programs write in every way: each is a consistent instant of memory and disk."""
import datetime
import json
import time

import pytest

import guests

INTERVAL_S = 2
KEPT = 10


def moment(snapshot):
    return datetime.datetime.fromisoformat(snapshot["created_at"].replace("Z", "+00:00")).timestamp()


def rolling_of(api, session):
    return [entry for entry in api.history(session)["snapshots"] if entry["kind"] == "rolling"]


@pytest.mark.limit(900)
def test_rewind_to_each_of_the_last_ten(api, make):
    """O_DIRECT, buffered, git and SQLite writers; integrity is clean everywhere, the counter is the one of then."""
    session = make()
    api.write(session, "/tmp/check.sh", guests.CHECK_WRITERS.encode())
    guests.start_counter(api, session)
    for name, program in guests.WRITERS.items():
        guests.background(api, session, program, name)
    api.write(session, "/tmp/git.sh", guests.GIT_WRITER.encode())
    api.out(session, "nohup sh /tmp/git.sh >/tmp/git.out 2>&1 </dev/null &")
    guests.wait_for(lambda: api.exec(session, "test -f db.sqlite && git -C repo log -1 >/dev/null").code == 0)
    # Every snapshot from here on has all that the checks need.
    api.update(session, snapshot_interval_s=INTERVAL_S)
    guests.wait_for(lambda: len(rolling_of(api, session)) >= KEPT, timeout=120, pause=0.5)
    api.update(session, snapshot_interval_s=0)
    present = guests.ask_counter(api, session)
    chosen = rolling_of(api, session)[-KEPT:]
    assert len({entry["id"] for entry in chosen}) == KEPT
    seen = []
    for entry in reversed(chosen):
        api.verb(session, "rewind", snapshot=entry["id"])
        counter = guests.ask_counter(api, session)
        assert counter["token"] == present["token"]
        # The last line written before the instant of the snapshot carries the guest's time of then.
        lines = api.out(session, "cat /home/user/counter.log").split("\n")
        before = [line for line in lines if float(line.split()[1]) <= moment(entry) + 0.3]
        assert before and moment(entry) - float(before[-1].split()[1]) < 1.5, (entry, before[-1])
        seen.append(int(before[-1].split()[0]))
        done = api.exec(session, ["sh", "/tmp/check.sh"], timeout=guests.patient(120))
        assert done.code == 0, (entry, done)
        assert api.history(session)["head"]
    assert seen == sorted(seen, reverse=True), seen
    # No rewind lost the present of before it.
    kept = [entry for entry in api.history(session)["snapshots"] if entry["kind"] == "rewind"]
    assert len(kept) >= KEPT - 1
    api.verb(session, "rewind", snapshot=kept[0]["id"])
    assert guests.ask_counter(api, session)["n"] >= present["n"]


def test_nothing_is_taken_when_nothing_changed(api, make):
    session = make(snapshot_interval_s=1)
    api.out(session, "echo x > f")
    guests.wait_for(lambda: rolling_of(api, session), timeout=20)
    time.sleep(3)
    count = len(rolling_of(api, session))
    time.sleep(5)
    assert len(rolling_of(api, session)) - count <= 1
    api.out(session, "echo y > f")
    guests.wait_for(lambda: len(rolling_of(api, session)) > count, timeout=20)


def test_a_rolling_snapshot_disturbs_no_stream(api, make):
    session = make(snapshot_interval_s=1)
    result = api.exec(session, "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.02; done", timeout=60)
    assert [int(number) for number in result.out.split()] == list(range(1, 301))
    assert len(rolling_of(api, session)) >= 3


def test_stored_bytes_follow_changed_bytes(api, make):
    """A snapshot costs what changed, not what the guest's memory is."""
    session = make()
    api.verb(session, "snapshot")
    api.out(session, "head -c 8000000 /dev/urandom > blob; sync")
    entry = api.verb(session, "snapshot")
    assert 0 < entry["bytes_stored"] < 160 << 20, entry
    time.sleep(0.2)
    idle = api.verb(session, "snapshot")
    assert idle["bytes_stored"] < 64 << 20, idle


def test_deleting_a_snapshot_leaves_the_others(api, session):
    ids = []
    for number in range(4):
        api.out(session, f"echo {number} > n")
        ids.append(api.verb(session, "snapshot")["id"])
    api.ask("DELETE", f"/v1/sessions/{session}/snapshots/{ids[1]}")
    left = [entry["id"] for entry in api.history(session)["snapshots"]]
    assert ids[1] not in left and {ids[0], ids[2], ids[3]} <= set(left)
    for number in (0, 2, 3):
        api.verb(session, "rewind", snapshot=ids[number])
        assert api.out(session, "cat n") == str(number)
    answer = api.call("POST", f"/v1/sessions/{session}/rewind", {"snapshot": ids[1]})
    assert answer.status == 404


def test_history_draws_a_tree(daemon, api, session):
    api.out(session, "echo 1 > n")
    first = api.verb(session, "snapshot", name="one")["id"]
    api.out(session, "echo 2 > n")
    api.verb(session, "snapshot", name="two")
    api.verb(session, "rewind", snapshot=first)
    api.out(session, "echo 3 > n")
    api.verb(session, "snapshot", name="three")
    history = api.history(session)
    by_name = {entry["name"]: entry for entry in history["snapshots"] if entry.get("name")}
    assert by_name["two"]["parent"] == first and by_name["three"]["parent"] == first
    assert history["head"] == by_name["three"]["id"]
    text = daemon.cli("history", session, check=0).stdout
    for name in ("one", "two", "three"):
        assert name in text
    assert json.loads(daemon.cli("history", session, "--json", check=0).stdout)["head"] == history["head"]
