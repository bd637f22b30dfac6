"""Everything about an engine that is settled before it starts, and what is then true of it.

Invariant: a wish that this engine cannot fulfil is an error here, before minutes of start-up; what
is announced to clients follows from the same options that the engine is started with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marft_agents.errors import ConfigError
from marft_agents.schema import BaseModelInfo, JsonDict
from marft_agents.serving.announced import announced_mode, announced_sampling, pinned_generation
from marft_agents.serving.chat_template import (
    mistral_tokenizer,
    model_template,
    needs_template,
    no_template_notice,
    read_chat_template,
)
from marft_agents.serving.commands import (
    LOGPROBS_MODE,
    SAMPLING_DEFAULTS,
    EngineCommand,
    EngineKind,
    VllmInstall,
    find_vllm,
    local_command,
    vllm_command,
)
from marft_agents.serving.engine_args import (
    Option,
    check_engine_args,
    given_value,
    read_options,
)
from marft_agents.serving.lora_limits import Slots, adapter_bytes
from marft_agents.serving.presets import Preset, choose_preset
from marft_agents.serving.tool_parsers import AUTO, OFF, Parsers, calls_are_held, choose_parsers

_FOUR_BYTES = ("float32", "float")


@dataclass(frozen=True)
class EngineWishes:
    """What the user asked of the engine, as flags of ``serve``."""

    kind: EngineKind = "vllm"
    python: str | None = None
    args: tuple[str, ...] = ()
    preset: str = AUTO
    tool_calls: str = AUTO
    reasoning_parser: str = AUTO
    chat_template: Path | None = None

    def changed(self) -> tuple[str, ...]:
        """Flags that only an engine started here can heed, as far as they were given."""
        named = {
            "--engine-arg": bool(self.args),
            "--preset": self.preset != AUTO,
            "--tool-calls": self.tool_calls != AUTO,
            "--reasoning-parser": self.reasoning_parser != AUTO,
            "--chat-template": self.chat_template is not None,
        }
        return tuple(flag for flag, given in named.items() if given)


@dataclass(frozen=True)
class EngineSetup:
    """How an engine is started, and what is true of it then."""

    kind: EngineKind
    python: str
    args: tuple[str, ...] = ()
    chat_template: Path | None = None
    install: VllmInstall | None = None
    preset: Preset | None = None
    parsers: Parsers = field(default_factory=Parsers)
    logprobs_mode: str = LOGPROBS_MODE
    sampling_defaults: JsonDict = field(default_factory=lambda: dict(SAMPLING_DEFAULTS))
    notices: tuple[str, ...] = ()
    """What the user should know before it starts."""

    def command(
        self,
        model_dir: Path,
        *,
        port: int,
        max_lora_rank: int,
        slots: Slots,
        target_modules: Sequence[str],
        max_model_len: int | None = None,
    ) -> EngineCommand:
        """The command line for one engine on ``port``."""
        if self.install is None:
            return local_command(
                model_dir,
                port=port,
                max_lora_rank=max_lora_rank,
                max_model_len=max_model_len,
                python=self.python,
                extra=self.args,
                chat_template=self.chat_template,
            )
        return vllm_command(
            model_dir,
            port=port,
            install=self.install,
            max_lora_rank=max_lora_rank,
            max_loras=slots.loaded,
            max_cpu_loras=slots.kept,
            target_modules=target_modules,
            max_model_len=max_model_len,
            extra=self.args,
            preset=self.preset,
            tool_parser=self.parsers.tool,
            reasoning_parser=self.parsers.reasoning,
            chat_template=self.chat_template,
        )

    def slot_bytes(
        self, model_dir: Path, base: BaseModelInfo, targets: Sequence[str], rank: int
    ) -> int | None:
        """Bytes of one adapter slot; ``None`` for an engine that keeps none."""
        if self.preset is None:
            return None
        options = read_options(self.args)
        wishes = [given_value(options, name) for name in ("--lora-dtype", "--dtype")]
        dtype = next((w for w in wishes if w not in (None, AUTO)), self.preset.options["--dtype"])
        size = 4 if dtype in _FOUR_BYTES else 2
        return adapter_bytes(model_dir, base.modules, targets, rank=rank, element_bytes=size)


def settle_engine(wishes: EngineWishes, model_dir: Path, base: BaseModelInfo) -> EngineSetup:
    """Check the wishes against the model and, for vLLM, the one that is installed.

    Raises:
        ConfigError: for a wish that cannot be fulfilled.
        EngineError: when there is no vLLM.
    """
    options = read_options(wishes.args)
    notices = list(check_engine_args(options))
    template, more = _template(wishes, model_dir, base, options)
    notices += more
    python = wishes.python or sys.executable
    if wishes.kind == "local":
        _check_local(wishes)
        return EngineSetup(
            "local", python, wishes.args, wishes.chat_template, notices=tuple(notices)
        )
    install = find_vllm(python)
    preset = choose_preset(wishes.preset, cpu=install.cpu)
    parsers = choose_parsers(
        template,
        base.model_type,
        tool=wishes.tool_calls,
        reasoning=wishes.reasoning_parser,
        package=install.package,
        given=options,
    )
    args = pinned_generation(_with_auto_choice(wishes, options), model_dir)
    in_use = given_value(options, "--tool-call-parser") or parsers.tool
    held = calls_are_held(in_use, mistral_tokenizer=mistral_tokenizer(model_dir))
    return EngineSetup(
        "vllm",
        python,
        args,
        wishes.chat_template,
        install,
        preset,
        parsers,
        announced_mode(args),
        announced_sampling(args, calls_held=held),
        (*notices, *(() if more else parsers.notices)),
    )


def _template(
    wishes: EngineWishes, model_dir: Path, base: BaseModelInfo, options: Sequence[Option]
) -> tuple[str | None, tuple[str, ...]]:
    """The template that will be used, as far as it can be read, and what is to be said of it."""
    given = given_value(options, "--chat-template")
    if given is not None and wishes.chat_template is not None:
        raise ConfigError(
            f"--chat-template {wishes.chat_template} and --engine-arg --chat-template {given}: give"
            " one of them"
        )
    if wishes.chat_template is not None:
        return read_chat_template(wishes.chat_template), ()
    if given is not None:
        path = Path(given).expanduser()
        return (read_chat_template(path) if path.is_file() else given), ()
    if needs_template(model_dir, base.model_type):
        return None, (no_template_notice(base.name),)
    return model_template(model_dir), ()


def _check_local(wishes: EngineWishes) -> None:
    if wishes.preset != AUTO:
        raise ConfigError(f"--preset {wishes.preset} is of vLLM; the local engine has none")
    for flag, value in (
        ("--tool-calls", wishes.tool_calls),
        ("--reasoning-parser", wishes.reasoning_parser),
    ):
        if value not in (AUTO, OFF):
            raise ConfigError(f"{flag} {value}: the local engine has no parsers; serve with vLLM")


def _with_auto_choice(wishes: EngineWishes, options: Sequence[Option]) -> tuple[str, ...]:
    """A parser that the user names among the engine's options is of no use without its switch."""
    names = {option.name for option in options}
    switch = "--enable-auto-tool-choice"
    if wishes.tool_calls == OFF or "--tool-call-parser" not in names or switch in names:
        return wishes.args
    return (*wishes.args, switch)
