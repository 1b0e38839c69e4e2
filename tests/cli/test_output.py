"""What the client prints: tables, trees, JSON, errors, help, completion."""
import json
import os
import pathlib
import pty
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def snapshot(identifier, parent=None, kind="rolling", name=None, stored=1 << 20):
    return {"id": identifier, "parent": parent, "kind": kind, "name": name, "bytes_stored": stored,
            "created_at": "2020-01-01T00:00:00.000Z"}


TREE = {"head": "n7", "snapshots": [
    snapshot("n1", None, "manual", "first", 100 << 20), snapshot("n2", "n1"), snapshot("n3", "n2", "manual", "b"),
    snapshot("n4", "n2"), snapshot("n5", "n4"), snapshot("n6", "n1"), snapshot("n7", "n6", "suspend"),
    snapshot("n8", "n6")]}

TREE_UTF8 = """\
● n1 first
├─● n2
│ ├─● n3 b
│ ● n4
│ ● n5
● n6
├─● n8
◉ n7 <- head
"""

TREE_ASCII = """\
* n1 first
|-* n2
| |-* n3 b
| * n4
| * n5
* n6
|-* n8
@ n7 <- head
"""


def shape(text):
    """The drawing with ids, names and the head mark; sizes and ages left out."""
    lines = []
    for line in text.splitlines():
        match = re.fullmatch(r"(.*?)(n\d)\s+\w+\s+[\d.]+ \w+\s+\d+ d ago\s*(.*)", line)
        assert match, line
        lines.append(" ".join(part for part in (match[1].strip(), match[2], match[3]) if part))
    return "\n".join(lines) + "\n"


def test_tree(cli, server):
    server.add("sx")
    server.snapshots["sx"] = TREE
    assert shape(cli.ok("history", "sx")) == TREE_UTF8
    assert shape(cli.ok("history", "sx", "--ascii")) == TREE_ASCII
    assert shape(cli.ok("history", "sx", env={"LC_ALL": "C"})) == TREE_ASCII
    columns = {line.index("n") for line in cli.ok("history", "--ascii", "sx").splitlines()}
    assert len(columns) == 1  # ids stand in one column
    assert json.loads(cli.ok("history", "sx", "--json")) == TREE


def test_long_chain_stays_narrow(cli, server):
    server.add("sx")
    server.snapshots["sx"] = {"head": "n2000", "snapshots": [
        snapshot(f"n{i}", f"n{i - 1}" if i > 1 else None) for i in range(1, 2001)]}
    lines = cli.ok("history", "sx").splitlines()
    assert len(lines) == 2000 and max(map(len, lines)) < 80


def test_deep_branches_and_loops(cli, server):
    """Nonsense from the server is drawn somehow, but ends."""
    server.add("sx")
    deep = [snapshot("n0")]
    for i in range(1, 500):
        deep += [snapshot(f"a{i}", deep[-1]["id"]), snapshot(f"b{i}", deep[-1]["id"])]
    server.snapshots["sx"] = {"head": None, "snapshots": deep + [snapshot("x", "y"), snapshot("y", "x")]}
    assert len(cli.ok("history", "sx").splitlines()) == len(deep) + 2


TABLE = """\
ID        NAME  STATE      TEMPLATE   CREATED  TIMEOUT          LABELS
s1        wäb   running    default:1  -        -                team=blue
s2longer  -     suspended  default:1  -        kill after 90 s  -
"""


def test_table(cli, server):
    server.add("s1", name="wäb", labels={"team": "blue"}, created_at=None)
    server.add("s2longer", state="suspended", timeout_s=90, on_timeout="kill", created_at=None)
    assert cli.ok("ls") == TABLE
    assert cli.ok("ls", "-q") == "s1\ns2longer\n"
    assert [s["id"] for s in json.loads(cli.ok("ls", "--json", "--state", "suspended"))["sessions"]] == ["s2longer"]


def test_names_cannot_drive_the_terminal(cli, server):
    server.add("s1", name="a\033]0;x\007b\u009bc", labels={"k": "v\r"})
    for words in (["ls"], ["info", "s1"]):
        text = cli.ok(*words)
        assert "\033" not in text and "\007" not in text and "\r" not in text and "\u009b" not in text


def on_terminal(cli, *words, env=None):
    master, slave = pty.openpty()
    process = cli.start(*words, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=env)
    os.close(slave)
    data = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        data += piece
    process.communicate()
    os.close(master)
    return data.decode()


def test_colours_only_on_a_terminal(cli, server):
    server.add("s1")
    assert "\033[32mrunning\033[0m" in on_terminal(cli, "ls")
    assert "\033" not in on_terminal(cli, "ls", env={"NO_COLOR": "1"})
    assert "\033" not in on_terminal(cli, "ls", env={"TERM": "dumb"})


def test_state_verbs(cli, server):
    server.add("s1", name="web")
    server.add("s2")
    assert cli.ok("suspend", "web", "s2") == "web suspended\ns2 suspended\n"
    assert json.loads(cli.ok("wake", "web", "--json"))["state"] == "running"
    done = cli("pause", "web", "nobody")
    assert done.stdout == "web paused\n" and done.returncode == 125
    assert 'space: cannot pause nobody: there is no session "nobody"' in done.stderr


def test_create_sends_what_was_asked(cli, server):
    identifier = cli.ok("create", "--name", "web", "-e", "A=1=2", "--label", "team=blue", "--timeout", "2h",
                        "--on-timeout", "kill", "--snapshot-interval", "0", "-t", "data:1").strip()
    assert server.calls[-1][2] == {"name": "web", "environment": {"A": "1=2"}, "labels": {"team": "blue"},
                                   "timeout_s": 7200, "on_timeout": "kill", "snapshot_interval_s": 0,
                                   "template": "data:1"}
    assert identifier in server.sessions
    done = cli("create", "--on-timeout", "explode")
    assert done.returncode == 125 and "suspend kill" in done.stderr
    assert cli("create", "--label", "novalue").returncode == 125
    cli.ok("update", identifier, "--timeout", "0", "--name", "shop")
    assert server.calls[-1][2] == {"timeout_s": 0, "name": "shop"}


def test_timeline_verbs(cli, server):
    server.add("s1")
    assert cli.ok("snapshot", "s1", "--name", "x") == "n1\n"
    assert cli.ok("branch", "s1", "-n", "3") == "b0\nb1\nb2\n"
    assert server.calls[-1][2] == {"count": 3}
    assert cli.ok("rewind", "s1", "n1") == "s1 running\n"
    assert server.calls[-1][2] == {"snapshot": "n1"}


def test_rm(cli, server):
    server.add("s1")
    server.add("s2")
    done = cli("rm", "s1", "gone", "s2")
    assert done.stdout == "s1\ns2\n" and done.returncode == 125 and not server.sessions
    assert cli("rm", "-f", "gone").returncode == 0


def test_port(cli, server):
    server.add("s1", name="web")
    assert cli.ok("port", "web", "8000") == "http://8000-s1.localhost:7777\n"
    server.sessions["s1"]["access_token"] = "secret"
    assert cli.ok("port", "web", "80", "--token") == "http://80-s1.localhost:7777/?space_token=secret\n"
    for bad in ("0", "65536", "x", "-1"):
        assert cli("port", "web", bad).returncode == 125


def test_ps_and_kill(cli, server):
    server.add("s1")
    pid = cli.ok("exec", "-d", "s1", "--", "sleep", "100").strip()
    lines = cli.ok("ps", "s1").splitlines()
    assert lines[0].split() == ["PID", "STATUS", "STARTED", "COMMAND"]
    assert lines[1].split()[:2] == [pid, "running"] and lines[1].endswith("sleep 100")
    assert cli.ok("kill", "-s", "KILL", "s1", pid) == ""
    assert server.calls[-1][2] == {"process": {"pid": int(pid)}, "signal": "SIGNAL_SIGKILL", "group": True}
    assert cli("attach", "s1", pid).returncode == 137
    assert "SIGKILL" in cli.ok("ps", "-a", "s1")
    done = cli("kill", "s1", "999999")
    assert done.returncode == 125 and "space ps" in done.stderr
    assert cli("kill", "-s", "NOSUCH", "s1", pid).returncode == 125


def test_template_build(cli, server):
    done = cli("template", "build", "t:1", "--packages", "a,b", "-p", "c", "--run", "x y", "--memory", "1G", "--vcpus", "2",
               "--size", "8G")
    assert done.returncode == 0 and done.stdout == "t:1 sha256:0\n" and done.stderr == "one\ntwo\n"
    assert server.calls[-1][2] == {"name": "t:1", "packages": ["a", "b", "c"], "run": ["x y"],
                                   "memory_bytes": 1 << 30, "size_bytes": 8 << 30, "vcpus": 2}
    lines = [json.loads(line) for line in cli.ok("template", "build", "t", "--json").splitlines()]
    assert lines == server.build_lines
    server.build_lines = [{"line": "x"}, {"error": {"code": "no_space", "message": "disk full", "details": {}}}]
    done = cli("template", "build", "t")
    assert done.returncode == 125 and "cannot build template t: disk full" in done.stderr
    server.build_lines = [{"line": "x"}]
    assert "before the build was done" in cli("template", "build", "t").stderr


def test_events(cli, server):
    server.events = [{"id": 1, "type": "session.running", "time": "2026-01-01T10:11:12.345Z", "session_id": "s1",
                      "tenant": "t", "reason": "asked", "then_cut": True},
                     {"id": 2, "type": "session.suspended", "time": "2026-01-01T10:11:13.345Z", "session_id": "s1"}]
    lines = cli.ok("events", "-n", "2").splitlines()
    assert lines[0].split()[:3] == ["10:11:12.345", "session.running", "s1"] and "reason=asked" in lines[0]
    assert lines[1].split()[1] == "session.suspended"
    assert [json.loads(line)["id"] for line in cli.ok("events", "--json", "-n", "2").splitlines()] == [1, 2]


def test_doctor(cli, server):
    assert cli.ok("doctor") == "STATUS  CHECK  FINDING\nok      kvm    works\n"
    server.checks.append({"name": "disk", "status": "fail", "text": "full"})
    assert cli("doctor").returncode == 125
    assert len(json.loads(cli("doctor", "--json").stdout)["checks"]) == 2


def test_version(cli):
    assert json.loads(cli.ok("version", "--json"))["server"]["version"] == "9.9.9"
    assert cli.ok("--version").startswith("space ")
    assert "not reached" in cli.ok("--socket", "/nowhere/s", "version")


def test_top(cli, server):
    server.add("s1", state="suspended")
    text = cli.ok("top", "-n", "1")
    assert "1 sessions, 0 running" in text and "s1" in text and "\033" not in text
    assert json.loads(cli.ok("top", "--json", "-n", "1"))[0]["id"] == "s1"
    assert not [path for _, path, _ in server.calls if "metrics" in path]  # asking would wake it


@pytest.mark.parametrize("words, text", [
    (["exce", "x"], 'did you mean "exec"?'), (["ls", "--sate", "x"], "did you mean --state?"),
    (["template"], "build, ls, inspect, rm"), (["template", "bulid"], "build, ls, inspect, rm"),
    (["info"], "usage: space info ID"), (["info", "a", "b"], '"b" is one argument too many'),
    (["create", "--timeout", "soon"], "is not a duration"), (["create", "--timeout"], "needs a value"),
    (["ls", "--json=yes"], "takes no value"), (["-x"], "unknown option -x"), (["cp", "a", "b"], "ID:/path"),
    (["cp", "s:a", "s:b"], "both sides"), (["exec", "-d", "-t", "s", "true"], "cannot be combined")])
def test_usage_errors(cli, words, text):
    done = cli(*words)
    assert done.returncode == 125 and text in done.stderr and done.stdout == ""
    assert done.stderr.startswith("space: ") and "\nhint: " in done.stderr


def test_errors_as_json(cli):
    done = cli("info", "nobody", "--json")
    assert done.stdout == "" and done.returncode == 125
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "not_found" and "nobody" in error["message"] and "space ls" in error["hint"]


def test_api_key_and_url(cli, server):
    done = cli("--url", "http://127.0.0.1:1", "ls", env={"SPACE_SOCKET": ""})
    assert done.returncode == 125 and "SPACE_URL" in done.stderr
    assert "is not http://HOST:PORT" in cli("--url", "ftp://x", "ls").stderr


def test_result_that_cannot_be_written(cli, server):
    server.add("s1")
    with open("/dev/full", "wb") as full:
        process = cli.start("ls", stdout=full, stderr=subprocess.PIPE)
        assert b"No space left" in process.communicate()[1] and process.returncode == 125


def verbs(cli):
    return json.loads(cli.ok("help", "--json"))


def test_help_of_every_verb(cli):
    assert len(verbs(cli)) >= 30
    for verb in verbs(cli):
        text = cli.ok("help", *verb["name"].split())
        assert text.startswith(f"space {verb['name']}: {verb['summary']}")
        assert f"usage: space {verb['name']}" in text and "examples:" in text
        assert max(map(len, text.splitlines())) <= 110
        if verb["name"] != "serve":
            assert cli.ok(*verb["name"].split(), "--help") == text


def test_manual_has_every_verb_and_option(cli):
    text = (ROOT / "man" / "space.1").read_text().replace("\\-", "-")
    for verb in verbs(cli):
        assert re.search(rf"^\.It Cm {verb['name']}\b", text, re.M), verb["name"]
        for option in verb["options"]:
            assert f"-{option['name']}" in text, (verb["name"], option["name"])


def complete(cli, line):
    script = f"""
        source {ROOT}/completions/space.bash
        COMP_LINE={json.dumps(line)}
        COMP_POINT=${{#COMP_LINE}}
        read -r -a COMP_WORDS <<<"$COMP_LINE"
        [[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _space
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{os.path.dirname(cli.program)}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "--norc", "-c", script], env={**cli.environment(), "PATH": path}, timeout=20,
                          check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_completion(cli, server):
    server.add("s1abc", name="web")
    server.add("s2")
    server.snapshots["s1abc"] = {"head": "n1", "snapshots": [snapshot("n1", name="first")]}
    assert complete(cli, "space su") == ["suspend"]
    assert "template" in complete(cli, "space ")
    assert complete(cli, "space template in") == ["inspect"]
    assert complete(cli, "space info w") == ["web"]
    assert complete(cli, "space exec s") == ["s1abc", "s2"]
    assert complete(cli, "space rewind web f") == ["first"]
    assert complete(cli, "space create --on-timeout k") == ["kill"]
    assert "--snapshot-interval" in complete(cli, "space create --sn")
    assert "--state" in complete(cli, "space ls --")
