"""What a secret looks like, in a text and under a name.

Invariant: the time is linear in the text, whatever it holds. A text is looked through for a few
literal anchors (``sk-``, ``://``, ``token``), and only there a pattern with bounded repetitions is
tried. A credential is recognised by its published shape, or by a name before a value that looks
like one; prose, code that handles credentials, hashes and ids are left alone.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MASK = "[redacted:{}]"
_LONGEST_NAME = 100
_ESCAPE = re.compile(r"(?:\\[a-z]|\\u[0-9a-fA-F]{4}|%[0-9a-fA-F]{2})\Z")


class Span(NamedTuple):
    """Characters ``start`` to ``end`` of a text are a secret of kind ``label``."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A credential with a shape of its own; group 1, where there is one, is the secret part."""

    label: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]
    accept: Callable[[str], object] = bool
    border: bool = True
    """Whether the anchor must begin a word."""


def _has_random_run(text: str) -> bool:
    """A run of 12 letters and digits with both in it: keys have one, names in code do not."""
    runs = re.findall(r"[A-Za-z0-9]{12,}", text)
    return any(_digits(run) and not run.isdigit() for run in runs)


def _digits(text: str) -> int:
    return sum(map(text.count, "0123456789"))


def _is_basic(text: str) -> bool:
    """Whether it is base64 of ``user:password``; "Basic authentication" is not."""
    try:
        return b":" in base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False


def _shape(
    label: str,
    anchors: str,
    pattern: str,
    accept: Callable[[str], object] = bool,
    *,
    border: bool = True,
) -> Shape:
    return Shape(label, tuple(anchors.split("|")), re.compile(pattern), accept, border)


_PRIVATE_KEY = r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
_TO_ITS_END = r"[^-]{0,20000}(?:-----END [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----)?"
_PASSWORD_IN_URL = r"""://[^\s/?#@:"'<>\[\\]{0,128}:([^\s/?#"'<>\\]{1,256})@"""
_TOKEN_IN_URL = r"""://([^\s/?#@:"'<>\[\\]{1,256})@"""

SHAPES = (
    _shape("anthropic-key", "sk-ant-", r"sk-ant-[A-Za-z0-9_-]{8,256}"),
    _shape("openai-key", "sk-", r"sk-(?:test|live|proj|svcacct|admin)[-_][A-Za-z0-9_-]{1,256}"),
    _shape("openai-key", "sk-", r"sk-[A-Za-z0-9_-]{16,256}", _has_random_run),
    _shape("aws-key", "AKIA|ASIA", r"A[KS]IA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    _shape("github-token", "ghp_|gho_|ghu_|ghs_|ghr_", r"gh[pousr]_[A-Za-z0-9]{20,255}"),
    _shape("github-token", "github_pat_", r"github_pat_[A-Za-z0-9_]{20,255}"),
    _shape("gitlab-token", "glpat-", r"glpat-[A-Za-z0-9_-]{16,255}"),
    _shape("slack-token", "xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,255}", _digits),
    _shape("slack-token", "xapp-", r"xapp-[A-Za-z0-9-]{10,255}", _digits),
    _shape("google-key", "AIza", r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_])"),
    _shape("google-key", "ya29.|GOCSPX-", r"(?:ya29\.|GOCSPX-)[A-Za-z0-9_-]{20,512}"),
    _shape("huggingface-token", "hf_", r"hf_[A-Za-z0-9]{20,64}(?![A-Za-z0-9_])"),
    _shape("stripe-key", "sk_|rk_", r"[sr]k_(?:live|test)_[A-Za-z0-9]{10,255}"),
    _shape("npm-token", "npm_", r"npm_[A-Za-z0-9]{30,64}(?![A-Za-z0-9_])"),
    _shape("pypi-token", "pypi-Ag", r"pypi-Ag[A-Za-z0-9_-]{30,512}"),
    _shape("api-key", "gsk_|nvapi-|xai-", r"(?:gsk_|nvapi-|xai-)[A-Za-z0-9_-]{32,255}", _digits),
    _shape(
        "jwt",
        "eyJ",
        r"eyJ[A-Za-z0-9_-]{8,2048}\.eyJ[A-Za-z0-9_-]{4,8192}\.[A-Za-z0-9_-]{8,2048}",
    ),
    _shape("private-key", "-----BEGIN ", _PRIVATE_KEY + _TO_ITS_END, border=False),
    _shape("password", "://", _PASSWORD_IN_URL, lambda t: not is_placeholder(t), border=False),
    _shape("token", "://", _TOKEN_IN_URL, lambda t: _looks_random(t), border=False),
    _shape(
        "authorization",
        "Bearer |bearer |BEARER ",
        r"(?i:bearer)\s{1,4}([A-Za-z0-9._~+/=-]{12,4096})",
        lambda t: _digits(t) > 0 and not is_placeholder(t),
    ),
    _shape(
        "authorization",
        "Basic |basic |BASIC ",
        r"(?i:basic)\s{1,4}([A-Za-z0-9+/]{6,1024}={0,2})",
        _is_basic,
    ),
)

_KEY_OF = "api|secret|access|private|account|session|service|master|signing|encryption|auth"
_SECRET_OF = "client|app|api|consumer|webhook|shared"
_TOKEN_OF = "access|auth|bearer|refresh|id|api|session|security|csrf|xsrf|oauth|bot"
_CERTAIN = re.compile(
    rf"(?:(?P<key>(?:{_KEY_OF})[_ -]?keys?)|(?P<secret>(?:{_SECRET_OF})[_ -]?secrets?)"
    rf"|(?P<token>(?<![a-z])(?:{_TOKEN_OF})[_ -]?tokens?)"
    r"|(?P<password>pass(?:word|wd|phrase)s?|pwd)|(?P<authorization>authorization))\Z",
    re.IGNORECASE,
)
_LIKELY = re.compile(r"(?:secret|token|credential|cookie)s?\Z", re.IGNORECASE)
_LABELS = {"key": "api-key", "secret": "secret", "token": "token"}
_PLACEHOLDER = re.compile(
    r"[<\[{$%*]|(?:arn:|your|xxx|example|placeholder|change|dummy|none|null|redacted|insert|todo)"
    r"|(?:pass(?:word|wd)?|pwd|pw|secret|token|postgres|root|admin|user|string)\d?\Z"
    r"|(?:os|env|self|config|settings|args|process|cfg|opts|options)[._]",
    re.IGNORECASE,
)
_ANCHORS = ("key", "token", "secret", "passw", "passphrase", "pwd", "authorization")
_ALL_ANCHORS = tuple(dict.fromkeys(anchor for shape in SHAPES for anchor in shape.anchors))
_BEFORE = re.compile(r"(?:[A-Za-z0-9_-]{1,20} )?[A-Za-z0-9_-]{0,40}\Z")
_AFTER = re.compile(
    r"(?P<rest>(?i:(?:or)?d))?\\{0,3}[\"'`]?\s{0,4}(?::=|=>|[:=]|\bis\b|provided:)\s{0,4}"
    r"(?:(?:[Bb]earer|[Bb]asic|[Tt]oken)\s{1,4})?"
    r"(?:(?P<q>\\{0,3}[\"'`])(?P<quoted>[^\"'`\\\s]{1,512})(?P=q)"
    r"|(?P<bare>[^\s\"'`<>,;&|(){}\[\]\\]{6,512}+)(?![(\[{]))"
)


def mask(text: str) -> tuple[str, list[str]]:
    """``text`` with each secret as ``[redacted:kind]``, and the kinds; itself when clean."""
    if not _may_hold(text):
        return text, []
    spans = sorted([*_by_shape(text), *_by_name(text)], key=lambda span: span.start)
    if not spans:
        return text, []
    out: list[str] = []
    labels: list[str] = []
    done = 0
    for start, end, label in spans:
        if start >= done:
            out += (text[done:start], MASK.format(label))
            labels.append(label)
        done = max(done, end)
    return "".join((*out, text[done:])), labels


def _may_hold(text: str) -> bool:
    """Whether any anchor is there; most texts hold none, and are looked through once."""
    for anchor in _ALL_ANCHORS:
        if anchor in text:
            return True
    lower = text.lower()
    return any(anchor in lower for anchor in _ANCHORS)


def name_kind(name: str) -> tuple[str, bool] | None:
    """Kind of secret that stands under ``name``, and whether that is certain."""
    return _known_kind(name) if len(name) <= _LONGEST_NAME else _name_kind(name)


def _name_kind(name: str) -> tuple[str, bool] | None:
    found = _CERTAIN.search(name)
    if found is not None:
        kind = next(k for k, part in found.groupdict().items() if part)
        return _LABELS.get(kind, kind), True
    found = _LIKELY.search(name)
    return (found[0].lower().rstrip("s"), False) if found else None


_known_kind = functools.lru_cache(maxsize=4096)(_name_kind)
"""The same few names come with every message."""


def under_name(name: str, value: str) -> str | None:
    """Kind of secret that ``value``, stored under ``name``, is; ``None``: none."""
    kind = name_kind(name)
    if kind is None or not value or value.startswith("[redacted:"):
        return None
    label, certain = kind
    if label == "cookie":
        return label if "=" in value else None
    return label if certain or _looks_random(value) else None


def is_telling(key: str) -> bool:
    """Whether a key is one by its looks; ``EMPTY`` and ``ollama`` are words that texts hold."""
    return len(key) >= 12 and _digits(key) > 0 and any(c.isalpha() for c in key)


def is_placeholder(value: str) -> bool:
    """``<your key>``, ``${TOKEN}``, ``password``: what stands where a secret would."""
    return _PLACEHOLDER.match(value) is not None


def _by_shape(text: str) -> Iterator[Span]:
    for shape in SHAPES:
        for anchor in shape.anchors:
            at = text.find(anchor)
            while at >= 0:
                match = shape.pattern.match(text, at) if _may_begin(shape, text, at) else None
                if match is not None and shape.accept(match[shape.pattern.groups]):
                    yield Span(*match.span(shape.pattern.groups), shape.label)
                at = text.find(anchor, match.end() if match else at + len(anchor))


def _may_begin(shape: Shape, text: str, at: int) -> bool:
    if not shape.border or at == 0:
        return True
    before = text[at - 1]
    if not (before.isascii() and before.isalnum()):
        return True
    return _ESCAPE.search(text[max(0, at - 6) : at]) is not None


def _by_name(text: str) -> Iterator[Span]:
    lower = text.lower()
    if len(lower) != len(text):  # a few letters get longer
        lower = "".join(c.lower() if c.isascii() else c for c in text)
    for anchor in _ANCHORS:
        at = lower.find(anchor)
        while at >= 0:
            after = at + len(anchor)
            match = _AFTER.match(text, after)
            if match is not None:
                found = _valued(text, at, after, match)
                if found is not None:
                    yield found
                after = max(after, match.start("q") if match["q"] else match.start("bare"))
            at = lower.find(anchor, after)


def _valued(text: str, at: int, after: int, match: re.Match[str]) -> Span | None:
    before = _BEFORE.search(text[max(0, at - 40) : at])
    name = (before[0] if before else "") + text[at:after] + (match["rest"] or "")
    kind = name_kind(name)
    if kind is None:
        return None
    label, certain = kind
    group = "quoted" if match["q"] else "bare"
    value = match[group].rstrip(".") if group == "bare" else match[group]
    if is_placeholder(value) or not (_credible(value, group) if certain else _looks_random(value)):
        return None
    return Span(match.start(group), match.start(group) + len(value), label)


def _credible(value: str, group: str) -> bool:
    """Whether a value under a certain name is a literal secret rather than a word or code."""
    if len(value) < 6 or value.startswith(("/", "./", "http")):
        return False
    digits = _digits(value)
    letters = any(c.isalpha() for c in value)
    if group == "bare":
        code = re.match(r"[A-Za-z_]\w*(?:\.[A-Za-z_]|\Z)", value)
        if code is not None and ("_" in value or "." in value):
            return _looks_random(value)
        return digits > 0 and letters
    return digits > 0 or len(value) >= 20 or any(c in "!#$%^&*+=~?" for c in value)


def _looks_random(value: str) -> bool:
    """16 characters or more of a key's alphabet, digits and letters mixed, and no path."""
    return (
        re.fullmatch(r"[A-Za-z0-9_~+=.-][A-Za-z0-9_~+/=.-]{15,}", value) is not None
        and _digits(value) >= 2
        and any(c.isalpha() for c in value)
        and not is_placeholder(value)
        and not value.startswith(("./", "../"))
    )
