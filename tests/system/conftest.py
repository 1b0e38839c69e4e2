"""One daemon with one default template for all cases of this folder; each case starts and ends with a clean host."""
import os
import time

import pytest

import daemon as daemon_module
import hostside

CENSUS_TIMEOUT_S = 10
TEMPLATE_TIMEOUT_S = 600


def pytest_sessionstart(session):
    hostside.remove_leftovers()


def pytest_sessionfinish(session, exitstatus):
    # Also after ctrl-C and errors in fixtures.
    if not os.environ.get("SPACE_TEST_KEEP"):
        hostside.remove_leftovers()


def build_template(instance):
    """Builds the default template in a running daemon; the lines of its progress are kept for the report."""
    done = instance.cli("template", "build", "default", timeout=TEMPLATE_TIMEOUT_S)
    assert done.returncode == 0, f"template build: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n" \
                                 f"{instance.log_tail(60)}"


@pytest.fixture(scope="session")
def main_daemon():
    instance = daemon_module.Daemon("main", 0)
    cached = instance.load_cache()
    try:
        instance.start()
        if not cached:
            build_template(instance)
            instance.save_cache()
        yield instance
    finally:
        instance.destroy()


@pytest.fixture
def daemon(main_daemon):
    """The shared daemon, running; a case may stop or kill it."""
    if main_daemon.process is None or main_daemon.process.poll() is not None:
        main_daemon.start()
    else:
        main_daemon.wait_ready()
    return main_daemon


@pytest.fixture
def api(daemon):
    return daemon.client()


@pytest.fixture(autouse=True)
def clean_host(request):
    """Every session of a case is removed after it, and the host census has to be back to where it was."""
    if "daemon" not in request.fixturenames:
        yield
        return
    instance = request.getfixturevalue("daemon")
    client = instance.client()
    before = instance.census()
    yield
    if instance.process.poll() is not None:
        instance.start()
    instance.wait_ready()
    for session in client.list():
        client.delete(session["id"])
    end = time.monotonic() + CENSUS_TIMEOUT_S
    while True:
        difference = daemon_module.census_difference(before, instance.census())
        if not difference:
            return
        if time.monotonic() > end:
            pytest.fail(f"left behind on the host: {difference}")
        time.sleep(0.2)


@pytest.fixture
def session(api):
    """A running session without rolling snapshots."""
    return api.create(template="default", snapshot_interval_s=0)["id"]


@pytest.fixture
def make(api):
    """Makes running sessions: make(), make(name="x")."""
    def create(**params):
        return api.create(**{"template": "default", "snapshot_interval_s": 0, **params})["id"]
    return create
