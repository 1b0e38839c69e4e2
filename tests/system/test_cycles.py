"""Suspend and wake lose nothing: processes, memory, unsynced files, clock, agent channel, servers."""
import http.client
import threading
import time

import pytest

import guests
from rest import ApiError, StreamError

CYCLES = 10


@pytest.mark.limit(180)
def test_ten_cycles_with_daemon_kills(daemon, api, session):
    """A counter in a live process and its unsynced file survive ten cycles, with kill -9 of spaced in between."""
    guests.start_counter(api, session)
    last = guests.ask_counter(api, session)
    token, pid = last["token"], last["pid"]
    for cycle in range(CYCLES):
        api.out(session, f"echo {cycle} > /home/user/cycle-{cycle}")
        if cycle % 3 == 0:
            daemon.restart(hard=True)
            assert api.state(session) == "running"
        api.verb(session, "suspend")
        if cycle % 3 == 1:
            daemon.restart(hard=True)
            assert api.state(session) == "suspended"
        api.verb(session, "wake")
        last = guests.check_counter(api, session, last["n"], token)
        assert last["pid"] == pid
        present = api.out(session, "cat /home/user/cycle-*").split()
        assert present == [str(n) for n in range(cycle + 1)]
    assert api.exec(session, "dmesg | grep -iE 'ext4.*err|i/o error'", user="root").code == 1


def test_timeout_suspend_loses_no_more_than_an_explicit_one(api, make):
    """A timeout goes the same way as a request: last line and in-memory number agree."""
    session = make(on_timeout="suspend")
    guests.start_counter(api, session)
    before = guests.ask_counter(api, session)
    api.update(session, timeout_s=4)
    suspended = api.wait_state(session, "suspended", timeout=15)
    assert suspended["state"] == "suspended"
    api.verb(session, "wake")
    # The time of life starts anew with the wake.
    api.wait_state(session, "suspended", timeout=15)
    api.update(session, timeout_s=0)
    api.verb(session, "wake")
    guests.check_counter(api, session, before["n"] + 50, before["token"])
    assert api.exec(session, "dmesg | grep -i 'ext4.*error'", user="root").code == 1


@pytest.mark.limit(150)
def test_agent_answers_after_being_cut_in_full_traffic(api, session):
    """Suspend while execs and a large stream run, wake, snapshot at once: the next exec answers within 2 s."""
    stop = threading.Event()
    outcomes = {"good": 0, "cut": 0, "silent": 0}

    def small():
        while not stop.is_set():
            started = time.monotonic()
            try:
                api.exec(session, ["true"], timeout=20)
                outcomes["good"] += 1
            except (ApiError, StreamError, OSError, EOFError, Exception):  # pylint: disable=broad-except
                outcomes["cut"] += 1
            if time.monotonic() - started > 15:
                outcomes["silent"] += 1
            time.sleep(0.05)

    def large():
        while not stop.is_set():
            try:
                api.exec(session, "head -c 30000000 /dev/zero", timeout=20)
            except Exception:  # pylint: disable=broad-except
                time.sleep(0.05)

    threads = [threading.Thread(target=small), threading.Thread(target=large)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            time.sleep(0.15)
            api.verb(session, "suspend")
            api.verb(session, "wake")
            api.verb(session, "snapshot")
            started = time.monotonic()
            assert api.exec(session, ["true"], timeout=10).code == 0
            assert time.monotonic() - started < guests.patient(2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(40)
    assert outcomes["silent"] == 0, outcomes


def skew(api, session):
    before = time.time()
    guest = float(api.out(session, ["date", "+%s.%N"]))
    after = time.time()
    return max(before - guest, guest - after, 0)


def test_clock_is_right_at_the_first_command(api, session):
    """A minute spent suspended is not missing from the guest's clock, in the session and in its branch."""
    api.out(session, "true")
    api.verb(session, "suspend")
    time.sleep(20)
    assert skew(api, session) <= 0.5
    stamp = float(api.out(session, "touch /tmp/new; stat -c %.9Y /tmp/new"))
    assert abs(stamp - time.time()) < 2
    api.verb(session, "pause")
    time.sleep(3)
    api.verb(session, "resume")
    assert skew(api, session) <= 0.5
    api.verb(session, "suspend")
    time.sleep(3)
    branch = api.branch(session)[0]["id"]
    assert skew(api, branch) <= 0.5


def test_wake_on_use(api, session):
    guests.start_web(api, session)
    for use in (lambda: api.out(session, "echo x"),
                lambda: api.read(session, "/etc/hostname"),
                lambda: api.port(session, 8000, "/").body,
                lambda: api.preview(session, 8000, "/").body,
                lambda: api.processes(session) is not None):
        api.verb(session, "suspend")
        assert api.state(session) == "suspended"
        assert use()
        assert api.state(session) == "running"
    api.verb(session, "pause")
    assert api.out(session, "echo x") == "x"
    assert api.state(session) == "running"


def test_wake_on_use_can_be_refused(api, make):
    session = make(wake_on_use=False)
    api.verb(session, "suspend")
    with pytest.raises(ApiError) as info:
        api.out(session, "echo x")
    assert info.value.status == 409
    assert api.call("GET", f"/v1/sessions/{session}/ports/8000/").status == 409
    assert api.state(session) == "suspended"
    api.verb(session, "wake")
    assert api.out(session, "echo x") == "x"


SERVERS = r'''
import asyncio, select, socket, threading
def blocking():
    s = socket.create_server(("0.0.0.0", 8001), backlog=512)
    while True:
        c, _ = s.accept(); c.recv(1000)
        c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"); c.close()
def edge():
    s = socket.create_server(("0.0.0.0", 8002), backlog=512); s.setblocking(False)
    ep = select.epoll(); ep.register(s, select.EPOLLIN | select.EPOLLET)
    while True:
        ep.poll()
        while True:
            try: c, _ = s.accept()
            except BlockingIOError: break
            c.setblocking(True); c.settimeout(2)
            try: c.recv(1000); c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            except OSError: pass
            c.close()
threading.Thread(target=blocking).start()
threading.Thread(target=edge).start()
async def loop(r, w):
    try: await r.read(1000)
    except OSError: pass
    w.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"); w.close()
async def main():
    async with await asyncio.start_server(loop, "0.0.0.0", 8003, backlog=512) as s: await s.serve_forever()
asyncio.run(main())
'''


def test_servers_under_load_accept_after_wake(api, session):
    """A blocking, an edge-triggered and an asyncio server; open shells and execs are there to be attached again."""
    guests.background(api, session, SERVERS, "servers")
    for port in (8001, 8002, 8003):
        guests.wait_for(lambda port=port: api.port(session, port, "/").body == b"ok")
    shell, shell_stream = api.start(session, ["/bin/bash"], pty=(80, 24), stdin=True)
    ticker, ticker_stream = api.start(session, "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done")
    stop = threading.Event()

    def load(port):
        while not stop.is_set():
            try:
                api.port(session, port, "/", timeout=10)
            except OSError:
                pass

    threads = [threading.Thread(target=load, args=(port,), daemon=True) for port in (8001, 8002, 8003)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    api.verb(session, "suspend")
    stop.set()
    api.verb(session, "wake")
    started = time.monotonic()
    for port in (8001, 8002, 8003):
        guests.wait_for(lambda port=port: api.port(session, port, "/").body == b"ok", timeout=5)
    assert time.monotonic() - started < guests.patient(5)
    for thread in threads:
        thread.join(15)
    # Old streams have ended or failed, quickly.
    for stream in (shell_stream, ticker_stream):
        started = time.monotonic()
        try:
            ended = api.collect(stream).end
        except (StreamError, ConnectionError, OSError, ValueError, AssertionError, http.client.HTTPException):
            ended = None
        assert not ended, "the process did not end, only the connection to it"
        assert time.monotonic() - started < guests.patient(5)
    pids = {entry["pid"] for entry in api.processes(session)}
    assert {shell, ticker} <= pids
    again = api.attach(session, ticker)
    result = api.collect(again, until=lambda result: result.out.count(b"\n") >= 4)
    numbers = [int(number) for number in result.out.split()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    again.close()
    attached = api.attach(session, shell)
    api.send_input(session, shell, b"echo still-$((40+2))\n", channel="pty")
    result = api.collect(attached, until=lambda result: b"still-42" in result.pty)
    attached.close()
    api.kill(session, ticker)
    api.kill(session, shell)


def test_reattach_with_an_offset_across_a_cycle(api, session):
    """What a reader missed while the session was away it gets by its offset, without a gap or repetition."""
    pid, stream = api.start(session, "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo $i; sleep 0.02; done")
    result = api.collect(stream, until=lambda result: result.out.count(b"\n") >= 20)
    stream.close()
    api.verb(session, "suspend")
    api.verb(session, "wake")
    rest_of_it = api.collect(api.attach(session, pid, offset=len(result.out)))
    assert [int(number) for number in (result.out + rest_of_it.out).split()] == list(range(1, 401))
    assert rest_of_it.code == 0


def test_paused_is_really_paused(api, session):
    guests.start_counter(api, session)
    api.verb(session, "pause")
    time.sleep(2)
    api.verb(session, "resume")
    # Two seconds of a 10 ms loop are missing.
    lines = api.out(session, "cat /home/user/counter.log").split("\n")
    times = [float(line.split()[1]) for line in lines if " " in line]
    assert max(b - a for a, b in zip(times, times[1:])) >= 1.8
