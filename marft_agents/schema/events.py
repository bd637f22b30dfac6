"""Every event of a log.

Invariant: a record is frozen, carries ``schema_version``, and is built only through its model.
``None`` means "not known" or "never scored"; it is never replaced by zero. What can be derived
(whether a turn can be trained on) is derived here and not stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

SCHEMA_VERSION = 1

EndReason = Literal["terminated", "truncated", "failed"]
TurnKind = Literal["act", "select", "summary", "reflect", "orchestrate", "guard"]
ACTION_KINDS: frozenset[TurnKind] = frozenset({"act", "reflect"})
"""What an agent says by its policy, also when it thinks again about what a tool gave; the rest
(selections, summaries, orchestration, guards) moves the team as a part of its environment."""
LogprobMode = Literal["raw", "processed"]
JsonDict = dict[str, Any]


class Record(BaseModel):
    """Frozen base of everything written to disk; unknown fields are kept for newer readers."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="constants")


def _in_utc_if_naive(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Event(Record):
    """One line of a log segment."""

    schema_version: int = SCHEMA_VERSION
    time: Annotated[datetime, AfterValidator(_in_utc_if_naive)] = Field(
        default_factory=lambda: datetime.now(UTC)
    )
    episode_id: str = Field(min_length=1)


class EpisodeStarted(Event):
    """An episode begins. ``parent_id`` is set for a nested chat."""

    type: Literal["episode_started"] = "episode_started"
    task: Any = None
    metadata: JsonDict = Field(default_factory=dict[str, Any])
    runtime: str | None = None
    parent_id: str | None = None


class Sampling(Record):
    """Sampling settings in effect for one call; ``None`` means neither asked for nor announced."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    grammar: bool = False
    """True when a grammar or a forced tool call constrained the tokens."""
    shaped_by: list[str] = Field(default_factory=list[str])
    """Other settings that forbade, forced or reweighted single tokens, e.g. ``logit_bias``."""
    searched: bool = False
    """True when the reply was chosen among several (beam search, best of)."""

    @property
    def truncates_support(self) -> bool:
        """Whether the sampled distribution is not a tempered softmax over the whole vocabulary."""
        return (
            self.grammar
            or self.searched
            or bool(self.shaped_by)
            or (self.top_p is not None and self.top_p < 1)
            or (self.top_k is not None and self.top_k > 0)
            or (self.min_p is not None and self.min_p > 0)
            or bool(self.presence_penalty)
            or bool(self.frequency_penalty)
            or (self.repetition_penalty is not None and self.repetition_penalty != 1)
        )


class Turn(Event):
    """One model call by one agent: observation, action, behaviour log-probabilities.

    ``prompt_token_ids`` (P,), ``token_ids`` (L,) and ``logprobs`` (L,) are exactly what the engine
    used and sampled; text is never re-encoded to get them.
    """

    type: Literal["turn"] = "turn"
    turn_id: str = Field(min_length=1)
    agent: str = Field(min_length=1)
    kind: TurnKind = "act"
    index: int = Field(default=0, ge=0)
    """Order of completion inside the episode."""
    step: int = Field(default=0, ge=0)
    """Environment step; turns of one step act on the same environment state."""
    messages: list[JsonDict] = Field(default_factory=list[JsonDict])
    """Messages as sent on the wire."""
    text: str | None = None
    reasoning: str | None = None
    """Text that the server separated from the answer as reasoning; its tokens are sampled ones."""
    tool_calls: list[JsonDict] | None = None
    sampling: Sampling = Field(default_factory=Sampling)
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    logprob_mode: LogprobMode | None = None
    finish_reason: str | None = None
    model: str | None = None
    """Model name the application asked for."""
    adapter_start: str | None = None
    """Adapter version that answered when the call began, e.g. ``planner@v3``."""
    adapter_end: str | None = None
    response_id: str | None = None
    choice_index: int = 0
    depends_on: list[str] = Field(default_factory=list[str])
    """``turn_id`` of earlier turns whose output was found in the messages sent."""
    depends_on_complete: bool = True
    """False where the messages may hold outputs of turns so old that the recorder of a very long
    episode no longer compared with them."""
    selected_by: str | None = None
    """Turn that chose this speaker: a speaker selection, or the turn that handed off."""
    parent_agent: str | None = None
    """Agent inside whose turn this nested call ran; ``None`` at the top of the episode."""
    parent_turn: str | None = None
    """``turn_id`` of the turn that started the nested chat, where one did."""
    latency_s: float | None = None
    attempt: int = Field(default=1, ge=1)
    cached: bool = False
    complete: bool = True
    """False for a stream cut before its last chunk, or ids that do not add up to the usage."""
    edited_text: str | None = None
    """Text a human put in place of ``text``, if any."""
    redacted: bool = False
    """True when something was masked before the disk; ids that spelled it out are gone."""
    error: str | None = None

    @property
    def untrainable_reason(self) -> str | None:
        """Why no policy update may use this turn; ``None`` when it can be trained on."""
        return (
            (self.error is not None and "the call failed")
            or (self.kind not in ACTION_KINDS and f"not an action of the agent (kind {self.kind})")
            or (self.cached and "answered from a cache")
            or (not self.complete and "not all of its tokens arrived")
            or (self.edited_text is not None and "edited by a human")
            or self._untrainable_tokens()
            or (
                self.adapter_start != self.adapter_end and "adapter version changed during the call"
            )
            or (self.sampling.grammar and "sampled under a grammar")
            or (self.sampling.searched and "chosen among several replies, not sampled")
            or (_has_media(self.messages) and "its prompt holds an image, audio or a file")
            or None
        )

    def _untrainable_tokens(self) -> str | Literal[False]:
        prompt, ids, logprobs = self.prompt_token_ids, self.token_ids, self.logprobs
        return (
            (
                self.redacted
                and not (prompt and ids)
                and "redacted: its token ids spelled out what was removed"
            )
            or (not prompt and "no prompt token ids")
            or (not ids and "no sampled token ids")
            or (not (are_ids(prompt) and are_ids(ids)) and "a token id is out of any vocabulary")
            or (logprobs is None and "no log-probabilities")
            or (
                len(ids or ()) != len(logprobs or ())
                and "token ids and log-probabilities differ in length"
            )
            or (
                not are_logprobs(logprobs)
                and "a log-probability is not finite, positive or a placeholder"
            )
        )

    @property
    def trainable(self) -> bool:
        return self.untrainable_reason is None


def are_ids(values: list[int] | None) -> bool:
    """Whether all can be token ids of some vocabulary."""
    return not values or (min(values) >= 0 and max(values) < 2**31)


def are_logprobs(values: list[float] | None) -> bool:
    """Whether all can be log-probabilities of sampled tokens."""
    if not values:
        return True
    # Of numbers in this range no sum overflows, and one that is not finite makes the sum so.
    return math.isfinite(sum(values)) and max(values) <= 1e-3 and min(values) > -9999


_TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}


def _has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether token ids alone may not say what the model saw."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = {str(part.get("type")) for part in content if isinstance(part, dict)}
            if not kinds <= _TEXT_PARTS:
                return True
    return False


class ToolEvent(Event):
    """A tool or code execution: the environment answered."""

    type: Literal["tool"] = "tool"
    agent: str | None = None
    name: str
    call_id: str | None = None
    arguments: Any = None
    result: Any = None
    ok: bool = True
    index: int = Field(default=0, ge=0)


class HumanEvent(Event):
    """A human turn: the environment answered."""

    type: Literal["human"] = "human"
    name: str | None = None
    text: str | None = None
    index: int = Field(default=0, ge=0)


class EditEvent(Event):
    """Somebody put another text in place of what a turn said; the latest record wins."""

    type: Literal["edit"] = "edit"
    turn_id: str = Field(min_length=1)
    text: str
    editor: str | None = None


LARGEST_REWARD = 1e15
"""Sums and squares of rewards up to this stay finite in float32; a larger one is a mistake."""


def _as_float(value: object) -> float:
    """A number, a truth value, or the scalar of an array library, as a float."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"not a number: {value!r}")


class RewardEvent(Event):
    """A reward, at any time and from any file.

    Type rule: a finite number of at most ``LARGEST_REWARD``, or ``true``/``false`` read as 1/0; a
    scalar of an array library is the number it holds. ``None`` is "not scored". Anything else is
    kept as ``refused`` with ``value`` None and never counts as a reward. ``agent`` None: the team's
    reward.
    For one (agent, turn, source) the latest record wins; different sources add up.
    """

    type: Literal["reward"] = "reward"
    value: float | None = None
    agent: str | None = None
    turn_id: str | None = None
    source: str = "app"
    refused: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_finite_numbers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "value" not in data:
            return data
        fields: dict[str, Any] = dict(data)
        value = fields["value"]
        if value is None:
            return fields
        try:
            number = _as_float(value)
        except (TypeError, OverflowError) as error:
            return fields | {"value": None, "refused": str(error)[:120]}
        if not math.isfinite(number):
            return fields | {"value": None, "refused": f"not finite: {number}"}
        if abs(number) > LARGEST_REWARD:
            return fields | {"value": None, "refused": f"larger than {LARGEST_REWARD:g}: {number}"}
        return fields | {"value": number}


class EpisodeEnded(Event):
    """An episode is over: ``terminated`` (task done), ``truncated`` (a limit) or ``failed``."""

    type: Literal["episode_ended"] = "episode_ended"
    reason: EndReason = "terminated"
    detail: str | None = None
    dropped_events: int = 0
    """Events the recorder could not write; the episode is incomplete when this is not 0."""


AnyEvent = Annotated[
    EpisodeStarted | Turn | ToolEvent | HumanEvent | EditEvent | RewardEvent | EpisodeEnded,
    Field(discriminator="type"),
]
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
