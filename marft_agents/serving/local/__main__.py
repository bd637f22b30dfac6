"""``python -m marft_agents.serving.local``: start the local engine.

Invariant: it listens on loopback only, and only once the model is loaded and checked.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

import click
import uvicorn

from marft_agents.errors import ConfigError, MarftError, MissingExtraError
from marft_agents.serving.chat_template import read_chat_template
from marft_agents.serving.engine_side.marft_engine_guard import VARIABLE, RequireKey

_NOT_FOR_PRODUCTION = "for development and tests, not for production: serve with vLLM there"
_BACKLOG = 2048
"""As uvicorn sets it: connections that wait to be taken."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Log-probabilities are those of the sampling distribution (after temperature, min-p,"
    " top-k, top-p); at temperature 0, and for prompts, those of the model at temperature 1.",
)
@click.option(
    "--model",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the base model.",
)
@click.option("--host", default="127.0.0.1", help="Loopback address to listen on.")
@click.option("--port", default=8001, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--served-model-name", default="base", help="Name that the base answers under.")
@click.option("--max-batch", default=32, type=click.IntRange(1), help="Replies in flight at once.")
@click.option(
    "--max-model-len",
    default=None,
    type=click.IntRange(2),
    help="Tokens of prompt and reply together; default: what the model was made for.",
)
@click.option("--max-lora-rank", default=16, type=click.IntRange(1), help="Largest adapter rank.")
@click.option(
    "--threads", default=None, type=click.IntRange(1), help="CPU threads; default: torch's choice."
)
@click.option(
    "--kv-cache-mib",
    default=4096,
    type=click.IntRange(1),
    help="Soft limit for keys and values of replies in flight; more requests wait.",
)
@click.option(
    "--prefix-cache-mib",
    default=256,
    type=click.IntRange(0),
    help="Memory for prompt beginnings computed before; 0 turns reuse off.",
)
@click.option(
    "--chat-template",
    default=None,
    type=click.Path(path_type=Path),
    help="Jinja template to use instead of the model's own.",
)
def command(
    folder: Path,
    host: str,
    port: int,
    served_model_name: str,
    max_batch: int,
    max_model_len: int | None,
    max_lora_rank: int,
    threads: int | None,
    kv_cache_mib: int,
    prefix_cache_mib: int,
    chat_template: Path | None,
) -> None:
    """Serve a base model and its LoRA adapters in one process, as vLLM would.

    For development and tests, not for production: serve with vLLM there.
    """
    check_loopback(host)
    template = read_chat_template(chat_template) if chat_template is not None else None
    try:
        import torch
        from transformers.utils import logging as transformers_logging

        from marft_agents.serving.local.app import create_app
        from marft_agents.serving.local.engine import EngineOptions, LocalEngine
    except ModuleNotFoundError as error:
        raise MissingExtraError("train", needed_for="the local engine") from error
    transformers_logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    listener = bind(host, port)
    url = f"http://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}"
    click.echo(f"marft local engine: {_NOT_FOR_PRODUCTION}", err=True)
    options = EngineOptions(
        base_name=served_model_name,
        max_batch=max_batch,
        window=max_model_len,
        max_rank=max_lora_rank,
        cache_mib=kv_cache_mib,
        prefix_mib=prefix_cache_mib,
        chat_template=template,
    )
    engine = LocalEngine(folder, options)
    click.echo(f"marft local engine: {folder} as {served_model_name!r} on {url}", err=True)
    app = create_app(engine)
    config = uvicorn.Config(
        RequireKey(app) if VARIABLE in os.environ else app,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.close()


def check_loopback(host: str) -> None:
    """Refuse every address that others can reach: the engine knows no keys.

    Raises:
        ConfigError: for any other address.
    """
    try:
        safe = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        safe = False
    if not safe:
        raise ConfigError(
            f"--host {host}: the local engine has no access control and listens on loopback only;"
            " put `marft-agents serve` in front of it"
        )


def bind(host: str, port: int) -> socket.socket:
    """Take the port now, so that a clash is told before the model is loaded.

    Raises:
        ConfigError: when the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # whoever reads the address may come at once
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {host}:{port} ({error.strerror}); choose another"
        ) from error
    return listener


def main() -> None:
    """Run the command; a user's mistake is one line and exit code 2."""
    try:
        code = command.main(prog_name="python -m marft_agents.serving.local", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except MarftError as error:
        click.echo(f"marft local engine: {error}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
