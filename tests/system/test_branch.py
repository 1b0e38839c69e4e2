"""Branches share nothing with their origin but the past, and the origin does not notice them."""
import datetime
import json
import struct
import threading
import time

import pytest

import guests

COUNT = 8


def moment(snapshot):
    return datetime.datetime.fromisoformat(snapshot["created_at"].replace("Z", "+00:00")).timestamp()


@pytest.mark.limit(180)
def test_nothing_secret_or_random_is_shared(api, session):
    """Kernel random numbers, ids, tokens, machine ids, host names: no value twice in origin and eight branches."""
    guests.background(api, session, guests.RANDOM, "random")
    api.write(session, "/tmp/ask.py", guests.ASK_RANDOM.encode())
    guests.wait_for(lambda: api.exec(session, "test -S /tmp/random.sock").code == 0)
    time.sleep(1)
    branches = [entry["id"] for entry in api.branch(session, COUNT)]
    assert len(set(branches)) == COUNT
    everyone = [session, *branches]
    time.sleep(2)
    probe = ("cat /proc/sys/kernel/random/uuid /etc/machine-id; hostname; "
             "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; python3 -c 'import uuid; print(uuid.uuid4())'")
    identities = guests.all_good(guests.parallel([lambda one=one: api.out(one, probe).split("\n") for one in everyone]))
    for column in range(5):
        values = [identity[column] for identity in identities]
        assert len(set(values)) == len(everyone), (column, values)
    tokens = [api.get(one).get("access_token") or one for one in everyone]
    assert len(set(tokens)) == len(everyone)
    instant = moment([entry for entry in api.history(session)["snapshots"] if entry["kind"] == "branch"][-1])
    owners = {}
    for one in everyone:
        for _, value, drawn_at in json.loads(api.out(one, ["python3", "/tmp/ask.py"])):
            owners.setdefault(value, []).append((one, drawn_at))
    after = [one for owner in owners.values() for one, drawn_at in owner if drawn_at > instant]
    assert set(after) == set(everyone)  # each has gone on drawing
    shared = {value: owner for value, owner in owners.items() if len(owner) > 1}
    assert shared, "no past in common"
    # A draw that had begun when the guest was stopped may end in all of them; none that began later may.
    late = [(drawn_at - instant, len(owner)) for owner in shared.values() for _, drawn_at in owner
            if drawn_at > instant + 0.05]
    assert not late, late[:10]


def test_clock_of_branches_of_a_suspended_session(api, session):
    api.verb(session, "suspend")
    time.sleep(15)
    branches = [entry["id"] for entry in api.branch(session, 3)]

    def skew(one):
        before = time.time()
        guest = float(api.out(one, ["date", "+%s.%N"]))
        return max(before - guest, guest - time.time(), 0)

    for value in guests.all_good(guests.parallel([lambda one=one: skew(one) for one in branches])):
        assert value <= 0.5, value
    assert api.state(session) == "suspended"


@pytest.mark.limit(150)
def test_open_streams_of_the_origin_go_on(api, session):
    """An exec, a terminal and a WebSocket through a port lose and repeat nothing while the origin branches."""
    guests.background(api, session, guests.WEBSOCKET, "ticks", (8765,))
    guests.wait_for(lambda: api.exec(session, "grep -q ':223D ' /proc/net/tcp").code == 0)
    pid, exec_stream = api.start(session, guests.TICKER)
    shell, pty_stream = api.start(session, guests.TICKER, pty=(80, 24))
    socket = api.websocket(session, 8765, "/ticks", timeout=20)
    collected = {"exec": [], "pty": [], "websocket": []}
    gaps = {"websocket": 0.0}
    stop = threading.Event()

    def from_stream(name, stream):
        def enough(result):
            return stop.is_set()
        try:
            result = api.collect(stream, until=enough)
        except (OSError, ValueError, AttributeError) as error:
            collected[name] = error
            return
        collected[name] = [int(word) for word in (result.out + result.pty).split(b"\n")[:-1] if word.strip()]

    def from_socket():
        last = time.monotonic()
        while not stop.is_set():
            try:
                _, data = socket.receive()
            except OSError as error:
                collected["websocket"].append(error)
                return
            now = time.monotonic()
            gaps["websocket"] = max(gaps["websocket"], now - last)
            last = now
            collected["websocket"].append(int(data))

    threads = [threading.Thread(target=from_stream, args=("exec", exec_stream)),
               threading.Thread(target=from_stream, args=("pty", pty_stream)), threading.Thread(target=from_socket)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    branches = [entry["id"] for entry in api.branch(session, COUNT)]
    time.sleep(1)
    more = [entry["id"] for entry in api.branch(session, 1)]
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join(20)
    for stream in (exec_stream, pty_stream):
        stream.close()
    socket.close()
    for name, values in collected.items():
        assert isinstance(values, list) and all(isinstance(value, int) for value in values), (name, values)
        assert len(values) > 30, (name, len(values))
        assert values == list(range(values[0], values[0] + len(values))), name
    assert len(branches) == COUNT and len(more) == 1
    api.kill(session, pid)
    api.kill(session, shell)


@pytest.mark.limit(150)
def test_answers_come_from_the_right_guest(api, session):
    """Ten branches with the same server on the same port and address: each preview answers with its own name."""
    guests.start_web(api, session)
    everyone = [session, *[entry["id"] for entry in api.branch(session, 5)]]
    names = {one: api.out(one, "hostname") for one in everyone}
    assert len(set(names.values())) == len(everyone)

    def ask(one):
        wrong = []
        for _ in range(30):
            answer = api.preview(one, 8000, "/")
            if answer.status != 200 or answer.body.decode() != names[one]:
                wrong.append((answer.status, answer.body[:100]))
        return wrong

    assert guests.all_good(guests.parallel([lambda one=one: ask(one) for one in everyone])) == [[]] * len(everyone)


def test_writes_stay_where_they_were_made(api, session):
    api.out(session, "echo origin > f; echo x > /dev/shm/m")
    one, two = [entry["id"] for entry in api.branch(session, 2)]
    api.out(one, "echo one > f; echo one > /dev/shm/m")
    api.out(two, "cat f; echo two >> f")
    assert api.out(session, "cat f /dev/shm/m") == "origin\nx"
    assert api.out(one, "cat f /dev/shm/m") == "one\none"
    assert api.out(two, "cat f /dev/shm/m") == "origin\ntwo\nx"
    api.delete(session)
    # A branch needs nothing of its origin.
    api.verb(one, "suspend")
    assert api.out(one, "cat f") == "one"


def test_branch_at_a_snapshot(api, session):
    api.out(session, "echo early > f")
    early = api.verb(session, "snapshot")["id"]
    api.out(session, "echo late > f")
    branch = api.branch(session, 1, snapshot=early)[0]["id"]
    assert api.out(branch, "cat f") == "early"
    assert api.out(session, "cat f") == "late"
    answer = api.call("POST", f"/v1/sessions/{session}/branch", {"snapshot": "nnotthere"})
    assert answer.status in (400, 404)
    for count in (0, -1, 100000, "two"):
        assert api.call("POST", f"/v1/sessions/{session}/branch", {"count": count}).status == 400


def test_branch_takes_environment_and_policy_along(api, make):
    session = make(environment={"A": "1", "B": "2"}, labels={"k": "v"})
    branch = api.branch(session)[0]["id"]
    assert api.out(branch, 'echo "$A$B"') == "12"
    assert api.get(branch)["labels"] == {"k": "v"}
    assert api.get(branch)["id"] != session


def test_half_written_messages_of_the_past_are_not_served(api, session):
    """Connections that were open at the instant do not reach into the branch."""
    guests.background(api, session, guests.WEBSOCKET, "echo", (8765,))
    guests.wait_for(lambda: api.exec(session, "grep -q ':223D ' /proc/net/tcp").code == 0)
    socket = api.websocket(session, 8765, "/echo")
    socket.send(b"half", final=False)
    branch = api.branch(session)[0]["id"]
    fresh = api.websocket(branch, 8765, "/echo")
    fresh.send(b"whole")
    assert fresh.receive() == (2, b"whole")
    socket.sock.sendall(b"")
    socket.send(b"-rest", opcode=0)
    assert socket.receive() == (2, b"half-rest")
    fresh.send(struct.pack(">H", 1000), opcode=8)
    fresh.close()
    socket.close()
