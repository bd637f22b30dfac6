"""Options that a user hands on to an engine: how they are read, and which are refused.

Invariant: whoever asks what an engine was told asks here, however an option was spelled and whether
it stands in a file. None that would break what ``serve`` promises reaches the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from marft_agents.errors import ConfigError

_SHORT = {
    "-asc": "--api-server-count",
    "-dc": "--diffusion-config",
    "-sc": "--speculative-config",
}
_OWN = "is what serve itself settles; give serve its own option"
_HTTP = "would put the engine where the gateway, which talks plain HTTP, cannot reach it"
_ONE_API = (
    "would start API processes of which only one hears of a new adapter; more engines are"
    " started with --replicas"
)
_REFUSED = {
    "--model": "would serve another base than the one that adapters are checked against; name it"
    " with serve's --model",
    "--served-model-name": "would hide the base from the gateway, which asks for it by name",
    "--host": "would open the engine to others; serve's own --host is the gateway's",
    "--port": "would put the engine where the gateway does not look; serve's own --port is the"
    " gateway's",
    "--uds": _HTTP,
    "--grpc": _HTTP,
    "--ssl-keyfile": _HTTP,
    "--ssl-certfile": _HTTP,
    "--api-key": "would make the engine refuse its own gateway, which has a key of its own; the key"
    " for clients is named with --api-key-env",
    "--lora-modules": "would serve adapters that nobody checked or probed; publish them in the"
    " folder of adapters",
    "--no-enable-lora": "would leave no agent to serve: each is an adapter",
    "--max-lora-rank": f"{_OWN} --max-lora-rank",
    "--max-loras": f"{_OWN} --max-loras",
    "--max-cpu-loras": f"{_OWN} --max-cpu-loras",
    "--lora-target-modules": f"{_OWN} --target-modules",
    "--api-server-count": _ONE_API,
    "--headless": "would start an engine without an address",
    "--tokens-only": "would start an engine without chat completions",
    "--diffusion-config": "would serve a model that does not draw one token after the other; its"
    " log-probabilities cannot be trained on",
}
_REFUSED["--speculative-config"] = (
    "would make the recorded log-probabilities wrong: those that vLLM 0.32 served while it"
    " speculated on a CPU were not the model's, by up to 29; other builds were not measured"
)
_CODE = "runs the code it names inside the engine"
_SAID = {
    "--allowed-local-media-path": "lets every client read files below it through the engine",
    "--trust-remote-code": "runs code that comes with the model, with this user's rights",
    "--trust-request-chat-template": "lets clients send templates of their own",
    "--tool-server": "lets the model run tools inside the engine, past the gateway",
    "--enable-log-requests": "writes prompts into the engine's log",
    "--enable-log-outputs": "writes replies into the engine's log",
    "--middleware": _CODE,
    "--tool-parser-plugin": _CODE,
    "--reasoning-parser-plugin": _CODE,
    "--logits-processors": f"{_CODE}; turns are marked as shaped by it and train no ratios",
}
_READ = (
    "--logprobs-mode",
    "--generation-config",
    "--override-generation-config",
    "--tool-strict-level",
    "--tool-call-parser",
    "--reasoning-parser",
    "--chat-template",
    "--watermark-config",
    "--config",
)
_WHOLE_NAMES = ("--watermark",)
"""Options that begin as one that matters does and are another one."""


@dataclass(frozen=True)
class Option:
    """One option: its name with dashes (``--a-b`` or ``--a-b.key``), "" for no value.

    ``words`` are its places on the command line, empty when it stands in a ``--config`` file.
    """

    name: str
    value: str
    words: tuple[int, ...] = ()

    @property
    def head(self) -> str:
        return self.name.partition(".")[0]


def read_options(args: Sequence[str]) -> tuple[Option, ...]:
    """Every option in the order in which the engine lets a later one win, files first.

    vLLM takes ``--a-b 1``, ``--a_b 1``, ``--a-b=1`` and ``--a-b.key 1``.

    Raises:
        ConfigError: for a ``--config`` file that cannot be read.
    """
    given = tuple(_on_the_line(args))
    files = [option.value for option in given if option.name == "--config"]
    return (*(option for name in files for option in _in_a_file(name)), *given)


def given_value(options: Sequence[Option], name: str) -> str | None:
    """The value that wins; ``None`` when the option was not given."""
    return next((o.value for o in reversed(options) if o.name == name), None)


def structured(options: Sequence[Option], name: str) -> dict[str, Any]:
    """Fields of an option that takes a JSON object, whole or key by key.

    Raises:
        ConfigError: when it is no JSON object.
    """
    out: dict[str, Any] = {}
    for option in options:
        if option.head != name:
            continue
        key = option.name.removeprefix(name).removeprefix(".")
        out |= {key: _scalar(option.value)} if key else _object(name, option.value)
    return out


def without(args: Sequence[str], options: Sequence[Option], name: str) -> tuple[str, ...]:
    """The words without those of one option."""
    gone = {place for o in options if o.head == name for place in o.words}
    return tuple(word for place, word in enumerate(args) if place not in gone)


def spelled_for_vllm(args: Sequence[str]) -> tuple[str, ...]:
    """``--config=FILE`` as two words: vLLM reads the file only then, and says nothing otherwise."""
    out: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        out += [name, value] if equals and name == "--config" else [word]
    return tuple(out)


def check_engine_args(options: Sequence[Option]) -> tuple[str, ...]:
    """Refuse what would break a promise of ``serve``; return what is to be said of the rest.

    Raises:
        ConfigError: naming the option and the reason.
    """
    for option in options:
        shown = f"--engine-arg {option.name}"
        if any(letter.isspace() for letter in option.name):
            first, _, rest = option.name.partition(" ")
            raise ConfigError(f"{shown!r} is two words; write --engine-arg={first}={rest.strip()}")
        if option.head in _REFUSED:
            raise ConfigError(f"{shown} {_REFUSED[option.head]}")
        if whole := _abbreviated(option.head):
            raise ConfigError(f"{shown} may stand for {whole}; write the name out")
    said = {o.head: f"{o.head} {_SAID[o.head]}" for o in options if o.head in _SAID}
    mode = given_value(options, "--logprobs-mode")
    if mode is not None and mode != "processed_logprobs":
        said["--logprobs-mode"] = (
            f"--logprobs-mode {mode}: turns sampled at a temperature other than 1 have no"
            " log-probability of what they were sampled with, and train without ratios"
        )
    return tuple(said.values())


def _abbreviated(name: str) -> str | None:
    known = (*_REFUSED, *_SAID, *_READ)
    if name in known or name in _WHOLE_NAMES or len(name) < 4:
        return None
    return next((whole for whole in known if whole.startswith(name)), None)


def _on_the_line(args: Sequence[str]) -> Iterator[Option]:
    for place, word in enumerate(args):
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if not name.startswith("--"):
            continue
        following = args[place + 1] if place + 1 < len(args) else "--"
        takes = not equals and not following.startswith("--")
        words = (place, place + 1) if takes else (place,)
        yield Option(_dashed(name), following if takes else value, words)


def _dashed(name: str) -> str:
    head, dot, key = name.partition(".")
    return head.replace("_", "-") + dot + key


def _in_a_file(name: str) -> Iterator[Option]:
    try:
        parsed: Any = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--engine-arg --config {name}: cannot be read ({reason})") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"--engine-arg --config {name}: is no YAML mapping of option to value")
    for key, value in cast("dict[Any, Any]", parsed).items():
        option = _dashed(f"--{key}")
        if isinstance(value, bool):
            yield Option(option if value else f"--no-{option[2:]}", "")
        else:
            yield Option(option, value if isinstance(value, str) else json.dumps(value))


def _scalar(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _object(name: str, value: str) -> dict[str, Any]:
    parsed = _scalar(value)
    if not isinstance(parsed, dict):
        raise ConfigError(f"--engine-arg {name} {value!r} is no JSON object")
    return cast("dict[str, Any]", parsed)
