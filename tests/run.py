#!/usr/bin/python3
"""make test: builds the variants, runs every suite, ends with one line `N passed, N failed, N skipped`.

Usage: tests/run.py [PART…]    PART is style, unit, fuzz, a folder of pytest suites, or a file below tests/.

Builds: build-gcc (warnings are errors), build-clang (compile only, warnings are errors), build-asan (ASan and UBSan).
Style checks run once; unit tests and fuzz replays run in build-gcc and build-asan; the pytest suites run against the
programs of build-gcc with all confinement on, those marked so again against the programs of build-asan.

Suites run in two lanes side by side, so that both cores have work; each lane has names, ports, user ids and folders of
its own. What a suite prints appears when it is done.

Guests are emulated where there is no hardware virtualisation, and a busy host can starve one past any limit of time.
Pytest cases that fail are therefore run once more by themselves; those that pass then count as passed, and are listed
by name as unsteady, so that nobody has to guess.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
REPORTS = ROOT / "build-gcc" / "reports"
sys.path.insert(0, str(TESTS / "lib"))
import hostside  # noqa: E402  (needs the path above)

GCC, ASAN = "build-gcc", "build-asan"
# The lanes, of about the same length: (suite, build whose programs it runs with). The second one begins with suites that
# need no guests, so that the first has built the default template by the time it is needed here.
FIRST = [("host", GCC), ("vmm", GCC), ("image", GCC), ("system-first", GCC), ("host", ASAN), ("system/test_verbs.py", ASAN)]
SECOND = [("agent", GCC), ("api", GCC), ("cli", GCC), ("agent", ASAN), ("api", ASAN), ("cli", ASAN), ("system-second", GCC)]
SYSTEM_SECOND = ["test_crash.py", "test_damage.py", "test_ports.py", "test_rolling.py", "test_run.py"]
SUITE_TIMEOUT_S = 2400
BUILDS = {
    "build-gcc": (["-Dwerror=true"], {"CC": "gcc"}),
    "build-clang": (["-Dwerror=true"], {"CC": "clang"}),
    # With sanitizers gcc warns of sizes it has itself made unclear: here warnings are no errors.
    "build-asan": (["-Db_sanitize=address,undefined", "-Doptimization=1"], {"CC": "gcc"}),
}


class Totals:
    def __init__(self):
        self.lock = threading.Lock()
        self.running = set()  # pytest processes
        self.interrupted = False
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


def paths_of(suite):
    system = TESTS / "system"
    if suite == "system-second":
        return [system / name for name in SYSTEM_SECOND]
    if suite == "system-first":
        return sorted(path for path in system.glob("test_*.py") if path.name not in SYSTEM_SECOND)
    return [TESTS / suite]


def suite_environment(build_folder, slot):
    folder = ROOT / build_folder
    environment = {**os.environ, "SPACE_TEST_BIN": str(folder / "bin"), "SPACE_TEST_BUILD": str(folder),
                   "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "SPACE_TEST_SLOT": str(slot),
                   "SPACE_AGENT": str(folder / "bin" / "space-agent"), "SPACE_CLI": str(folder / "bin" / "space"),
                   "SPACED_PROTOCOL": str(folder / "src" / "api" / "spaced-protocol"),
                   "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"}
    if build_folder == ASAN:
        # Programs that run for long are killed in the middle by tests: leaks are looked for by the unit tests.
        environment["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=1:disable_coredump=1"
        environment["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
        environment["SPACE_TEST_SANITIZED"] = "1"
    return environment


def pytest_suite(target, build_folder, totals, slot, output):
    """Runs one suite; what it prints goes to the file `output`. Failed cases are run once more."""
    paths = paths_of(target)
    label = f"{build_folder}: {target}"
    for path in paths:
        if not path.exists():
            totals.fail(f"no such suite: {path}")
            return
    report = REPORTS / (re.sub(r"[^\w.-]+", "-", label) + ".xml")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    environment = suite_environment(build_folder, slot)
    command = ["/usr/bin/python3", "-m", "pytest", "-q", "--tb=short", "--durations=8",
               "-o", "console_output_style=classic", "-o", f"cache_dir={report.with_suffix('.cache')}",
               f"--rootdir={TESTS}", "-c", str(TESTS / "pytest.ini"), *map(str, paths)]
    code = run_pytest([*command, f"--junitxml={report}"], environment, label, totals, output)
    result = Totals()
    if report.exists():
        count_report(report, build_folder, result)
    failed = result.failed
    if code == 1 and failed and not totals.interrupted:
        output.write(f"== {label}: once more, {len(failed)} that failed\n")
        output.flush()
        again = report.with_suffix(".again.xml")
        code = run_pytest([*command, "--last-failed", "--last-failed-no-failures=none", f"--junitxml={again}"],
                          environment, label, totals, output)
        if code == 0 and again.exists():
            result.failed, result.unsteady = [], failed
            count_report(again, build_folder, result)
    if code not in (0, 5) and not result.failed:
        result.failed.append(f"{label}: pytest ended with {code}")
    with totals.lock:
        totals.passed += result.passed
        totals.failed += result.failed
        totals.skipped += result.skipped
        totals.unsteady += result.unsteady


def run_pytest(command, environment, label, totals, output):
    """Its exit status; one that takes too long is ended and counts as failed."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=subprocess.STDOUT)
    totals.running.add(process)
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
    finally:
        totals.running.discard(process)


def run_lane(jobs, slot, totals):
    for suite, build_folder in jobs:
        if totals.interrupted:
            return
        started = time.monotonic()
        say(f"{build_folder}: {suite}")
        with tempfile.TemporaryFile("w+") as output:
            try:
                pytest_suite(suite, build_folder, totals, slot, output)
            except Exception as error:  # pylint: disable=broad-except  (a lane that dies must not pass)
                totals.fail(f"{build_folder}: {suite}: {type(error).__name__}: {error}")
            output.seek(0)
            with totals.lock:
                sys.stdout.write(output.read())
                say(f"{build_folder}: {suite}: {time.monotonic() - started:.0f} s")


def run_lanes(lanes, totals):
    threads = [threading.Thread(target=run_lane, args=(jobs, slot, totals)) for jobs, slot in lanes if jobs]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        totals.interrupted = True
        for process in list(totals.running):
            process.send_signal(signal.SIGINT)  # they tidy up
        for thread in threads:
            thread.join(120)
        raise


def run(parts, totals):
    everything = not parts
    suites = [part for part in parts if part not in ("style", "unit", "fuzz")]
    wants = {part for part in ("style", "unit", "fuzz") if everything or part in parts}
    if not build(GCC, totals):
        return
    shutil.rmtree(REPORTS, ignore_errors=True)
    if everything:
        build("build-clang", totals)
    sanitized = (everything or wants & {"unit", "fuzz"}) and build(ASAN, totals)
    if wants:
        meson_tests(GCC, sorted(wants), totals)
    if sanitized:
        meson_tests(ASAN, sorted(wants - {"style"}), totals)
    if not everything:
        run_lanes([([(suite, GCC) for suite in suites], hostside.SLOT)], totals)
        return
    lanes = [([job for job in lane if sanitized or job[1] != ASAN], slot)
             for lane, slot in ((FIRST, hostside.SLOT), (SECOND, hostside.SECOND_SLOT))]
    run_lanes(lanes, totals)


def remove_leftovers():
    """Of both lanes; texts of what was found."""
    code = "import hostside; print('\\n'.join(hostside.remove_leftovers()))"
    other = subprocess.run(["/usr/bin/python3", "-c", code], check=True, stdout=subprocess.PIPE, text=True,
                           env={**os.environ, "SPACE_TEST_SLOT": str(hostside.SECOND_SLOT), "PYTHONPATH": str(TESTS / "lib"),
                                "PYTHONDONTWRITEBYTECODE": "1"})
    return hostside.remove_leftovers() + other.stdout.strip().splitlines()


def main():
    # A terminal that goes away or a kill must end in the same tidying up as ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.monotonic()
    totals = Totals()
    interrupted = False
    with hostside.one_run_at_a_time(), hostside.one_run_at_a_time(hostside.SECOND_SLOT):
        remove_leftovers()
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
                for text in remove_leftovers():
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
