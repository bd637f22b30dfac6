"""A scripted model server in the shape of vLLM.

Invariant: everything is deterministic and in this process; chat completions carry token ids and
log-probabilities when they are asked for. Token ids are the UTF-8 bytes of the text, plus ``END``
when a reply ended by itself.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, cast

from marft_agents.schema import JsonDict

END = 256


@dataclass(frozen=True)
class Reply:
    """One scripted answer; the fields from ``status`` to ``hang`` are faults."""

    text: str | None = None
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """(function name, arguments) each."""
    finish_reason: str | None = None
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    prompt_token_ids: Sequence[int] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    chunks: Sequence[Mapping[str, Any]] | None = None
    """Stream events to replay as they are; the usage and end marker are not added to."""
    body: Mapping[str, Any] | None = None
    """Whole JSON body to send as it is."""
    status: int = 200
    error: str = "scripted error"
    with_ids: bool = True
    cut_after: int | None = None
    """Stream: break the connection after this many events."""
    delay_s: float = 0.0
    hang: bool = False
    """Do not answer until the server stops."""
    texts: Sequence[str] = ()
    """One text a choice, for requests with ``n`` > 1; otherwise all choices say ``text``."""
    reasoning: str | None = None


@dataclass(frozen=True)
class ServerRequest:
    """A chat completion request as it arrived; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: JsonDict
    raw: bytes = b""
    """The body byte for byte."""


Script = (
    Callable[[JsonDict], "Reply | str"]
    | Sequence["Reply | str"]
    | Mapping[str, "Reply | str | Sequence[Reply | str]"]
    | None
)


class ScriptedServer:
    """OpenAI-compatible server on loopback; a context manager.

    ``script``: a list (one reply a request, in order), a dict by model name, a callable of the
    request body, or ``None`` for replies that depend on the request alone (so parallel runs agree).
    """

    def __init__(
        self, script: Script = None, *, owned_by: str = "vllm", models: Sequence[str] = ("base",)
    ) -> None:
        self.requests: list[ServerRequest] = []
        self.listings = 0
        """How often the models were listed."""
        self.owned_by = owned_by
        self.models = list(models)
        """Names that ``GET /v1/models`` lists; requests for others are answered all the same."""
        self.stopping = threading.Event()
        self._script = script
        self._places: dict[str, Iterator[Reply | str]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.scripted = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    @property
    def url(self) -> str:
        """Base URL, ``http://127.0.0.1:PORT/v1``."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: ServerRequest) -> tuple[Reply, int]:
        """The next reply for ``request``, and its number."""
        with self._lock:
            self.requests.append(request)
            number = next(self._numbers)
            reply = self._next(request.body)
        return (Reply(text=reply) if isinstance(reply, str) else reply), number

    def _next(self, body: JsonDict) -> Reply | str:
        script, model = self._script, str(body.get("model"))
        if script is None:
            return default_reply(body)
        if callable(script):
            return script(body)
        if isinstance(script, Mapping):
            entry = script.get(model)
            if entry is None:
                return Reply(status=404, error=f"no model {model!r} in the script")
            if isinstance(entry, str | Reply):
                return entry
            place = self._places.setdefault(model, iter(entry))
        else:
            place = self._places.setdefault("", iter(script))
        return next(place, Reply(status=400, error="the script has no reply left"))


def default_reply(body: JsonDict) -> str:
    """A reply fixed by the request: a speaker's name where one is asked for, else a short text."""
    text = json.dumps(body.get("messages"), sort_keys=True)
    mark = zlib.crc32(text.encode())
    roles = re.findall(r"select the next role from \[([^\]]*)\]", text)
    if roles:
        names = re.findall(r"'([^']+)'", roles[-1])
        return names[mark % len(names)]
    return f"{body.get('model')} says {mark:08x}"


def token_ids_of(text: str, *, ended: bool = True) -> list[int]:
    """The ids that the server gives ``text``."""
    return [*text.encode("utf-8", "replace"), *([END] if ended else [])]


def completion_body(reply: Reply, body: JsonDict, number: int) -> JsonDict:
    """The JSON of a chat completion in vLLM's shape."""
    prompt = list(reply.prompt_token_ids or json.dumps(body.get("messages")).encode())
    texts = list(reply.texts) or [reply.text] * int(body.get("n") or 1)
    made = [_choice(reply, body, number, i, text) for i, text in enumerate(texts)]
    out: JsonDict = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [choice for choice, _ in made],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": sum(length for _, length in made),
            "total_tokens": len(prompt) + sum(length for _, length in made),
        },
    }
    return out | _ids(reply, body, "prompt_token_ids", prompt)


def _ids(reply: Reply, body: JsonDict, name: str, ids: list[int]) -> JsonDict:
    """The field for ids of a server that knows it: null where nobody asked."""
    return {name: ids if body.get("return_token_ids") else None} if reply.with_ids else {}


def _choice(
    reply: Reply, body: JsonDict, number: int, index: int, text: str | None
) -> tuple[JsonDict, int]:
    """One choice and the number of its tokens."""
    calls = [
        {
            "id": f"call-{number}-{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(dict(arguments))},
        }
        for i, (name, arguments) in enumerate(reply.tool_calls)
    ]
    finish = reply.finish_reason or ("tool_calls" if calls else "stop")
    sampled = text if text is not None else json.dumps(calls)
    ids = list(reply.token_ids or token_ids_of(sampled, ended=finish != "length"))
    logprobs = reply.logprobs or [-0.1 * (1 + i % 7) for i in range(len(ids))]
    message: JsonDict = {"role": "assistant", "content": text}
    choice: JsonDict = {
        "index": index,
        "message": message,
        "finish_reason": finish,
        "logprobs": None,
    }
    if reply.reasoning is not None:
        message["reasoning"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    if body.get("logprobs"):
        content = [{"token": "", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]
        choice["logprobs"] = {"content": content}
    return choice | _ids(reply, body, "token_ids", ids), len(ids)


def stream_events(whole: JsonDict, *, usage: bool) -> Iterator[JsonDict]:
    """The chunks of a completion, in the order and shape of vLLM: prompt ids in the first."""
    head = {k: whole[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    prompt = {k: v for k, v in whole.items() if k == "prompt_token_ids"}
    for choice in whole["choices"]:
        index = {"index": choice["index"]}
        start = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield {**head, "choices": [{**index, **start, "logprobs": None}], **prompt}
        prompt = {}
        yield from ({**head, "choices": [{**index, **piece}]} for piece in _pieces(choice))
    if usage:
        yield {**head, "choices": [], "usage": whole["usage"]}


def _pieces(choice: JsonDict) -> Iterator[JsonDict]:
    message = choice["message"]
    deltas: list[JsonDict] = [
        {"reasoning": word} for word in re.findall(r"\s*\S+", message.get("reasoning") or "")
    ]
    deltas += [{"content": word} for word in re.findall(r"\s*\S+|\s+$", message["content"] or "")]
    deltas += [
        {"tool_calls": [{"index": i, **c}]} for i, c in enumerate(message.get("tool_calls", ()))
    ]
    deltas = deltas or [{"content": ""}]
    ids, content = choice.get("token_ids"), (choice["logprobs"] or {}).get("content")
    length = len(ids or content or ())
    for i, delta in enumerate(deltas):
        last = i == len(deltas) - 1
        part = slice(length * i // len(deltas), length * (i + 1) // len(deltas))
        piece: JsonDict = {
            "delta": delta,
            "finish_reason": choice["finish_reason"] if last else None,
        }
        piece["logprobs"] = {"content": content[part]} if content else None
        piece |= {"token_ids": ids and ids[part]} if "token_ids" in choice else {}
        yield piece


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    scripted: ScriptedServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        scripted = cast("_Server", self.server).scripted
        scripted.listings += 1
        common = {"object": "model", "created": 1, "owned_by": scripted.owned_by}
        data = [{"id": name, **common} for name in scripted.models]
        self._json(200, {"object": "list", "data": data}, {})

    def do_POST(self) -> None:
        scripted = cast("_Server", self.server).scripted
        raw = self.rfile.read(int(self.headers["content-length"]))
        headers = {k.lower(): v for k, v in self.headers.items()}
        request = ServerRequest(self.path, headers, cast("JsonDict", json.loads(raw)), raw)
        reply, number = scripted.answer(request)
        if scripted.stopping.wait(None if reply.hang else reply.delay_s):
            self.close_connection = True  # or the client would wait on, for a server that is gone
            return
        if reply.status != 200:
            error = {"message": reply.error, "type": "scripted", "code": reply.status}
            self._json(reply.status, {"error": error}, reply.headers)
            return
        whole = dict(reply.body) if reply.body else completion_body(reply, request.body, number)
        if not request.body.get("stream"):
            self._json(200, whole, reply.headers)
            return
        usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
        events = reply.chunks if reply.chunks is not None else stream_events(whole, usage=usage)
        self._stream(events, reply)

    def _json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        data = json.dumps(body).encode()
        self._head(status, {"content-type": "application/json", **headers})
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in {**headers, "connection": "close"}.items():
            self.send_header(name, value)

    def _stream(self, events: Any, reply: Reply) -> None:
        self._head(200, {"content-type": "text/event-stream", **reply.headers})
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(events):
            if number == reply.cut_after:
                return
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
