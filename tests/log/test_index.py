"""Where lines belong is seen at a glance; what the glance cannot tell is parsed, never guessed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import LogError
from marft_agents.log import LogReader, index, reader, records
from marft_agents.log.encode import encode_line
from marft_agents.log.fold import fold
from marft_agents.log.index import Entry, EpisodeIndex
from marft_agents.log.records import plain_episode, read_line
from marft_agents.schema import (
    AnyEvent,
    EditEvent,
)
from tests.log.events import at, some_line, turn


def line(**fields: Any) -> bytes:
    return encode_line(turn(0, **fields))


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (line(episode="é🙂"), "é🙂"),
        (line(text='{"schema_version":1,"episode_id":"x"}'), "e"),
        (line(episode='a"b'), None),
        (line(messages=[{"role": "tool", "content": {"episode_id": "x"}}]), None),
        (line(messages=[{"role": "tool", "content": {"schema_version": 1}}]), None),
        (line() + line(), None),
        (line()[:40] + b"\0" * 3 + b"\n", None),
        (b" " + line(), None),
        (json.dumps(json.loads(line())).encode(), None),
    ],
)
def test_a_glance_tells_only_what_is_certain(data: bytes, seen: str | None) -> None:
    assert plain_episode(data) == seen


def test_the_glance_agrees_with_the_parser_on_every_cut_and_flip() -> None:
    """Whatever a glance names is the episode of the one record in the line, if it holds one."""
    draw = random.Random(0)
    whole = line(text='a {quoted} "schema_version": 1', messages=[{"role": "user"}])
    for _ in range(3000):
        data = bytearray(whole + (whole if draw.random() < 0.2 else b""))
        for _ in range(draw.randrange(3)):
            data[draw.randrange(len(data))] = draw.choice(b'"{}\\\0,:\nx')
        cut = bytes(data[: draw.randrange(1, len(data) + 1)]).split(b"\n")[0]
        name = plain_episode(cut)
        if name is not None:
            assert [f.event.episode_id for f in read_line(cut, 0)[0]] in ([], [name])


@pytest.mark.parametrize("block", [1, 300, 700, 2**18])
def test_many_lines_at_a_glance_are_each_line_at_a_glance(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BLOCK", block)
    draw = random.Random(block)
    for _ in range(150):
        names = [draw.choice("abü") for _ in range(draw.randrange(9))]
        data = bytearray(b"".join(line(episode=name) for name in names))
        for _ in range(draw.choice([0, 0, 1, 2]) * bool(data)):
            data[draw.randrange(len(data))] = draw.choice(b'"{}\\\0,:\nx\xff')
        cut = bytes(data[: len(data) - draw.choice([0, 0, 7])])
        if draw.random() < 0.3:
            cut = cut.replace(b"}\n", b'}{"schema_version":\n', 1)
        (tmp_path / "log").write_bytes(cut)
        with (tmp_path / "log").open("rb") as file:
            found = list(records.glances(file))
        with (tmp_path / "log").open("rb") as file:
            lines = list(records.raw_lines(file))
        seen = [plain_episode(raw.data or b"") for raw in lines]
        assert [g.episode and g.episode.decode() for g in found] == seen
        assert [(g.line, g.offset, g.size) for g in found] == [
            (raw.number, raw.offset, len(raw.data or b"")) for raw in lines
        ]
        assert all(g.data in (None, raw.data) for g, raw in zip(found, lines, strict=True))
        assert all(g.data is not None for g in found if g.episode is None)


def test_damage_that_a_glance_does_not_see_is_counted_when_it_is_read(tmp_path: Path) -> None:
    good, torn = line(), line()[:-30] + b"\n"
    newer = line().replace(b'"schema_version":1', b'"schema_version":9')
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + torn + newer + good)
    log = LogReader(path)
    (episode,) = log.episodes()
    assert len(episode.turns) == 1 and log.duplicates == 1
    assert [(s.line, s.offset) for s in log.skipped] == [
        (2, len(good)),
        (3, len(good) + len(torn)),
    ]
    assert "torn" in log.skipped[0].reason and "newer version" in log.skipped[1].reason


def test_a_log_of_damage_alone_has_no_event(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line()[:-30] + b"\n")
    with pytest.raises(LogError, match=r"no event in .*skipped: 1, first .*a\.jsonl:1"):
        list(LogReader(tmp_path).episodes())
    with pytest.raises(LogError, match="no episode 'e'"):
        LogReader(tmp_path).episode("e")


def test_an_id_given_twice_in_one_record_is_the_one_that_json_keeps(tmp_path: Path) -> None:
    twice = line()[:-2] + b',"episode_id":"other"}\n'
    (tmp_path / "a.jsonl").write_bytes(twice)
    assert [e.episode_id for e in LogReader(tmp_path).episodes()] == ["other"]
    hidden = line()[:-2] + b',"episode\\u005fid":"other"}\n'
    (tmp_path / "a.jsonl").write_bytes(line() + hidden)
    log = LogReader(tmp_path)
    assert [e.episode_id for e in log.episodes()] == ["e"]
    assert "of episode 'other'" in log.skipped[0].reason


def test_lines_that_follow_each_other_are_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Entry]] = []

    class Seen(EpisodeIndex):
        def __init__(self, rows: Iterable[tuple[str, Entry]]) -> None:
            made.extend(rows)
            super().__init__(made)

    monkeypatch.setattr(reader, "EpisodeIndex", Seen)
    a, b, odd = line(episode="a"), line(episode="b"), line(episode='a"')
    (tmp_path / "1.jsonl").write_bytes(a + a + b + a + odd + odd + a + b"\n" + a)
    (tmp_path / "2.jsonl").write_bytes(a)
    assert len(list(LogReader(tmp_path).episodes())) == 3
    n, o = len(a), len(odd)
    assert made == [
        ("a", (0, 0, 2 * n, 1)),
        ("b", (0, 2 * n, n, 3)),
        ("a", (0, 3 * n, n, 4)),
        ('a"', (0, 4 * n, o, 5)),
        ('a"', (0, 4 * n + o, o, 6)),
        ("a", (0, 4 * n + 2 * o, n, 7)),
        ("a", (0, 5 * n + 2 * o + 1, n, 9)),
        ("a", (1, 0, n, 1)),
    ]


def test_any_number_of_entries_held_gives_the_same_index(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    rows = [(draw.choice("abcd"), Entry(0, 100 * n, 50, n + 1)) for n in range(200)]
    with EpisodeIndex(rows) as made:
        whole = [(name, list(entries)) for name, entries in made.episodes()]
    monkeypatch.setattr(index, "_PENDING", 7)
    with EpisodeIndex(rows) as made:
        assert [(name, list(entries)) for name, entries in made.episodes()] == whole
        assert list(made.episode_ids()) == [name for name, _ in whole]
        assert [list(made.entries(name)) for name, _ in whole] == [e for _, e in whole]


def test_episodes_are_what_folding_all_events_in_memory_gives(tmp_path: Path) -> None:
    """Any mixture of episodes over any files, long runs and damage included."""
    draw = random.Random(2)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in range(draw.randrange(1, 4)):
            lines = [some_line(draw, draw.choice("abc")) for _ in range(draw.randrange(1, 60))]
            (folder / f"{file}.jsonl").write_bytes(b"".join(lines))
        log, by_id = LogReader(folder), dict[str, list[tuple[AnyEvent, str]]]()
        for event, place in log.events():
            by_id.setdefault(event.episode_id, []).append((event, str(place.file)))
        damage = sorted(str(s) for s in log.skipped)
        assert {e.episode_id: e for e in log.episodes()} == {
            name: fold(name, events).episode for name, events in by_id.items()
        }
        assert sorted(str(s) for s in log.skipped) == damage


def test_edits_replace_text_by_time_and_not_by_place(tmp_path: Path) -> None:
    events: list[AnyEvent] = [
        EditEvent(episode_id="e", time=at(9), turn_id="t0", text="last", editor="Ann"),
        turn(0),
        turn(1, response_id="r"),
        turn(2, response_id="r"),
        EditEvent(episode_id="e", time=at(8), turn_id="t0", text="first"),
        EditEvent(episode_id="e", time=at(8), turn_id="t2", text="of the copy"),
        EditEvent(episode_id="e", time=at(8), turn_id="gone", text="of nobody"),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(encode_line(event) for event in events))
    (episode,) = LogReader(tmp_path).episodes()
    assert [t.edited_text for t in episode.turns] == ["last", "of the copy"]
    assert [t.untrainable_reason for t in episode.turns] == ["edited by a human"] * 2


def test_a_run_longer_than_one_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [encode_line(turn(n)) for n in range(50)]
    monkeypatch.setattr(reader, "_RUN", 2000)
    sizes: list[int] = []
    monkeypatch.setattr(reader, "_Files", _sizing(sizes))
    data = b"".join(lines)
    (tmp_path / "a.jsonl").write_bytes(data)
    (episode,) = LogReader(tmp_path).episodes()
    assert [t.turn_id for t in episode.turns] == [f"t{n}" for n in range(50)]
    assert sum(sizes) == len(data) and max(sizes) < 2000 + max(map(len, lines))


def _sizing(sizes: list[int]) -> type:
    class Sizing(reader._Files):  # pyright: ignore[reportPrivateUsage]
        def read(self, entry: Entry) -> bytes:
            sizes.append(entry.length)
            return super().read(entry)

    return Sizing
