"""Each verb once on a real microVM, each verb in each wrong state, and input that must change nothing."""
import json
import time

import pytest

import guests
from rest import ApiError


def refused(status, function, *arguments, **options):
    with pytest.raises(ApiError) as info:
        function(*arguments, **options)
    assert info.value.status == status, str(info.value)
    assert info.value.code and info.value.message
    return info.value


def test_the_main_job(api):
    """create → run code → pause → resume → snapshot → suspend → wake → branch → rewind → delete."""
    made = api.create(template="default", name="main-job", labels={"team": "red"}, environment={"A": "1"},
                      snapshot_interval_s=0)
    session = made["id"]
    assert made["state"] == "running" and made["name"] == "main-job" and made["labels"] == {"team": "red"}
    assert api.out(session, "echo $A; echo one > note") == "1"
    guests.start_counter(api, session)
    first = guests.ask_counter(api, session)
    api.verb(session, "pause")
    assert api.state(session) == "paused"
    api.verb(session, "resume")
    guests.check_counter(api, session, first["n"], first["token"])
    taken = api.verb(session, "snapshot", name="first")
    snapshot = taken["id"]
    api.out(session, "echo two >> note")
    api.verb(session, "suspend")
    assert api.state(session) == "suspended"
    api.verb(session, "wake")
    assert api.state(session) == "running"
    assert api.out(session, "cat note") == "one\ntwo"
    before = guests.check_counter(api, session, first["n"], first["token"])
    branch = api.branch(session)[0]["id"]
    assert api.out(branch, "cat note; echo three >> note") == "one\ntwo"
    guests.check_counter(api, branch, before["n"], first["token"])
    assert api.out(session, "cat note") == "one\ntwo"
    api.verb(session, "rewind", snapshot=snapshot)
    assert api.out(session, "cat note") == "one"
    history = api.history(session)
    kinds = [entry["kind"] for entry in history["snapshots"]]
    assert "suspend" in kinds and "rewind" in kinds, kinds
    assert any(entry.get("name") == "first" for entry in history["snapshots"])
    # The present was kept: it can be had again.
    kept = [entry for entry in history["snapshots"] if entry["kind"] == "rewind"][-1]
    api.verb(session, "rewind", snapshot=kept["id"])
    assert api.out(session, "cat note") == "one\ntwo"
    api.delete(session)
    refused(404, api.get, session)
    api.delete(branch)


def test_verbs_in_wrong_states(api, session):
    refused(409, api.verb, session, "resume")
    api.verb(session, "wake")
    api.verb(session, "suspend")
    api.verb(session, "suspend")
    assert api.state(session) == "suspended"
    refused(409, api.verb, session, "pause")
    refused(409, api.verb, session, "resume")
    refused(409, api.verb, session, "snapshot")
    assert api.state(session) == "suspended"
    api.verb(session, "wake")
    api.verb(session, "pause")
    api.verb(session, "pause")
    assert api.state(session) == "paused"
    api.verb(session, "snapshot")
    assert api.state(session) == "paused"
    api.verb(session, "suspend")
    assert api.state(session) == "suspended"
    api.delete(session)
    for verb in ("pause", "resume", "suspend", "wake", "connect", "snapshot", "branch", "rewind"):
        refused(404, api.verb, session, verb, **({"snapshot": "nabc"} if verb == "rewind" else {}))


@pytest.mark.parametrize("params, named", [
    ({"template": "no-such"}, "no-such"),
    ({"template": 7}, "template"),
    ({"template": "../../etc"}, "template"),
    ({"name": "a b/c"}, "name"),
    ({"name": "x" * 300}, "name"),
    ({"timeout_s": -1}, "timeout"),
    ({"timeout_s": "soon"}, "timeout"),
    ({"timeout_s": 1e300}, "timeout"),
    ({"on_timeout": "explode"}, "on_timeout"),
    ({"labels": {"k": 1}}, "labels"),
    ({"labels": []}, "labels"),
    ({"labels": {f"k{n}": "v" for n in range(500)}}, "labels"),
    ({"environment": {"A=B": "x"}}, "environment"),
    ({"environment": {"": "x"}}, "environment"),
    ({"environment": {"A": "x\0y"}}, ""),
    ({"environment": {"A": "x" * 200000}}, "environment"),
    ({"snapshot_interval_s": "often"}, "snapshot_interval"),
    ({"colour": "red"}, "colour"),
])
def test_bad_create_changes_nothing(api, daemon, params, named):
    with pytest.raises(ApiError) as info:
        api.create(**{"template": "default", **params})
    assert info.value.status in (400, 404, 413), str(info.value)
    assert named in info.value.message, info.value.message
    assert api.list() == []


def test_bad_bodies(api):
    for raw, kind in ((b"{", "cut"), (b"[]", "array"), (b'{"name":"a","name":"b"}', "key twice"), (b"\xff\xfe", "bytes"),
                      (b'{"template":"default"} x', "more"), (b"[" * 100000, "deep"),
                      (b'{"labels":' + b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"}", "deep object")):
        answer = api.call("POST", "/v1/sessions", raw=raw, headers={"Content-Type": "application/json"})
        assert answer.status in (400, 413), (kind, answer.status, answer.body[:200])
        assert answer.json["message"], kind
    assert api.list() == []


def test_oversized_body_is_refused_early(api):
    answer = api.call("POST", "/v1/sessions", raw=b'{"name":"' + b"x" * (32 << 20) + b'"}',
                      headers={"Content-Type": "application/json"})
    assert answer.status == 413
    assert api.list() == []


@pytest.mark.parametrize("path", ["/v1/sessions/..%2f..%2fetc", "/v1/sessions/%00", "/v1/sessions/" + "a" * 5000,
                                  "/v1/sessions/snotthere", "/v1/nothing", "/v1/sessions/x/nosuchverb/y",
                                  "/../../etc/passwd"])
def test_strange_paths(api, path):
    answer = api.call("GET", path)
    assert answer.status in (400, 404, 405, 414), answer.status
    assert "passwd" not in answer.body.decode(errors="replace").replace("/etc/passwd", "")


def test_wrong_method(api, session):
    assert api.call("PUT", f"/v1/sessions/{session}").status == 405
    assert api.call("GET", f"/v1/sessions/{session}/suspend").status in (404, 405)
    assert api.state(session) == "running"


def test_update(api, session):
    end = api.update(session, timeout_s=600)
    assert end["timeout_s"] == 600 and end["end_at"]
    changed = api.update(session, name="renamed", labels={"a": "b"}, on_timeout="kill")
    assert changed["name"] == "renamed" and changed["labels"] == {"a": "b"} and changed["on_timeout"] == "kill"
    assert api.get("renamed")["id"] == session  # a name is as good as an id
    refused(400, api.update, session, template="other")
    refused(400, api.update, session, labels={"a": None})
    assert api.get(session)["labels"] == {"a": "b"}


def test_names_are_unique_and_free_again(api, make):
    first = make(name="taken")
    refused(409, api.create, template="default", name="taken")
    api.delete(first)
    make(name="taken")


def test_events_tell_what_happened(api, make):
    seen = []
    stream = api.events(timeout=30)
    import threading
    reader = threading.Thread(target=lambda: [seen.append(event) for event in iter_quietly(stream)], daemon=True)
    reader.start()
    time.sleep(0.3)
    session = make(name="watched")
    api.verb(session, "suspend")
    api.verb(session, "wake")
    api.delete(session)
    guests.wait_for(lambda: any(event["type"].endswith(("deleted", "gone")) for event in seen), timeout=10)
    own = [event for event in seen if event.get("session_id") == session]
    types = [event["type"] for event in own]
    assert any(name.endswith("running") for name in types) and any(name.endswith("suspended") for name in types), types
    numbers = [event["id"] for event in seen]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)


def iter_quietly(stream):
    try:
        yield from stream
    except OSError:
        return


def test_metrics_health_and_doctor(api, session):
    health = api.call("GET", "/healthz")
    assert health.status == 200
    text = api.call("GET", "/metrics").body.decode()
    assert "# TYPE" in text and "space_" in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0, line
    checks = api.ask("GET", "/v1/doctor")["checks"]
    names = {check["name"] for check in checks}
    assert names and all(check["status"] in ("ok", "warn", "fail") and check["text"] for check in checks)
    assert not [check for check in checks if check["status"] == "fail"], json.dumps(checks, indent=1)


def test_cli_json_everywhere(daemon, session):
    for words in (["ls"], ["info", session], ["history", session], ["doctor"], ["template", "ls"], ["key", "ls"],
                  ["template", "inspect", "default"], ["version"]):
        done = daemon.cli("--json", *words, check=0) if words[0] == "version" else daemon.cli(*words, "--json", check=0)
        json.loads(done.stdout)


def test_templates_are_pinned(api, session):
    template = [entry for entry in api.ask("GET", "/v1/templates")["templates"] if entry["name"].startswith("default")][0]
    assert template["digest"].startswith("sha256:")
    assert api.get(session)["template_digest"] == template["digest"]
    # In use: deleting it must not take the ground from under a session that would wake from it.
    answer = api.call("DELETE", "/v1/templates/default")
    assert answer.status == 409, answer.body
    assert api.out(session, "echo alive") == "alive"
