"""Which fields of a request reach the engine.

Invariant: what is passed on is on a list; what acts beyond this one reply is refused by name;
what nobody knows is dropped and said, once in the log and in every reply's header. A field that is
passed on keeps its value.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from marft_agents.schema import JsonDict
from marft_agents.serving.media import check_media
from marft_agents.serving.refusals import Refusal

_log = logging.getLogger(__name__)
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
RENDER = "/v1/chat/completions/render"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANY_REPLY = _names(
    """model stream stream_options n best_of seed stop max_tokens temperature top_p top_k min_p
    frequency_penalty presence_penalty repetition_penalty length_penalty use_beam_search logit_bias
    logprobs prompt_logprobs logprob_token_ids allowed_token_ids bad_words stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side echo add_special_tokens
    response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern thinking_token_budget repetition_detection
    watermarking stream_interval cache_salt request_id session_id return_token_ids
    return_tokens_as_token_ids return_token_offsets routed_experts_prompt_start mm_payload
    return_mm_kwargs user"""
)
_CHAT = _ANY_REPLY | _names(
    """messages tools tool_choice parallel_tool_calls functions function_call top_logprobs
    max_completion_tokens reasoning_effort reasoning include_reasoning add_generation_prompt
    continue_final_message documents chat_template_kwargs return_prompt_text audio modalities
    metadata moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention
    safety_identifier service_tier store verbosity web_search_options"""
)
KNOWN: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _ANY_REPLY | {"prompt", "suffix"},
    RENDER: _CHAT,
    TOKENIZE: _names(
        """model prompt messages tools add_generation_prompt continue_final_message
        add_special_tokens chat_template_kwargs return_token_strs"""
    ),
    DETOKENIZE: frozenset({"model", "tokens"}),
}
"""Fields that act on one reply alone, and those that OpenAI's clients send and engines ignore."""

_ADAPTERS = "adapters are chosen by the model's name alone"
_CODE = "it names code or files of the engine's machine"
_MEDIA = "it changes how much work media may make for the engine"
_CACHE = "it steers how the engine shares its cache with other machines"
BEYOND: Mapping[str, str] = {
    "priority": "it would overtake the requests of others",
    "kv_transfer_params": _CACHE,
    "ec_transfer_params": _CACHE,
    "vllm_xargs": "it is handed to extensions of the engine",
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "chat_template": "a template is a program that the engine would run",
    "prompt_embeds": "the engine would unpack it as a tensor",
    "adapter_name": _ADAPTERS,
    "adapter_path": _ADAPTERS,
    "load_inplace": _ADAPTERS,
    "logits_processors": _CODE,
    "plugins": _CODE,
    "model_path": _CODE,
    "tokenizer_path": _CODE,
}
"""Fields that act beyond one reply, and how."""

_LARGEST: Mapping[str, int] = {
    "n": 128,
    "best_of": 128,
    "logprobs": 20,
    "top_logprobs": 20,
    "prompt_logprobs": 20,
    "max_tokens": 10_000_000,
    "max_completion_tokens": 10_000_000,
}
_LONGEST: Mapping[str, int] = {"messages": 10_000, "logit_bias": 4096, "tools": 1024}
_MOST_PROMPTS = 1024
_TEMPLATE = frozenset({"chat_template", "tokenize", "tokenizer"})
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_SAID = 100


@dataclass(frozen=True, slots=True)
class FieldRules:
    """What one gateway opens beyond the lists.

    ``allowed``: names that are passed on whatever they do, without a limit of their own.
    ``media_urls``: whether the engine may fetch ``http`` and ``https`` addresses in messages.
    """

    allowed: frozenset[str] = frozenset()
    media_urls: bool = False


class Fields:
    """The allow-list of one gateway."""

    def __init__(self, allowed: Collection[str] = (), *, media_urls: bool = False) -> None:
        self.rules = FieldRules(frozenset(allowed), media_urls)
        opened = self.rules.allowed
        self._known = {path: names | opened for path, names in KNOWN.items()}
        self._largest = [pair for pair in _LARGEST.items() if pair[0] not in opened]
        self._longest = [pair for pair in _LONGEST.items() if pair[0] not in opened]
        self._said: set[str] = set()

    def checked(self, path: str, body: JsonDict) -> tuple[JsonDict, tuple[str, ...]]:
        """The body to send to the engine's ``path``, and the names of what was left out.

        Raises:
            Refusal: 400 for a field that would act beyond this one reply.
        """
        self._check_values(body)
        unknown = body.keys() - self._known[path]
        if not unknown:
            return body, ()
        neutral = {name for name in unknown if _refused_unless_neutral(name, body[name])}
        dropped = sorted(unknown - neutral)
        if not dropped:
            return body, ()
        self._say(path, dropped)
        return {name: body[name] for name in body if name not in dropped}, _header_names(dropped)

    def _check_values(self, body: JsonDict) -> None:
        for name, most in self._largest:
            value = body.get(name)
            if value is not None and not 0 <= _number(value) <= most:
                raise _refused(name, f"it is a number from 0 to {most}")
        for name, most in self._longest:
            value: Any = body.get(name)
            if isinstance(value, list | dict) and len(cast("list[Any]", value)) > most:
                raise _refused(name, f"it has more than {most} entries")
        prompt: Any = body.get("prompt")
        many = isinstance(prompt, list) and len(cast("list[Any]", prompt)) > _MOST_PROMPTS
        if many and not isinstance(prompt[0], int) and "prompt" not in self.rules.allowed:
            raise _refused("prompt", f"it has more than {_MOST_PROMPTS} prompts")
        template: Any = body.get("chat_template_kwargs")
        inside = _TEMPLATE & cast("JsonDict", template).keys() if isinstance(template, dict) else ()
        if inside and "chat_template" not in self.rules.allowed:
            raise _refused("chat_template", "chat_template_kwargs would replace the model's")
        messages: Any = body.get("messages")
        if isinstance(messages, list):
            check_media(cast("list[Any]", messages), self.rules.allowed, self.rules.media_urls)

    def _say(self, path: str, dropped: list[str]) -> None:
        for name in dropped:
            if name not in self._said and len(self._said) < _MOST_SAID:
                self._said.add(name)
                _log.warning(
                    "requests to %s carry the field %s, which no engine here knows; it is dropped"
                    " (--allow-field NAME passes it on)",
                    path,
                    ascii(name[:64]),
                )


def _number(value: Any) -> float:
    """The number that the engine would read; -1 for none it could read, unless it is a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return 0  # the engine refuses it
    return value if isinstance(value, int | float) else 0


def _refused_unless_neutral(name: str, value: Any) -> bool:
    """Whether a field that acts beyond a reply asks for nothing; False for an unknown one."""
    reason = BEYOND.get(name) or (_ADAPTERS if "lora" in name.lower() else None)
    if reason is None:
        return False
    if value in (None, 0, "", [], {}):
        return True
    raise _refused(name, reason)


def _refused(name: str, reason: str) -> Refusal:
    shown = ascii(name[:64])[1:-1]
    return Refusal(
        400,
        f"the field {shown} is not passed on to the engine: {reason}. The operator of this server"
        f" can open it with --allow-field {shown}",
        code="field_not_allowed",
        param=shown,
    )


def _header_names(dropped: list[str]) -> tuple[str, ...]:
    """Names as a header may carry them; others are counted."""
    plain = [name for name in dropped if _NAME.fullmatch(name)][:16]
    rest = len(dropped) - len(plain)
    return (*plain, f"+{rest}") if rest else tuple(plain)
