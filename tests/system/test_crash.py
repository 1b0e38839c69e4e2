"""kill -9 of daemon, helper and VMM at random moments of every verb: nothing that was reported durable is lost."""
import os
import random
import signal
import threading
import time

import pytest

import guests
import hostside
from rest import ApiError

SEED = int(os.environ.get("SPACE_TEST_SEED", "1"))
ROUNDS = int(os.environ.get("SPACE_TEST_ROUNDS", "100"))
VERBS = ["create", "exec", "pause", "resume", "snapshot", "suspend", "wake", "branch", "rewind", "delete", "update"]
# A verb's work takes up to about this long here; the moment of the kill is drawn from it.
WINDOW_S = 0.35


class Model:
    """What has to be true of the one session that all rounds work on."""

    def __init__(self, daemon, dice):
        self.daemon, self.dice = daemon, dice
        self.api = daemon.client(timeout=30)
        self.session = None
        self.durable = 0   # the number in the file at the last snapshot that was reported
        self.written = 0   # the last number that was written and answered
        self.snapshots = {}

    def renew(self):
        self.session = self.api.create(template="default", snapshot_interval_s=0)["id"]
        self.durable = self.written = 0
        self.snapshots = {}
        self.note()
        self.remember(self.api.verb(self.session, "snapshot")["id"])

    def note(self):
        self.written += 1
        self.api.out(self.session, f"echo {self.written} > /home/user/number; sync")

    def remember(self, snapshot):
        self.durable = self.written
        self.snapshots[snapshot] = self.written

    def prepare(self, verb):
        """Brings the session into a state in which the verb makes sense."""
        state = self.api.state(self.session)
        if verb == "resume":
            if state != "paused":
                self.api.verb(self.session, "connect")
                self.api.verb(self.session, "pause")
        elif verb == "wake":
            if state != "suspended":
                self.api.verb(self.session, "connect")
                self.note()
                self.suspend()
        else:
            self.api.verb(self.session, "connect")
            self.note()

    def suspend(self):
        self.api.verb(self.session, "suspend")
        self.durable = self.written
        self.snapshots[self.api.history(self.session)["head"]] = self.written

    def act(self, verb):
        api, session = self.api, self.session
        if verb == "create":
            return api.create(template="default", snapshot_interval_s=0)
        if verb == "exec":
            return api.exec(session, "sleep 0.1; echo done", timeout=20)
        if verb == "snapshot":
            self.remember(api.verb(session, "snapshot")["id"])
        elif verb == "suspend":
            self.suspend()
        elif verb == "branch":
            return api.branch(session, 2)
        elif verb == "rewind":
            chosen = self.dice.choice(sorted(self.snapshots))
            # Both the present and the chosen instant are legal results until the answer says which.
            self.rewinding = (self.written, self.snapshots[chosen])
            api.verb(session, "rewind", snapshot=chosen)
            self.written = self.durable = self.snapshots[chosen]
            self.rewinding = None
        elif verb == "delete":
            api.delete(session)
            self.session = None
        elif verb == "update":
            return api.update(session, labels={"round": str(time.time())})
        else:
            return api.verb(session, verb)
        return None

    def read_number(self):
        """None while the death of its VMM has not been noticed yet, which may take a moment."""
        try:
            return int(self.api.out(self.session, "cat /home/user/number", timeout=30))
        except ApiError as error:
            if error.status not in (502, 503):
                raise
            return None

    def check(self):
        """After the crash: the session runs on, or wakes from the last snapshot that was reported."""
        if self.session is None:
            return
        state = self.api.get(self.session)
        assert state["state"] in ("running", "paused", "suspended"), state
        number = guests.wait_for(self.read_number, timeout=guests.patient(10))
        legal = range(self.durable, self.written + 1)
        rewinding = getattr(self, "rewinding", None)
        assert number in legal or (rewinding and number in (*rewinding, *self.snapshots.values())), \
            f"file says {number}, durable {self.durable}, written {self.written}, {rewinding}"
        self.rewinding = None
        self.written = number
        self.durable = min(self.durable, number)


def crash(daemon, victim):
    if victim == "daemon":
        daemon.kill()
    elif victim == "worker":
        hostside.kill_hard(daemon.role_pids("worker"))
    elif victim == "helper":
        hostside.kill_hard(daemon.role_pids("helper"))
    else:
        for pid in daemon.vmms():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def recover(daemon):
    if daemon.process.poll() is not None:
        daemon.start()
    daemon.wait_ready()
    guests.wait_for(lambda: daemon.role_pids("helper") and daemon.role_pids("worker"), timeout=10)


@pytest.mark.limit(900)
def test_random_kills_during_every_verb(daemon):
    dice = random.Random(SEED)
    model = Model(daemon, dice)
    model.renew()
    rounds = 0
    while rounds < ROUNDS:
        verb = VERBS[rounds % len(VERBS)]
        victim = dice.choice(["daemon", "worker", "helper", "vmm"])
        moment = dice.uniform(0, WINDOW_S)
        where = f"round {rounds} seed {SEED}: {victim} killed {moment:.3f} s into {verb}"
        try:
            if model.session is None:
                model.renew()
            model.prepare(verb)
            failure = []

            def act():
                try:
                    model.act(verb)
                except (ApiError, OSError, Exception) as error:  # pylint: disable=broad-except
                    failure.append(error)

            worker = threading.Thread(target=act)
            worker.start()
            time.sleep(moment)
            crash(daemon, victim)
            worker.join(60)
            assert not worker.is_alive(), "the caller is still waiting"
            recover(daemon)
            if verb == "delete":
                # Either it is gone, or it is there and can be deleted; nothing in between.
                answer = model.api.call("GET", f"/v1/sessions/{model.session}") if model.session else None
                if answer is not None and answer.status == 200:
                    model.api.delete(model.session)
                model.session = None
            model.check()
            for other in model.api.list():
                if other["id"] != model.session:
                    assert other["state"] in ("running", "paused", "suspended"), other
                    model.api.delete(other["id"])
        except BaseException as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}\n{daemon.log_tail(30)}") from error
        rounds += 1


def test_daemon_restart_leaves_everything_running(daemon, api, make):
    """Same ids, labels and end; the guests were not restarted; exec, files, ports and streams work on."""
    running = [make(labels={"n": str(n)}, timeout_s=900) for n in range(3)]
    suspended = [make() for _ in range(2)]
    for one in suspended:
        api.out(one, "echo kept > f")
        api.verb(one, "suspend")
    guests.start_web(api, running[0])
    guests.start_counter(api, running[1])
    ticker, stream = api.start(running[2], "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done")
    counter = guests.ask_counter(api, running[1])
    boots = [api.out(one, "cat /proc/sys/kernel/random/boot_id") for one in running]
    before = {entry["id"]: entry for entry in api.list()}
    daemon.kill()
    stream.close()
    time.sleep(2)
    daemon.start()
    after = {entry["id"]: entry for entry in api.list()}
    assert set(after) == set(before)
    for one, entry in before.items():
        for field in ("state", "labels", "end_at", "name", "template_digest", "created_at"):
            assert after[one].get(field) == entry.get(field), (one, field)
    assert [api.out(one, "cat /proc/sys/kernel/random/boot_id") for one in running] == boots
    assert api.port(running[0], 8000, "/").status == 200
    guests.check_counter(api, running[1], counter["n"], counter["token"])
    entry = [entry for entry in api.processes(running[2]) if entry["pid"] == ticker]
    assert entry
    result = api.collect(api.attach(running[2], ticker, offset=0), until=lambda result: result.out.count(b"\n") > 30)
    numbers = [int(number) for number in result.out.split(b"\n")[:-1]]
    assert numbers == list(range(1, len(numbers) + 1))
    api.kill(running[2], ticker)
    for one in suspended:
        assert api.out(one, "cat f") == "kept"


def test_timeout_that_ran_out_while_the_daemon_was_down(daemon, api, make):
    keep = make(timeout_s=2, on_timeout="suspend")
    drop = make(timeout_s=2, on_timeout="kill")
    api.out(keep, "echo kept > f")
    daemon.kill()
    time.sleep(3)
    daemon.start()
    api.wait_state(keep, "suspended", timeout=10)
    guests.wait_for(lambda: api.call("GET", f"/v1/sessions/{drop}").status == 404, timeout=10)
    assert api.out(keep, "cat f") == "kept"


def test_orderly_stop_keeps_sessions(daemon, api, session):
    guests.start_counter(api, session)
    counter = guests.ask_counter(api, session)
    daemon.restart(hard=False)
    guests.check_counter(api, session, counter["n"], counter["token"])


def test_helper_is_back_by_itself(daemon, api, session, make):
    for _ in range(3):
        hostside.kill_hard(daemon.role_pids("helper"))
        assert api.out(session, "echo alive") == "alive"
        guests.wait_for(lambda: daemon.role_pids("helper"), timeout=5)
        other = make()
        assert api.out(other, "echo new") == "new"
        api.delete(other)


def test_everything_killed_at_once(daemon, api, make):
    """All VMMs and the daemon together: leftovers are removed at start and new sessions work at once."""
    sessions = [make() for _ in range(4)]
    for one in sessions:
        api.out(one, "echo kept > f")
        api.verb(one, "snapshot")
    hostside.kill_hard([*daemon.pids(), *daemon.vmms()])
    hostside.kill_hard([*daemon.pids(), *daemon.vmms()])
    daemon.process.wait(10)
    daemon.start()
    fresh = make()
    assert api.out(fresh, "echo new") == "new"
    for one in sessions:
        entry = api.wait_state(one, "suspended", "running", timeout=10)
        assert entry["state"] == "suspended" and entry.get("reason"), entry
        assert api.out(one, "cat f") == "kept"
    assert len(daemon.vmms()) == len(sessions) + 1
