"""Delete works from every state, in every race, and leaves nothing."""
import os
import random
import signal
import threading
import time

import pytest

import daemon as daemon_module
import guests
import hostside
from rest import ApiError

SEED = int(os.environ.get("SPACE_TEST_SEED", "1"))
ROUNDS = int(os.environ.get("SPACE_TEST_RACE_ROUNDS", "200"))


def gone(api, session):
    return api.call("GET", f"/v1/sessions/{session}").status == 404


@pytest.mark.parametrize("state", ["running", "paused", "suspended"])
def test_from_resting_states(daemon, api, make, state):
    before = daemon.census()
    session = make(name="again")
    if state != "running":
        api.verb(session, "pause" if state == "paused" else "suspend")
    started = time.monotonic()
    api.delete(session)
    assert time.monotonic() - started < guests.patient(2)
    assert gone(api, session)
    guests.wait_for(lambda: not daemon_module.census_difference(before, daemon.census()), timeout=10)
    make(name="again")


@pytest.mark.parametrize("verb", ["create", "suspend", "wake", "snapshot", "branch", "rewind", "pause"])
def test_while_a_verb_runs(api, make, verb):
    """Delete during a verb: it waits or cancels, then everything is gone."""
    for moment in (0.0, 0.02, 0.06, 0.15):
        name = f"race-{verb}-{int(moment * 1000)}"
        if verb == "create":
            worker = threading.Thread(target=lambda name=name: quietly(
                lambda: api.create(template="default", name=name, snapshot_interval_s=0)))
            worker.start()
            time.sleep(moment)
            quietly(lambda name=name: api.delete(name))
            worker.join(30)
            quietly(lambda name=name: api.delete(name))
            assert gone(api, name)
            continue
        session = make(name=name)
        params = {}
        if verb == "wake":
            api.verb(session, "suspend")
        if verb == "rewind":
            params = {"snapshot": api.verb(session, "snapshot")["id"]}
        worker = threading.Thread(target=lambda session=session, params=params: quietly(
            lambda: api.verb(session, verb, **params)))
        worker.start()
        time.sleep(moment)
        api.delete(session)
        worker.join(30)
        assert not worker.is_alive()
        assert gone(api, session)
        for entry in api.list():
            api.delete(entry["id"])


def quietly(function):
    try:
        return function()
    except (ApiError, OSError) as error:
        return error


def test_parallel_deletes_agree(api, make):
    session = make()
    answers = guests.all_good(guests.parallel(
        [lambda: api.call("DELETE", f"/v1/sessions/{session}").status for _ in range(6)]))
    assert set(answers) <= {200, 204, 404} and set(answers) & {200, 204}, answers


def test_with_streams_open(api, session):
    """Streams end at once with an error when their session goes."""
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
    api.delete(session)
    assert ended.wait(5)


def test_a_stopped_vmm_dies_before_its_place_is_given_away(daemon, api, make):
    """SIGSTOP the VMM, delete, create at once: no two VMMs share a namespace or a user id at any time."""
    for _ in range(3):
        session = make()
        pid = daemon.vmms()[0]
        os.kill(pid, signal.SIGSTOP)
        api.delete(session)
        assert hostside.is_zombie(pid) or not os.path.exists(f"/proc/{pid}")
        fresh = make()
        assert len(daemon.vmms()) == 1
        assert api.out(fresh, "echo fine") == "fine"
        api.delete(fresh)


@pytest.mark.limit(420)
def test_two_hundred_rounds_of_create_and_delete(daemon, api):
    """Creates and deletes race in four threads, by id and by name; the host is as before."""
    before = daemon.census()
    failures = []
    lock = threading.Lock()
    left = [ROUNDS]

    def work(seed):
        dice = random.Random(SEED * 100 + seed)
        client = daemon.client()
        while True:
            with lock:
                if left[0] <= 0:
                    return
                left[0] -= 1
                number = left[0]
            try:
                made = client.create(template="default", name=f"r{number}", snapshot_interval_s=0)
                choice = dice.random()
                if choice < 0.2:
                    quietly(lambda: client.verb(made["id"], "suspend"))
                elif choice < 0.4:
                    quietly(lambda: client.exec(made["id"], ["true"], timeout=20))
                elif choice < 0.5:
                    threading.Thread(target=lambda: quietly(lambda: client.verb(made["id"], "pause")),
                                     daemon=True).start()
                answer = client.call("DELETE", f"/v1/sessions/{made['id'] if dice.random() < 0.5 else f'r{number}'}")
                if answer.status not in (200, 204):
                    failures.append((number, answer.status, answer.body))
            except Exception as error:  # pylint: disable=broad-except
                failures.append((number, repr(error)))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[:5]
    assert api.list() == []
    guests.wait_for(lambda: not daemon_module.census_difference(before, daemon.census()), timeout=10)


def test_deletes_interrupted_by_kills_end_after_a_restart(daemon, api, make):
    dice = random.Random(SEED)
    for _ in range(5):
        session = make()
        worker = threading.Thread(target=lambda session=session: quietly(lambda: api.delete(session)))
        worker.start()
        time.sleep(dice.uniform(0, 0.08))
        daemon.kill()
        worker.join(30)
        daemon.start()
        answer = api.call("DELETE", f"/v1/sessions/{session}")
        assert answer.status in (200, 204, 404)
        guests.wait_for(lambda session=session: gone(api, session), timeout=10)


def test_suspended_ones_are_deleted_after_a_restart(daemon, api, make):
    sessions = [make() for _ in range(4)]
    for one in sessions:
        api.verb(one, "suspend")
    daemon.restart()
    vmms = daemon.vmms()
    for one in sessions:
        started = time.monotonic()
        api.delete(one)
        assert time.monotonic() - started < guests.patient(2)
    assert daemon.vmms() == vmms == []
