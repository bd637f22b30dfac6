"""What a good reply lacks for training, said once per agent and server.

Invariant: what is said names the reason, as far as the request and the server tell it, and a cure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marft_agents.recording.outgoing import TOKEN_FIELDS

if TYPE_CHECKING:
    from marft_agents.recording.exchange import Exchange


def say_if_ids_are_missing(exchange: Exchange) -> None:
    """Warn once per agent and server when a good reply cannot be trained on."""
    choices = exchange.reply.choices.values() if exchange.reply else ()
    ids = all(c.token_ids for c in choices) and exchange.reply and exchange.reply.prompt_token_ids
    if ids and all(c.logprobs for c in choices):
        return
    core, agent = exchange.call.episode.core, exchange.call.agent
    missing = "log-probabilities" if ids else "token ids"
    if exchange.verdict is not None and exchange.verdict.accepts is False:
        why = f"the server does not look like one that returns them: {exchange.verdict.reason}"
        cure = "serve the model with `marft-agents serve` or vLLM; if it is one behind a proxy,"
        cure += ' use MarftRecorder(inject="always")'
    elif exchange.request_body.get("include_reasoning") is False:
        why = "the request hides the reasoning, and its tokens with it"
        cure = "leave include_reasoning on"
    elif core.inject == "never":
        why, cure = 'the recorder was made with inject="never"', 'use inject="auto"'
    else:
        fields = {k: exchange.request_body.get(k) for k in TOKEN_FIELDS}
        why = f"the server ignored them (the request said {fields})"
        cure = "leave these fields to the recorder, and serve with `marft-agents serve` or vLLM"
    core.safety.warn_once(
        ("no ids", agent, exchange.base_url),
        f"marft-agents: replies to agent {agent!r} from {exchange.base_url} carry no {missing}, so"
        f" its turns are logged but cannot be trained on; {why}; {cure}",
    )
