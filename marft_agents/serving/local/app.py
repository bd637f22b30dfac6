"""The routes: requests in, engine jobs, replies out.

Invariant: every error leaves as an OpenAI error object with the right status; a stream that has
begun ends with the error as an event.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from marft_agents.serving.local.chat import encode, render
from marft_agents.serving.local.engine import LocalEngine
from marft_agents.serving.local.jobs import ClientGone, EventStream, Job, unless_gone
from marft_agents.serving.local.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapter,
    Settings,
    TokenizeRequest,
    UnloadAdapter,
    parse,
)
from marft_agents.serving.local.refusal import Refusal
from marft_agents.serving.local.replies import DONE, JsonDict, Replies, sse
from marft_agents.serving.local.rows import Piece


def create_app(engine: LocalEngine) -> Starlette:
    """The ASGI application around a running engine."""
    routes = _Routes(engine)
    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions/render", routes.rendered, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/v1/load_lora_adapter", routes.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", routes.unload, methods=["POST"]),
        ],
        exception_handlers={
            Refusal: _refuse,
            HTTPException: _no_route,
            ClientGone: _nobody_there,
            Exception: _crash,
        },
    )


class _Routes:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._model = engine.model
        self._base = engine.options.base_name

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._engine.alive else 503)

    async def models(self, _request: Request) -> Response:
        served = {self._base: (str(self._model.folder), None)}
        served |= {name: (path, self._base) for name, path in self._engine.adapters.paths().items()}
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "marft-agents",
                "root": root,
                "parent": parent,
                "max_model_len": self._model.window,
            }
            for name, (root, parent) in served.items()
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, await _json(request))
        name = self._named(body)
        prompt = self._checked(render(self._model.tokenizer, body.messages, body))
        settings = body.settings(len(prompt), self._model.window)
        replies = Replies(
            "chat",
            name,
            f"chatcmpl-{_request_id(request)}",
            self._model.tokenizer,
            [prompt],
            body.choices,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
        )
        return await self._answer(request, body, replies, [settings])

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await _json(request))
        name = self._named(body)
        prompts = [self._checked(prompt) for prompt in self._prompts(body)]
        settings = [body.settings(len(prompt), self._model.window) for prompt in prompts]
        replies = Replies(
            "completion",
            name,
            f"cmpl-{_request_id(request)}",
            self._model.tokenizer,
            prompts,
            body.choices,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
        )
        return await self._answer(request, body, replies, settings)

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeRequest, await _json(request))
        if body.messages is not None:
            ids = render(self._model.tokenizer, body.messages, body)
        else:
            special = body.add_special_tokens is not False
            ids = encode(self._model.tokenizer, body.prompt or "", special=special)
        names = [self._model.tokenizer.decode([i]) for i in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._model.window,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeRequest, await _json(request))
        ids = self._checked(body.tokens, "tokens")
        return JSONResponse({"prompt": self._model.tokenizer.decode(ids)})

    async def rendered(self, request: Request) -> Response:
        body = parse(ChatRequest, await _json(request))
        name = self._named(body)
        ids = self._checked(render(self._model.tokenizer, body.messages, body))
        named = {"request_id": f"chatcmpl-{_request_id(request)}", "model": name}
        return JSONResponse(named | {"token_ids": ids})

    async def load(self, request: Request) -> Response:
        body = parse(LoadAdapter, await _json(request))
        name, folder = body.lora_name, Path(body.lora_path)
        await run_in_threadpool(self._engine.load_adapter, name, folder, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = parse(UnloadAdapter, await _json(request))
        self._engine.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _named(self, body: ChatRequest | CompletionRequest) -> str:
        name = body.model or self._base
        self._engine.known(name)
        return name

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if isinstance(given[0], int):
            given = [given]
        return [
            encode(self._model.tokenizer, prompt, special=body.add_special_tokens)
            if isinstance(prompt, str)
            else list(prompt)  # pyright: ignore[reportArgumentType] a list of ids, by validation
            for prompt in given
        ]

    def _checked(self, prompt: list[int], field: str = "prompt") -> list[int]:
        if prompt and max(prompt) >= self._model.vocab_size:
            raise Refusal(
                400,
                f"Token id {max(prompt)} is out of vocabulary ({self._model.vocab_size} tokens)",
                param=field,
            )
        return prompt

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        replies: Replies,
        settings: Sequence[Settings],
    ) -> Response:
        orders = [
            (list(prompt), each.for_choice(choice))
            for prompt, each in zip(replies.prompts, settings, strict=True)
            for choice in range(body.choices)
        ]
        job = Job(self._engine, replies.model, orders)
        if body.stream:
            return await _stream(request, job, replies, usage=body.include_usage)
        try:
            pieces = await unless_gone(request.receive, job.collect())
        finally:
            job.cancel()
        return JSONResponse(replies.whole(pieces))


async def _stream(request: Request, job: Job, replies: Replies, *, usage: bool) -> Response:
    """Begin to stream once the first token is there, so that an early error has its status."""
    arrivals = job.pieces()
    try:
        first = await unless_gone(request.receive, _next(arrivals))
    except BaseException:
        job.cancel()
        raise
    return EventStream(_events(first, arrivals, replies, usage=usage), job.cancel)


async def _next(arrivals: AsyncIterator[tuple[int, Piece]]) -> tuple[int, Piece]:
    return await anext(arrivals)


async def _events(
    first: tuple[int, Piece],
    arrivals: AsyncIterator[tuple[int, Piece]],
    replies: Replies,
    *,
    usage: bool,
) -> AsyncIterator[str]:
    choices = len(replies.prompts) * replies.choices
    for index in range(choices):
        for chunk in replies.opening(index):
            yield sse(chunk)
    tokens = 0
    offsets: dict[int, int] = {}

    def chunk_of(index: int, piece: Piece) -> JsonDict:
        offset, is_first = offsets.get(index, 0), index not in offsets
        offsets[index] = offset + len(piece.text)
        return replies.piece(index, piece, offset=offset, first=is_first)

    try:
        tokens += len(first[1].token_ids)
        yield sse(chunk_of(*first))
        async for index, piece in arrivals:
            tokens += len(piece.token_ids)
            yield sse(chunk_of(index, piece))
        if usage:
            yield sse(replies.closing(tokens))
    except Refusal as error:
        yield sse(error.body())
    yield DONE


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex


def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.body(), status_code=error.status)


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refuse(request, Refusal(error.status_code, f"{error.detail}: {request.url.path}"))


def _nobody_there(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


def _crash(_request: Request, error: Exception) -> Response:
    refusal = Refusal(500, f"internal error: {type(error).__name__}: {error}")
    return JSONResponse(refusal.body(), status_code=500)
