"""Bring one published version up in the engine, or say which step failed.

Invariant: nothing is sent to the engine before the folder was compared with its checksums, its
base and the engine's limits. A version counts as up only after its probe passed; one that fails
is taken out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from marft_agents.errors import (
    AdapterError,
    ConfigError,
    MarftError,
    RegistryError,
    ServerError,
    SwapError,
)
from marft_agents.registry import Registry, read_adapter_config, validate_adapter_config
from marft_agents.schema import AdapterManifest, BaseModelInfo, served_name
from marft_agents.serving import probe as probes
from marft_agents.serving.client import EngineClient
from marft_agents.serving.probe import Baseline, ProbeReport

Step = Literal["check", "load", "probe", "record"]


class StepError(SwapError):
    """A version could not be brought up; ``refused`` tells a bad adapter from a bad engine."""

    def __init__(self, message: str, *, step: Step, refused: bool) -> None:
        super().__init__(message)
        self.step: Step = step
        self.refused = refused


@contextlib.contextmanager
def step(name: str, doing: Step) -> Generator[None]:
    """Name the step in whatever error leaves the block."""
    try:
        yield
    except (MarftError, OSError) as error:
        refused = isinstance(error, AdapterError | RegistryError | ConfigError) or doing == "check"
        raise StepError(f"step {doing} of {name}: {error}", step=doing, refused=refused) from error


@dataclass(frozen=True)
class Limits:
    """What the engine was started for."""

    max_lora_rank: int
    target_modules: tuple[str, ...] = ()
    """Empty: every module."""
    max_loras: int | None = None
    """Adapters in use at once; ``None``: as many as there are, or not known."""


def check_version(
    registry: Registry, base: BaseModelInfo, limits: Limits, agent: str, version: int
) -> AdapterManifest:
    """The manifest of a version that an engine with these limits can serve.

    Raises:
        AdapterError: when it is damaged, of another base, or beyond the engine's limits.
        RegistryError: when there is no such version.
        SwapError: when its own probe shows no effect.
    """
    manifest = registry.verify(agent, version)
    name = manifest.served_name
    if manifest.base.fingerprint != base.fingerprint:
        raise AdapterError(
            f"{name} was trained on {manifest.base.name}"
            f" (fingerprint {manifest.base.fingerprint[:12]}), this server serves"
            f" {base.name} (fingerprint {base.fingerprint[:12]}); serve the base it was trained on"
        )
    config = read_adapter_config(registry.path(agent, version))
    try:
        validate_adapter_config(config, max_lora_rank=limits.max_lora_rank)
    except AdapterError as error:
        raise AdapterError(f"{name}: {error}") from error
    wanted = set(manifest.target_modules)
    missing = sorted(wanted - set(limits.target_modules)) if limits.target_modules else []
    if missing:
        raise AdapterError(
            f"{name} adapts {', '.join(missing)}, the engine was started for"
            f" {', '.join(limits.target_modules)}; restart serve with"
            f" --target-modules {','.join(sorted({*limits.target_modules, *missing}))}"
        )
    if manifest.probe is not None:
        probes.check_probe_makes_sense(name, manifest.probe, untrained=manifest.untrained)
    return manifest


class Loader:
    """Checks, loads and probes versions of one registry on one engine; blocking calls."""

    def __init__(
        self,
        client: EngineClient,
        registry: Registry,
        base: BaseModelInfo,
        limits: Limits,
        *,
        tolerance: float = probes.TOLERANCE,
    ) -> None:
        self.client = client
        self.registry = registry
        self.base = base
        self.limits = limits
        self.tolerance = tolerance
        self.baseline: Baseline | None = None

    def take_baseline(self) -> None:
        """Ask the base itself, while no adapter request is in flight.

        Beside adapter requests a CPU engine answers base requests wrongly, so this is for start-up.
        """
        ids = probes.baseline_tokens(self.base.vocab_size)
        logprobs = self.client.prompt_logprobs(self.client.base_name(), ids[:1], ids[1:])
        self.baseline = Baseline(ids, tuple(logprobs))

    def bring_up(self, agent: str, version: int, *, in_use: bool = False) -> ProbeReport:
        """Check, load and probe one version; safe to repeat.

        Raises:
            StepError: naming the step. The version is then not left loaded, unless it is
                ``in_use`` by requests in flight.
        """
        name = served_name(agent, version)
        with step(name, "check"):
            manifest = check_version(self.registry, self.base, self.limits, agent, version)
        try:
            with step(name, "load"):
                self.client.load(name, self.registry.path(agent, version))
            with step(name, "probe"):
                return self._probe(manifest)
        except StepError:
            if in_use:
                raise
            with contextlib.suppress(ServerError):
                self.client.unload(name)
            raise

    def probe_again(self, agent: str, version: int) -> ProbeReport:
        """Probe a version that serves already; it stays loaded whatever comes out.

        Raises:
            StepError: when it does not answer as it should.
        """
        name = served_name(agent, version)
        with step(name, "check"):
            manifest = check_version(self.registry, self.base, self.limits, agent, version)
        with step(name, "probe"):
            return self._probe(manifest)

    def _probe(self, manifest: AdapterManifest) -> ProbeReport:
        name, untrained = manifest.served_name, manifest.untrained
        probe = manifest.probe
        if probe is not None:
            served = self.client.prompt_logprobs(name, probe.prompt_token_ids, probe.token_ids)
            return probes.judge_against_trainer(
                name, probe, served, untrained=untrained, tolerance=self.tolerance
            )
        if self.baseline is None:
            raise SwapError(f"{name} has no probe and the base's answers were not taken")
        ids = self.baseline.token_ids
        served = self.client.prompt_logprobs(name, ids[:1], ids[1:])
        return probes.judge_against_base(
            name, self.baseline, served, untrained=untrained, tolerance=self.tolerance
        )

    def is_loaded(self, agent: str, version: int) -> bool:
        path = self.registry.path(agent, version)
        return self.client.has_loaded(served_name(agent, version), path)

    def unload(self, agent: str, version: int) -> None:
        self.client.unload(served_name(agent, version))
