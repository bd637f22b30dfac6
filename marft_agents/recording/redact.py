"""What may not reach a log is taken out on the way there, on the log's thread.

Invariant: every event passes ``Redactor`` once, before any ``EventLog`` sees it, and one whose
redaction fails is not written at all. Token ids spell what was masked, so a turn loses the ids of
the side (prompt or reply) that held it. Ids that join events (of episodes, turns and responses) and
the names of agents and models are never changed.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import BaseModel

from marft_agents.errors import ConfigError
from marft_agents.log.encode import to_plain
from marft_agents.recording.clean import Payload
from marft_agents.recording.patterns import MASK, mask, name_kind, under_name
from marft_agents.recording.safety import Safety
from marft_agents.schema import EVENT, EpisodeStarted, Event, JsonDict, Turn

_KEPT = frozenset(
    {
        "schema_version", "type", "time", "episode_id", "parent_id", "turn_id", "parent_turn",
        "response_id", "depends_on", "selected_by", "call_id", "kind", "agent", "parent_agent",
        "model", "adapter_start", "adapter_end", "prompt_token_ids", "token_ids", "logprobs",
        "finish_reason", "logprob_mode",
    }
)  # fmt: skip
_REPLY = ("text", "tool_calls", "reasoning")
_NUMBERS = frozenset({bool, int, float})
_SHORTEST = 8
_SHORTEST_NAME = 16
_MEMO_CHARS = 4_000_000
_MEMO_ENTRY = 100
"""What an entry takes beside its characters."""
_MOST_NAMES = 1000


@dataclass(frozen=True)
class Redaction:
    """What ``MarftRecorder(redact=…)`` takes out of events, in this order.

    Args:
        defaults: mask secrets of well-known shapes and values under names like ``api_key``.
        patterns: further regular expressions to mask; where one has a group, the first group.
        hash_fields: names in ``task`` and ``metadata`` (``user_id``) whose values become a keyed
            hash: equal values stay equal, and nobody without the salt can tell them.
        salt: key of these hashes; without one they are comparable within this process only.
        function: sees each event as the dict that would be written and returns the one to write;
            ``None`` drops the event. When it raises, the event is not written.
        keep_ids: keep the token ids of a turn in which something was masked. They spell it.

    Raises:
        ConfigError: a pattern is no regular expression or matches nothing at all, ``hash_fields``
            are no names, or ``function`` cannot be called.
    """

    function: Callable[[JsonDict], JsonDict | None] | None = None
    patterns: Sequence[str | re.Pattern[str]] = ()
    hash_fields: Collection[str] = ()
    salt: str | bytes | None = field(default=None, repr=False)
    keep_ids: bool = False
    defaults: bool = True

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise ConfigError(f"redact function {self.function!r} cannot be called")
        for name, given in (("patterns", self.patterns), ("hash_fields", self.hash_fields)):
            if isinstance(given, str):
                raise ConfigError(f"{name}={given!r} is one text; give a list: [{given!r}]")
        if not all(isinstance(name, str) for name in cast("Iterable[object]", self.hash_fields)):
            raise ConfigError(f"hash_fields are names as text, not {list(self.hash_fields)!r}")
        if self.salt is not None and not self.salt:
            raise ConfigError("the salt is empty: anybody could compute the hashes; give a secret")
        self.compiled()

    def compiled(self) -> list[re.Pattern[str]]:
        """The patterns, checked."""
        out: list[re.Pattern[str]] = []
        for pattern in self.patterns:
            try:
                out.append(re.compile(pattern))
            except (re.error, TypeError) as error:
                problem = f"pattern {pattern!r} is no regular expression: {error}"
                raise ConfigError(problem) from None
            if out[-1].search(""):
                raise ConfigError(f"pattern {pattern!r} matches the empty text; make it longer")
        return out


Redact = Literal["default", "off"] | Redaction


class Redactor:
    """Turns events into what may be written. Used from one thread."""

    def __init__(self, redact: Redact = "default", safety: Safety | None = None) -> None:
        if not isinstance(redact, Redaction) and redact not in ("default", "off"):
            raise ConfigError(
                f"redact is 'default', 'off' or a Redaction, not {redact!r};"
                " a function of your own goes in as Redaction(function=...)"
            )
        given = isinstance(redact, Redaction)
        self._plan = redact if given else Redaction(defaults=redact != "off")
        self._safety = safety or Safety()
        self._patterns = self._plan.compiled()
        salt = self._plan.salt if self._plan.salt is not None else secrets.token_bytes(16)
        self._salt = salt.encode() if isinstance(salt, str) else salt
        self._keys: tuple[str, ...] = ()
        self._clean: dict[str, None] = {}
        self._clean_chars = 0
        self._harmless: set[str] = set()
        """Names that are kept, and so is what stands under them if it is clean."""
        self._labels: list[str] = []

    def __call__(self, event: Event) -> Event | None:
        """The event to write; ``None``: the user's function dropped it."""
        self._labels = []
        self._mind_new_keys()
        updates: JsonDict = {}
        changed: set[str] = set()
        for name, value in _looked_at(event):
            if value is None or (name in self._harmless and self._is_clean(value)):
                continue
            found = len(self._labels)
            if (new := self._under(name, value)) is not value:
                updates[name] = new
            if len(self._labels) > found:
                changed.add(name)
            self._note_name(name)
        if isinstance(event, EpisodeStarted) and self._plan.hash_fields:
            for name in ("task", "metadata"):
                updates[name] = self._hashed(updates.get(name, getattr(event, name)))
        if updates:
            event = event.model_copy(update=updates)
        if self._plan.function is not None:
            given = self._plan.function(to_plain(event))
            if given is None:
                return None
            new = EVENT.validate_python(given)
            changed |= _differing(event, new)
            event = new
        if isinstance(event, Turn):
            return self._without_ids(event, changed)
        return event

    def _mind_new_keys(self) -> None:
        """What was clean may hold a key that was not known then."""
        if self._safety.keys is not self._keys:
            self._keys = self._safety.keys
            self._clean.clear()
            self._harmless.clear()
            self._clean_chars = 0

    def _is_clean(self, value: Any) -> bool:
        """Whether ``value`` is certainly left as it is: all of it was met before, and was clean.

        A chat sends its history again with each turn.
        """
        kind = type(value)
        if kind is str:
            return value in self._clean or (len(value) < _SHORTEST and not self._patterns)
        if kind is dict:
            for name, item in value.items():
                if name not in self._harmless or not self._is_clean(item):
                    return False
            return True
        if kind is list:
            return all(map(self._is_clean, value))
        if isinstance(value, BaseModel):
            return not value.model_extra and all(map(self._is_clean, value.__dict__.values()))
        return value is None or kind in _NUMBERS

    def _walk(self, value: Any) -> Any:
        """``value`` without secrets; itself where nothing changed."""
        if value is None:
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return self._dict(cast("dict[str, Any]", value))
        if isinstance(value, list):
            items = cast("list[Any]", value)
            new = [self._walk(item) for item in items]
            return new if any(a is not b for a, b in zip(items, new, strict=True)) else items
        if isinstance(value, Payload):
            return value.described()
        if isinstance(value, BaseModel):
            changes = {k: new for k, v in value if (new := self._walk(v)) is not v}
            return value.model_copy(update=changes) if changes else value
        return value

    def _dict(self, fields: dict[str, Any]) -> dict[str, Any]:
        changed = False
        out: dict[str, Any] = {}
        for name, value in fields.items():
            key = self._text(name) if len(name) >= _SHORTEST_NAME else name
            if key is name:
                self._note_name(name)
            out[key] = new = self._under(name, value)
            changed = changed or new is not value or key is not name
        return out if changed else fields

    def _note_name(self, name: str) -> None:
        if len(self._harmless) < _MOST_NAMES and (not self._plan.defaults or not name_kind(name)):
            self._harmless.add(name)

    def _under(self, name: str, value: Any) -> Any:
        if not self._plan.defaults or name_kind(name) is None:
            return self._walk(value)
        if isinstance(value, list):
            items = cast("list[Any]", value)
            new = [self._under(name, item) for item in items]
            return new if any(a is not b for a, b in zip(items, new, strict=True)) else items
        if isinstance(value, str | int) and not isinstance(value, bool):
            label = under_name(name, str(value))
            if label is not None and (isinstance(value, str) or label == "password"):
                self._labels.append(label)
                return MASK.format(label)
        return self._walk(value)

    def _text(self, text: str) -> str:
        if len(text) < _SHORTEST and not self._patterns:
            return text
        self._mind_new_keys()
        if text in self._clean:
            return text
        new = text
        if self._plan.defaults and len(text) >= _SHORTEST:
            new = self._safety.without_keys(text)
            if new is not text:
                self._labels.append("api-key")
            new, labels = mask(new)
            self._labels += labels
        for pattern in self._patterns:
            new = pattern.sub(self._custom, new)
        if new is text or new == text:
            self._remember(text)
            return text
        return new

    def _custom(self, match: re.Match[str]) -> str:
        group = 1 if match.re.groups and match[1] is not None else 0
        self._labels.append("pattern")
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return match[0][:start] + MASK.format("pattern") + match[0][end:]

    def _remember(self, text: str) -> None:
        """What was clean is clean."""
        if len(text) > _MEMO_CHARS // 4:
            return
        self._clean[text] = None
        self._clean_chars += len(text) + _MEMO_ENTRY
        while self._clean_chars > _MEMO_CHARS:
            oldest = next(iter(self._clean))
            del self._clean[oldest]
            self._clean_chars -= len(oldest) + _MEMO_ENTRY

    def _hashed(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                name: self._hash(item) if name in self._plan.hash_fields else self._hashed(item)
                for name, item in cast("Mapping[str, Any]", value).items()
            }
        if isinstance(value, list):
            return [self._hashed(item) for item in cast("list[Any]", value)]
        return value

    def _hash(self, value: Any) -> Any:
        if value is None:
            return None
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
        data = text.encode("utf-8", "replace")
        return f"[hash:{hmac.new(self._salt, data, hashlib.sha256).hexdigest()[:24]}]"

    def _without_ids(self, turn: Turn, changed: set[str]) -> Turn:
        prompt, reply = "messages" in changed, not changed.isdisjoint(_REPLY)
        if not (prompt or reply):
            return turn
        updates: JsonDict = {"redacted": True}
        if self._plan.keep_ids:
            return turn.model_copy(update=updates)
        if prompt:
            updates["prompt_token_ids"] = None
        if reply:
            updates |= {"token_ids": None, "logprobs": None}
        what = " and ".join(dict.fromkeys(self._labels)) or "what the redact function took out"
        self._safety.warn_once(
            "redacted",
            f"marft-agents masked a secret ({what}) in a {'prompt' if prompt else 'reply'} of agent"
            f" {turn.agent!r}; such turns are logged without the token ids that spell it and"
            " cannot be trained on; keep secrets out of prompts, or see docs/privacy.md for"
            " MarftRecorder(redact=...) if it is none",
        )
        return turn.model_copy(update=updates)


def _looked_at(event: Event) -> Iterable[tuple[str, Any]]:
    """The fields that may hold what is to be taken out."""
    fields = event.__dict__
    known = [(name, fields[name]) for name in _names_of(type(event))]
    if event.model_extra:
        known += [(k, v) for k, v in event.model_extra.items() if k not in _KEPT]
    return known


@functools.cache
def _names_of(kind: type[Event]) -> tuple[str, ...]:
    return tuple(name for name in kind.model_fields if name not in _KEPT)


def _differing(old: Event, new: Event) -> set[str]:
    """Fields of a turn's two sides that the user's function has changed."""
    names = ("messages", *_REPLY)
    return {name for name in names if getattr(old, name, None) != getattr(new, name, None)}
