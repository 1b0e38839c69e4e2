"""Timeouts, races of verbs, listing, and VMMs that end by themselves."""
import os
import signal
import threading
import time

import pytest

import guests
from rest import ApiError


def statuses(functions):
    return [answer.status for answer in guests.all_good(guests.parallel(functions))]


@pytest.mark.limit(150)
def test_parallel_wakes_make_one_vmm(daemon, api, session):
    api.out(session, "true")
    for _ in range(8):
        api.verb(session, "suspend")
        answers = statuses([lambda: api.call("POST", f"/v1/sessions/{session}/connect", {}) for _ in range(10)])
        assert set(answers) <= {200, 201}, answers
        assert len(daemon.vmms()) == 1
        assert api.out(session, "echo fine") == "fine"


@pytest.mark.limit(150)
def test_connect_right_behind_suspend(daemon, api, session):
    """Not waiting for the suspend's answer: in the end it runs and answers."""
    for number in range(15):
        worker = threading.Thread(target=lambda: api.call("POST", f"/v1/sessions/{session}/suspend", {}))
        worker.start()
        time.sleep(0.01 * (number % 5))
        answer = api.call("POST", f"/v1/sessions/{session}/connect", {})
        worker.join(20)
        assert answer.status in (200, 201), answer.body
        # The suspend may have come second; then using it wakes it.
        assert api.out(session, "echo fine") == "fine"
        assert api.state(session) == "running" and len(daemon.vmms()) == 1


def test_two_suspends_make_one_generation(api, session):
    api.out(session, "echo x > f")
    before = len(api.history(session)["snapshots"])
    answers = statuses([lambda: api.call("POST", f"/v1/sessions/{session}/suspend", {}) for _ in range(2)])
    assert set(answers) <= {200, 204, 409}, answers
    assert len(api.history(session)["snapshots"]) == before + 1


@pytest.mark.limit(120)
def test_use_during_a_slow_suspend(api, session):
    """A guest with much dirty memory: requests that come meanwhile are answered, nothing is lost."""
    guests.start_web(api, session)
    api.out(session, "head -c 200000000 /dev/urandom > /dev/shm/dirty; sha256sum < /dev/shm/dirty > sum", timeout=60)

    def later(function):
        time.sleep(0.1)
        return function()

    results = guests.parallel([
        lambda: api.verb(session, "suspend", _timeout=60)["state"],
        lambda: later(lambda: api.preview(session, 8000, "/", timeout=60).status),
        lambda: later(lambda: api.out(session, "sha256sum < /dev/shm/dirty | diff - sum && echo same", timeout=60))])
    assert guests.all_good(results) == ["suspended", 200, "same"]


def test_kill_timer_stands_still_while_suspended(daemon, api, make):
    """Suspended by hand before its time ran out, it is not deleted when the old time comes."""
    session = make(timeout_s=4, on_timeout="kill")
    api.out(session, "echo kept > f")
    time.sleep(1)
    api.verb(session, "suspend")
    time.sleep(3)
    daemon.restart()
    time.sleep(3)
    assert api.state(session) == "suspended"
    api.verb(session, "connect")
    assert api.out(session, "cat f") == "kept"
    guests.wait_for(lambda: api.call("GET", f"/v1/sessions/{session}").status == 404, timeout=15)


def test_timeout_kill(daemon, api, make):
    session = make(timeout_s=2, on_timeout="kill")
    guests.wait_for(lambda: api.call("GET", f"/v1/sessions/{session}").status == 404, timeout=15)
    guests.wait_for(lambda: daemon.vmms() == [], timeout=10)


def test_connect_extends_and_never_shortens(api, make):
    session = make(timeout_s=1800)
    before = api.get(session)["end_at"]
    api.verb(session, "connect", timeout_s=300)
    assert api.get(session)["end_at"] >= before
    api.verb(session, "connect", timeout_s=3600)
    assert api.get(session)["end_at"] > before
    api.update(session, timeout_s=60)
    assert api.get(session)["end_at"] < before


def test_policy_survives_every_wake(api, make):
    session = make(timeout_s=2, on_timeout="suspend")
    for _ in range(3):
        api.wait_state(session, "suspended", timeout=15)
        api.verb(session, "connect", timeout_s=2)
        assert api.get(session)["on_timeout"] == "suspend"
    api.wait_state(session, "suspended", timeout=15)


def test_listing_and_filters(api, make):
    running = [make(labels={"k": "v"} if n % 2 else {}) for n in range(3)]
    suspended = [make(labels={"k": "v"} if n % 2 else {}) for n in range(3)]
    for one in suspended:
        api.verb(one, "suspend")
    paused = make()
    api.verb(paused, "pause")
    dead = make()
    api.delete(dead)

    def ids(**query):
        found = [entry["id"] for entry in api.list(**query)]
        assert len(found) == len(set(found))
        return set(found)

    assert ids() == {*running, *suspended, paused}
    assert ids(state="running") == set(running)
    assert ids(state="suspended") == set(suspended)
    assert ids(state="paused") == {paused}
    assert ids(state=["running", "paused"]) == {*running, paused}
    assert ids(limit=2) == {*running, *suspended, paused}
    labelled = {entry["id"] for entry in api.list() if entry["labels"] == {"k": "v"}}
    assert ids(label="k=v") == labelled and len(labelled) == 2
    for query in ("state=nonsense", "limit=0", "limit=x", "cursor=garbage", "colour=red"):
        answer = api.call("GET", f"/v1/sessions?{query}")
        assert answer.status == 400, (query, answer.status, answer.body)


def test_pages_stay_whole_while_one_changes(api, make):
    sessions = {make() for _ in range(5)}
    changing = sorted(sessions)[2]
    stop = threading.Event()

    def change():
        while not stop.is_set():
            api.verb(changing, "pause")
            api.verb(changing, "resume")

    worker = threading.Thread(target=change)
    worker.start()
    try:
        for _ in range(10):
            found = [entry["id"] for entry in api.list(limit=2)]
            assert len(found) == len(set(found)) and set(found) >= sessions - {changing}
    finally:
        stop.set()
        worker.join(20)


def kill_vmm(daemon, api, session):
    os.kill(daemon.vmms()[0], signal.SIGKILL)


def in_guest(command):
    def act(daemon, api, session):
        try:
            api.exec(session, command, user="root", timeout=10)
        except Exception:  # pylint: disable=broad-except
            pass
    return act


@pytest.mark.parametrize("way", ["vmm killed", "reboot", "poweroff", "panic"])
def test_a_vmm_that_ends_is_noticed(daemon, api, session, way):
    """State changes within 5 s with a reason, streams end, memory and disk of one generation come back."""
    act = {"vmm killed": kill_vmm, "reboot": in_guest("echo b > /proc/sysrq-trigger"),
           "poweroff": in_guest("echo o > /proc/sysrq-trigger"), "panic": in_guest("echo c > /proc/sysrq-trigger")}[way]
    guests.start_counter(api, session)
    counter = guests.ask_counter(api, session)
    api.out(session, "echo durable > f")
    api.verb(session, "snapshot")
    api.out(session, "echo lost > f; sync")
    _, stream = api.start(session, "while :; do echo x; sleep 0.1; done")
    ended = threading.Event()

    def read():
        try:
            api.collect(stream)
        except Exception:  # pylint: disable=broad-except
            pass
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.3)
    act(daemon, api, session)
    # The use by the reader must not be what wakes it: look at it without using it.
    entry = api.wait_state(session, "suspended", timeout=6)
    assert entry.get("reason"), entry
    assert ended.wait(5)
    guests.wait_for(lambda: daemon.vmms() == [], timeout=10)
    text = str(entry.get("reason")).lower() + str(entry.get("reason_code", "")).lower()
    if way == "poweroff":
        assert "power" in text, text
    elif way == "panic":
        assert "panic" in text or "reboot" in text or "crash" in text, text
    assert api.out(session, "cat f") == "durable"
    guests.check_counter(api, session, counter["n"], counter["token"])
    assert entry.get("lost_since"), entry


def test_environment_reaches_every_process(api, make):
    values = {"A": "1", "EMPTY": "", "EQ": "a=b=c", "LINES": "one\ntwo", "QUOTE": "it's \"q\"", "DOLLAR": "$HOME",
              "UTF": "äöü☃", "BIG": "x" * 60000}
    session = make(environment=values)

    def seen(one, **options):
        code = "import os, json, sys; sys.stdout.write(json.dumps({k: os.environ.get(k) for k in %r}))" % list(values)
        import json
        return json.loads(api.out(one, ["python3", "-c", code], **options))

    assert seen(session) == values
    assert seen(session, env={"A": "2"})["A"] == "2"
    assert seen(session)["A"] == "1"
    assert api.out(session, ["bash", "-lc", 'echo "$A-$EQ"']) == "1-a=b=c"
    api.verb(session, "suspend")
    assert seen(session) == values
    branch = api.branch(session)[0]["id"]
    assert seen(branch) == values


def test_create_answers_when_the_guest_does(api):
    """What create returns is usable at once."""
    for _ in range(3):
        made = api.create(template="default", snapshot_interval_s=0)
        started = time.monotonic()
        assert api.exec(made["id"], ["true"]).code == 0
        assert time.monotonic() - started < guests.patient(2)
        api.delete(made["id"])


def test_too_many_sandboxes_is_told(daemon, api, make):
    """A limit that is reached is named, and what it keeps out is as it was."""
    daemon.settings["sandboxes_max"] = 2
    daemon.restart(hard=False)
    try:
        sleeper, first = make(), make()
        api.verb(sleeper, "suspend")
        make()
        with pytest.raises(ApiError) as info:
            api.create(template="default")
        assert info.value.status == 429 and "2 sandboxes" in info.value.message
        with pytest.raises(ApiError) as info:
            api.verb(sleeper, "wake")
        assert info.value.status == 429 and api.state(sleeper) == "suspended"
        assert len(api.list()) == 3
        api.delete(first)
        api.verb(sleeper, "wake")
        assert api.out(sleeper, "echo awake") == "awake"
    finally:
        del daemon.settings["sandboxes_max"]
        daemon.restart(hard=False)
