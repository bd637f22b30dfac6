"""The reader: damage costs the damaged lines only; episodes fold from any files in any order."""

from __future__ import annotations

import itertools
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import LogError
from marft_agents.log import LogReader, LogWriter
from marft_agents.log.encode import encode_line
from marft_agents.log.records import raw_lines
from marft_agents.schema import (
    AnyEvent,
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    RewardEvent,
    ToolEvent,
    Turn,
)
from tests.log.events import CASES, at, case_bytes, turn


def save(path: Path, *events: AnyEvent) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encode_line(event) for event in events))
    return path


def read(path: Path, data: bytes) -> tuple[LogReader, list[str | None]]:
    path.write_bytes(data)
    reader = LogReader(path)
    return reader, [e.text for e, _ in reader.events() if isinstance(e, Turn)]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("20-torn.jsonl", [(3, "not UTF-8")]),
        ("20-nul-middle.jsonl", [(2, "300 zero bytes")]),
        ("20-no-final-newline.jsonl", []),
    ],
)
def test_case_20_two_good_records(
    tmp_path: Path, name: str, skipped: list[tuple[int, str]]
) -> None:
    """Case 20: two records from each file; the rest counted with file, line and offset."""
    data = case_bytes(name)
    reader, texts = read(tmp_path / name, data)
    assert texts == ["One", "Two"]
    assert reader.skipped_count == len(skipped)
    for seen, (line, reason) in zip(reader.skipped, skipped, strict=True):
        assert (seen.file, seen.line) == (tmp_path / name, line)
        assert seen.offset == sum(len(x) + 1 for x in data.split(b"\n")[: line - 1])
        assert reason in seen.reason


def test_zero_bytes_before_and_inside_a_line_hide_only_themselves(tmp_path: Path) -> None:
    one, two, three = (encode_line(turn(n)) for n in range(3))
    data = b"\0" * 100 + one + two[:40] + b"\0" * 9 + three
    reader, texts = read(tmp_path / "a.jsonl", data)
    assert texts == ["reply 0", "reply 2"]
    assert [(s.line, s.reason) for s in reader.skipped] == [
        (1, "100 zero bytes"),
        (2, "9 zero bytes"),
    ]
    places = [place.offset for _, place in reader.events()]
    assert places == [100, 100 + len(one) + 49]
    assert len(next(iter(LogReader(tmp_path).episodes())).turns) == 2


def test_a_file_in_utf16_is_one_skipped_line_a_line(tmp_path: Path) -> None:
    data = encode_line(turn(0)) + b"x\n" + "{}\n{}\n".encode("utf-16-le")
    reader, texts = read(tmp_path / "a.jsonl", data)
    assert texts == ["reply 0"]
    assert reader.skipped_count == 4


def test_lines_that_lost_the_newline_between_them(tmp_path: Path) -> None:
    one, two, three = (encode_line(turn(n)).rstrip() for n in range(3))
    reader, texts = read(tmp_path / "a.jsonl", one + two + b"\n" + one[:50] + three)
    assert texts == ["reply 0", "reply 1", "reply 2"]
    assert [s.line for s in reader.skipped] == [2]


def test_records_inside_a_payload_are_never_taken_for_events(tmp_path: Path) -> None:
    alien = {"type": "export", "items": [json.loads(encode_line(turn(5)))]}
    data = encode_line(turn(0)) + json.dumps(alien, separators=(",", ":")).encode()
    reader, texts = read(tmp_path / "a.jsonl", data)
    assert texts == ["reply 0"]
    assert "unknown event type 'export'" in reader.skipped[0].reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"type":"turn","episode_id":"e"', "torn or not JSON"),
        (b"plain text", "torn or not JSON"),
        (b"[1,2]", "JSON list, not an event"),
        (b"{}", "no `type`"),
        (b'{"type":"credit","episode_id":"e"}', "unknown event type 'credit'"),
        (b'{"type":["turn"],"episode_id":"e"}', "unknown event type"),
        (b'{"type":"turn","episode_id":"e","agent":"a"}', "not a valid turn: turn_id"),
        (b'{"type":"turn","schema_version":2,"x":1}', "written by a newer version"),
        (b'{"type":"warp","schema_version":2,"episode_id":"e"}', "written by a newer version"),
        (b'{"type":"reward","schema_version":0,"episode_id":"e"}', "schema_version is 0"),
        (b'{"type":"reward","schema_version":null,"episode_id":"e"}', "schema_version is None"),
        (b'{"type":"human","episode_id":"e","text":"caf\xe9"}', "not UTF-8"),
        (b"[" * 100_000, "torn or not JSON"),
        (b'{"type":"reward","episode_id":"e","value":' + b"9" * 5000 + b"x}", "torn or not JSON"),
    ],
)
def test_alien_lines_are_skipped_with_a_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    reader, texts = read(
        tmp_path / "a.jsonl", encode_line(turn(0)) + line + b"\n" + encode_line(turn(1))
    )
    assert texts == ["reply 0", "reply 1"]
    assert reader.skipped_count == 1
    assert reason in reader.skipped[0].reason
    assert str(tmp_path / "a.jsonl") + ":2 (byte " in str(reader.skipped[0])


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_damage(tmp_path: Path) -> None:
    one, two = (encode_line(turn(n)).rstrip() for n in range(2))
    data = b"\xef\xbb\xbf" + one + b"\r\n\r\n  \n" + two + b"\r\n"
    reader, texts = read(tmp_path / "a.jsonl", data)
    assert (texts, reader.skipped_count) == (["reply 0", "reply 1"], 0)


def test_only_the_first_places_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    reader, texts = read(tmp_path / "a.jsonl", b"torn\n" * 250 + encode_line(turn(0)))
    assert texts == ["reply 0"]
    assert (len(reader.skipped), reader.skipped_count) == (100, 250)
    list(reader.events())
    assert reader.skipped_count == 250


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"ab\n" + b"x" * 1000 + b"\ncd\n" + b"y" * 16 + b"\n" + b"z" * 99)
    with path.open("rb") as file:
        lines = [tuple(line) for line in raw_lines(file, max_line=16)]
    assert lines == [
        (1, 0, b"ab\n"), (2, 3, None), (3, 1004, b"cd\n"), (4, 1007, None), (5, 1024, None),
    ]  # fmt: skip


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", turn(0, episode="one"), turn(0, episode="two"))
    reader = LogReader(path)
    episodes = reader.episodes()
    assert next(episodes).episode_id == "one"
    path.write_bytes(b"")
    assert list(episodes) == []
    assert "changed while being read" in reader.skipped[0].reason


# --- paths ----------------------------------------------------------------------------------------


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LogError, match=r"pipe is neither a file nor a folder.*save what comes"):
        LogReader(tmp_path / "pipe")


def test_missing_and_empty_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no log was named"):
        LogReader()
    with pytest.raises(LogError, match="nowhere does not exist"):
        LogReader(tmp_path / "nowhere")
    with pytest.raises(LogError, match=r"no \*\.jsonl file in .*was anything recorded"):
        LogReader(tmp_path)
    save(tmp_path / "run1" / "a.jsonl", turn(0))
    with pytest.raises(LogError, match="run1 has some"):
        LogReader(tmp_path)


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "skipped: 0"), (b"\n\n", "skipped: 0"), (b"torn\n", "skipped: 1, first ")],
)
def test_files_without_any_event(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(LogError, match=f"no event in .*{why}"):
        list(LogReader(tmp_path).events())
    with pytest.raises(LogError, match="no event in"):
        list(LogReader(tmp_path).episodes())


def test_a_file_that_cannot_be_read_is_a_log_error(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", turn(0))
    reader = LogReader(path)
    path.unlink()
    with pytest.raises(LogError, match=r"cannot read .*No such file"):
        list(reader.events())


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", turn(0, response_id=None))
    (tmp_path / "link.jsonl").symlink_to(path)
    assert len(list(LogReader(tmp_path, path, str(path)).events())) == 1


def test_only_jsonl_files_of_the_folder_itself(tmp_path: Path) -> None:
    save(tmp_path / "b.jsonl", turn(1))
    save(tmp_path / "a.jsonl", turn(0))
    save(tmp_path / "notes.txt", turn(2))
    save(tmp_path / "old" / "c.jsonl", turn(3))
    events = [event for event, _ in LogReader(tmp_path).events()]
    assert [e.turn_id for e in events if isinstance(e, Turn)] == ["t0", "t1"]


# --- folding --------------------------------------------------------------------------------------


def test_an_episode_folds_from_any_files_in_any_order(tmp_path: Path) -> None:
    events: list[AnyEvent] = [
        EpisodeStarted(episode_id="e", time=at(0), task="2+2", metadata={"split": "train"}),
        turn(0),
        ToolEvent(episode_id="e", name="run", time=at(1)),
        HumanEvent(episode_id="e", text="go on", time=at(2)),
        turn(1, agent="coder"),
        RewardEvent(episode_id="e", value=0.5, time=at(3)),
        EpisodeEnded(episode_id="e", time=at(4)),
    ]
    for number, order in enumerate(itertools.islice(itertools.permutations(events), 0, 5040, 504)):
        folder = tmp_path / str(number)
        for place, event in enumerate(order):
            save(folder / f"{place}.jsonl", event)
        (episode,) = LogReader(folder).episodes()
        assert [t.turn_id for t in episode.turns] == ["t0", "t1"]
        assert (episode.task, episode.metadata) == ("2+2", {"split": "train"})
        assert episode.team_reward == 0.5
        assert (len(episode.tools), len(episode.humans)) == (1, 1)
        assert episode.untrainable_reason is None
        assert len(episode.sources) == 7


def test_a_reward_before_its_episode_and_days_after(tmp_path: Path) -> None:
    early = RewardEvent(episode_id="b", value=1.0, time=at(0))
    late = RewardEvent(episode_id="a", value=0.25, agent="planner", time=at(90_000))
    save(tmp_path / "0.jsonl", early)
    save(tmp_path / "1.jsonl", turn(0, episode="a"), turn(0, episode="b"))
    save(tmp_path / "2.jsonl", late)
    episodes = list(LogReader(tmp_path).episodes())
    assert [e.episode_id for e in episodes] == ["b", "a"]
    assert episodes[0].team_reward == 1.0
    assert (episodes[1].team_reward, episodes[1].agent_rewards) == (None, {"planner": 0.25})


def test_an_episode_without_a_beginning_is_still_one(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", turn(0))
    (episode,) = LogReader(tmp_path).episodes()
    assert (episode.started, len(episode.turns)) == (None, 1)


def test_turns_are_ordered_by_index_then_time(tmp_path: Path) -> None:
    save(
        tmp_path / "a.jsonl",
        turn(2, index=1, time=at(9)),
        turn(1, index=1, time=at(8)),
        turn(0, index=0, time=at(20)),
    )
    (episode,) = LogReader(tmp_path).episodes()
    assert [t.turn_id for t in episode.turns] == ["t0", "t1", "t2"]


def test_first_start_and_latest_end_count(tmp_path: Path) -> None:
    save(
        tmp_path / "a.jsonl",
        EpisodeEnded(episode_id="e", time=at(9), reason="failed"),
        EpisodeStarted(episode_id="e", task="first"),
        EpisodeStarted(episode_id="e", task="second"),
        EpisodeEnded(episode_id="e", time=at(5)),
    )
    (episode,) = LogReader(tmp_path).episodes()
    assert episode.task == "first"
    assert episode.ended is not None
    assert episode.ended.reason == "failed"


def test_case_23_retries_and_duplicates(tmp_path: Path) -> None:
    """Case 23: B once and C once are trained on; A and D are kept, flagged, untrained."""
    (tmp_path / "a.jsonl").write_bytes(case_bytes("23-retries.jsonl"))
    reader = LogReader(tmp_path)
    (episode,) = reader.episodes()
    assert [(t.response_id, t.trainable) for t in episode.turns] == [
        ("chatcmpl-A", False),
        ("chatcmpl-B", True),
        ("chatcmpl-C", True),
        ("chatcmpl-D", False),
    ]
    assert reader.duplicates == 1
    assert episode.team_reward == 1.0


def test_a_duplicate_in_another_file_and_what_pointed_at_it(tmp_path: Path) -> None:
    first = turn(0, response_id="r")
    again = turn(1, response_id="r", turn_id="copy")
    after = turn(2, depends_on=["copy", "t0"], selected_by="copy", parent_turn="copy")
    reward = RewardEvent(episode_id="e", value=1.0, turn_id="copy")
    save(tmp_path / "a.jsonl", again, after, reward)
    save(tmp_path / "b.jsonl", first)
    reader = LogReader(tmp_path)
    (episode,) = reader.episodes()
    assert [(t.turn_id, t.depends_on) for t in episode.turns] == [("t0", []), ("t2", ["t0"])]
    assert (episode.turns[1].selected_by, episode.turns[1].parent_turn) == ("t0", "t0")
    assert episode.turn_rewards == {"t0": 1.0}
    assert reader.duplicates == 1


def test_never_duplicates_by_text_choice_or_missing_id(tmp_path: Path) -> None:
    same: dict[str, Any] = {"text": "same", "token_ids": [7], "logprobs": [-1.0]}
    save(
        tmp_path / "a.jsonl",
        turn(0, response_id="r", choice_index=0, **same),
        turn(1, response_id="r", choice_index=1, **same),
        turn(2, response_id=None, **same),
        turn(3, response_id=None, **same),
    )
    reader = LogReader(tmp_path)
    (episode,) = reader.episodes()
    assert (len(episode.turns), reader.duplicates) == (4, 0)


def test_cached_replies_stay_in_every_episode_and_train_nobody(tmp_path: Path) -> None:
    save(
        tmp_path / "a.jsonl",
        turn(0, episode="a", response_id="r"),
        turn(0, episode="b", response_id="r", cached=True),
        turn(1, episode="a", response_id="r", cached=True),
    )
    reader = LogReader(tmp_path)
    trainable = [[t.trainable for t in episode.turns] for episode in reader.episodes()]
    assert trainable == [[True, False], [False]]
    assert reader.duplicates == 0


def test_case_15_rewards_through_the_log(tmp_path: Path) -> None:
    """Case 15: null is "not scored", NaN and text are refused, ``true`` is 1.0."""
    lines = (CASES / "15-rewards.jsonl").read_text().splitlines()
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(
            line.replace('"kind"', '"type"').replace('"episode"', '"episode_id"') for line in lines
        )
    )
    reader = LogReader(path)
    episodes = {episode.episode_id: episode for episode in reader.episodes()}
    assert {name: e.team_reward for name, e in episodes.items()} == {
        "a": 1.0, "b": None, "c": 0.0, "d": None, "e": None, "f": None, "g": 1.0,
    }  # fmt: skip
    assert {n: e.refused_rewards[0].refused for n, e in episodes.items() if e.refused_rewards} == {
        "d": "not finite: nan",
        "e": "not finite: inf",
        "f": "not a number: '0.5'",
    }
    assert [n for n, e in episodes.items() if e.scored] == ["a", "c", "g"]
    assert reader.skipped_count == 0


def test_case_14_ids_that_text_would_not_give_back_stay(tmp_path: Path) -> None:
    """Case 14: sampled ids come back as they were, also when they decode to more than the text."""
    case = json.loads((CASES / "14-drift.json").read_text())
    stop = case["stop_string"]
    with LogWriter(tmp_path) as writer:
        writer.write(
            turn(0, text=case["text"], token_ids=case["sampled_ids"],
                 logprobs=case["sampled_logprobs"])
        )  # fmt: skip
        writer.write(
            turn(1, text=stop["content"], token_ids=stop["token_ids"],
                 logprobs=[-0.1] * len(stop["token_ids"]))
        )  # fmt: skip
        writer.write(turn(2, token_ids=case["reencoded_ids"], logprobs=case["sampled_logprobs"]))
    (episode,) = LogReader(tmp_path).episodes()
    assert episode.turns[0].token_ids == [1252, 1362]
    assert episode.turns[1].token_ids == stop["token_ids"]
    assert [t.untrainable_reason for t in episode.turns] == [
        None, None, "token ids and log-probabilities differ in length",
    ]  # fmt: skip


# --- one episode, memory --------------------------------------------------------------------------


def test_one_episode_by_its_id(tmp_path: Path) -> None:
    names = ["alpha-1", "alpha-2", "beta-77", "gamma"]
    save(tmp_path / "a.jsonl", *(turn(0, episode=name) for name in names))
    reader = LogReader(tmp_path)
    assert reader.episode("beta-77").turns[0].episode_id == "beta-77"
    for asked, near in [
        ("alpha", "'alpha-1' or 'alpha-2'"),
        ("beta-7", "'beta-77'[?]"),
        ("zzzz", "'alpha-1' or 'alpha-2' or 'beta-77'"),
    ]:
        with pytest.raises(LogError, match=f"no episode '{asked}'.*{near}"):
            reader.episode(asked)


def test_odd_episode_ids(tmp_path: Path) -> None:
    names = ["a\0b", "a", "é", "🙂", " ", 'q"q']
    save(tmp_path / "a.jsonl", *(turn(0, episode=name) for name in names))
    reader = LogReader(tmp_path)
    assert [episode.episode_id for episode in reader.episodes()] == names
    assert reader.episode("a\0b").episode_id == "a\0b"


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """20,000 turns of 2,000 interleaved episodes: 40 MB as objects, a few as read."""
    line = encode_line(turn(0, episode="EPISODE", turn_id="TURN", text="x" * 600))
    with (tmp_path / "a.jsonl").open("wb") as file:
        for number in range(20_000):
            name = b"e%d" % (number % 2000)
            file.write(
                line.replace(b"EPISODE-0", b"%d" % number)
                .replace(b"EPISODE", name)
                .replace(b"TURN", b"t%d" % number)
            )
    reader = LogReader(tmp_path)
    tracemalloc.start()
    try:
        sizes = [len(episode.turns) for episode in reader.episodes()]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == [10] * 2000
    assert peak < 4 * 2**20
