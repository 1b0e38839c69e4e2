"""The process calls of the agent as its tests make them; plain http.client."""
import base64
import http.client
import json
import struct

from agent_files import Agent


class RpcError(Exception):
    def __init__(self, error):
        super().__init__(f"{error['code']}: {error.get('message')}")
        self.code = error["code"]
        self.message = error.get("message", "")
        self.detail = error


def envelope(message, flags=0):
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


class Stream:
    """One answer stream; iterates over its events and raises RpcError if it ends with an error."""

    def __init__(self, agent, method, message, headers=None, timeout=60):
        self.connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=timeout)
        self.connection.request("POST", f"/process.Process/{method}", envelope(message), {
            "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", **agent.auth(), **(headers or {})})
        self.response = self.connection.getresponse()
        if self.response.status != 200:
            raise RpcError(json.loads(self.response.read()))

    def message(self):
        head = self.response.read(5)
        assert len(head) == 5, "the stream was cut off"
        flags, size = struct.unpack(">BI", head)
        data = self.response.read(size)
        assert len(data) == size
        return flags, json.loads(data)

    def __iter__(self):
        while True:
            flags, message = self.message()
            if flags & 2:
                if "error" in message:
                    raise RpcError(message["error"])
                return
            yield message["event"]

    def close(self):
        self.connection.close()
        self.response.close()


class Result:
    def __init__(self):
        self.pid = None
        self.out = b""
        self.err = b""
        self.pty = b""
        self.end = None
        self.gap = None
        self.order = []

    @property
    def code(self):
        return self.end["exitCode"]

    def take(self, event):
        if "start" in event:
            self.pid = event["start"]["pid"]
        for name, attribute in (("stdout", "out"), ("stderr", "err"), ("pty", "pty")):
            if name in event.get("data", {}):
                data = base64.b64decode(event["data"][name], validate=True)
                self.order.append((event["data"]["offset"], len(data)))
                setattr(self, attribute, getattr(self, attribute) + data)
        if "gap" in event:
            self.gap = event["gap"]
        if "end" in event:
            self.end = event["end"]
        return self


class ProcessAgent(Agent):
    def auth(self, user=None):
        headers = {"X-Access-Token": self.token} if self.token else {}
        if self.user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{self.user}:".encode()).decode()
        return headers

    def start(self, cmd, *args, headers=None, timeout=60, envs=None, cwd=None, **fields):
        process = {"cmd": cmd, "args": list(args)}
        if envs is not None:
            process["envs"] = envs
        if cwd is not None:
            process["cwd"] = cwd
        return Stream(self, "Start", {"process": process, "stdin": False, **fields}, headers, timeout)

    def run(self, cmd, *args, **options):
        result = Result()
        stream = self.start(cmd, *args, **options)
        try:
            for event in stream:
                result.take(event)
        finally:
            stream.close()
        assert result.end is not None
        return result

    def sh(self, script, **options):
        return self.run("sh", "-c", script, **options)

    def background(self, cmd, *args, **options):
        """Starts and leaves: the pid."""
        stream = self.start(cmd, *args, **options)
        pid = stream.message()[1]["event"]["start"]["pid"]
        stream.close()
        return pid

    def attach(self, pid, offset=None, headers=None, timeout=60):
        message = {"process": {"pid": pid}}
        if offset is not None:
            message["offset"] = offset
        return Stream(self, "Connect", message, headers, timeout)

    def follow(self, pid, **options):
        result = Result()
        for event in self.attach(pid, **options):
            result.take(event)
        return result

    def rpc(self, method, message, headers=None):
        answer = self.request("POST", f"/process.Process/{method}", json.dumps(message),
                              {"Content-Type": "application/json", **self.auth(), **(headers or {})})
        if answer.status != 200:
            raise RpcError(answer.json)
        return answer.json

    def list(self, all=False):
        return self.rpc("List", {"all": True} if all else {})["processes"]

    def send(self, pid, data, kind="stdin"):
        return self.rpc("SendInput", {"process": {"pid": pid}, "input": {kind: base64.b64encode(data).decode()}})

    def close_stdin(self, pid):
        return self.rpc("CloseStdin", {"process": {"pid": pid}})

    def signal(self, pid, name, **fields):
        return self.rpc("SendSignal", {"process": {"pid": pid}, "signal": name, **fields})
