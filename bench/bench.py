#!/usr/bin/python3
"""make bench: one JSON line per figure: {"name","unit","n","p50","p90","p99"} and, where there is one, goal and ratios.

Everything goes through the REST interface over the unix socket of a daemon of its own. Peers are measured in the same
run: a plain boot of the same guest with QEMU, and gVisor's runsc if it is installed.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "lib"))
import guests  # noqa: E402  (needs the path above)
import hostside  # noqa: E402
import rest  # noqa: E402

POOL_SIZE = 2
SPARES = 2  # as a daemon has them by default
SETTLE_S = 0.5
TEMPLATE_TIMEOUT_S = 900


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Report:
    def __init__(self, wanted):
        self.wanted, self.figures = wanted, {}

    def wants(self, name):
        return not self.wanted or any(name.startswith(part) for part in self.wanted)

    def add(self, name, values, unit="ms", goal=None, **more):
        if not values:
            return
        digits = 2 if unit in ("ms", "ratio") else 1
        line = {"name": name, "unit": unit, "n": len(values), "p50": round(statistics.median(values), digits),
                "p90": round(percentile(values, 0.9), digits), "p99": round(percentile(values, 0.99), digits)}
        if goal:
            line["goal"] = goal
        self.figures[name] = line
        for peer in ("peer_qemu_boot", "peer_runsc"):
            if unit == "ms" and peer in self.figures and not name.startswith("peer") and line["p50"]:
                line[peer.removeprefix("peer_") + "_ratio"] = round(self.figures[peer]["p50"] / line["p50"], 1)
        line.update(more)
        print(json.dumps(line), flush=True)

    @staticmethod
    def note(text):
        print(f"bench: {text}", file=sys.stderr, flush=True)


def timed(function):
    started = time.monotonic()
    function()
    return (time.monotonic() - started) * 1000


class Bench:
    def __init__(self, daemon, report):
        self.daemon, self.report = daemon, report
        self.api = daemon.client(timeout=120)

    def create(self, **params):
        return self.api.create(**{"template": "default", "snapshot_interval_s": 0, **params})["id"]

    def true(self, session):
        result = self.api.exec(session, ["true"])
        assert result.code == 0, result

    def restart(self, **settings):
        self.daemon.stop()
        self.daemon.settings.update({"spares": SPARES, **settings})
        self.daemon.start()

    def wait_pool(self):
        """Until the warm pool and the spares are as they are on an idle host."""
        settings = self.daemon.settings
        wanted = {"space_warm_pool_ready": settings.get("pool_size", POOL_SIZE), "space_spares_ready": settings["spares"]}
        end = time.monotonic() + 20
        while time.monotonic() < end:
            lines = (line.split() for line in self.api.call("GET", "/metrics").body.decode().splitlines())
            ready = {words[0]: float(words[1]) for words in lines if len(words) == 2 and words[0] in wanted}
            if all(ready.get(name, 0) >= number for name, number in wanted.items()):
                break
            time.sleep(0.05)
        time.sleep(SETTLE_S)

    # -- figures

    def creates(self):
        self.restart(pool_size=0)
        self.api.delete(self.create())
        times, answered = [], []
        for _ in range(30):
            self.wait_pool()
            started = time.monotonic()
            session = self.create()
            times.append((time.monotonic() - started) * 1000)
            self.true(session)
            answered.append((time.monotonic() - started) * 1000)
            self.api.delete(session)
        self.report.add("create_on_demand", times, goal={"p50": 60})
        self.report.add("create_on_demand_true", answered)

    def warm_creates(self):
        self.restart(pool_size=POOL_SIZE)
        times, answered = [], []
        for _ in range(40):
            self.wait_pool()
            started = time.monotonic()
            session = self.create()
            times.append((time.monotonic() - started) * 1000)
            self.true(session)
            answered.append((time.monotonic() - started) * 1000)
            self.api.delete(session)
        self.report.add("create_warm", times, goal={"p50": 10, "p99": 40})
        self.report.add("create_warm_true", answered, goal={"p50": 25})
        self.restart(pool_size=0)

    def suspends(self):
        session = self.create()
        suspended, woken = [], []
        for number in range(15):
            self.api.out(session, f"echo {number} > f; head -c 8000000 /dev/urandom > /dev/shm/d")
            suspended.append(timed(lambda: self.api.verb(session, "suspend")))
            self.wait_pool()
            woken.append(timed(lambda: (self.api.verb(session, "wake"), self.true(session))))
        self.api.delete(session)
        self.report.add("suspend", suspended, goal={"p50": 300})
        self.report.add("wake_true", woken, goal={"p50": 120})

    def execs(self):
        session = self.create()
        for _ in range(5):
            self.true(session)
        self.report.add("exec_true", [timed(lambda: self.true(session)) for _ in range(60)])
        self.report.add("exec_python", [timed(lambda: self.api.exec(session, ["python3", "-c", "1"])) for _ in range(10)])
        self.api.delete(session)

    def snapshots(self):
        session = self.create()
        guests.background(self.api, session, DIRTIER, "dirtier", (100,))
        guests.wait_for(lambda: self.api.exec(session, "test -e /tmp/dirty-ready").code == 0, timeout=60)
        stalls, totals, ratios = [], [], []
        for number in range(12):
            self.api.out(session, f"touch /tmp/again; while [ -e /tmp/again ]; do sleep 0.05; done; echo {number} > f")
            started = time.monotonic()
            entry = self.api.verb(session, "snapshot")
            totals.append((time.monotonic() - started) * 1000)
            stalls.append(entry["stall_us"] / 1000)
            if entry["changed_bytes"]:
                ratios.append(entry["bytes_stored"] / entry["changed_bytes"])
        self.api.delete(session)
        self.report.add("snapshot_stall_100mib", stalls, goal={"p50": 25, "p99": 80})
        self.report.add("snapshot_total_100mib", totals)
        self.report.add("snapshot_stored_per_changed", ratios, unit="ratio", goal={"p50": 1.3})

    def rolling(self):
        """The stall as a program inside sees it, and what a minute of light work costs."""
        session = self.create(snapshot_interval_s=2)
        self.api.write(session, "/tmp/gaps.py", GAPS.encode())
        text = self.api.out(session, ["python3", "/tmp/gaps.py", "20"], timeout=60)
        gaps = [float(word) for word in text.split()]
        entries = [entry for entry in self.api.history(session)["snapshots"] if entry["kind"] == "rolling"]
        self.report.add("rolling_gap_seen_inside", gaps)
        self.report.add("rolling_bytes_stored", [entry["bytes_stored"] / 1e6 for entry in entries], unit="MB")
        self.report.add("rolling_stored_per_changed",
                        [entry["bytes_stored"] / entry["changed_bytes"] for entry in entries if entry["changed_bytes"]],
                        unit="ratio", goal={"p50": 1.3})
        self.api.delete(session)

    def branches(self):
        session = self.create()
        self.api.out(session, "echo x > f")
        for count, rounds, goal in ((1, 10, 250), (10, 4, 1200)):
            times = []
            for number in range(rounds):
                self.api.out(session, f"echo {number} > f")
                self.wait_pool()
                started = time.monotonic()
                made = [entry["id"] for entry in self.api.branch(session, count)]
                threads = [threading.Thread(target=self.true, args=(one,)) for one in made]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                times.append((time.monotonic() - started) * 1000)
                for one in made:
                    self.api.delete(one)
                time.sleep(0.2)
            self.report.add(f"branch_{count}_true", times, goal={"p50": goal})
        self.api.delete(session)

    def memory(self):
        self.restart(pool_size=0)
        time.sleep(1)

        def resident():
            return {role: sum(hostside.rss_bytes(pid) for pid in self.daemon.role_pids(role)) / (1 << 20)
                    for role in ("worker", "helper", "supervisor")}

        idle = resident()
        self.report.add("daemon_rss_idle", [idle["worker"]], unit="MiB", goal={"p50": 20}, **idle)
        sessions = [self.create() for _ in range(2)]
        for session in sessions:
            self.api.verb(session, "suspend")
        made = []
        while len(made) + len(sessions) < 100:
            made += [entry["id"] for entry in self.api.branch(sessions[0], min(49, 100 - len(made) - 2), wake=False)]
        for entry in self.api.list(limit=200):
            if entry["state"] != "suspended":
                self.api.verb(entry["id"], "suspend")
        time.sleep(1)
        full = resident()
        self.report.add("daemon_rss_100_suspended", [full["worker"]], unit="MiB", goal={"p50": 20}, **full)
        for entry in self.api.list(limit=200):
            self.api.delete(entry["id"])

    def output(self):
        session = self.create()
        size = 50_000_000
        times = [timed(lambda: self.api.exec(session, f"head -c {size} /dev/zero", timeout=120)) for _ in range(2)]
        self.report.add("output_throughput", [size / 1000 / value for value in times], unit="MB/s")
        data = os.urandom(20_000_000)
        times = [timed(lambda: self.api.write(session, "/home/user/up", data)) for _ in range(3)]
        self.report.add("upload_throughput", [len(data) / 1000 / value for value in times], unit="MB/s")
        self.api.delete(session)


# Keeps the given number of MiB changing: touches every page anew whenever /tmp/again appears.
DIRTIER = r'''
import os, sys, time
block = bytearray(int(sys.argv[1]) << 20)
n = 0
while True:
    n += 1
    for at in range(0, len(block), 4096): block[at] = n & 255
    open("/tmp/dirty-ready", "w").close()
    while not os.path.exists("/tmp/again"): time.sleep(0.01)
    os.unlink("/tmp/again")
'''

# Prints the longest pauses of a tight loop, in ms, for the given number of seconds.
GAPS = r'''
import sys, time
end = time.monotonic() + float(sys.argv[1]); last = time.monotonic(); gaps = []; n = 0
while last < end:
    time.sleep(0.001)
    now = time.monotonic()
    if now - last > 0.015: gaps.append((now - last) * 1000)
    last = now; n += 1
    open("/home/user/n", "w").write(str(n)) if n % 100 == 0 else None
print(" ".join("%.1f" % gap for gap in gaps) or "0")
'''


def peer_qemu_boot(report, build, boots=4):
    """What the same guest takes to boot with plain QEMU until its agent first answers."""
    work = hostside.BASE_DIR / "peer"
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ninja", "-C", build, "src/image/image-tool"], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([build / "src" / "image" / "image-tool", build / "bin" / "space-agent", work, work / "tmp", "-",
                           "python3"], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        report.note(f"no image for a plain boot: {done.stdout[-500:]}")
        return
    has_kvm = os.path.exists("/dev/kvm") and re.search(r"\b(vmx|svm)\b", open("/proc/cpuinfo").read())
    times = []
    # Told rather than measured: the kernel's own measurement fails on a busy host, and then it never gets a clock.
    tsc = re.search(r"cpu MHz\s*: ([0-9.]+)", open("/proc/cpuinfo").read())
    clock = f"no_timer_check tsc=reliable tsc_early_khz={int(float(tsc.group(1)) * 1000)} " if tsc and not has_kvm else ""
    for number in range(boots):
        port = hostside.PORT_FIRST + 28 + number
        started = time.monotonic()
        process = subprocess.Popen(
            ["qemu-system-x86_64", "-M", "microvm,acpi=on,rtc=on,isa-serial=off", "-accel", "kvm" if has_kvm else "tcg",
             "-cpu", "host" if has_kvm else "max", "-m", "512", "-nodefaults", "-display", "none", "-no-reboot",
             "-kernel", work / "kernel", "-initrd", work / "initrd", "-append",
             f"console=ttyS0 quiet loglevel=3 mitigations=off {clock}space.control=" + "0" * 64,
             "-chardev", "null,id=c", "-device", "isa-serial,chardev=c",
             "-drive", f"file={work / 'disk'},format=raw,if=none,id=d,snapshot=on", "-device", "virtio-blk-device,drive=d",
             "-netdev", f"user,id=n,net=169.254.77.0/24,host=169.254.77.1,hostfwd=tcp:127.0.0.1:{port}-169.254.77.2:49983",
             "-device", "virtio-net-device,netdev=n,mac=06:53:50:41:00:02"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while time.monotonic() - started < 60:
                try:
                    if rest.Client(("127.0.0.1", port), timeout=30).call("GET", "/health").status == 204:
                        times.append((time.monotonic() - started) * 1000)
                        break
                except (OSError, rest.http.client.HTTPException):
                    time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    if times:
        report.add("peer_qemu_boot", times)
    else:
        report.note("a plain boot never answered")
    shutil.rmtree(work)


def peer_runsc(report):
    program = shutil.which("runsc")
    if not program:
        report.note("runsc is not installed: no figures of that peer")
        return
    command = [program, "--network=none", "--ignore-cgroups", "do", "true"]
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        report.note("runsc is installed but does not run here")
        return
    report.add("peer_runsc", [timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                                                           stderr=subprocess.DEVNULL)) for _ in range(8)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bin", default=str(ROOT / "build" / "bin"), help="folder of the programs")
    parser.add_argument("figures", nargs="*", help="only figures whose names begin so")
    arguments = parser.parse_args()
    os.environ["SPACE_TEST_BIN"] = str(pathlib.Path(arguments.bin).resolve())
    import daemon as daemon_module  # pylint: disable=import-outside-toplevel  (reads the environment)
    report = Report(arguments.figures)
    with hostside.one_run_at_a_time():
        hostside.remove_leftovers()
        instance = daemon_module.Daemon("bench", 0, {"log_level": "info"})
        try:
            instance.start()
            report.note("building the template")
            done = instance.cli("template", "build", "default", timeout=TEMPLATE_TIMEOUT_S)
            assert done.returncode == 0, done.stderr[-3000:]
            peer_qemu_boot(report, pathlib.Path(arguments.bin).resolve().parent)
            peer_runsc(report)
            bench = Bench(instance, report)
            for name, function in (("create_on_demand", bench.creates), ("create_warm", bench.warm_creates),
                                   ("suspend", bench.suspends), ("exec", bench.execs), ("snapshot", bench.snapshots),
                                   ("rolling", bench.rolling), ("branch", bench.branches),
                                   ("output", bench.output), ("daemon_rss", bench.memory)):
                if not report.wants(name):
                    continue
                report.note(name)
                try:
                    function()
                except Exception as error:  # pylint: disable=broad-except
                    report.note(f"{name}: {type(error).__name__}: {error}")
                    for session in bench.api.list():
                        with contextlib.suppress(Exception):
                            bench.api.delete(session["id"])
        finally:
            instance.destroy()
            hostside.remove_leftovers()


if __name__ == "__main__":
    main()
