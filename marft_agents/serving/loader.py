"""Bring one published version up in the engine, or say which step failed.

Invariant: nothing is sent to the engine before the manifest and the configuration were compared
with their checksums, the base and the engine's limits, and the engine computes nothing with weights
that were not compared with their checksum: long ones are read while it loads them. A version counts
as up only after its probe passed; one that fails is taken out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
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
from marft_agents.registry.reader import folder_name
from marft_agents.schema import AdapterManifest, BaseModelInfo, parse_served_name, served_name
from marft_agents.serving import probe as probes
from marft_agents.serving.client import EngineClient
from marft_agents.serving.probe import Baseline, ProbeReport
from marft_agents.serving.proofs import Folder, Proofs
from marft_agents.serving.swap_events import timed_step
from marft_agents.serving.threads import aside

Step = Literal["check", "load", "probe", "record"]
ASK_S = 5.0
"""Longest wait for an engine's list, where there is another way to go on."""
LONG_FILE = 4 * 1024 * 1024
"""Bytes; to compare a shorter file takes a few milliseconds."""


class StepError(SwapError):
    """A version could not be brought up.

    ``refused`` tells a bad adapter from a bad engine, ``replica`` which engine it was.
    """

    def __init__(
        self, message: str, *, step: Step, refused: bool, replica: str | None = None
    ) -> None:
        super().__init__(message)
        self.step: Step = step
        self.refused = refused
        self.replica = replica


class NoRoomError(StepError):
    """The engine has no slot for a version; it may have one another time."""


@contextlib.contextmanager
def step(
    name: str, doing: Step, replica: str | None = None, *, part: str | None = None
) -> Generator[None]:
    """Name the step, and the replica, in whatever error leaves the block.

    A ``part`` of it that is done beside other steps is timed by itself.
    """
    with timed_step(part or doing, replica):
        try:
            yield
        except StepError:
            raise
        except (MarftError, OSError) as error:
            bad = isinstance(error, AdapterError | RegistryError | ConfigError)
            where = "" if replica is None else f" on {replica}"
            message = f"step {doing} of {name}{where}: {error}"
            raise StepError(
                message, step=doing, refused=bad or doing == "check", replica=replica
            ) from error


@dataclass(frozen=True)
class Limits:
    """What the engine was started for."""

    max_lora_rank: int
    target_modules: tuple[str, ...] = ()
    """Empty: every module."""
    max_loras: int | None = None
    """Adapters in use at once; ``None``: as many as there are, or not known."""
    max_cpu_loras: int | None = None
    """Adapters that the engine keeps in main memory; ``None`` likewise."""

    @property
    def slots(self) -> int | None:
        """Versions that may be loaded at once; ``None``: no limit is known."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


def check_version(
    registry: Registry, base: BaseModelInfo, limits: Limits, agent: str, version: int
) -> AdapterManifest:
    """The manifest of a version that an engine with these limits can serve.

    Raises:
        AdapterError: when it is damaged, of another base, or beyond the engine's limits.
        RegistryError: when there is no such version.
        SwapError: when its own probe shows no effect.
    """
    manifest = look_over(registry, base, limits, agent, version)
    registry.verify_files(manifest)
    return manifest


def look_over(
    registry: Registry, base: BaseModelInfo, limits: Limits, agent: str, version: int
) -> AdapterManifest:
    """As :func:`check_version`, without the checksums of long files.

    Raises:
        AdapterError, RegistryError, SwapError: see there.
    """
    manifest = registry.manifest(agent, version)
    registry.verify_files(manifest, most_bytes=LONG_FILE)
    config = read_adapter_config(registry.path(agent, version))
    name = manifest.served_name
    if manifest.base.fingerprint != base.fingerprint:
        raise AdapterError(
            f"{name} was trained on {manifest.base.name}"
            f" (fingerprint {manifest.base.fingerprint[:12]}), this server serves"
            f" {base.name} (fingerprint {base.fingerprint[:12]}); serve the base it was trained on"
        )
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
        self.proofs = Proofs()

    def take_baseline(self) -> None:
        """Ask the base itself, while no adapter request is in flight.

        Beside adapter requests a CPU engine answers base requests wrongly, so this is for start-up.
        """
        ids = probes.baseline_tokens(self.base.vocab_size)
        logprobs = self.client.prompt_logprobs(self.client.base_name(), ids[:1], ids[1:])
        self.baseline = Baseline(ids, tuple(logprobs))

    def check(self, agent: str, version: int) -> AdapterManifest:
        """The manifest of a version that may be sent to the engine.

        Raises:
            StepError: when the version, its base or its size does not fit.
        """
        with step(served_name(agent, version), "check"):
            return check_version(self.registry, self.base, self.limits, agent, version)

    def look_over(self, agent: str, version: int) -> AdapterManifest:
        """As :meth:`check`, without reading long files; :meth:`compare` does that.

        Raises:
            StepError: see there.
        """
        with step(served_name(agent, version), "check"):
            return look_over(self.registry, self.base, self.limits, agent, version)

    def compare(self, manifest: AdapterManifest) -> None:
        """Compare a version's files with their checksums.

        Raises:
            StepError: when one differs.
        """
        with step(manifest.served_name, "check", part="compare"):
            self.registry.verify_files(manifest)

    def bring_up(self, agent: str, version: int) -> ProbeReport:
        """Check, load and probe one version; safe to repeat.

        Raises:
            StepError: naming the step; the version is then not left loaded.
        """
        folder = self.folder(agent, version)
        manifest = self.check(agent, version)
        try:
            return self.load_and_probe(manifest, folder)
        except StepError:
            with contextlib.suppress(ServerError):
                self.unload(agent, version)
            raise

    def folder(self, agent: str, version: int) -> Folder:
        """The version's folder as it is now; to be asked for before it is looked over.

        Raises:
            StepError: there is none.
        """
        with step(served_name(agent, version), "check"):
            return Folder.seen(self.registry.path(agent, version))

    def load_and_probe(
        self,
        manifest: AdapterManifest,
        before: Folder,
        *,
        compared: Callable[[], None] = lambda: None,
        replica: str | None = None,
        begins: Callable[[Step], None] = lambda _: None,
    ) -> ProbeReport:
        """Load a version that was looked over, and probe it; it stays loaded whatever comes out.

        Whether the engine lists it from its folder is asked while it computes the probe's answer.

        Args:
            before: its folder, seen before the manifest was looked over.
            compared: returns when the weights are those that were published, or raises; nothing is
                computed with them before.
            replica: named in errors.
            begins: is told every step that begins.

        Raises:
            StepError: naming the step.
        """
        name, run = manifest.served_name, self.proofs.run
        folder = self.registry.path(manifest.agent, manifest.version)
        begins("load")
        with step(name, "load", replica):
            self.client.ask_to_load(name, folder)
        begins("check")
        compared()
        begins("probe")
        listed = aside(self.client.require_loaded, name, folder)
        try:
            with step(name, "probe", replica):
                report = self.probe(manifest)
        finally:  # an engine that does not list it fails at that, whatever it answered
            begins("load")
            with step(name, "load", replica, part="list"):
                listed.result()
        self.proofs.add(run, name, report, before)
        return report

    def probe(self, manifest: AdapterManifest) -> ProbeReport:
        """Whether a loaded version answers as it should; it stays loaded whatever comes out.

        Raises:
            SwapError: when it does not.
            ServerError: when the engine fails.
        """
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

    def require_listed(self, name: str, folder: Path, replica: str) -> None:
        """Return when the engine still lists a version that was proved on it.

        Raises:
            StepError: it does not, or does not say so soon.
        """
        with step(name, "load", replica, part="list"):
            limit_s = min(ASK_S, self.client.timeout_s)
            self.client.require_loaded(name, folder, timeout_s=limit_s)

    def unload(self, agent: str, version: int) -> None:
        name = served_name(agent, version)
        self.proofs.drop(name)
        self.client.unload(name)

    def listed(self, timeout_s: float | None = None) -> set[tuple[str, int]]:
        """Agent and version of everything that the engine has loaded from this registry.

        What it lists under the same names from elsewhere is not among them.

        Raises:
            ServerError: when the engine cannot be asked.
        """
        found: set[tuple[str, int]] = set()
        for model in self.client.models(timeout_s):
            named = parse_served_name(model.name)
            if named is None:
                continue
            folder = (self.registry.root / named[0] / folder_name(named[1])).absolute()
            if model.root is None or Path(model.root) == folder:
                found.add(named)
        return found

    def answers(self, agent: str, version: int) -> None:
        """Return when a loaded version answers at all.

        Raises:
            ServerError: when it does not.
        """
        self.client.prompt_logprobs(served_name(agent, version), [1], [2])
