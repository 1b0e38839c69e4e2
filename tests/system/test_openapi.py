"""Answers of the real daemon are as docs/openapi.yaml describes them, in every state a session goes through."""
import json

import schema

DESCRIPTION = schema.Description()


def ask(api, method, path, body=None):
    answer = api.call(method, path, body)
    assert answer.status < 400, (method, path, answer.status, answer.body[:300])
    DESCRIPTION.check_answer(method, path, answer)
    return answer.json if answer.headers.get("content-type") == "application/json" else None


def test_a_life_as_described(api):
    session = ask(api, "POST", "/v1/sessions", {"name": "described", "labels": {"a": "b"}, "environment": {"A": "1"},
                                                "timeout_s": 900, "snapshot_interval_s": 0})["id"]
    base = f"/v1/sessions/{session}"
    snapshot = ask(api, "POST", base + "/snapshot", {"name": "first"})["id"]
    for verb, body in (("pause", {}), ("resume", {}), ("suspend", {}), ("wake", {}), ("connect", {"timeout_s": 60}),
                       ("rewind", {"snapshot": snapshot})):
        ask(api, "POST", f"{base}/{verb}", body)
        ask(api, "GET", base)
        ask(api, "GET", "/v1/sessions")
    ask(api, "PATCH", base, {"labels": {}, "name": None, "on_timeout": "kill"})
    branch = ask(api, "POST", base + "/branch", {"count": 1})["sessions"][0]["id"]
    history = ask(api, "GET", base + "/snapshots")
    assert len(history["snapshots"]) >= 4
    ask(api, "DELETE", f"{base}/snapshots/{history['snapshots'][0]['id']}")
    ask(api, "DELETE", f"/v1/sessions/{branch}")
    ask(api, "DELETE", base)


def test_the_rest_as_described(api):
    for path in ("/v1/templates", "/v1/templates/default", "/v1/doctor", "/v1/version", "/metrics", "/healthz", "/v1/openapi"):
        ask(api, "GET", path)
    key = ask(api, "POST", "/v1/keys", {"name": "described", "tenant": "t"})
    ask(api, "GET", "/v1/keys")
    ask(api, "DELETE", f"/v1/keys/{key['id']}")


def test_events_as_described(api):
    session = api.create(snapshot_interval_s=0)["id"]
    api.verb(session, "pause")
    events = api.events(timeout=20, last_id=0, query=f"?session={session}")
    seen = []
    for event in events:
        if event["type"] == "gap":
            continue
        DESCRIPTION.check(event, {"$ref": "#/components/schemas/Event"}, json.dumps(event))
        seen.append(event["type"])
        if event["type"] == "session.paused":
            break
    assert seen[0] == "session.created" and seen[-1] == "session.paused"
    api.delete(session)
