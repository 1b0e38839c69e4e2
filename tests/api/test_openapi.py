"""docs/openapi.yaml against the routes of the source and against the running server."""
import pathlib
import re

import pytest

import schema
from conftest import ADMIN, RED, ROOT

DESCRIPTION = schema.Description()
OPERATIONS = list(DESCRIPTION.operations())


def test_it_is_what_the_server_hands_out(server):
    answer = server.tcp().call("GET", "/v1/openapi")
    assert answer.status == 200 and answer.body.decode() == schema.PATH.read_text()


def test_every_route_is_described_and_every_described_route_exists():
    routes = set()
    for path in (ROOT / "src" / "api").glob("*.c"):
        routes |= set(re.findall(r'\{"([A-Z]+)", "(/[^"]*)",', path.read_text()))
    described = {(method, re.sub(r"\{\w+\}", "{}", path)) for method, path, operation in OPERATIONS
                 if "/{path}" not in path}
    assert routes == described


def test_references_resolve():
    def walk(node):
        if isinstance(node, dict):
            if "$ref" in node:
                DESCRIPTION.resolve(node)
            for name, item in node.items():
                assert item is not None, f"{name}: a comma in a description that is not quoted?"
                walk(item)
        elif isinstance(node, list):
            for item in node:
                walk(item)

    walk(DESCRIPTION.root)
    names = [operation["operationId"] for _, _, operation in OPERATIONS if "operationId" in operation]
    assert len(names) == len(set(names))


def test_errors_have_described_codes():
    """Every code of the one table, and those of the router and proxy, are in the enumeration."""
    table = (ROOT / "src" / "base" / "error.c").read_text()
    codes = set(re.findall(r'\[ERROR_\w+\] = \{"(\w+)"', table)) - {"ok"}
    codes |= {"method_not_allowed", "port_closed", "guest_unavailable"}
    assert codes == set(DESCRIPTION.root["components"]["schemas"]["Error"]["properties"]["code"]["enum"])


@pytest.mark.parametrize("method, path, operation", OPERATIONS, ids=[f"{m} {p}" for m, p, _ in OPERATIONS])
def test_operation(server, method, path, operation):
    """Reached with and without credentials: a described status, an error body as described."""
    if path == "/v1/events":
        concrete = path + "?type=" + "x" * 100  # refused, so that it ends
    else:
        concrete = path.replace("{id}", "s" + "0" * 19).replace("{port}", "8000").replace("{path}", "x")
        concrete = re.sub(r"\{\w+\}", "nothing", concrete)
    body = {} if method in ("POST", "PATCH", "PUT") else None
    is_open = operation.get("security") == []
    for client, statuses in ((server.tcp(), (200,) if is_open else (401,)),
                             (server.tcp("e2b_" + "0" * 40), (200,) if is_open else (401,)),
                             (server.tcp(RED), None), (server.tcp(ADMIN), None)):
        if method == "HEAD":
            continue
        if path.startswith("/v1/sessions/{id}/ports/") and client.key is None:
            statuses = (404,)  # the session decides whether it wants a token, and there is none
        answer = client.call(method, concrete, body)
        if statuses:
            assert answer.status in statuses, (client.key, answer.status)
        assert answer.status != 405 and b"there is nothing at" not in answer.body
        assert answer.status == 401 or answer.headers.get("x-request-id") or answer.status >= 400
        if answer.status >= 400:
            DESCRIPTION.check(answer.json, {"$ref": "#/components/schemas/Error"}, concrete)
            DESCRIPTION.check_answer(method, concrete, answer)
        if answer.status == 201 and path == "/v1/sessions":
            server.local.delete(answer.json["id"])


def test_unknown_session_without_credentials_tells_nothing(server):
    """Whether an id exists is told to nobody who cannot name it whole: ids are 98 random bits."""
    session = server.local.create(name="guessable")
    for id in (session["id"][:-1], session["id"] + "a", "guessable", "s" + "0" * 19):
        assert server.tcp().call("GET", f"/v1/sessions/{id}/ports/80/").status in (400, 404)
    server.local.delete(session["id"])
