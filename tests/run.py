#!/usr/bin/python3
"""make test: builds the variants, runs every suite, ends with one line `N passed, N failed, N skipped`.

Usage: tests/run.py [PART…]    PART is style, unit, fuzz, a folder of pytest suites, or a file below tests/.

Builds: build-gcc (warnings are errors), build-clang (compile only, warnings are errors), build-asan (ASan and UBSan).
Style checks run once; unit tests and fuzz replays run in build-gcc and build-asan; the pytest suites run against the
programs of build-gcc with all confinement on, those of SANITIZED again against the programs of build-asan.

Guests are emulated where there is no hardware virtualisation, and a busy host can starve one past any limit of time.
Pytest cases that fail are therefore run once more by themselves; those that pass then count as passed, and are listed
by name as unsteady, so that nobody has to guess.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
REPORTS = ROOT / "build-gcc" / "reports"
sys.path.insert(0, str(TESTS / "lib"))
import hostside  # noqa: E402  (needs the path above)

SUITES = ["agent", "host", "vmm", "store", "session", "image", "api", "cli", "system"]
# Suites that are run a second time with the sanitized programs. Those on microVMs are to follow: by hand they run with
# SPACE_TEST_SANITIZED=1 and SPACE_TEST_BIN=build-asan/bin.
SANITIZED = ["agent"]
SUITE_TIMEOUT_S = 2400
BUILDS = {
    "build-gcc": (["-Dwerror=true"], {"CC": "gcc"}),
    "build-clang": (["-Dwerror=true"], {"CC": "clang"}),
    # With sanitizers gcc warns of sizes it has itself made unclear: here warnings are no errors.
    "build-asan": (["-Db_sanitize=address,undefined", "-Doptimization=1"], {"CC": "gcc"}),
}


class Totals:
    def __init__(self):
        self.passed = 0
        self.failed = []
        self.skipped = []
        self.unsteady = []

    def fail(self, name, text=""):
        self.failed.append(name)
        print(f"FAILED  {name}" + (f"\n{text}" if text else ""), flush=True)


def say(text):
    print(f"== {text}", flush=True)


def build(name, totals):
    options, environment = BUILDS[name]
    started = time.monotonic()
    done = subprocess.run([ROOT / "scripts/build.sh", name, *options], cwd=ROOT, check=False,
                          env={**os.environ, **environment}, stdin=subprocess.DEVNULL)
    took = time.monotonic() - started
    if done.returncode:
        totals.fail(f"build {name}")
        return False
    totals.passed += 1
    say(f"{name} built in {took:.0f} s")
    return True


def count_report(path, prefix, totals):
    """Adds up a JUnit report; returns the number of cases."""
    cases = 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        cases += 1
        label = f"{prefix}: {case.get('classname', '')}.{case.get('name')}".replace("tests.", "")
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        skipped = case.find("skipped")
        if failure is not None:
            totals.failed.append(label)
        elif skipped is not None:
            totals.skipped.append((label, skipped.get("message") or (skipped.text or "").strip() or "no reason given"))
        else:
            totals.passed += 1
    return cases


def meson_tests(folder, suites, totals):
    say(f"{folder}: {', '.join(suites)}")
    started = time.monotonic()
    command = ["meson", "test", "-C", folder, "--print-errorlogs", "--no-rebuild"]
    if set(suites) >= {"unit", "fuzz"}:
        # Rooms may register tests without a suite: run all but what was not asked for.
        command += [] if "style" in suites else ["--no-suite", "style"]
    else:
        for suite in suites:
            command += ["--suite", suite]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
                   "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    report = ROOT / folder / "meson-logs" / "testlog.junit.xml"
    report.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        print(done.stdout)
    before = len(totals.failed)
    if not report.exists():
        totals.fail(f"{folder}: meson test", done.stdout)
        return
    cases = count_report(report, folder, totals)
    if done.returncode and len(totals.failed) == before:
        totals.fail(f"{folder}: meson test ended with {done.returncode}")
    say(f"{folder}: {cases} in {time.monotonic() - started:.0f} s")


def pytest_suite(target, build_folder, totals):
    path = TESTS / target
    if not path.exists():
        totals.fail(f"no such suite: tests/{target}")
        return
    label = f"{build_folder}: {target}"
    say(label)
    started = time.monotonic()
    report = REPORTS / (label.replace(": ", "-").replace("/", "-") + ".xml")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    environment = {**os.environ, "SPACE_TEST_BIN": str(ROOT / build_folder / "bin"),
                   "SPACE_TEST_BUILD": str(ROOT / build_folder), "PYTHONDONTWRITEBYTECODE": "1",
                   "SPACE_AGENT": str(ROOT / build_folder / "bin" / "space-agent"),
                   "SPACE_CLI": str(ROOT / build_folder / "bin" / "space"),
                   "SPACED_PROTOCOL": str(ROOT / build_folder / "src" / "api" / "spaced-protocol"),
                   "PATH": f"{ROOT / build_folder / 'bin'}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"}
    if build_folder == "build-asan":
        # Programs that run for long are killed in the middle by tests: leaks are looked for by the unit tests.
        environment["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=1:disable_coredump=1"
        environment["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
        environment["SPACE_TEST_SANITIZED"] = "1"
    command = ["/usr/bin/python3", "-m", "pytest", "-q", "--tb=short", "--durations=8",
               "-o", "console_output_style=classic", "-o", f"cache_dir={report.with_suffix('.cache')}",
               f"--rootdir={TESTS}", "-c", str(TESTS / "pytest.ini"), str(path)]
    code = run_pytest([*command, f"--junitxml={report}"], environment, label, totals)
    before = len(totals.failed)
    if report.exists():
        count_report(report, build_folder, totals)
    failed = totals.failed[before:]
    if code == 1 and failed:
        say(f"{label}: once more, {len(failed)} that failed")
        again = report.with_suffix(".again.xml")
        code = run_pytest([*command, "--last-failed", "--last-failed-no-failures=none", f"--junitxml={again}"],
                          environment, label, totals)
        if code == 0 and again.exists():
            del totals.failed[before:]
            count_report(again, build_folder, totals)
            totals.unsteady += failed
    if code not in (0, 5) and len(totals.failed) == before:
        totals.fail(f"{label}: pytest ended with {code}")
    say(f"{label}: {time.monotonic() - started:.0f} s")


def run_pytest(command, environment, label, totals):
    """Its exit status; one that takes too long is ended and counts as failed."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    try:
        return process.wait(SUITE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        totals.fail(f"{label}: not done after {SUITE_TIMEOUT_S} s")
        return code
    except KeyboardInterrupt:
        process.wait(120)  # it got the signal too and tidies up
        raise


def has_tests(suite):
    path = TESTS / suite
    return path.is_file() or any(path.glob("test_*.py")) or any(path.glob("*_test.py"))


def run(parts, totals):
    everything = not parts
    suites = [suite for suite in SUITES if has_tests(suite)] if everything else [
        part for part in parts if part not in ("style", "unit", "fuzz")]
    wants = {part for part in ("style", "unit", "fuzz") if everything or part in parts}
    if not build("build-gcc", totals):
        return
    shutil.rmtree(REPORTS, ignore_errors=True)
    if everything:
        build("build-clang", totals)
    sanitized = (everything or wants & {"unit", "fuzz"}) and build("build-asan", totals)
    if wants:
        meson_tests("build-gcc", sorted(wants), totals)
    if sanitized:
        meson_tests("build-asan", sorted(wants - {"style"}), totals)
    for suite in suites:
        pytest_suite(suite, "build-gcc", totals)
    if everything and sanitized:
        for suite in SANITIZED:
            if has_tests(suite):
                pytest_suite(suite, "build-asan", totals)


def main():
    # A terminal that goes away or a kill must end in the same tidying up as ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.monotonic()
    totals = Totals()
    interrupted = False
    with hostside.one_run_at_a_time():
        hostside.remove_leftovers()
        # The suites of one run share the default template: it is built once, by the first that needs it.
        own_cache = pathlib.Path(f"/var/tmp/space-test-template-{hostside.SLOT}")
        shutil.rmtree(own_cache, ignore_errors=True)
        os.environ.setdefault("SPACE_TEST_CACHE", str(own_cache))
        try:
            run(sys.argv[1:], totals)
        except KeyboardInterrupt:
            interrupted = True
            totals.fail("interrupted")
        finally:
            if not os.environ.get("SPACE_TEST_KEEP"):
                for text in hostside.remove_leftovers():
                    totals.fail(f"left behind: {text}")
            shutil.rmtree(own_cache, ignore_errors=True)
    if totals.skipped:
        say("skipped")
        for label, reason in totals.skipped:
            print(f"  {label}: {reason}")
    if totals.unsteady:
        say("unsteady: failed at first, passed when run once more")
        for label in totals.unsteady:
            print(f"  {label}")
    if totals.failed:
        say("failed")
        for label in totals.failed:
            print(f"  {label}")
    say(f"all in {time.monotonic() - started:.0f} s")
    print(f"{totals.passed} passed, {len(totals.failed)} failed, {len(totals.skipped)} skipped", flush=True)
    sys.exit(1 if totals.failed or interrupted else 0)


if __name__ == "__main__":
    main()
