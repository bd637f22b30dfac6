"""Every record on disk.

Invariant: a record is frozen, carries ``schema_version``, and is built only through its model.
``None`` means "not known" or "never scored"; it is never replaced by zero. What can be derived
(whether a turn can be trained on, an episode's return) is derived here and not stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from marft_agents.errors import ConfigError

SCHEMA_VERSION = 1

EndReason = Literal["terminated", "truncated", "failed"]
TurnKind = Literal["act", "select", "summary", "reflect", "orchestrate", "guard"]
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
            or (self.kind != "act" and f"not an action of the agent (kind {self.kind})")
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
    return all(map(math.isfinite, values)) and max(values) <= 1e-3 and min(values) > -9999


def _has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether token ids alone may not say what the model saw."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    kinds = {str(p.get("type")) for parts in contents for p in parts if isinstance(p, dict)}
    return not kinds <= {"text", "input_text", "output_text", "refusal", "thinking"}


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


class Episode(Record):
    """All events of one episode, folded."""

    episode_id: str
    started: EpisodeStarted | None = None
    turns: list[Turn] = Field(default_factory=list[Turn])
    tools: list[ToolEvent] = Field(default_factory=list[ToolEvent])
    humans: list[HumanEvent] = Field(default_factory=list[HumanEvent])
    rewards: list[RewardEvent] = Field(default_factory=list[RewardEvent])
    ended: EpisodeEnded | None = None
    sources: list[str] = Field(default_factory=list[str])
    """Files that the events came from."""

    @property
    def task(self) -> Any:
        return self.started.task if self.started else None

    @property
    def metadata(self) -> JsonDict:
        return self.started.metadata if self.started else {}

    def _latest(self) -> list[RewardEvent]:
        latest: dict[tuple[str | None, str | None, str], RewardEvent] = {}
        for reward in sorted(self.rewards, key=lambda r: r.time):
            latest[reward.agent, reward.turn_id, reward.source] = reward
        return [r for r in latest.values() if r.value is not None]

    @property
    def team_reward(self) -> float | None:
        """Sum of the team's rewards that belong to no turn; ``None`` when nobody scored it."""
        values = [r.value for r in self._latest() if r.agent is None and r.turn_id is None]
        return math.fsum(v for v in values if v is not None) if values else None

    @property
    def agent_rewards(self) -> dict[str, float]:
        """Extra reward per agent, for the agents that were given one."""
        out: dict[str, float] = {}
        for r in self._latest():
            if r.agent is not None and r.turn_id is None and r.value is not None:
                out[r.agent] = out.get(r.agent, 0.0) + r.value
        return out

    @property
    def turn_rewards(self) -> dict[str, float]:
        """Reward per turn id, for the turns that were given one."""
        out: dict[str, float] = {}
        for r in self._latest():
            if r.turn_id is not None and r.value is not None:
                out[r.turn_id] = out.get(r.turn_id, 0.0) + r.value
        return out

    @property
    def refused_rewards(self) -> list[RewardEvent]:
        return [r for r in self.rewards if r.refused is not None]

    @property
    def scored(self) -> bool:
        """Whether any finite reward was given. A missing reward is never 0."""
        return bool(self._latest())

    @property
    def untrainable_reason(self) -> str | None:
        """Why the whole episode is left out of training; ``None`` when it can be used.

        An episode that failed and was scored all the same counts as over: its earlier turns are
        what led there.
        """
        if not self.turns:
            return "no model call was recorded"
        if self.refused_rewards:
            return f"refused reward ({self.refused_rewards[-1].refused})"
        if not self.scored and self.ended is not None and self.ended.reason == "failed":
            return f"no reward, the episode failed ({self.ended.detail or 'no detail'})"
        if not self.scored:
            return "no reward"
        if self.ended is None:
            return "the episode never ended (still running, or the app was killed)"
        return None


class BaseModelInfo(Record):
    """What identifies a base model well enough to refuse an adapter of another one."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    model_type: str
    fingerprint: str
    """sha256 over the config's shape fields and a sample of the weights."""
    modules: dict[str, tuple[int, int]] = Field(default_factory=dict[str, tuple[int, int]])
    """(out, in) per linear module, ``model.layers.*.self_attn.q_proj`` for all layers at once."""


class Probe(Record):
    """A check that a served adapter is the trained one.

    ``logprobs`` (L,) are the trainer's under the adapter, ``base_logprobs`` (L,) without it, both
    at temperature 1 for ``token_ids`` (L,) given ``prompt_token_ids`` (P,).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    base_logprobs: list[float]


class AdapterManifest(Record):
    """``manifest.json`` beside one published adapter version; written once, never changed."""

    schema_version: int = SCHEMA_VERSION
    agent: str
    version: int = Field(ge=1)
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    base: BaseModelInfo
    parent: int | None = None
    """Version that training started from; ``None`` for the untrained first one."""
    untrained: bool = False
    """True when B = 0: the adapter answers exactly as the base does."""
    rank: int
    target_modules: list[str]
    files: dict[str, str]
    """sha256 per file in the folder."""
    probe: Probe | None = None
    training: JsonDict = Field(default_factory=dict[str, Any])
    """What it was trained on: episodes, turns, tokens, metrics, configuration."""

    @property
    def served_name(self) -> str:
        return served_name(self.agent, self.version)


CRITIC_ADAPTER = "marft-critic"
"""Reserved for the value function's own adapter; plain ``critic`` is what teams call a reviewer."""
RESERVED_NAMES = frozenset({"default", "ref", "base", "__base__", CRITIC_ADAPTER})
_MODULE_PARTS = frozenset(
    {
        "model", "layers", "self_attn", "mlp", "lm_head", "embed_tokens", "norm", "base_model",
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "input_layernorm", "post_attention_layernorm", "lora_a", "lora_b", "weight",
    }
)  # fmt: skip


def adapter_slug(agent: str) -> str:
    """The one rule that turns an agent's name into an adapter's: lower case, ``[a-z0-9_-]``.

    Raises:
        ConfigError: when nothing usable is left, or the name is reserved or a module's.
    """
    slug = re.sub(r"[^a-z0-9_-]+", "-", agent.strip().lower()).strip("-")
    if not slug or slug.isdigit() or len(slug) > 64:
        raise ConfigError(
            f"agent name {agent!r} gives no usable adapter name; use letters, digits, - and _"
            " (at most 64, not digits alone)"
        )
    if slug in RESERVED_NAMES or slug in _MODULE_PARTS:
        raise ConfigError(
            f"agent name {agent!r} gives the reserved adapter name {slug!r}; use another name,"
            " or map it to an adapter under `agents:` in the config of finetune"
        )
    return slug


def served_name(agent: str, version: int) -> str:
    """Name under which the engine knows one version: ``planner@v7``."""
    return f"{agent}@v{version}"


def parse_served_name(name: str) -> tuple[str, int] | None:
    """``("planner", 7)`` for ``planner@v7``; ``None`` for anything else."""
    match = re.fullmatch(r"([a-z0-9_-]+)@v([1-9][0-9]*)", name)
    return (match[1], int(match[2])) if match else None


def adapter_slugs(agents: Sequence[str]) -> dict[str, str]:
    """Adapter name per agent.

    Raises:
        ConfigError: when two different agents would share one adapter name by accident.
    """
    out: dict[str, str] = {}
    for agent in agents:
        slug = adapter_slug(agent)
        clash = next((a for a, s in out.items() if s == slug and a != agent), None)
        if clash is not None:
            raise ConfigError(
                f"agents {clash!r} and {agent!r} both give the adapter name {slug!r};"
                " rename one, or map them under `agents:` in the config"
            )
        out[agent] = slug
    return out
