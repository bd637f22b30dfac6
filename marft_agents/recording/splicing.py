"""Token fields taken out of the text of a reply without reading it.

Invariant: what comes out is what reading and writing it again gives. That is certain for text of
one choice in the form that engines write (no spaces, the members in vLLM's order); anything else
gives ``None`` and is to be read. It rests on JSON: a quotation mark inside a text is escaped, so
``"token_ids":`` is the name of a member wherever it stands.
"""

from __future__ import annotations

import re

_CHOICES = b'"choices":[{'
_REASON = b'"finish_reason":'
_LOGPROBS = b'"logprobs":'
_TOKENS = b'"logprobs":{"content":['
_IDS = b'"token_ids":'
_PROMPT = b'"prompt_token_ids":'
_ANY_IDS = b'token_ids"'
_MODEL = b'"model":"'
_NULL = b"null"
_NEXT_MEMBER = b'},"'
"""A member behind one that is an object, or such marks inside a text, with its end behind them."""

_STRING = rb'"[^"\\\r\n]*+(?:\\.[^"\\\r\n]*+)*+"'
_NAME = rb'"[^"\\{}\[\]\r\n]*+"'
_NUMBERS = rb"(?:null|\[[0-9,]*+\])"
_TOKEN = rb'\{"token":%s,"logprob":[^",{}\[\]]++,"bytes":%s,"top_logprobs":\[\]\}' % (
    _STRING,
    _NUMBERS,
)
_ALL_TOKENS = re.compile(rb'"logprobs":\{"content":\[(?:%s,?)*+\]\},' % _TOKEN)
_FLAT = rb"[^{}\[\]\\\r\n]"
_ONE = (
    rb'(\{"id":%(name)s,"object":%(name)s,"created":[0-9]++,"model":%(name)s,'
    rb'"choices":\[\{"index":[0-9]++,"delta":\{(?:%(string)s|[:,]|null)++\},"logprobs":)'
    rb'(?:null|\{"content":\[%(token)s\]\})'
    rb'(,"finish_reason":%(flat)s*?"token_ids":)%(numbers)s(%(flat)s*+\}\]%(flat)s*?)'
    rb'(?:("prompt_token_ids":)%(numbers)s(%(flat)s*+))?\}'
    % {
        b"name": _NAME,
        b"string": _STRING,
        b"token": _TOKEN,
        b"numbers": _NUMBERS,
        b"flat": _FLAT,
    }
)
"""A chunk of one choice and one token as vLLM writes it, its delta without anything nested."""
_CHUNK = re.compile(_ONE)
_EVENT = re.compile(rb"data: %s\n\n" % _ONE)
_GROUPS = 6
"""Of what ``_EVENT.split`` gives for each event: what is before it, and its five parts."""


class _OtherForm(Exception):
    """Text that has to be read."""


def is_whole(text: bytes) -> bool:
    """Whether it looks like a whole object and not like one of several lines of it."""
    return text.count(b"{") == text.count(b"}")


def chunk_without_tokens(text: bytes) -> bytes | None:
    """A chunk of a stream in its most usual form with null for all its token fields.

    ``None``: it is of another form.
    """
    match = _CHUNK.fullmatch(text)
    return None if match is None else b"".join(_spliced(*match.groups()))


def events_without_tokens(
    data: bytes, asked: bytes | None = None, served: bytes | None = None
) -> tuple[bytes, int]:
    """The same for as many whole events as ``data`` begins with, and how much of it they are.

    ``asked`` and ``served``: as in ``with_model``. Nothing, where only some in the middle are of
    that form.
    """
    parts = _EVENT.split(data)
    others = parts[::_GROUPS]
    if len(others) == 1 or any(others[:-1]):
        return b"", 0
    heads = parts[1::_GROUPS]
    if asked is not None:
        named = [with_model(head, asked, served) for head in heads]
        heads = [head for head in named if head is not None]
        if len(heads) < len(named):
            return b"", 0
    # Piece by piece, as ``_spliced``, but all events at once: a stream has a lot of them.
    prompts = [b"" if name is None else name + _NULL for name in parts[4::_GROUPS]]
    rests = [rest or b"" for rest in parts[5::_GROUPS]]
    pieces = [_NULL] * (8 * len(heads))
    pieces[0::8], pieces[1::8] = [b"data: "] * len(heads), heads
    pieces[3::8], pieces[5::8] = parts[2::_GROUPS], parts[3::_GROUPS]
    pieces[6::8] = map(bytes.__add__, prompts, rests)
    pieces[7::8] = [b"}\n\n"] * len(heads)
    return b"".join(pieces), len(data) - len(others[-1])


def _spliced(
    head: bytes, reason: bytes, tail: bytes, prompt: bytes | None, rest: bytes | None
) -> tuple[bytes, ...]:
    """The parts of a chunk, with null between them."""
    if prompt is None or rest is None:
        return head, _NULL, reason, _NULL, tail, b"}"
    return head, _NULL, reason, _NULL, tail, prompt, _NULL, rest, b"}"


def without_tokens(text: bytes, *, ids: bool = True, logprobs: bool = True) -> bytes | None:
    """A completion or chunk with null for its token ids, its log-probabilities, or both.

    ``None``: it has to be read to tell.
    """
    if not text.startswith(b'{"') or not text.endswith(b"}"):
        return None
    if b"\\" in text and b"\\u" in text:  # names may be written so, too
        return None
    reason = text.rfind(_REASON)
    if reason < 0:
        return None if _ANY_IDS in text or b'"logprobs"' in text else text
    try:
        start = _tokens_before(text, reason)
        before, after = text[:start], text[reason:]
        if before.count(_CHOICES) != 1 or _REASON in before or _ANY_IDS in before:
            return None
        if _LOGPROBS in before or (start < reason and _LOGPROBS in after):
            return None
        between = text[start:reason]
        if logprobs and start < reason:
            between = _LOGPROBS + _NULL + b","
        return b"".join((before, between, _without_ids(after) if ids else after))
    except _OtherForm:
        return None


def with_model(text: bytes, asked: bytes, served: bytes | None) -> bytes | None:
    """The text with ``asked`` as its model, in place of ``served`` alone where that is given.

    ``None``: it has to be read to tell.
    """
    start = text.find(_MODEL, 0, text.find(b'"choices":'))
    if start < 0 or b"\\" in text[:start] or text.find(_MODEL, start + 1) >= 0:
        return None
    if text.find(b"{", 1, start) >= 0 or text.find(b"[", 1, start) >= 0:
        return None
    start += len(_MODEL)
    end = text.find(b'"', start)
    model = text[start:end]
    if b"\\" in model:
        return None
    return text if served not in (None, model) else text[:start] + asked + text[end:]


def _tokens_before(text: bytes, reason: int) -> int:
    """Where the log-probabilities just before the reason begin; ``reason`` when there are none."""
    if text.endswith(b'"logprobs":null,', 0, reason):
        return reason - len(b'"logprobs":null,')
    if not text.endswith(b"]},", 0, reason):
        return reason
    start = text.find(_TOKENS)
    if start < 0:
        return reason
    if text.find(_REASON, start, reason) >= 0:  # these are of another choice
        raise _OtherForm
    # Nothing follows an object in there, so what begins at the start ends at the reason.
    if text.find(_NEXT_MEMBER, start) == reason - 2:
        return start
    match = _ALL_TOKENS.match(text, start)  # a token that holds such marks, or another member
    if match is None or match.end() != reason:
        raise _OtherForm
    return start


def _without_ids(after: bytes) -> bytes:
    """What follows the reason with null for the ids of its choice and of the reply."""
    out: list[bytes] = []
    named = after.count(_ANY_IDS)
    for name, beside in ((_IDS, "before"), (_PROMPT, "behind")):
        at = after.find(name)
        if at < 0:
            continue
        end, named = _end_of_list(after, at + len(name)), named - 1
        # In the object of the reason, as what precedes it; in the reply, as what is left.
        others = after[:at] if beside == "before" else after[end:-1]
        if b"{" in others or b"}" in others or b"[" in others:
            raise _OtherForm
        out += (after[:at], name, _NULL)
        after = after[end:]
    if named:
        raise _OtherForm
    return b"".join((*out, after))


def _end_of_list(text: bytes, start: int) -> int:
    """Behind the null, or the list of numbers, that begins there."""
    if text.startswith(_NULL, start):
        return start + len(_NULL)
    end = text.find(b"]", start)
    if end < 0 or not text.startswith(b"[", start):
        raise _OtherForm
    inside = text[start + 1 : end]
    if b"[" in inside or b"{" in inside or b'"' in inside:
        raise _OtherForm
    return end + 1
