"""Whether published versions are what was published, and could be served.

Invariant: everything is read anew from disk and nothing is changed; each finding is one line that
names what is broken. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from marft_agents.errors import AdapterError, MarftError, RegistryError
from marft_agents.registry.audit import in_use
from marft_agents.registry.check import CONFIG_FILE, WEIGHTS_FILE, inspect_adapter
from marft_agents.registry.durable import sha256_file
from marft_agents.registry.reader import MANIFEST_FILE, RegistryReader, require_plain_name
from marft_agents.schema import AdapterManifest, BaseModelInfo

_UNHASHED = {MANIFEST_FILE, "README.md"}


def check_agent(registry: RegistryReader, agent: str) -> Iterator[str]:
    """What is wrong with an agent's pointers."""
    for read in (registry.current, registry.pinned, registry.canary):
        try:
            read(agent)
        except RegistryError as error:
            yield str(error)
    with suppress(RegistryError):
        now, pinned = registry.current(agent), registry.pinned(agent)
        if now is None:
            yield f"{agent}: no version is in use; promote one"
        elif pinned not in (None, now):
            yield f"{agent}: version {pinned} is pinned and {now} is in use"
        told = in_use(registry.audit(agent))[-1:]
        if now is not None and now not in told:
            says = f"version {told[0]}" if told else "nothing"
            yield f"{agent}: CURRENT says version {now}, and the audit trail says {says}"


def check_version(
    registry: RegistryReader, agent: str, version: int, base: BaseModelInfo | None = None
) -> Iterator[str]:
    """What is wrong with one version; ``base`` is what it is to be served on."""
    name = f"{agent}@v{version}"
    try:
        manifest = registry.manifest(agent, version)
    except MarftError as error:
        yield f"{name}: {error}"
        return
    folder = registry.path(agent, version)
    if (manifest.agent, manifest.version) != (agent, version):
        yield f"{name}: its manifest is of {manifest.served_name}"
    if manifest.parent is not None and manifest.parent >= version:
        yield f"{name}: its parent is the later version {manifest.parent}"
    if base is not None and manifest.base.fingerprint != base.fingerprint:
        yield (
            f"{name}: it is of the base {manifest.base.name} ({manifest.base.fingerprint[:12]}),"
            f" not of {base.name} ({base.fingerprint[:12]})"
        )
    for what in (*_files(folder, manifest), *_weights(folder, manifest), *_probe(manifest)):
        yield f"{name}: {what}"


def file_states(folder: Path, manifest: AdapterManifest) -> Iterator[tuple[str, str]]:
    """Every file that is there or should be, and what is wrong with it (empty: nothing)."""
    for file, wanted in manifest.files.items():
        try:
            require_plain_name(folder, file)
            found = sha256_file(folder / file)
        except AdapterError as error:
            yield file, str(error)
        except FileNotFoundError:
            yield file, "is gone"
        except OSError as error:
            yield file, f"cannot be read ({error.strerror or error})"
        else:
            yield file, "" if found == wanted else "is not the file that was published (checksum)"
    for path in sorted(folder.iterdir()):
        if path.name not in manifest.files and path.name[0] != ".":
            yield path.name, "" if path.name in _UNHASHED else "was not published with it"


def _files(folder: Path, manifest: AdapterManifest) -> Iterator[str]:
    for needed in (CONFIG_FILE, WEIGHTS_FILE):
        if needed not in manifest.files:
            yield f"its manifest has no checksum of {needed}"
    yield from (f"{file} {state}" for file, state in file_states(folder, manifest) if state)


def _weights(folder: Path, manifest: AdapterManifest) -> Iterator[str]:
    try:
        facts = inspect_adapter(folder, manifest.base)
    except (AdapterError, OSError) as error:
        yield str(error)
        return
    if facts.rank != manifest.rank:
        yield f"its rank is {facts.rank}, its manifest says {manifest.rank}"
    if facts.target_modules != sorted(manifest.target_modules):
        yield (
            f"it adapts {', '.join(facts.target_modules)}, its manifest says"
            f" {', '.join(manifest.target_modules)}"
        )
    if facts.has_effect == manifest.untrained:
        says = "untrained" if manifest.untrained else "trained"
        yield f"its B is {'not ' if facts.has_effect else ''}zero, its manifest says {says}"


def _probe(manifest: AdapterManifest) -> Iterator[str]:
    probe = manifest.probe
    if probe is None:
        return
    lengths = {len(probe.token_ids), len(probe.logprobs), len(probe.base_logprobs)}
    if len(lengths) != 1 or 0 in lengths or not probe.prompt_token_ids:
        yield "its probe has no tokens, or not as many log-probabilities as tokens"
    ids = [*probe.prompt_token_ids, *probe.token_ids]
    if any(not 0 <= token < manifest.base.vocab_size for token in ids):
        yield f"its probe has token ids outside the vocabulary of {manifest.base.vocab_size}"
    if not all(map(math.isfinite, (*probe.logprobs, *probe.base_logprobs))):
        yield "its probe has log-probabilities that are not finite"
