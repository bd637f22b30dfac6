"""A model server that costs next to nothing: the same answer every time, connections kept open.

    python -m benchmarks.recorder.server [DELAY_MS]

Invariant: it runs in a process of its own, so that what it costs is not the application's; it
answers in the shape of vLLM, with ids and log-probabilities where they are asked for, and after
the same delay each time, as if a model had thought.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

PROMPT, TOKENS = 512, 64
"""Ids of the prompt and of the reply, where they are asked for."""
TEXT = " ".join(f"word{i}" for i in range(TOKENS))
DELAY_S = float(sys.argv[1]) / 1e3 if __name__ == "__main__" and len(sys.argv) > 1 else 0.0
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
MODELS = {"object": "list", "data": [{"id": "agent", "object": "model", "owned_by": "vllm"}]}


def _json(value: Any) -> bytes:
    """As vLLM writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


def _logprobs(tokens: int) -> dict[str, Any]:
    item = {"token": "word", "logprob": -0.25, "bytes": None, "top_logprobs": []}
    return {"content": [item] * tokens}


def _whole(ids: bool) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT},
        "logprobs": _logprobs(TOKENS) if ids else None,
        "finish_reason": "stop",
        "token_ids": list(range(1000, 1000 + TOKENS)) if ids else None,
    }
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "agent"}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS}
    prompt = {"prompt_token_ids": list(range(PROMPT)) if ids else None}
    return _json({**body, "choices": [choice], "usage": usage, **prompt})


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
            "logprobs": _logprobs(1) if ids else None,
            "finish_reason": "stop" if last else None,
            "token_ids": [1000 + i] if ids else None,
        }
        chunk: dict[str, Any] = {**head, "choices": [choice]}
        if i == 0:
            chunk["prompt_token_ids"] = list(range(PROMPT)) if ids else None
        out.append(b"data: " + _json(chunk) + b"\n\n")
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
LISTING = _http(_json(MODELS), "application/json")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(LISTING)
                continue
            found = LENGTH.search(head)
            body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
            await asyncio.sleep(DELAY_S)
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
