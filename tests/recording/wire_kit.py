"""A server without sockets: exact bytes in any cut, for the SDK's own HTTP client."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from marft_agents.recording import MarftRecorder
from marft_agents.testing import InMemoryLog, Reply, completion_body, stream_events

HTTP: Any = importlib.import_module("httpx2" if int(openai.__version__[0]) >= 3 else "httpx")
"""What the installed SDK speaks HTTP with."""
URL = "http://model.test/v1"
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
LISTING: Any = {
    "object": "list",
    "data": [{"id": "base", "object": "model", "created": 1, "owned_by": "vllm"}],
}


@dataclass(frozen=True)
class Answer:
    """One response; ``error`` is raised after the last piece, ``refused`` in its place.

    ``pieces`` are those of a request for all token fields; ``made`` gives those of any request.
    """

    pieces: Sequence[bytes] = ()
    status: int = 200
    kind: str | None = JSON
    headers: dict[str, str] = field(default_factory=dict[str, str])
    error: Callable[[Any], BaseException] | None = None
    refused: Callable[[Any], BaseException] | None = None
    made: Callable[[Any], Sequence[bytes]] | None = None


class _Pieces(HTTP.SyncByteStream, HTTP.AsyncByteStream):
    def __init__(self, answer: Answer, request: Any) -> None:
        self._answer = answer
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        made = self._answer.made
        yield from made(json.loads(self._request.content)) if made else self._answer.pieces
        if self._answer.error is not None:
            raise self._answer.error(self._request)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


class Wire:
    """Answers in order; ``requests`` are those for completions, as the transport got them."""

    def __init__(self, *answers: Answer, listing: Any = LISTING) -> None:
        self.requests: list[Any] = []
        self.others: list[Any] = []
        self._answers = iter(answers)
        self._listing = listing

    def __call__(self, request: Any) -> Any:
        if request.method == "GET":
            self.others.append(request)
            return HTTP.Response(200, json=self._listing)
        self.requests.append(request)
        answer = next(self._answers)
        if answer.refused is not None:
            raise answer.refused(request)
        headers = {"content-type": answer.kind} if answer.kind else {}
        return HTTP.Response(
            answer.status, headers=headers | answer.headers, stream=_Pieces(answer, request)
        )

    async def answer_async(self, request: Any) -> Any:
        return self(request)

    @contextmanager
    def recorded(self, **options: Any) -> Generator[tuple[openai.OpenAI, InMemoryLog]]:
        """A client of the agent ``planner`` inside an episode; everything is logged at the end."""
        log, sdk = InMemoryLog(), options.pop("sdk", {})
        with MarftRecorder(log=log, **options) as recorder:
            recorder.attach_client(client := self.sdk(**sdk), "planner")
            with recorder.episode():
                yield client, log

    def sdk(self, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "api_key": "sk-test"} | options
        http = HTTP.Client(transport=HTTP.MockTransport(self), follow_redirects=True)
        return openai.OpenAI(base_url=URL, http_client=http, **options)

    def async_sdk(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "api_key": "sk-test"} | options
        http = HTTP.AsyncClient(transport=HTTP.MockTransport(self.answer_async))
        return openai.AsyncOpenAI(base_url=URL, http_client=http, **options)


ASKED: Any = {"return_token_ids": True, "logprobs": True, "model": "planner", "messages": []}


def whole(reply: Reply | str, **changes: Any) -> Answer:
    """A completion in one piece; ``changes`` of its first choice's message."""

    def made(request: Any) -> list[bytes]:
        body = body_of(reply, request)
        body["choices"][0]["message"] |= changes
        return [json.dumps(body, indent=1).encode()]

    return Answer(made(ASKED), made=lambda request: made(fields_of(request)))


def fields_of(request: Any) -> dict[str, Any]:
    """What a request asks of ``ASKED``."""
    return ASKED | {name: request.get(name) for name in ("return_token_ids", "logprobs")}


def body_of(reply: Reply | str, request: Any = ASKED) -> dict[str, Any]:
    return completion_body(Reply(reply) if isinstance(reply, str) else reply, request, 1)


def events_of(
    reply: Reply | str, *, usage: bool = True, request: Any = ASKED
) -> list[dict[str, Any]]:
    return list(stream_events(body_of(reply, request), usage=usage))


def stream(events: Sequence[Any], *, end: str = "\n", done: bool = True) -> bytes:
    """Server-sent events as bytes."""
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{end}{end}" for event in events]
    return "".join([*lines, f"data: [DONE]{end}{end}" if done else ""]).encode()


def in_pieces(data: bytes, cuts: int) -> list[bytes]:
    return [data[i : i + cuts] for i in range(0, len(data), cuts)]


def streamed(reply: Reply | str, *, cuts: int = 7) -> Answer:
    """A completion as a stream, cut every few bytes."""

    def made(request: Any) -> list[bytes]:
        return in_pieces(stream(events_of(reply, request=fields_of(request))), cuts)

    return Answer(made(ASKED), made=made, kind=EVENTS)
