"""The warm pool and the spare VMMs: what they hand out is as good as what is restored, and they never get in the way."""
import contextlib
import http.client
import os
import random
import re
import signal
import threading
import time

import pytest

from rest import ApiError

FILL_TIMEOUT_S = 60


def metric(api, name):
    text = api.call("GET", "/metrics").body.decode()
    return int(re.search(rf"^{name} (\d+)$", text, re.MULTILINE).group(1))


def wait_full(api, warm, spares):
    end = time.monotonic() + FILL_TIMEOUT_S
    while (metric(api, "space_warm_pool_ready"), metric(api, "space_spares_ready")) != (warm, spares):
        assert time.monotonic() < end, "the pools do not fill"
        time.sleep(0.1)


@pytest.fixture
def with_pools(main_daemon):
    """The shared daemon with two warm sandboxes and two spare VMMs; without any afterwards."""
    before = dict(main_daemon.settings)
    main_daemon.settings.update(pool_size=2, spares=2)
    try:
        main_daemon.stop()
        main_daemon.start()
        wait_full(main_daemon.client(), 2, 2)
        yield main_daemon
    finally:
        main_daemon.settings = before
        main_daemon.stop()
        main_daemon.start()


def test_sessions_from_pools(with_pools):
    """Create from the warm pool; wake, branch and rewind on spares: each has its own identity and the right work."""
    api = with_pools.client()
    hits = metric(api, "space_warm_pool_hits_total")
    spare_hits = metric(api, "space_spare_hits_total")
    first, second = (api.create(template="default", snapshot_interval_s=0, environment={"N": str(n)})["id"]
                     for n in range(2))
    assert metric(api, "space_warm_pool_hits_total") == hits + 2
    tell = "echo $N; cat /etc/machine-id; hostname; head -c 16 /dev/urandom | od -An -tx1; id -un"
    told = [api.out(session, tell).split("\n") for session in (first, second)]
    assert [lines[0] for lines in told] == ["0", "1"] and [lines[4] for lines in told] == ["user", "user"]
    assert [lines[2] for lines in told] == [first, second]
    for at in (1, 3):
        assert told[0][at] != told[1][at]
    wait_full(api, 2, 2)
    assert api.out(first, "head -c 30000000 /dev/urandom > big; sha256sum < big > sum; sync; echo $$ > pid") == ""
    digest = api.out(first, "cat sum")
    api.verb(first, "suspend")
    wait_full(api, 2, 2)
    before = metric(api, "space_spare_hits_total")
    assert before >= spare_hits
    api.verb(first, "wake")
    assert metric(api, "space_spare_hits_total") == before + 1
    assert api.out(first, "sha256sum < big") == digest
    branches = [made["id"] for made in api.branch(first, 3)]
    told = [api.out(session, "cat /etc/machine-id; sha256sum < big").split("\n") for session in branches]
    assert len({lines[0] for lines in told}) == 3 and {lines[1] for lines in told} == {digest}
    # Nothing of one branch's disk or memory is another's.
    for session in branches:
        api.out(session, f"echo {session} > mine; rm big")
    assert [api.out(session, "cat mine") for session in branches] == branches
    assert api.out(first, "ls mine 2>/dev/null; sha256sum < big") == digest
    for session in [first, second, *branches]:
        api.delete(session)


def test_dead_ones_are_not_handed_out(with_pools):
    """VMMs of both pools killed from outside: creating and waking go on, the pools fill again."""
    api = with_pools.client()
    session = api.create(template="default", snapshot_interval_s=0)["id"]
    api.verb(session, "suspend")
    wait_full(api, 2, 2)
    for pid in with_pools.vmms():
        os.kill(pid, signal.SIGKILL)
    made = api.create(template="default", snapshot_interval_s=0)["id"]
    assert api.out(made, "echo alive") == "alive"
    api.verb(session, "wake")
    assert api.out(session, "echo alive") == "alive"
    wait_full(api, 2, 2)
    api.delete(made)
    api.delete(session)


def test_restart_leaves_no_pooled_vmm(with_pools):
    """kill -9 of the daemon with full pools: the next one ends what it does not know and fills its own."""
    api = with_pools.client()
    session = api.create(template="default", snapshot_interval_s=0)["id"]
    boot = api.out(session, "cat /proc/sys/kernel/random/boot_id; echo x > f")
    wait_full(api, 2, 2)
    old = set(with_pools.vmms())
    assert len(old) == 5
    with_pools.restart()
    api = with_pools.client()
    wait_full(api, 2, 2)
    now = set(with_pools.vmms())
    assert len(now) == 5 and len(now & old) == 1
    assert api.out(session, "cat /proc/sys/kernel/random/boot_id; cat f") == boot + "\nx"
    api.delete(session)


@pytest.mark.limit(400)  # ten times the pools are filled
def test_creates_from_the_pool_that_fail(with_pools):
    """Refused, or cut by a kill at any moment: no session, no sandbox and no name is left of them."""
    api = with_pools.client()
    api.create(template="default", name="taken", snapshot_interval_s=0)
    for _ in range(3):
        wait_full(api, 2, 2)
        with pytest.raises(ApiError) as info:
            api.create(template="default", name="taken", snapshot_interval_s=0)
        assert info.value.status == 409
    wait_full(api, 2, 2)
    assert len(with_pools.vmms()) == 5
    moments = random.Random(int(os.environ.get("SPACE_TEST_SEED", "1")))
    for number in range(6):
        def create(name=f"cut-{number}"):
            with contextlib.suppress(ApiError, OSError, http.client.HTTPException):
                api.create(template="default", name=name, snapshot_interval_s=0, environment={"N": name})

        thread = threading.Thread(target=create)
        thread.start()
        time.sleep(moments.uniform(0, 0.05))
        with_pools.kill()
        thread.join(60)
        with_pools.start()
        wait_full(api, 2, 2)
    for entry in api.list():
        if entry["name"] != "taken":
            assert api.out(entry["id"], "echo $N") == entry["name"]
        api.delete(entry["id"])
    wait_full(api, 2, 2)
    assert len(with_pools.vmms()) == 4
