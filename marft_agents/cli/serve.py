"""``marft-agents serve``: the current adapters of every agent behind one address."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from marft_agents.cli._amounts import Finite
from marft_agents.cli._serve_access import access_options, access_settings, key_from
from marft_agents.cli._serve_help import ServeCommand
from marft_agents.cli._serve_logs import log_options, logged
from marft_agents.errors import ConfigError
from marft_agents.registry import ALLOWED_MAX_RANKS
from marft_agents.serving.client import checked_url
from marft_agents.serving.commands import EngineKind
from marft_agents.serving.leases import LEASE_TIMEOUT_S
from marft_agents.serving.plan import ServeSettings
from marft_agents.serving.presets import PRESET_NAMES
from marft_agents.serving.probe import TOLERANCE
from marft_agents.serving.server import serve
from marft_agents.serving.supervisor import Pace


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (value or "").split(",") if name.strip())


def _rank(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    del context, parameter
    if value == "auto":
        return None
    if not value.isdecimal():
        raise ConfigError(f"--max-lora-rank {value}: give a number, or auto")
    return int(value)


def _say(line: str) -> None:
    click.echo(line)


@click.command(name="serve", cls=ServeCommand)
@click.argument("adapters", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", required=True, help="Base model: a folder or a hub id.")
@click.option("--agents", metavar="NAMES", help="Agents to begin with, comma-separated.")
@click.option(
    "--engine",
    type=click.Choice(["vllm", "local"]),
    default="vllm",
    show_default=True,
    help="vLLM, or this package's own engine on transformers.",
)
@click.option("--engine-python", metavar="PATH", help="Python interpreter that has the engine.")
@click.option(
    "--engine-arg",
    "engine_args",
    metavar="OPTION",
    multiple=True,
    help="Passed on to the engine, e.g. --engine-arg=--seed=1; repeatable.",
)
@click.option(
    "--preset",
    type=click.Choice(PRESET_NAMES),
    default="auto",
    show_default=True,
    help="vLLM's options for a kind of machine; each --engine-arg wins over it.",
)
@click.option(
    "--tool-calls",
    metavar="auto|off|PARSER",
    default="auto",
    show_default=True,
    help="How vLLM reads the model's tool calls.",
)
@click.option(
    "--reasoning-parser",
    metavar="auto|off|PARSER",
    default="auto",
    show_default=True,
    help="How vLLM tells the model's reasoning from its answer.",
)
@click.option(
    "--chat-template",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Jinja template to use instead of the model's own.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Engines to start; each gets its part of the machine.",
)
@click.option("--gpus", metavar="IDS", help="GPUs to divide among them, e.g. 0,1.")
@click.option(
    "--server",
    "servers",
    metavar="URL",
    multiple=True,
    help="Use an engine that runs already; repeatable.",
)
@click.option("--server-key-env", metavar="NAME", help="Variable with those engines' API key.")
@click.option(
    "--logprobs-mode",
    type=click.Choice(["processed_logprobs", "raw_logprobs"]),
    help="What the engines at --server were started with.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any but loopback needs --keys or --api-key-env.",
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@access_options
@click.option(
    "--max-lora-rank",
    metavar="auto|RANK",
    default="auto",
    show_default=True,
    callback=_rank,
    help=f"Highest rank served: {' '.join(map(str, ALLOWED_MAX_RANKS))}; auto: what the versions"
    " in use need, 16 at least.",
)
@click.option(
    "--max-loras",
    type=click.IntRange(min=1),
    help="Adapters in one batch; default: 2 for each agent.",
)
@click.option(
    "--max-cpu-loras",
    type=click.IntRange(min=1),
    help="Adapters kept in main memory; default: twice --max-loras.",
)
@click.option(
    "--target-modules",
    metavar="NAMES",
    help="Modules the engine prepares for adapters; default: those of the versions in use.",
)
@click.option("--max-model-len", type=click.IntRange(min=1), help="Context length in tokens.")
@click.option(
    "--probe-tolerance",
    type=Finite(min=0, min_open=True),
    default=TOLERANCE,
    show_default=True,
    help="Largest difference to the trainer's log-probabilities; more for half precision.",
)
@click.option(
    "--start-timeout",
    metavar="SECONDS",
    type=Finite(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="For the engine to be up.",
)
@click.option(
    "--stop-timeout",
    metavar="SECONDS",
    type=Finite(min=0),
    default=30.0,
    show_default=True,
    help="How long requests in flight may go on when the server is asked to stop.",
)
@click.option(
    "--silence-timeout",
    metavar="SECONDS",
    type=Finite(min=0),
    default=Pace.silence_s,
    show_default=True,
    help="Without a byte of any reply for so long, an engine is asked whether it hangs; 0: never.",
)
@click.option(
    "--lease-timeout",
    metavar="SECONDS",
    type=Finite(min=0, min_open=True),
    default=LEASE_TIMEOUT_S,
    show_default=True,
    help="Without a request for so long, an episode loses the adapter versions it began with.",
)
@click.option(
    "--record",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Record calls to /episodes/<id>/agents/<name>/v1 into this folder.",
)
@click.option(
    "--record-all",
    is_flag=True,
    help="Record every call, also of apps that record themselves; each must name its episode.",
)
@click.option(
    "--episode-idle-timeout",
    metavar="SECONDS",
    type=Finite(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Without a call for so long, a recorded episode ends as failed in the log.",
)
@log_options
def command(**options: Any) -> None:
    """Serve every agent in ADAPTERS by its name, each from its current adapter version.

    Applications use the printed base_url with model = the agent's name. Agents named with --agents
    that have no adapter yet get an untrained one.
    """
    settings = ServeSettings(
        adapters=options["adapters"],
        model=options["model"],
        agents=_names(options["agents"]),
        engine=cast("EngineKind", options["engine"]),
        engine_python=options["engine_python"],
        engine_args=options["engine_args"],
        preset=options["preset"],
        tool_calls=options["tool_calls"],
        reasoning_parser=options["reasoning_parser"],
        chat_template=options["chat_template"],
        replicas=options["replicas"],
        gpus=_names(options["gpus"]),
        servers=tuple(map(checked_url, options["servers"])),
        server_api_key=key_from(options["server_key_env"]),
        host=options["host"],
        port=options["port"],
        **access_settings(options),
        max_lora_rank=options["max_lora_rank"],
        max_loras=options["max_loras"],
        max_cpu_loras=options["max_cpu_loras"],
        max_model_len=options["max_model_len"],
        target_modules=_names(options["target_modules"]),
        logprobs_mode=options["logprobs_mode"],
        probe_tolerance=options["probe_tolerance"],
        start_timeout_s=options["start_timeout"],
        stop_timeout_s=options["stop_timeout"],
        silence_s=options["silence_timeout"],
        record=options["record"],
        record_all=options["record_all"],
        episode_idle_s=options["episode_idle_timeout"],
        lease_timeout_s=options["lease_timeout"],
    )
    with logged(options, _say) as say:
        try:
            serve(settings, say)
        except KeyboardInterrupt:
            say("stopped")
