"""The help of ``serve``: its options under headings, since there are many.

Invariant: every option is shown once, those without a heading of their own among the first.
"""

from __future__ import annotations

import click

SECTIONS = {
    "Options": "model agents engine host port silence_timeout",
    "Engines that are started here": "engine_python engine_args preset tool_calls reasoning_parser"
    " chat_template max_model_len replicas gpus start_timeout",
    "Engines that run already": "servers server_key_env logprobs_mode",
    "Adapters": "max_lora_rank max_loras max_cpu_loras target_modules probe_tolerance"
    " lease_timeout",
    "Who may ask, and what": "api_key_env keys allowed_hosts max_in_flight allow_fields"
    " allow_media_urls stop_timeout",
    "Recording of calls": "record record_all episode_idle_timeout",
    "Log": "log_format log_level log_file",
}
"""Names of parameters, in the order in which they are shown."""


class ServeCommand(click.Command):
    """Shows its options under ``SECTIONS``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            parameter.name: record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx))
        }
        named = {name for names in SECTIONS.values() for name in names.split()}
        rest = [record for name, record in records.items() if name not in named]
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                shown = [records[name] for name in names.split()]
                formatter.write_dl(shown + (rest if heading == "Options" else []))
