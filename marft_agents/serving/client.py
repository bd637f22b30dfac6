"""Talk to one engine: models, adapters, log-probabilities of given tokens.

Invariant: every call ends within its limit and may be repeated. ``load`` returns only when the
engine lists the adapter under that name from that very folder; it never replaces one in place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httpx

from marft_agents.errors import ConfigError, ServerError
from marft_agents.serving.calls import AnswerError, NoAnswerError, call, json_object, new_client

_POLL_S = 0.25
_GATEWAY_SAYS = ("ok", "degraded", "unavailable")
_TOKEN_COUNTS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_KEYS = ("root", "parent")


@dataclass(frozen=True)
class ServedModel:
    """One entry of ``/v1/models``; ``parent`` is None for the base."""

    name: str
    root: str | None
    parent: str | None


def _served_model(entry: dict[str, Any]) -> ServedModel:
    root, parent = (None if entry.get(key) is None else str(entry[key]) for key in _KEYS)
    return ServedModel(str(entry.get("id")), root, parent)


_HOW_WRITTEN = "write it as http://host:port"


def root_url(url: str) -> str:
    """``http://host:port`` for an address given with or without ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")


_ENGINE_KEY = "give the key of the engines with --server-key-env NAME"


def checked_url(url: str, key: str = _ENGINE_KEY) -> str:
    """A server's address as it may be asked and said; ``key`` says where its key belongs.

    Raises:
        ConfigError: it is none, or bears a password, which every message would repeat.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ConfigError(f"{_bare(url)!r} is no address; {_HOW_WRITTEN}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"the address of a server bears no user and no password; {key}")
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"{_bare(url)!r} is no address of a server; {_HOW_WRITTEN}")
    return url


def _bare(url: str) -> str:
    return url.rpartition("@")[2][:80]


class EngineClient:
    """Synchronous client of the engine's own API; ``url`` with or without ``/v1``.

    ``probe_timeout_s`` is for log-probabilities, which wait behind the requests of a busy engine.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        load_timeout_s: float = 60.0,
        probe_timeout_s: float = 120.0,
    ) -> None:
        self.url = root_url(url)
        self.timeout_s = timeout_s
        self.load_timeout_s = load_timeout_s
        self.probe_timeout_s = probe_timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = new_client(headers)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> httpx.Response:
        limit = self.timeout_s if timeout_s is None else timeout_s
        return call(self._http, method, f"{self.url}{path}", body=body, timeout_s=limit)

    def health(self, timeout_s: float = 5.0) -> None:
        """Return when the engine says it is well.

        Raises:
            ServerError: when it does not, or does not answer.
        """
        self._call("GET", "/health", timeout_s=timeout_s)

    def is_gateway(self) -> bool:
        """Whether a gateway of ours answers here: no engine has its ``/ready``.

        Raises:
            ServerError: when there is no answer.
        """
        try:
            told = self._call("GET", "/ready").text
        except AnswerError as error:  # 503 while it is not ready
            told = error.detail
        try:
            value: Any = json.loads(told)
        except ValueError:
            return False
        status: Any = cast("Any", value).get("status") if isinstance(value, dict) else None
        return status in _GATEWAY_SAYS

    def loads_adapters(self) -> bool:
        """Whether the engine has a route to load adapters; it is asked for nothing there.

        Raises:
            ServerError: when there is no answer.
        """
        try:
            self._call("POST", "/v1/load_lora_adapter", {})
        except AnswerError as error:
            return error.status not in (404, 405)
        return True

    def one_token(self, model: str, timeout_s: float) -> None:
        """Return when the engine has generated a token.

        Raises:
            ServerError: when it does not.
        """
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0.0}
        self._call("POST", "/v1/completions", body, timeout_s)

    def tokens_counted(self, timeout_s: float = 5.0) -> float | None:
        """Tokens read and generated since the engine's start; ``None`` where it does not count."""
        try:
            lines = self._call("GET", "/metrics", timeout_s=timeout_s).text.splitlines()
            return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(_TOKEN_COUNTS))
        except (ServerError, ValueError, IndexError):
            return None

    def models(self, timeout_s: float | None = None) -> list[ServedModel]:
        """What the engine lists: the base and every adapter it knows."""
        data = json_object(self._call("GET", "/v1/models", timeout_s=timeout_s)).get("data")
        if not isinstance(data, list):
            raise ServerError(f"{self.url}/v1/models has no list under 'data'")
        entries = cast("list[Any]", data)
        if not all(isinstance(entry, dict) for entry in entries):
            raise ServerError(f"{self.url}/v1/models lists something else than models")
        return [_served_model(cast("dict[str, Any]", entry)) for entry in entries]

    def base_name(self) -> str:
        """The name under which the engine serves the bare base model."""
        for model in self.models():
            if model.parent is None:
                return model.name
        raise ServerError(f"{self.url}/v1/models lists no base model")

    def has_loaded(self, name: str, path: Path, timeout_s: float | None = None) -> bool:
        """Whether the engine lists ``name`` from the folder ``path``."""
        listed = self.models(timeout_s)
        return any(m.name == name and (m.root is None or Path(m.root) == path) for m in listed)

    def load(self, name: str, path: str | Path) -> None:
        """Load the adapter folder ``path`` under ``name``; a repeated call changes nothing.

        Raises:
            ServerError: when the engine refuses, does not answer in time, or has another folder
                under this name.
        """
        self.ask_to_load(name, path)
        self.require_loaded(name, path)

    def ask_to_load(self, name: str, path: str | Path) -> None:
        """Load an adapter as far as the engine says so; see :meth:`require_loaded`.

        Raises:
            ServerError: when the engine refuses, or does not answer in time and has not done it.
        """
        folder = Path(path).absolute()
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            self._call("POST", "/v1/load_lora_adapter", body, self.load_timeout_s)
        except (AnswerError, NoAnswerError) as error:
            if isinstance(error, AnswerError) and error.status != 400:
                raise
            try:
                loaded = self.has_loaded(name, folder)
            except ServerError:
                raise error from None
            if not loaded:
                raise

    def require_loaded(self, name: str, path: str | Path, timeout_s: float | None = None) -> None:
        """Return when the engine lists ``name`` from the folder ``path``.

        Raises:
            ServerError: when it does not.
        """
        folder = Path(path).absolute()
        if not self.has_loaded(name, folder, timeout_s):
            raise ServerError(f"{self.url} accepted {name!r} but does not list it from {folder}")

    def unload(self, name: str) -> None:
        """Take the adapter ``name`` out; one that is not there is no error."""
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except AnswerError as error:
            if error.status != 404:
                raise

    def prompt_logprobs(
        self, model: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> list[float]:
        """Log-probabilities (L,) of ``completion_ids`` (L,) after ``prompt_ids`` (P,), at T = 1.

        Raises:
            ServerError: when the engine fails or leaves one of them out.
        """
        body = {
            "model": model,
            "prompt": [*prompt_ids, *completion_ids],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = json_object(self._call("POST", "/v1/completions", body, self.probe_timeout_s))
        try:
            entries = answer["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
            pairs = zip(completion_ids, entries, strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url}/v1/completions gave no prompt log-probability for every token of"
                f" {model!r}; is this an engine that knows prompt_logprobs?"
            ) from error

    def warm_up(self, timeout_s: float = 180.0) -> None:
        """One short request to the base: the first one after a start is much slower."""
        body = {
            "model": self.base_name(),
            "prompt": [1, 2, 3],
            "max_tokens": 2,
            "prompt_logprobs": 0,
        }
        self._call("POST", "/v1/completions", body, timeout_s)

    def wait_ready(self, timeout: float) -> None:
        """Wait for ``/health``, then for one warm-up request.

        Raises:
            ServerError: when the engine is not ready within ``timeout`` seconds.
        """
        start = time.monotonic()
        self.wait_healthy(timeout)
        self.warm_up(max(1.0, timeout - (time.monotonic() - start)))

    def wait_healthy(
        self,
        timeout: float,
        *,
        still_alive: Callable[[], None] | None = None,
        progress: Callable[[float], None] | None = None,
        every_s: float = 5.0,
    ) -> None:
        """Wait for ``/health``.

        Args:
            timeout: seconds.
            still_alive: raises when waiting makes no sense any more.
            progress: called with the seconds waited, every ``every_s`` seconds.

        Raises:
            ServerError: when the engine is not well in time.
        """
        start = time.monotonic()
        told = start
        while True:
            if still_alive is not None:
                still_alive()
            try:
                self.health(timeout_s=2.0)
                return
            except ServerError as error:
                now = time.monotonic()
                if now - start > timeout:
                    raise ServerError(
                        f"{self.url} was not ready within {timeout:g} s ({error})"
                    ) from error
                if progress is not None and now - told >= every_s:
                    progress(now - start)
                    told = now
                time.sleep(_POLL_S)
