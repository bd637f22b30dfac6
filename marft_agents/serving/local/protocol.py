"""Request bodies and the sampling settings read from them.

Invariant: a field that would change the sampled distribution is either obeyed or refused with 400,
never dropped; any other unknown field is ignored. Fields left out mean what the wire format says
(temperature 1, no truncation), not what the model's ``generation_config.json`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from marft_agents.serving.local.refusal import Refusal

GREEDY_BELOW = 1e-5
"""A temperature below this takes the most likely token, as vLLM does."""
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "response_format": ({"type": "text"},),
}
"""Fields this engine does not do, with the values (besides null) that ask for nothing."""


@dataclass(frozen=True)
class Settings:
    """How one reply is sampled, checked and complete."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut from the distribution before sampling."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def for_choice(self, choice: int) -> Settings:
        """The settings of one of ``n`` choices: each has a seed of its own."""
        if self.seed is None or choice == 0:
            return self
        return replace(self, seed=(self.seed + choice) % _INT64)


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Generate(BaseModel):
    """What a chat and a completion request share."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_dropped(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            body = cast("Mapping[str, Any]", data)
            for field, neutral in _NEUTRAL.items():
                value = body.get(field)
                if value is not None and value not in neutral:
                    raise Refusal(
                        400,
                        f"{field}={value!r} is not supported by the local engine;"
                        " leave it out, or serve with vLLM",
                        param=field,
                    )
        return data

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _settings(self, max_tokens: int, top_logprobs: int) -> Settings:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise Refusal(400, "stop cannot contain an empty string", param="stop")
        return Settings(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop=stop,
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            top_logprobs=top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatRequest(_Generate):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _tools_are_text_only(self) -> ChatRequest:
        if self.tools and self.tool_choice != "none":
            raise Refusal(
                400,
                f"tool_choice={self.tool_choice or 'auto'!r} is not supported by the local engine,"
                " which has no tool parser; send tool_choice='none', or serve with"
                " --engine vllm",
                param="tool_choice",
            )
        return self

    def settings(self, prompt_tokens: int, window: int) -> Settings:
        """Checked settings for a prompt of this length; the default fills the window."""
        asked = self.max_completion_tokens or self.max_tokens
        room = room_left(prompt_tokens, asked, window)
        return self._settings(asked or room, (self.top_logprobs or 0) if self.logprobs else 0)


class CompletionRequest(_Generate):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[list[Annotated[int, Field(ge=0)]]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    def settings(self, prompt_tokens: int, window: int) -> Settings:
        """Checked settings for a prompt of this length; the default is 16 tokens."""
        asked = self.max_tokens
        room = room_left(prompt_tokens, asked, window)
        return self._settings(asked or min(16, room), self.logprobs or 0)


class TokenizeRequest(BaseModel):
    """``POST /tokenize``, of a text or of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise Refusal(400, "give either `prompt` or `messages`")
        return self


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    tokens: list[Annotated[int, Field(ge=0)]]


class LoadAdapter(BaseModel):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False


class UnloadAdapter(BaseModel):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1)]


def room_left(prompt_tokens: int, asked: int | None, window: int) -> int:
    """Tokens that fit behind the prompt.

    Raises:
        Refusal: 400, when the prompt alone, or with what was asked for, exceeds the window.
    """
    text = f"This model's maximum context length is {window} tokens. However, "
    if prompt_tokens < 1:
        raise Refusal(400, "the prompt has no tokens", param="prompt")
    if prompt_tokens >= window:
        raise Refusal(
            400,
            f"{text}your prompt contains {prompt_tokens} input tokens, which leaves no room for"
            " output. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if asked is not None and prompt_tokens + asked > window:
        raise Refusal(
            400,
            f"{text}you requested {asked} output tokens and your prompt contains {prompt_tokens}"
            f" input tokens, for a total of {prompt_tokens + asked}. Please reduce one of them.",
            param="max_tokens",
        )
    return window - prompt_tokens


Body = TypeVar("Body", bound=BaseModel)


def parse(model: type[Body], data: Any) -> Body:
    """Read one JSON body.

    Raises:
        Refusal: 400, naming the first wrong field.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, Refusal):
            raise cause from None
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refusal(400, f"{field}: {first['msg']}", param=field) from error
