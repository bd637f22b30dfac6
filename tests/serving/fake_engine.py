"""A scripted engine: the part of vLLM's API that serving uses, with faults on demand.

Its log-probabilities depend on the adapter's folder alone, so a probe can be right or wrong. It
runs in a thread of the test, or as a process of its own (``python fake_engine.py --port P``).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BASE = "base"
STEPS = {
    "/health": "health",
    "/v1/models": "list",
    "/v1/load_lora_adapter": "load",
    "/v1/completions": "probe",
    "/v1/unload_lora_adapter": "unload",
}


KINDS = ("refuse", "hang", "drip", "nothing", "reset", "garbage", "late")
"""500; no answer; an answer without end; 200 without effect; no connection; 200 and no JSON; done,
but the answer is lost."""


def base_logprob(token: int) -> float:
    return -1.0 - 0.01 * (token % 50)


def adapter_effect(folder: Path) -> float:
    """How far an adapter's log-probabilities lie below the base's."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return 0.0 if manifest["untrained"] else 0.1 * manifest["version"]


@dataclass
class Faults:
    """What goes wrong; everything is off at first."""

    hang_loads: bool = False
    hang_generation: bool = False
    """Nothing is generated any more, while all else answers; probes, too, wait for ever."""
    load_status: int = 200
    load_message: str = "refused"
    forget_loads: bool = False
    """Say success, list nothing."""
    extra_effect: float = 0.0
    """Answer as another adapter would."""
    ignore_adapters: bool = False
    """Answer as the base whatever the model."""
    generate_status: int = 200
    broken: str | None = None
    """An adapter whose requests fail, while its probe passes."""
    score_status: int = 200
    unload_status: int = 200
    unwell: bool = False
    break_stream_after: int | None = None
    nan: bool = False
    refuses: Callable[[dict[str, Any]], str | None] | None = None
    """Looks at the body of every generation or probe first; the message of a 400, or none."""
    at: dict[str, str] = field(default_factory=dict[str, str])
    """By step (health, list, load, probe, unload): one of ``KINDS``."""


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeEngine:
    """One engine; ``url`` while it runs."""

    port: int = 0
    faults: Faults = field(default_factory=Faults)
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    seen: list[Seen] = field(default_factory=list[Seen])
    events: list[str] = field(default_factory=list[str])
    chunks: int = 4
    fingerprint: str | None = None
    """When set, JSON is written and marked as vLLM does it: at the end of what ends a reply."""
    gate: threading.Semaphore | None = None
    """When set, every chunk of a stream and every whole reply waits for one permit."""
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Messages to answer with next; a text of its own otherwise."""
    release: threading.Event = field(default_factory=threading.Event)
    """Ends every hang."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client left in the middle of a reply."""
    started: threading.Event = field(default_factory=threading.Event)
    """Set when a generation has begun."""
    counted: int | None = None
    """When set, tokens generated so far, as vLLM tells them under ``/metrics``."""
    api_key: str | None = None
    """Asked for on every route."""
    delay_s: float = 0.0
    """Before every whole reply."""
    pause_s: float = 0.0
    """Before every chunk of a stream."""

    def start(self) -> Self:
        engine = self

        class Handler(_Handler):
            fake = engine

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_connections()
        self._thread.join()

    def restart_empty(self) -> None:
        """A new engine at the same address: it knows no adapter."""
        self.adapters.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [s.body for s in self.seen if s.path == path]

    def logprobs(self, model: str, tokens: Sequence[int]) -> list[float]:
        effect = self.faults.extra_effect
        if model != BASE and not self.faults.ignore_adapters:
            effect += adapter_effect(Path(self.adapters[model]))
        if self.faults.nan:
            effect = float("nan")
        return [base_logprob(token) - effect for token in tokens]


class _Server(ThreadingHTTPServer):
    """Takes its connections with it when it ends, as a process would."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeEngine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.fake.gone.set()

    def _answer(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Request-Id", self.headers.get("X-Request-Id", "none"))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": "x", "code": status}})

    def _note(self, body: dict[str, Any]) -> None:
        headers = {k.lower(): v for k, v in self.headers.items()}
        self.fake.seen.append(Seen(self.command, self.path, headers, body))

    def _locked_out(self) -> bool:
        key = self.fake.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._error(401, "this engine answers to its gateway only")
        return True

    def _goes_wrong(self, body: dict[str, Any]) -> bool:
        """Whether a fault stood in for the answer."""
        step = STEPS.get(self.path, "")
        if step == "probe" and "prompt_logprobs" not in body:
            return False
        kind = self.fake.faults.at.get(step)
        if kind == "refuse":
            self._error(500, f"{step} is refused")
        elif kind == "garbage":
            self._answer(200, '{"data": [')
        elif kind == "nothing":
            data = [{"id": BASE, "root": "/models/base", "parent": None}]
            self._answer(200, {"object": "list", "data": data, "choices": []})
        elif kind is not None:
            self._says_nothing(kind, body)
        return kind is not None

    def _says_nothing(self, kind: str, body: dict[str, Any]) -> None:
        self.close_connection = True
        if kind == "late" and self.command == "POST":
            out, self.wfile = self.wfile, io.BytesIO()
            self._do(body)
            self.wfile = out
        if kind == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not self.fake.release.wait(0.02):
                self.wfile.write(b"x")
        elif kind == "hang":
            self.fake.release.wait(30)
        else:
            hard = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hard)
            # The stream that reads from it keeps the connection open otherwise.
            self.rfile.close()
            self.connection.close()

    def do_GET(self) -> None:
        self._note({})
        if self._locked_out() or self._goes_wrong({}):
            return
        if self.path == "/health":
            self._answer(503 if self.fake.faults.unwell else 200, "")
        elif self.path == "/metrics" and self.fake.counted is not None:
            lines = f'vllm:generation_tokens_total{{engine="0"}} {self.fake.counted}.0\n# TYPE x\n'
            self._answer(200, f"{lines}vllm:prompt_tokens_total 1e+02\nvllm:other_total 5.0\n")
        elif self.path == "/v1/models":
            cards = [{"id": BASE, "root": "/models/base", "parent": None}]
            cards += [
                {"id": n, "root": p, "parent": BASE} for n, p in dict(self.fake.adapters).items()
            ]
            self._answer(200, {"object": "list", "data": cards})
        else:
            self._error(404, "no such route")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body: dict[str, Any] = json.loads(self.rfile.read(length) or b"{}")
        self._note(body)
        if self._locked_out() or self._goes_wrong(body):
            return
        self._do(body)

    def _do(self, body: dict[str, Any]) -> None:
        if self.path == "/v1/load_lora_adapter":
            self._load(body)
        elif self.path == "/v1/unload_lora_adapter":
            self._unload(body["lora_name"])
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            try:
                self._generate(body)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
                self._error(400, f"no valid request: {type(error).__name__}")
        elif self.path in ("/tokenize", "/detokenize", "/v1/chat/completions/render"):
            known = body["model"] in self.fake.adapters
            tokens = {"tokens": [1, 2], "token_ids": [1, 2], "prompt": "x", "model": body["model"]}
            self._answer(200, tokens) if known else self._error(404, "no such model")
        else:
            self._error(404, "no such route")

    def _load(self, body: dict[str, Any]) -> None:
        fake, name, path = self.fake, body.get("lora_name"), body.get("lora_path")
        if fake.faults.hang_loads:
            fake.release.wait(30)
            return
        if not (name and path) or name in fake.adapters:
            self._error(400, f"The lora adapter '{name}' has already been loaded.")
        elif not (Path(path) / "adapter_config.json").exists():
            self._error(404, f"No adapter found for {path}")
        elif fake.faults.load_status != 200:
            self._error(fake.faults.load_status, fake.faults.load_message)
        else:
            if not fake.faults.forget_loads:
                fake.adapters[name] = path
            fake.events.append(f"load {name}")
            self._answer(200, f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, name: str) -> None:
        if self.fake.faults.unload_status != 200:
            self._error(self.fake.faults.unload_status, "cannot unload")
        elif name not in self.fake.adapters:
            self._error(404, f"The lora adapter '{name}' cannot be found.")
        else:
            del self.fake.adapters[name]
            self.fake.events.append(f"unload {name}")
            self._answer(200, "removed")

    def _generate(self, body: dict[str, Any]) -> None:
        fake, model = self.fake, body["model"]
        if fake.faults.hang_generation:
            fake.started.set()
            fake.release.wait(30)
            return
        refused = fake.faults.refuses(body) if fake.faults.refuses is not None else None
        if refused is not None:
            self._error(400, refused)
        elif model != BASE and model not in fake.adapters:
            self._error(404, f"The model `{model}` does not exist.")
        elif "prompt_logprobs" in body and fake.faults.score_status != 200:
            self._error(fake.faults.score_status, "EngineCore encountered an issue")
        elif "prompt_logprobs" in body:
            self._score(body)
        elif model == fake.faults.broken:
            self._error(500, "EngineCore encountered an issue")
        elif fake.faults.generate_status != 200:
            self._error(fake.faults.generate_status, "EngineCore encountered an issue")
        elif body.get("stream"):
            self._stream(body)
        else:
            fake.started.set()
            if fake.gate is not None:
                self._wait_or_leave()
            time.sleep(fake.delay_s)
            self._answer(200, self._reply(body))

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        model, n = body["model"], int(body.get("n") or 1)
        choices: list[dict[str, Any]] = []
        for index in range(n):
            message: dict[str, Any] = {"role": "assistant", "content": f'says "model":"{model}"'}
            message |= self.fake.replies.pop(0) if self.fake.replies else {}
            ids = [10 * index + k for k in range(3)]
            choices.append(
                {"index": index, "message": message, "finish_reason": "stop"} | _tokens(body, ids)
            )
        return {
            "id": self._id(),
            "model": model,
            "choices": choices,
            "usage": {"prompt_tokens": 2, "completion_tokens": 3 * n},
            "prompt_token_ids": [1, 2] if body.get("return_token_ids") else None,
        }

    def _id(self) -> str:
        """Like the real engines, after the request's own id."""
        given = self.headers.get("X-Request-Id")
        return f"chatcmpl-{given or len(self.fake.seen)}"

    def _score(self, body: dict[str, Any]) -> None:
        ids: list[int] = body["prompt"]
        values = self.fake.logprobs(body["model"], ids)
        entries = [{str(t): {"logprob": v}} for t, v in zip(ids, values, strict=True)]
        self._answer(200, {"choices": [{"index": 0, "prompt_logprobs": [None, *entries[1:]]}]})

    def _wait_or_leave(self) -> None:
        """Wait for the gate, noticing a client that leaves meanwhile."""
        assert self.fake.gate is not None
        self.connection.setblocking(False)
        try:
            while not self.fake.gate.acquire(timeout=0.01):
                try:
                    if self.connection.recv(1) == b"":
                        raise ConnectionResetError
                except BlockingIOError:
                    continue
        finally:
            self.connection.setblocking(True)

    def _stream(self, body: dict[str, Any]) -> None:
        fake, model, name = self.fake, body["model"], self._id()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(fake.chunks):
            if fake.faults.break_stream_after == i:
                self.close_connection = True  # in the middle of the reply
                return
            if fake.gate is not None:
                self._wait_or_leave()
            time.sleep(fake.pause_s)
            for chunk in self._chunks(body, i):
                self._event({"id": name, "model": model} | chunk)
            fake.started.set()
        if _usage_asked(body):
            usage = {"prompt_tokens": 2, "completion_tokens": fake.chunks + 1}
            self._event({"id": name, "model": model, "choices": [], "usage": usage} | self._print())
        self._write(b"data: [DONE]\n\n")
        fake.events.append(f"stream ended {model}")
        self._write(b"")

    def _event(self, data: dict[str, Any]) -> None:
        separators = (",", ":") if self.fake.fingerprint else None
        self._write(f"data: {json.dumps(data, separators=separators)}\n\n".encode())

    def _print(self) -> dict[str, Any]:
        return {"system_fingerprint": self.fake.fingerprint} if self.fake.fingerprint else {}

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _chunks(self, body: dict[str, Any], i: int) -> list[dict[str, Any]]:
        """One token's chunks; for ids or logprobs there is also one without text, as from vLLM."""
        ids: list[int] = [1, 2]
        asked = bool(body.get("return_token_ids"))
        out: list[dict[str, Any]] = []
        if i == 0:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            out.append({"choices": [opening], "prompt_token_ids": ids if asked else None})
        if (asked or body.get("logprobs")) and i == 1:
            bare = {"index": 0, "delta": {}, "finish_reason": None} | _tokens(body, [100])
            out.append({"choices": [bare]})
        ended = "stop" if i == self.fake.chunks - 1 else None
        choice = {"index": 0, "delta": {"content": f"w{i} "}, "finish_reason": ended}
        last: dict[str, Any] = {"choices": [choice | _tokens(body, [i])]}
        out.append(last | (self._print() if ended and not _usage_asked(body) else {}))
        if _usage_asked(body) and body["stream_options"].get("continuous_usage_stats"):
            for chunk in out:
                chunk["usage"] = {"prompt_tokens": 2, "completion_tokens": i + 1}
        return out


def _usage_asked(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _tokens(body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Fields that hold nothing unless they were asked for."""
    content = [{"token": str(i), "logprob": -0.5 - 0.01 * i} for i in ids]
    return {
        "logprobs": {"content": content} if body.get("logprobs") else None,
        "token_ids": ids if body.get("return_token_ids") else None,
    }


def main() -> None:
    """A process that behaves like an engine's: slow start, dies on request."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    arguments, _ = parser.parse_known_args()
    print("loading weights", flush=True)
    time.sleep(arguments.delay)
    if arguments.die:
        print("torch.OutOfMemoryError: no memory left", flush=True)
        raise SystemExit(3)
    key, pause = os.environ.get("MARFT_ENGINE_KEY"), arguments.pause
    FakeEngine(port=arguments.port, api_key=key, delay_s=pause, pause_s=pause).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
