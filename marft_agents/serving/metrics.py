"""What the gateway measures, in the format that Prometheus reads.

Invariant: the registry is the gateway's own. Labels are names of agents, versions, replicas and
keys, and words from fixed lists; nothing that a request says becomes one. A version's numbers go
``KEEP_S`` after it was unloaded, so the number of series is bounded by what is loaded. Requests are
counted on the event loop; a scrape reads the state there and is written out in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from marft_agents.serving.admission import Admission
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.metrics_state import State
from marft_agents.serving.passage import Outcome
from marft_agents.serving.swap_events import SwapEvent
from marft_agents.serving.visits import Visit

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEEP_S = 300.0
"""How long an unloaded version's numbers stay: some scrapes must see the last ones."""
MOST_GONE = 32
MOST_CLIENTS = 1000
OTHER = "other"
REFUSALS = frozenset({400, 401, 403, 404, 405, 409, 413, 414, 422, 429, 431, 500, 502, 503, 504})
ERRORS = ("rejected", "engine", "unreachable", "timeout", "cut_off", "client_left")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
_STEP = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 240)
_VERSION = ("agent", "version")


def error_kind(outcome: Outcome) -> str | None:
    """Which of ``ERRORS`` an outcome is; ``None`` for a whole reply."""
    if outcome.left or outcome.status is None:
        return "client_left"
    if outcome.problem is not None:
        broken = "cut_off" if outcome.streamed else "unreachable"
        return "timeout" if outcome.status == 504 else broken
    if outcome.status >= 400:
        return "engine" if outcome.status >= 500 else "rejected"
    return None


def status_class(status: int | None) -> str:
    """``2xx`` to ``5xx``; ``none`` where there was no answer."""
    return f"{status // 100}xx" if status is not None and 100 <= status < 600 else "none"


@dataclass(slots=True)
class _Series:
    """The numbers of one version."""

    seconds: Histogram
    first: Histogram
    token: Histogram
    prompt: Counter
    completion: Counter
    codes: dict[str, Counter] = field(default_factory=dict[str, Counter])
    errors: dict[str, Counter] = field(default_factory=dict[str, Counter])
    gone_since: float | None = None


class Metrics:
    """The numbers of one gateway.

    Args:
        state: what is read at every scrape.
        now: seconds that never go back.
    """

    def __init__(self, state: State, *, now: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._now = now
        self._registry = CollectorRegistry()
        self._series: dict[Route, _Series] = {}
        self._clients: dict[tuple[str, str], Counter] = {}
        self.labels: dict[str, tuple[str, ...]] = {}
        """Of every metric that counts, by name."""
        self._requests = self._counter(
            "marft_requests",
            "Requests that reached a replica, by class of status.",
            *_VERSION,
            "code",
        )
        self._errors = self._counter(
            "marft_request_errors",
            f"Of these, those without a whole good reply: {', '.join(ERRORS)}.",
            *_VERSION,
            "kind",
        )
        self._seconds = self._histogram(
            "marft_request_seconds", "From admission to the last byte.", _SECONDS, *_VERSION
        )
        self._first = self._histogram(
            "marft_first_token_seconds", "Of streams: until the first byte.", _FIRST, *_VERSION
        )
        self._token = self._histogram(
            "marft_output_token_seconds",
            "Of streams: time per token after the first.",
            _TOKEN,
            *_VERSION,
        )
        self._prompt = self._counter("marft_prompt_tokens", "Tokens of prompts.", *_VERSION)
        self._completion = self._counter("marft_completion_tokens", "Tokens of replies.", *_VERSION)
        self._uncounted = self._counter(
            "marft_uncounted_replies", "Good replies whose engine told no token counts.", "agent"
        )
        self._by_client = self._counter(
            "marft_client_requests", "Requests by the name of their key.", "client", "code"
        )
        self._refusals = self._counter(
            "marft_refusals", "Requests that this server turned away itself, by status.", "status"
        )
        self._swaps = self._counter(
            "marft_swaps",
            "Swaps by result (refused: the version's fault) and the step they stopped at.",
            "result",
            "step",
        )
        self._steps = self._histogram(
            "marft_swap_step_seconds",
            "Time of each step of a swap, on each replica.",
            _STEP,
            "step",
        )
        ProcessCollector(registry=self._registry)

    # -- what happens ----------------------------------------------------------------------

    def outcome(self, outcome: Outcome) -> None:
        """Count a request that reached a replica."""
        route = outcome.route
        series = self._series.get(route) or self._begin(route)
        code = status_class(outcome.status)
        counter = series.codes.get(code)
        if counter is None:
            counter = series.codes[code] = self._requests.labels(route.agent, route.version, code)
        counter.inc()
        kind = error_kind(outcome)
        if kind is not None:
            error = series.errors.get(kind)
            if error is None:
                error = series.errors[kind] = self._errors.labels(route.agent, route.version, kind)
            error.inc()
        self._time(series, outcome, good=kind is None)
        self._client(outcome.client, code)

    def _time(self, series: _Series, outcome: Outcome, *, good: bool) -> None:
        if good:  # how long an error takes says nothing of how fast replies are
            series.seconds.observe(outcome.seconds)
        if outcome.streamed and outcome.first_s is not None:
            series.first.observe(outcome.first_s)
        per_token = outcome.token_s if good else None
        if per_token is not None:
            series.token.observe(per_token)
        if outcome.prompt_tokens is not None:
            series.prompt.inc(outcome.prompt_tokens)
        if outcome.completion_tokens is not None:
            series.completion.inc(outcome.completion_tokens)
        elif good:
            self._uncounted.labels(outcome.route.agent).inc()

    def _client(self, name: str, code: str) -> None:
        counter = self._clients.get((name, code))
        if counter is None:
            name = name if len(self._clients) < MOST_CLIENTS else OTHER
            counter = self._clients[name, code] = self._by_client.labels(name, code)
        counter.inc()

    def visit(self, visit: Visit) -> None:
        """Count a request that was turned away."""
        if visit.refused:
            status = str(visit.status) if visit.status in REFUSALS else OTHER
            self._refusals.labels(status).inc()

    def swap(self, event: SwapEvent) -> None:
        """Count a swap, or time one of its steps."""
        if event.whole and event.what == "prepare":
            return  # its steps are timed, and it moves nothing
        if event.whole:
            self._swaps.labels(event.result, event.step or "").inc()
        elif event.step is not None:
            self._steps.labels(event.step).observe(event.seconds)

    # -- what is loaded --------------------------------------------------------------------

    def _begin(self, route: Route) -> _Series:
        self._expire()
        named = route.agent, str(route.version)
        series = self._series[route] = _Series(
            self._seconds.labels(*named),
            self._first.labels(*named),
            self._token.labels(*named),
            self._prompt.labels(*named),
            self._completion.labels(*named),
        )
        return series

    def _expire(self) -> None:
        """Forget versions that have long been unloaded, the oldest ones first."""
        now, loaded = self._now(), self._state.loaded()
        gone: list[tuple[float, Route]] = []
        for route, series in self._series.items():
            if route in loaded:
                series.gone_since = None
                continue
            series.gone_since = now if series.gone_since is None else series.gone_since
            gone.append((series.gone_since, route))
        gone.sort(key=lambda pair: pair[0], reverse=True)
        for place, (since, route) in enumerate(gone):
            if place >= MOST_GONE or now - since >= KEEP_S:
                self._forget(route)

    def _forget(self, route: Route) -> None:
        series = self._series.pop(route)
        named = route.agent, str(route.version)
        for metric in (self._seconds, self._first, self._token, self._prompt, self._completion):
            metric.remove(*named)
        for code in series.codes:
            self._requests.remove(*named, code)
        for kind in series.errors:
            self._errors.remove(*named, kind)

    # -- scrapes ---------------------------------------------------------------------------

    async def page(self) -> bytes:
        """All numbers in the text format."""
        self._expire()
        # What the loop owns is read here; only writing it out takes long.
        everything = _Everything(self._registry, list(self._state.families()))
        return await asyncio.to_thread(generate_latest, everything)

    def described(self) -> list[tuple[str, str, tuple[str, ...], str]]:
        """Name, kind, labels and meaning of every metric of this package."""
        found = [
            (m, self.labels[m.name]) for m in self._registry.collect() if m.name in self.labels
        ]
        found += [(m, m.label_names) for m in self._state.families()]
        return sorted((_full_name(m), m.type, tuple(names), m.documentation) for m, names in found)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        self.labels[name] = labels
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        self.labels[name] = labels
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)


def described() -> list[tuple[str, str, tuple[str, ...], str]]:
    """:meth:`Metrics.described` of any gateway."""
    return Metrics(State(Fleet(()), Aliases(), Admission())).described()


def _full_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


class _Everything(Collector):
    """What was counted, and the state of the moment."""

    def __init__(self, counted: CollectorRegistry, state: list[Metric]) -> None:
        self._counted = counted
        self._moment = state

    def collect(self) -> Iterable[Metric]:
        yield from self._counted.collect()
        yield from self._moment
