"""Test kit for applications and integrations: a scripted model server, fakes, and a contract.

Invariant: everything is deterministic and in this process; the server answers chat completions in
the shape of vLLM, with token ids and log-probabilities when they are asked for. Token ids are the
UTF-8 bytes of the text, plus ``END`` when a reply ended by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from marft_agents.recording import EventLog, MarftRecorder
from marft_agents.schema import EpisodeEnded, EpisodeStarted, Event, JsonDict, Turn

END = 256
_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True)
class Reply:
    """One scripted answer; the fields after ``headers`` are faults."""

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


@dataclass(frozen=True)
class ServerRequest:
    """A chat completion request as it arrived; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: JsonDict


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

    def __init__(self, script: Script = None, *, owned_by: str = "vllm") -> None:
        self.requests: list[ServerRequest] = []
        self.listings = 0
        """How often the models were listed."""
        self.owned_by = owned_by
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
    calls = [
        {
            "id": f"call-{number}-{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(dict(arguments))},
        }
        for i, (name, arguments) in enumerate(reply.tool_calls)
    ]
    finish = reply.finish_reason or ("tool_calls" if calls else "stop")
    sampled = reply.text if reply.text is not None else json.dumps(calls)
    ids = list(reply.token_ids or token_ids_of(sampled, ended=finish != "length"))
    logprobs = reply.logprobs or [-0.1 * (1 + i % 7) for i in range(len(ids))]
    prompt = list(reply.prompt_token_ids or json.dumps(body.get("messages")).encode())
    message: JsonDict = {"role": "assistant", "content": reply.text}
    choice: JsonDict = {"message": message, "finish_reason": finish, "logprobs": None}
    if calls:
        message["tool_calls"] = calls
    if body.get("logprobs"):
        content = [{"token": "", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]
        choice["logprobs"] = {"content": content}
    with_ids = reply.with_ids and bool(body.get("return_token_ids"))
    if with_ids:
        choice["token_ids"] = ids
    n = int(body.get("n") or 1)
    out: JsonDict = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [{"index": i, **choice} for i in range(n)],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids) * n,
            "total_tokens": len(prompt) + len(ids) * n,
        },
    }
    return out | ({"prompt_token_ids": prompt} if with_ids else {})


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
        {"content": word} for word in re.findall(r"\s*\S+|\s+$", message["content"] or "")
    ]
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
        yield piece | ({"token_ids": ids[part]} if ids is not None else {})


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
        model = {"id": "base", "object": "model", "created": 1, "owned_by": scripted.owned_by}
        self._json(200, {"object": "list", "data": [model]}, {})

    def do_POST(self) -> None:
        scripted = cast("_Server", self.server).scripted
        raw = self.rfile.read(int(self.headers["content-length"]))
        headers = {k.lower(): v for k, v in self.headers.items()}
        request = ServerRequest(self.path, headers, cast("JsonDict", json.loads(raw)))
        reply, number = scripted.answer(request)
        if scripted.stopping.wait(None if reply.hang else reply.delay_s):
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


class InMemoryLog:
    """An event log in a list: ``MarftRecorder(log=InMemoryLog())``, then ``recorder.flush()``."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type[_E]) -> list[_E]:
        """The events of one type, in order."""
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def turns(self) -> list[Turn]:
        return self.of(Turn)


class FakeClock:
    """``MarftRecorder(clock=FakeClock())``: each look is one second later."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self.now = start

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


class FakeIds:
    """``MarftRecorder(ids=FakeIds())``: ``id-1``, ``id-2``, …"""

    def __init__(self, prefix: str = "id") -> None:
        self._prefix = prefix
        self._numbers = itertools.count(1)

    def __call__(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


class BrokenLog:
    """An event log whose every write fails as a full disk does."""

    def write(self, event: Event) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Nothing to close."""


class IntegrationContract:
    """What every integration keeps; a test class inherits it and gives ``make_team`` and ``run``.

    The team has at least two agents; each calls the model that has its own name, and each sees what
    the others said. ``run`` may be async and returns what the app sees, comparable with ``==``.
    """

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        raise NotImplementedError

    def run(self, team: Any, task: str) -> Any:
        raise NotImplementedError

    def _recorded(
        self, *, stream: bool = False, **options: Any
    ) -> tuple[Any, InMemoryLog, ScriptedServer]:
        log: EventLog = options.pop("log", None) or InMemoryLog()
        with (
            ScriptedServer() as server,
            MarftRecorder(log=log, **options) as recorder,
        ):
            team = recorder.wrap(self.make_team(server.url, stream=stream))
            seen = self._seen(team)
            assert recorder.flush()
        return seen, cast("InMemoryLog", log), server

    def _seen(self, team: Any) -> Any:
        result = self.run(team, "Solve it together.")
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _plain(self, *, stream: bool = False) -> tuple[Any, ScriptedServer]:
        with ScriptedServer() as server:
            return self._seen(self.make_team(server.url, stream=stream)), server

    def test_wrap_returns_the_same_object(self) -> None:
        with ScriptedServer() as server, MarftRecorder(log=InMemoryLog()) as recorder:
            team = self.make_team(server.url, stream=False)
            assert recorder.wrap(team) is team
            assert recorder.wrap(team) is team

    def test_the_app_sees_the_same(self) -> None:
        for stream in (False, True):
            plain, server = self._plain(stream=stream)
            recorded, _, recorded_server = self._recorded(stream=stream)
            assert recorded == plain
            added = {"return_token_ids", "logprobs"}
            bodies = [
                {k: v for k, v in r.body.items() if k not in added}
                for r in recorded_server.requests
            ]
            assert bodies == [r.body for r in server.requests]

    def test_every_call_is_a_turn_of_its_agent(self) -> None:
        for stream in (False, True):
            _, log, server = self._recorded(stream=stream)
            acts = [t for t in log.turns if t.kind == "act"]
            assert acts and len(log.turns) == len(server.requests)
            assert all(t.agent == t.model for t in acts)
            assert {r.headers["x-marft-agent"] for r in server.requests} == {
                t.agent for t in log.turns
            }

    def test_turns_hold_the_tokens(self) -> None:
        for stream in (False, True):
            _, log, _ = self._recorded(stream=stream)
            for turn in log.turns:
                assert turn.token_ids and turn.prompt_token_ids and turn.logprobs
                assert len(turn.token_ids) == len(turn.logprobs)
                assert turn.token_ids == token_ids_of(turn.text or "")

    def test_prompts_are_linked_to_earlier_turns(self) -> None:
        _, log, _ = self._recorded()
        acts = [t for t in log.turns if t.kind == "act"]
        earlier: set[str] = set()
        for turn in log.turns:
            assert set(turn.depends_on) <= earlier
            earlier.add(turn.turn_id)
        assert acts[0].turn_id in acts[-1].depends_on

    def test_a_run_is_an_episode(self) -> None:
        _, log, _ = self._recorded()
        assert len({e.episode_id for e in log.events}) == 1
        assert isinstance(log.events[0], EpisodeStarted) and isinstance(
            log.events[-1], EpisodeEnded
        )

    def test_an_explicit_episode_beats_the_automatic_one(self) -> None:
        log = InMemoryLog()
        with ScriptedServer() as server, MarftRecorder(log=log) as recorder:
            team = recorder.wrap(self.make_team(server.url, stream=False))
            with recorder.episode(id="mine") as episode:
                self._seen(team)
                episode.reward(1.0)
        assert {e.episode_id for e in log.events} == {"mine"}
        assert log.turns

    def test_a_failure_of_the_recorder_stays_inside(self) -> None:
        def no_ids() -> str:
            raise RuntimeError("a bug in the recorder")

        plain, _ = self._plain()
        assert self._recorded(log=BrokenLog(), raise_errors=False)[0] == plain
        assert self._recorded(ids=no_ids, raise_errors=False)[0] == plain


async def _awaited(result: Any) -> Any:
    return await result


__all__ = [
    "END",
    "BrokenLog",
    "FakeClock",
    "FakeIds",
    "InMemoryLog",
    "IntegrationContract",
    "Reply",
    "ScriptedServer",
    "ServerRequest",
    "completion_body",
    "default_reply",
    "stream_events",
    "token_ids_of",
]
