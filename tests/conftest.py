"""What all pytest suites share: a time limit for every case, and the programs under test."""
import os
import pathlib
import signal
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import daemon as daemon_module  # noqa: E402  (needs the path above)

CASE_LIMIT_S = 120


class OutOfTime(BaseException):
    """Not an Exception: a retry loop of a case must not swallow it."""


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): a case may take this long")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    marker = item.get_closest_marker("limit")
    seconds = marker.args[0] if marker else CASE_LIMIT_S
    if os.environ.get("SPACE_TEST_SANITIZED"):
        seconds *= 2

    def expired(*_):
        raise OutOfTime(f"not done after {seconds} s")

    former = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def pytest_runtest_logreport(report):
    # At once, not only at the end: a run may be cut before that.
    if report.failed and os.environ.get("SPACE_TEST_INSTANT"):
        sys.__stderr__.write(f"\n---- {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        sys.__stderr__.flush()


@pytest.fixture(scope="session")
def programs():
    """Folder of the programs under test (SPACE_TEST_BIN, or build-gcc/bin)."""
    return daemon_module.BIN
