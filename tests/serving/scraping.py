"""Reads what a gateway measures, as Prometheus would."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.serving.stage import Stage


class Page:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def sum(self, name: str, **labels: object) -> float:
        """Of every sample with these labels."""
        wanted = {k: str(v) for k, v in labels.items()}
        return sum(
            value for has, value in self.samples.get(name, ()) if wanted.items() <= has.items()
        )

    def values(self, name: str, label: str) -> set[str]:
        """What a label says."""
        return {has[label] for has, _ in self.samples.get(name, ())}


def scrape(stage: Stage) -> Page:
    answer = stage.http.get(f"{stage.url}/metrics")
    assert answer.status_code == 200
    return Page(answer.text)


def scrape_until(stage: Stage, condition: Callable[[Page], bool]) -> Page:
    """A request is counted just after its client has its last byte."""
    pages: list[Page] = []

    def holds() -> bool:
        pages.append(scrape(stage))
        return condition(pages[-1])

    stage.wait(holds)
    return pages[-1]
