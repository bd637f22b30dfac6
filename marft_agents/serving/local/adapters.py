"""Adapters by their served names: put into the model, held while in use, taken out.

Invariant: an adapter enters the model whole or not at all, and nothing else is changed. A row keeps
the adapter it began with: unloading or replacing a name only stops new rows, and the weights leave
when the last row on them has ended. Inside PEFT each load has a fresh name, so a served name can be
used again at once.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# reason: transformers and peft ship no complete types
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from marft_agents.serving.local.adapter_files import SCALING, Staged
from marft_agents.serving.local.model import BASE, LocalModel
from marft_agents.serving.local.refusal import Refusal, unknown_model


@dataclass
class _Loaded:
    slug: str
    path: str
    rows: int = 0
    retired: bool = False


class AdapterTable:
    """Served names -> adapters in the model.

    Names may be looked up and taken from any thread; :meth:`install` and :meth:`tidy` change the
    model and belong to the model's thread.
    """

    def __init__(self, model: LocalModel, base_name: str) -> None:
        self._model = model
        self._base_name = base_name
        self._lock = threading.Lock()
        self._by_name: dict[str, _Loaded] = {}
        self._by_slug: dict[str, _Loaded] = {}
        self._count = 0

    def paths(self) -> dict[str, str]:
        """Folder per served adapter name."""
        with self._lock:
            return {name: loaded.path for name, loaded in self._by_name.items()}

    def knows(self, name: str) -> bool:
        return name == self._base_name or name in self._by_name

    def check_free(self, name: str, *, replace: bool) -> None:
        """Refuse (400) the base's name, and a name in use unless it is to be replaced."""
        if name == self._base_name:
            message = f"The lora adapter '{name}' conflicts with a served base model."
        elif name in self._by_name and not replace:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the"
                " adapter in place, set 'load_inplace' to True."
            )
        else:
            return
        raise Refusal(400, message, kind="InvalidUserInput")

    def take(self, name: str, rows: int) -> str:
        """Hold the adapter for this many rows; returns its name inside the model."""
        if name == self._base_name:
            return BASE
        with self._lock:
            if name not in self._by_name:
                raise unknown_model(name)
            loaded = self._by_name[name]
            loaded.rows += rows
            return loaded.slug

    def give_back(self, slug: str) -> None:
        """One row on this adapter has ended."""
        with self._lock:
            if slug != BASE:
                self._by_slug[slug].rows -= 1

    def retire(self, name: str) -> None:
        """Stop serving a name: new requests get 404 from here on."""
        with self._lock:
            if name not in self._by_name:
                message = f"The lora adapter '{name}' cannot be found."
                raise Refusal(404, message)
            self._by_name.pop(name).retired = True

    def install(self, name: str, staged: Staged, *, replace: bool) -> None:
        """Put a staged adapter into the model and serve it under ``name``."""
        self.check_free(name, replace=replace)
        self._count += 1
        slug = f"slot{self._count}"
        _inject(self._model, slug, staged)
        with self._lock:
            old = self._by_name.get(name)
            if old is not None:
                old.retired = True
            self._by_name[name] = self._by_slug[slug] = _Loaded(slug, staged.path)

    def tidy(self, forget: Callable[[str], None]) -> None:
        """Take retired adapters that no row uses out of the model; ``forget`` hears each one."""
        with self._lock:
            done = [slug for slug, x in self._by_slug.items() if x.retired and x.rows <= 0]
            for slug in done:
                del self._by_slug[slug]
        for slug in done:
            self._model.peft.delete_adapter(slug)
            forget(slug)


def _inject(model: LocalModel, slug: str, staged: Staged) -> None:
    options: Any = {key: value for key, value in staged.config.items() if key in SCALING}
    config = LoraConfig(**options, target_modules=sorted(staged.weights))
    try:
        model.peft.add_adapter(slug, config, autocast_adapter_dtype=False)
        _copy(_layers_of(model, slug), slug, staged)
    except Exception as error:
        if slug in model.peft.peft_config:
            model.peft.delete_adapter(slug)
        if isinstance(error, Refusal):
            raise
        raise Refusal(400, f"{staged.path} cannot be loaded: {error}") from error
    model.peft.requires_grad_(False)
    model.peft.eval()


def _layers_of(model: LocalModel, slug: str) -> dict[str, LoraLayer]:
    named: Sequence[tuple[str, Any]] = list(model.peft.get_base_model().named_modules())
    return {n: m for n, m in named if isinstance(m, LoraLayer) and slug in m.lora_A}


@torch.no_grad()
def _copy(layers: Mapping[str, LoraLayer], slug: str, staged: Staged) -> None:
    if layers.keys() != staged.weights.keys():
        odd = sorted(layers.keys() ^ staged.weights.keys())[0]
        raise Refusal(400, f"{staged.path}: layer {odd!r} could not be adapted")
    for name, layer in layers.items():
        for half, given in zip((layer.lora_A, layer.lora_B), staged.weights[name], strict=True):
            weight: Any = half[slug].weight
            if weight.shape != given.shape:
                raise Refusal(
                    400,
                    f"{staged.path}: {name} has rank {min(given.shape)} in the file and"
                    f" {min(weight.shape)} in adapter_config.json",
                )
            weight.copy_(given)
