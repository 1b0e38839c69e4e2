"""A WebSocket client (RFC 6455) as small as tests need: masks, fragments, close codes; no extensions."""
import base64
import hashlib
import os
import struct

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class Refused(Exception):
    def __init__(self, status, headers, body):
        super().__init__(f"the upgrade was answered with {status}")
        self.status, self.headers, self.body = status, headers, body


class WebSocket:
    def __init__(self, sock, host, path="/", headers=()):
        self.sock = sock
        self.buffer = b""
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: Upgrade", "Upgrade: websocket",
                 "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}"]
        lines += [f"{name}: {value}" for name, value in headers]
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        while b"\r\n\r\n" not in self.buffer:
            data = sock.recv(65536)
            if not data:
                break
            self.buffer += data
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        status = int(first.split()[1]) if len(first.split()) > 1 else 0
        if status != 101:
            raise Refused(status, self.headers, self.buffer)
        digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        assert self.headers["sec-websocket-accept"] == base64.b64encode(digest).decode()

    def send(self, data, opcode=BINARY, final=True):
        mask = os.urandom(4)
        size = len(data)
        head = bytes([(0x80 if final else 0) | opcode])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 65536:
            head += bytes([0x80 | 126]) + struct.pack(">H", size)
        else:
            head += bytes([0x80 | 127]) + struct.pack(">Q", size)
        if size:
            repeated = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
        self.sock.sendall(head + mask + data)

    def _take(self, size):
        while len(self.buffer) < size:
            data = self.sock.recv(1 << 20)
            if not data:
                raise ConnectionError("closed in the middle of a frame")
            self.buffer += data
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def receive_frame(self):
        first, second = self._take(2)
        size = second & 127
        assert not second & 128, "a server must not mask"
        if size == 126:
            size = struct.unpack(">H", self._take(2))[0]
        elif size == 127:
            size = struct.unpack(">Q", self._take(8))[0]
        return first & 15, bool(first & 128), self._take(size)

    def receive(self):
        """(opcode, data) of the next message; answers pings."""
        message, kind = b"", None
        while True:
            opcode, final, data = self.receive_frame()
            if opcode == PING:
                self.send(data, PONG)
                continue
            if opcode in (CLOSE, PONG):
                return opcode, data
            kind = opcode or kind
            message += data
            if final:
                return kind, message

    def close(self):
        self.sock.close()
