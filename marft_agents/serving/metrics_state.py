"""What is true at this moment of replicas, versions, admission and the recorder, as metrics.

Invariant: nothing is kept here: every number is read where it is true, at every scrape, so what is
gone is gone from the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from marft_agents.recording.sink import Sink
from marft_agents.serving.admission import Admission
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.log_lines import lost_lines

_VERSION = ("agent", "version")


class Family(Metric):
    """A metric that knows its labels, also where it has no sample."""

    label_names: tuple[str, ...] = ()


class _Gauge(GaugeMetricFamily, Family):
    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, labels=labels)
        self.label_names = labels


class _Total(CounterMetricFamily, Family):
    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, labels=labels)
        self.label_names = labels


class State:
    """The parts of one gateway that have a state.

    Args:
        sink: the recorder's, if it records.
        verdicts: how often canaries came out in which way.
        silences: how often silent replicas were asked for a token, by name and what came of it.
    """

    def __init__(
        self,
        fleet: Fleet,
        aliases: Aliases,
        admission: Admission,
        sink: Sink | None = None,
        verdicts: Mapping[str, int] = MappingProxyType({}),
        silences: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        self._fleet = fleet
        self._aliases = aliases
        self._admission = admission
        self._sink = sink
        self._verdicts = verdicts
        self._silences = silences

    def loaded(self) -> Collection[Route]:
        """Every version that an engine keeps for this gateway."""
        return self._aliases.kept()

    def families(self) -> Iterator[Family]:
        """Read on the event loop."""
        yield from self._versions()
        yield from self._replicas()
        yield from self._entrance()
        yield from self._recorder()
        build = _Gauge("marft_build", "Always 1; which version of marft-agents serves.", "version")
        build.add_metric([version("marft-agents")], 1)
        yield build

    def _versions(self) -> Iterator[Family]:
        aliases = self._aliases
        in_flight = _Gauge("marft_in_flight", "Requests under way.", *_VERSION)
        leases = _Gauge("marft_leases", "Episodes that keep the version.", *_VERSION)
        current = _Gauge("marft_current_version", "The version that new episodes get.", "agent")
        share = _Gauge("marft_canary_share", "Share of new episodes a canary gets.", *_VERSION)
        count = _Gauge("marft_versions_loaded", "Versions that are loaded.", "agent")
        loaded = self.loaded()
        for route in loaded:
            in_flight.add_metric(_named(route), aliases.in_flight(route))
            leases.add_metric(_named(route), aliases.leased(route))
        for agent in sorted({*aliases.agents, *(route.agent for route in loaded)}):
            count.add_metric([agent], sum(route.agent == agent for route in loaded))
            if (now := aliases.current(agent)) is not None:
                current.add_metric([agent], now)
            if (split := aliases.split(agent)) is not None:
                share.add_metric([agent, str(split.version)], split.share)
        verdicts = _Total("marft_canary_verdicts", "How canaries and watches ended.", "verdict")
        for verdict, times in self._verdicts.items():
            verdicts.add_metric([verdict], times)
        yield from (in_flight, leases, current, share, count, verdicts)

    def _replicas(self) -> Iterator[Family]:
        up = _Gauge("marft_replica_up", "1 while the replica takes traffic.", "replica")
        state = _Gauge("marft_replica_state", "1 for the state it is in.", "replica", "state")
        in_flight = _Gauge("marft_replica_in_flight", "Requests that it answers.", "replica")
        restarts = _Total("marft_replica_restarts", "Times its engine was started anew.", "replica")
        for told in self._fleet.status():
            up.add_metric([told.name], told.state == "ready")
            state.add_metric([told.name, told.state], 1)
            in_flight.add_metric([told.name], told.in_flight)
            restarts.add_metric([told.name], told.restarts)
        asked = "Times it was asked for a token as no reply had a byte: answered, busy or hangs."
        silences = _Total("marft_replica_silences", asked, "replica", "result")
        for labels, times in self._silences().items():
            silences.add_metric(labels, times)
        yield from (up, state, in_flight, restarts, silences)

    def _entrance(self) -> Iterator[Family]:
        admission = self._admission
        yield _one("marft_admission_in_flight", "Requests that were let in.", admission.in_flight)
        yield _one("marft_admission_waiting", "Requests in the line.", admission.waiting)
        limit = "Requests that may be under way at once."
        yield _one("marft_admission_limit", limit, admission.max_in_flight)
        kept = "What bodies of requests hold in memory."
        yield _one("marft_admission_kept_bytes", kept, admission.kept_bytes)

    def _recorder(self) -> Iterator[Family]:
        lost = _Total("marft_recorder_dropped_events", "Events that never reached the log.")
        waiting = _Gauge("marft_recorder_waiting_events", "Events that wait for the disk.")
        if self._sink is not None:
            lost.add_metric([], self._sink.lost)
            waiting.add_metric([], self._sink.waiting)
        yield from (lost, waiting)
        lines = _Total("marft_log_lines_lost", "Lines of this server's log that were not written.")
        lines.add_metric([], lost_lines())
        yield lines


def _one(name: str, text: str, value: float) -> Family:
    family = _Gauge(name, text)
    family.add_metric([], value)
    return family


def _named(route: Route) -> list[str]:
    return [route.agent, str(route.version)]
