"""docs/openapi.yaml as the tests use it: its operations, and a checker for the part of JSON Schema it makes use of."""
import pathlib
import re

import yaml

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "openapi.yaml"
METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "$ref", "allOf", "description",
         "minimum", "maximum", "maxLength", "maxProperties", "pattern", "format"}


class Description:
    def __init__(self, text=None):
        self.root = yaml.safe_load(text if text is not None else PATH.read_text())

    def resolve(self, node):
        while "$ref" in node:
            target = self.root
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            node = target
        return node

    def operations(self):
        """(METHOD, path, operation) of each."""
        for path, item in self.root["paths"].items():
            for method in METHODS:
                if method in item:
                    yield method.upper(), path, item[method]

    def operation(self, method, path):
        """The operation that serves a concrete path."""
        for candidate, pattern, operation in self.operations():
            regex = re.escape(pattern).replace(r"\{path\}", ".*")
            regex = re.sub(r"\\\{\w+\\\}", "[^/]+", regex)
            if candidate == method and re.fullmatch(regex, path.split("?")[0]):
                return operation
        raise AssertionError(f"{method} {path} is not described")

    def check_answer(self, method, path, answer):
        """Status and body of an answer are as described."""
        operation = self.operation(method, path)
        response = operation["responses"].get(str(answer.status)) or operation["responses"].get("default")
        assert response, f"{method} {path}: status {answer.status} is not described: {answer.body[:300]}"
        content = self.resolve(response).get("content")
        kind = answer.headers.get("content-type", "").split(";")[0]
        if content is None:
            assert not answer.body or "default" in operation["responses"], f"{method} {path}: an answer without a described body"
            return
        assert kind in content, f"{method} {path}: {kind} is not described"
        if kind == "application/json":
            self.check(answer.json, content[kind]["schema"], f"{method} {path} {answer.status}")

    def check(self, value, schema, where):
        schema = self.resolve(schema)
        unknown = set(schema) - KNOWN
        assert not unknown, f"{where}: the checker does not know {unknown}"
        for part in schema.get("allOf", ()):
            merged = dict(self.resolve(part))
            merged["properties"] = {**merged.get("properties", {}), **schema.get("properties", {})}
            self.check(value, merged, where)
        self.check_type(value, schema, where)
        if "enum" in schema:
            assert value in schema["enum"], f"{where}: {value!r} is none of {schema['enum']}"
        if "const" in schema:
            assert value == schema["const"], f"{where}: {value!r}"
        if isinstance(value, str):
            assert "pattern" not in schema or re.search(schema["pattern"], value), f"{where}: {value!r}"
            assert len(value) <= schema.get("maxLength", len(value)), f"{where}: too long"
            if schema.get("format") == "date-time":
                assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", value), f"{where}: {value!r}"
        if isinstance(value, int) and not isinstance(value, bool):
            assert schema.get("minimum", value) <= value <= schema.get("maximum", value), f"{where}: {value}"
        if isinstance(value, list):
            for index, item in enumerate(value):
                self.check(item, schema.get("items", {}), f"{where}[{index}]")
        if isinstance(value, dict):
            self.check_object(value, schema, where)

    @staticmethod
    def check_type(value, schema, where):
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds

        def fits(kind):
            if kind == "integer":
                return isinstance(value, int) and not isinstance(value, bool)
            return isinstance(value, TYPES[kind])

        assert not kinds or any(fits(kind) for kind in kinds), f"{where}: {value!r} is no {kinds}"

    def check_object(self, value, schema, where):
        for name in schema.get("required", ()):
            assert name in value, f"{where}: {name} is missing in {value}"
        others = schema.get("additionalProperties", True)
        for name, item in value.items():
            if name in schema.get("properties", {}):
                self.check(item, schema["properties"][name], f"{where}.{name}")
            else:
                assert others is not False, f"{where}: {name} is not described"
                if isinstance(others, dict):
                    self.check(item, others, f"{where}.{name}")
