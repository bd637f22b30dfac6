"""A model server that costs next to nothing: the same answer every time, connections kept open.

    python -m benchmarks.recorder.server

Invariant: it runs in a process of its own, so that what it costs is not the application's; it
answers in the shape of vLLM, with ids and log-probabilities where they are asked for.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

PROMPT, TOKENS = 512, 64
"""Ids of the prompt and of the reply, where they are asked for."""
TEXT = " ".join(f"word{i}" for i in range(TOKENS))
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
MODELS = {"object": "list", "data": [{"id": "agent", "object": "model", "owned_by": "vllm"}]}


def _logprobs(begin: int, end: int) -> dict[str, Any]:
    item = {"token": "word", "logprob": -0.25, "bytes": None, "top_logprobs": []}
    return {"content": [item] * (end - begin)}


def _whole(ids: bool) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT},
        "finish_reason": "stop",
    }
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "agent"}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS}
    extra: dict[str, Any] = {}
    if ids:
        choice |= {"logprobs": _logprobs(0, TOKENS), "token_ids": list(range(1000, 1000 + TOKENS))}
        extra = {"prompt_token_ids": list(range(PROMPT))}
    return json.dumps({**body, "choices": [choice], "usage": usage, **extra}).encode()


def _streamed(ids: bool) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "agent"}
    out: list[bytes] = []
    words = TEXT.split(" ")
    for i, word in enumerate(words):
        last = i == len(words) - 1
        delta = {"content": word if last else word + " "}
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "finish_reason": "stop" if last else None,
        }
        chunk: dict[str, Any] = {**head, "choices": [choice]}
        if ids:
            choice |= {"logprobs": _logprobs(0, 1), "token_ids": [1000 + i]}
            chunk |= {"prompt_token_ids": list(range(PROMPT))} if i == 0 else {}
        out.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return b"".join(out) + b"data: [DONE]\n\n"


def _http(body: bytes, kind: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


ANSWERS = {
    (stream, ids): _http(
        (_streamed if stream else _whole)(ids),
        "text/event-stream" if stream else "application/json",
    )
    for stream in (False, True)
    for ids in (False, True)
}
LISTING = _http(json.dumps(MODELS).encode(), "application/json")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(LISTING)
                continue
            found = LENGTH.search(head)
            body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
            key = (bool(body.get("stream")), bool(body.get("return_token_ids")))
            writer.write(ANSWERS[key])
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
