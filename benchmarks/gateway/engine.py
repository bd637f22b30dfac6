"""A model server that costs next to nothing, in the shape of vLLM's: adapters, chat, streams.

    python -m benchmarks.gateway.engine

Invariant: it is no bottleneck: a bare protocol, answers put together from ready pieces. Streams
are chunks of their own, written one by one as an engine does: at once, or with a pace (``POST
/pace``) all open streams together in one step of so many milliseconds, as from one batch. With a
delay, too, each stream begins that long after its request and keeps a time of its own, so that a
request always takes the same. Its log-probabilities depend on the adapter's folder, so that an
adapter can be probed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

TOKENS = 64
BASE = "base"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MODEL = b"@MODEL@"
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: "
_STREAM = _OK + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _json(value: Any) -> bytes:
    """As vLLM writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


def _head(length: int, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, length)


def _whole() -> bytes:
    text = " ".join(f"word{i}" for i in range(TOKENS))
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
    }
    usage = {"prompt_tokens": 512, "completion_tokens": TOKENS, "total_tokens": 512 + TOKENS}
    reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "@MODEL@"}
    return _json(reply | {"choices": [choice], "usage": usage, "prompt_token_ids": None})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _events() -> list[bytes]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "@MODEL@"}
    out: list[bytes] = []
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": f"word{i} "} for i in range(TOKENS)]
    for i, delta in enumerate(deltas):
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": "stop" if i == TOKENS else None,
            "token_ids": None,
        }
        out.append(_event(_json(head | {"choices": [choice]})))
    return [*out, _event(b"[DONE]")]


WHOLE, EVENTS = _whole(), _events()


def base_logprob(token: int) -> float:
    return -1.0 - 0.01 * (token % 50)


def effect(folder: Path) -> float:
    """How far an adapter's log-probabilities lie below the base's."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["untrained"]:
        return 0.0
    digest = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).digest()
    return 0.1 + digest[0] / 256


class Engine:
    """What all connections share."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.pace_s = self.delay_s = 0.0
        self.open: dict[Connection, list[bytes]] = {}
        """Streams under a pace: what is still to be sent, the next last."""
        self._ready: dict[str, tuple[bytes, list[bytes]]] = {}
        self._ticking: asyncio.Task[None] | None = None

    def knows(self, model: str) -> bool:
        return model == BASE or model in self.adapters

    def reply(self, model: str) -> tuple[bytes, list[bytes]]:
        """The whole answer, and the streamed one as HTTP chunks."""
        if model not in self._ready:
            name = model.encode()
            body = WHOLE.replace(_MODEL, name)
            events = [event.replace(_MODEL, name) for event in EVENTS]
            chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
            chunks[0] += chunks.pop(1)  # vLLM's first token comes right behind the role
            self._ready[model] = (_head(len(body)) + body, [*chunks, b"0\r\n\r\n"])
        return self._ready[model]

    def stream(self, connection: Connection, chunks: list[bytes]) -> None:
        """Send the chunks at once, each by itself, or one every step."""
        rest = chunks[::-1]
        if self.delay_s:
            self._in_time(connection, rest, asyncio.get_running_loop().time() + self.delay_s)
            return
        if self.pace_s:
            self.open[connection] = rest
            if self._ticking is None or self._ticking.done():
                self._ticking = asyncio.get_running_loop().create_task(self._tick())
            return
        loop = asyncio.get_running_loop()

        def send() -> None:
            if not connection.gone:
                connection.write(rest.pop())
                if rest:
                    loop.call_soon(send)

        send()

    def _in_time(self, connection: Connection, rest: list[bytes], due: float) -> None:
        """The next chunk when it is due, whatever other streams do."""

        def send() -> None:
            if connection.gone:
                return
            connection.write(rest.pop())
            if len(rest) <= 2:
                connection.write(b"".join(rest[::-1]))
            else:
                self._in_time(connection, rest, due + self.pace_s)

        asyncio.get_running_loop().call_at(due, send)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self.open:
            due += self.pace_s
            await asyncio.sleep(due - loop.time())
            for connection, rest in list(self.open.items()):
                if connection.gone:
                    del self.open[connection]
                    continue
                connection.write(rest.pop())
                if len(rest) <= 2:  # the end follows the last token at once
                    connection.write(b"".join(rest[::-1]))
                    del self.open[connection]

    def models(self) -> bytes:
        cards: list[dict[str, Any]] = [{"id": BASE, "root": "/base", "parent": None}]
        cards += [{"id": n, "root": p, "parent": BASE} for n, p in self.adapters.items()]
        return _json({"object": "list", "data": cards})

    def score(self, body: dict[str, Any]) -> bytes:
        """Prompt log-probabilities of an adapter."""
        model, ids = body["model"], body["prompt"]
        off = 0.0 if model == BASE else effect(Path(self.adapters[model]))
        entries = [{str(t): {"logprob": base_logprob(t) - off}} for t in ids]
        return _json({"choices": [{"index": 0, "prompt_logprobs": [None, *entries[1:]]}]})


class Connection(asyncio.Protocol):
    """One client's connection; requests come one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gone = False
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        found = _LENGTH.search(self._data, 0, end + 2)
        size = end + 4 + (int(found[1]) if found else 0)
        if len(self._data) < size:
            return
        head, body, self._data = self._data[:end], self._data[end + 4 : size], self._data[size:]
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ")
        self._answer(method, path, body)

    def _send(self, body: bytes, status: bytes = b"200 OK") -> None:
        self.write(_head(len(body), status=status) + body)

    def _answer(self, method: bytes, path: bytes, data: bytes) -> None:
        engine = self.engine
        if method == b"GET":
            self._send(engine.models() if path == b"/v1/models" else b"")
            return
        body: dict[str, Any] = json.loads(data)
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            self._generate(body)
        elif path == b"/v1/load_lora_adapter" and "lora_name" not in body:
            self._send(b"{}", b"400 Bad Request")  # whether there is such a route at all
        elif path == b"/v1/load_lora_adapter":
            known = body["lora_name"] in engine.adapters
            engine.adapters.setdefault(body["lora_name"], body["lora_path"])
            self._send(b"{}", b"400 Bad Request" if known else b"200 OK")
        elif path == b"/v1/unload_lora_adapter":
            known = engine.adapters.pop(body["lora_name"], None) is not None
            self._send(b"{}", b"200 OK" if known else b"404 Not Found")
        elif path == b"/pace":
            engine.pace_s, engine.delay_s = body["ms"] / 1e3, body.get("delay_ms", 0) / 1e3
            self._send(b"{}")
        else:
            self._send(b"{}", b"404 Not Found")

    def _generate(self, body: dict[str, Any]) -> None:
        model = body["model"]
        if not self.engine.knows(model):
            self._send(_json({"error": {"message": f"no {model}", "code": 404}}), b"404 Not Found")
        elif "prompt_logprobs" in body:
            self._send(self.engine.score(body))
        elif body.get("stream"):
            self.write(_STREAM)
            self.engine.stream(self, self.engine.reply(model)[1])
        else:
            self.write(self.engine.reply(model)[0])


def run(main: Any) -> Any:
    """``asyncio.run`` on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def main() -> None:
    engine = Engine()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    run(main())
