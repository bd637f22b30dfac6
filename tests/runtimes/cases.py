"""Real failures of real users, as a test class that every runtime's ``test_cases.py`` inherits.

Invariant: one agent, ``planner``, plays the same script twice, plain and recorded; the app sees the
same, and what is asserted of the recording is read back from the files of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from marft_agents.log import LogReader
from marft_agents.recording import MarftRecorder
from marft_agents.schema import Episode, Turn
from marft_agents.testing import Reply, ScriptedServer
from tests.recording.kit import case, case_lines

Tool = Callable[[], Any]
KEY = "sk-test-aB3dE5gH7jK9"
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Answer(BaseModel):
    """A structured output."""

    number: int


def chunks_of_case_05() -> list[dict[str, Any]]:
    return [{"created": 1, **chunk} for chunk in case_lines("05-stream-chunks.jsonl")]


def streaming(chunks: Sequence[dict[str, Any]], **options: Any) -> Callable[[Any], Reply]:
    """A server that streams ``chunks``, with their tokens for those who ask for them."""
    bare = [{k: v for k, v in chunk.items() if k != "prompt_token_ids"} for chunk in chunks]
    for chunk in bare:
        chunk["choices"] = [
            {k: v for k, v in choice.items() if k != "token_ids"} | {"logprobs": None}
            for choice in chunk["choices"]
        ]
    return lambda body: Reply(chunks=chunks if body.get("logprobs") else bare, **options)


@dataclass
class Played:
    """What the app saw, what the server got, and what the log on disk holds."""

    seen: list[Any]
    requests: list[dict[str, Any]]
    episodes: list[Episode]
    raw: str

    @property
    def turns(self) -> list[Turn]:
        return [turn for episode in self.episodes for turn in episode.turns]


class RuntimeCases:
    """A test class inherits it and gives ``make`` and ``say``."""

    streams = True
    at_once = True
    """Whether the tools of one reply run at once; results of the others are never out of order."""

    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> Any:
        """An agent named ``planner`` on the model ``planner`` with the key ``KEY``."""
        raise NotImplementedError

    def say(self, app: Any, message: Any, *, stream: bool) -> Any:
        """Run the agent and return, or promise, what the app sees, comparable with ``==``."""
        raise NotImplementedError

    def picture(self, text: str, url: str) -> Any:
        """A message of a text and an image in ``url``, a data URL of a PNG."""
        pytest.skip("this runtime sends no images")

    def wrapped(self, recorder: MarftRecorder, app: Any) -> Any:
        return recorder.wrap(app)

    # -- playing ------------------------------------------------------------------------------

    def play(
        self,
        logs: Path,
        script: Any,
        *messages: Any,
        stream: bool = False,
        around: dict[str, Any] | None = None,
        **options: Any,
    ) -> Played:
        """Each message in an episode of its own, or all in one that is opened with ``around``."""
        if stream and not self.streams:
            pytest.skip("this version does not stream")
        options["stream"] = stream
        with ScriptedServer(script) as server:
            plain = self.plain(server.url, messages, options)
            bodies = [request.body for request in server.requests]
        with ScriptedServer(script) as server:
            seen = self.recorded(logs, server.url, messages, around, options)
            sent = [request.body for request in server.requests]
        assert seen == plain
        added = {"return_token_ids", "logprobs"}
        assert [{k: v for k, v in b.items() if k not in added} for b in sent] == bodies
        assert all(body["return_token_ids"] is True and body["logprobs"] is True for body in sent)
        raw = "".join(path.read_text(encoding="utf-8") for path in logs.glob("*.jsonl"))
        assert "sk-test" not in raw
        return Played(seen, sent, list(LogReader(logs).episodes()), raw)

    def plain(self, url: str, messages: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        return self._seen(self.make(url, **options), messages, options["stream"])

    def recorded(
        self,
        logs: Path,
        url: str,
        messages: Sequence[Any],
        around: dict[str, Any] | None,
        options: dict[str, Any],
    ) -> list[Any]:
        """Play it recorded; the log is whole afterwards."""
        with MarftRecorder(logs) as recorder:
            app = self.wrapped(recorder, self.make(url, **options))
            with contextlib.nullcontext() if around is None else recorder.episode(**around):
                return self._seen(app, messages, options["stream"])

    def _seen(self, app: Any, messages: Sequence[Any], stream: bool) -> list[Any]:
        async def run() -> list[Any]:
            return [await self._outcome(self.say, app, m, stream) for m in messages]

        return asyncio.run(run())

    async def _outcome(self, say: Any, app: Any, message: Any, stream: bool) -> Any:
        try:
            result = say(app, message, stream=stream)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            return type(error).__name__, "scripted" in str(error)

    # -- the cases ----------------------------------------------------------------------------

    @both
    def test_cases_01_02_03_messages_are_logged_as_they_were_sent(
        self, tmp_path: Path, stream: bool
    ) -> None:
        """Arguments, null content beside calls and names: whatever the runtime makes of them."""

        async def five() -> str:
            """Say five."""
            return "5"

        script = [Reply(None, [("five", {})]), "It is five."]
        done = self.play(tmp_path, script, "How many?", stream=stream, tools=[five])
        assert [t.messages for t in done.turns] == [r["messages"] for r in done.requests]
        assert len(done.turns) == 2 and all(t.trainable for t in done.turns)
        for turn in done.turns:
            assert turn.prompt_token_ids == list(json.dumps(turn.messages).encode())
        (call,) = done.turns[0].tool_calls or ()
        assert call["function"]["arguments"] == "{}"
        assert done.turns[0].text is None
        assert "None" not in done.raw

    def test_case_05_a_stream_gives_all_its_ids(self, tmp_path: Path) -> None:
        chunks, want = chunks_of_case_05(), case("05-want.json")
        done = self.play(tmp_path, streaming(chunks), "Say hello.", stream=True)
        (turn,) = done.turns
        found = (turn.text, turn.token_ids, turn.logprobs, turn.finish_reason)
        fields = ("text", "token_ids", "logprobs", "finish_reason")
        assert found == tuple(want[name] for name in fields)
        assert turn.prompt_token_ids == chunks[0]["prompt_token_ids"] and turn.trainable

    @pytest.mark.parametrize("broken", [False, True], ids=["chunks left out", "broken"])
    def test_case_05_a_cut_stream_is_incomplete(self, tmp_path: Path, broken: bool) -> None:
        chunks = chunks_of_case_05()
        cut = streaming(chunks, cut_after=4) if broken else streaming(chunks[:-2])
        done = self.play(tmp_path, cut, "Say hello.", stream=True)
        for turn in done.turns:  # a runtime may try again
            assert (turn.text, turn.token_ids) == ("Hello there!", [19556, 665, 17])
            assert turn.finish_reason is None and not turn.complete and not turn.trainable
        assert done.turns

    def test_a_stream_that_loses_ids_is_no_sample(self, tmp_path: Path) -> None:
        *chunks, last = chunks_of_case_05()
        last["usage"] = last["usage"] | {"completion_tokens": 5}
        done = self.play(tmp_path, streaming([*chunks, last]), "Hello?", stream=True)
        assert done.turns[0].untrainable_reason == "not all of its tokens arrived"

    @both
    def test_case_06_a_reply_without_ids_is_said_once(
        self, tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The app's configuration names no option of the engine."""
        script = [Reply("ok", with_ids=False)] * 2
        with caplog.at_level(logging.WARNING, "marft_agents"):
            done = self.play(tmp_path, script, "One?", "Two?", stream=stream)
        said = [r.getMessage() for r in caplog.records if r.name.startswith("marft_agents")]
        assert len([text for text in said if "token ids" in text]) == 1
        assert [t.untrainable_reason for t in done.turns] == ["no prompt token ids"] * 2

    @both
    def test_case_13_a_prompt_that_is_too_long(self, tmp_path: Path, stream: bool) -> None:
        async def words() -> str:
            """Say many words."""
            return "word " * 600

        error = "scripted: maximum context length is 512 tokens"
        script = [Reply(None, [("words", {})]), Reply(status=400, error=error)]
        done = self.play(tmp_path, script, "Talk.", stream=stream, tools=[words])
        (seen,), (episode,) = done.seen, done.episodes
        assert seen[1] is True, "the app sees the server's own words"
        good, bad = episode.turns
        assert good.trainable
        assert (bad.error, bad.token_ids) == (f"HTTP 400: {error}", None)
        assert episode.ended is not None and episode.ended.reason == "failed"

    @both
    def test_case_23_retries_are_one_turn(self, tmp_path: Path, stream: bool) -> None:
        busy = Reply(status=500, error="busy", headers={"retry-after-ms": "1"})
        done = self.play(tmp_path, [busy, "Here."], "Go.", stream=stream)
        assert len(done.requests) == 2
        assert [(t.text, t.attempt, t.trainable) for t in done.turns] == [("Here.", 2, True)]

    @both
    def test_case_33_ids_rule_where_characters_are_cut(self, tmp_path: Path, stream: bool) -> None:
        data = case("33-emoji.json")
        cut = data["cut_after_first"]
        said = {data["text"]: data["token_ids"], **data["more"], cut["content"]: cut["token_ids"]}
        script = [
            Reply(
                text,
                token_ids=ids,
                logprobs=[-0.5] * len(ids),
                finish_reason="length" if text == cut["content"] else "stop",
            )
            for text, ids in said.items()
        ]
        done = self.play(tmp_path, script, *["Smile."] * len(script), stream=stream)
        assert {t.text: t.token_ids for t in done.turns} == said
        assert all(t.trainable for t in done.turns)

    @both
    def test_case_38_versions_are_those_of_the_call(self, tmp_path: Path, stream: bool) -> None:
        headers = {"X-Marft-Adapter": "planner@v3"}
        chunks = chunks_of_case_05()
        for number, chunk in enumerate(chunks):
            chunk["model"] = "planner@v3" if number < 3 else "planner@v4"

        def script(body: Any) -> Reply:
            swapped = stream and "B?" in json.dumps(body["messages"])
            return streaming(chunks)(body) if swapped else Reply("Alpha", headers=headers)

        done = self.play(tmp_path, script, *(["A?", "B?"] if stream else ["A?"]), stream=stream)
        versions = [(t.adapter_start, t.adapter_end, t.untrainable_reason) for t in done.turns]
        mixed = ("planner@v3", "planner@v4", "adapter version changed during the call")
        assert versions == [("planner@v3", "planner@v3", None), *([mixed] if stream else [])]

    @both
    def test_case_40_an_image_is_a_hash_and_a_size(self, tmp_path: Path, stream: bool) -> None:
        data = case("40-images.json")
        text, image = data["image"][0]["content"]
        refused = Reply(status=data["image_status_on_text_model"], error="scripted: text only")
        message = self.picture(text["text"], image["image_url"]["url"])
        done = self.play(tmp_path, [refused], message, stream=stream)
        assert done.seen[0][1] is True
        (turn,) = done.turns
        assert turn.error == "HTTP 400: scripted: text only" and not turn.trainable
        assert "iVBORw0KGgo" not in done.raw and '"bytes":' in done.raw
        assert "iVBORw0KGgo" in json.dumps(done.requests[0]["messages"])

    @both
    def test_an_error_that_shows_the_key_is_logged_without_it(
        self, tmp_path: Path, stream: bool
    ) -> None:
        refused = Reply(status=401, error=f"scripted: no such key: {KEY}")
        done = self.play(tmp_path, [refused], "Go.", stream=stream)
        assert "no such key" in (done.turns[0].error or "")

    @both
    def test_parallel_tool_results_keep_ids_and_order(self, tmp_path: Path, stream: bool) -> None:
        """Results b, a for calls a, b."""
        gates: list[asyncio.Event] = []

        async def slow() -> str:
            """Answer last."""
            if self.at_once:
                gates.append(asyncio.Event())
                await gates[-1].wait()
            return "of a"

        async def quick() -> str:
            """Answer first."""
            while self.at_once and not gates:
                await asyncio.sleep(0)
            for gate in gates:
                gate.set()
            gates.clear()
            return "of b"

        script = [Reply(None, [("slow", {}), ("quick", {})]), "Both."]
        done = self.play(tmp_path, script, "Go.", stream=stream, tools=[slow, quick])
        assert [t.messages for t in done.turns] == [r["messages"] for r in done.requests]
        (episode,) = done.episodes
        results = {(e.name, e.call_id, str(e.result)) for e in episode.tools}
        assert results == {("slow", "call-1-0", "of a"), ("quick", "call-1-1", "of b")}

    @both
    def test_reasoning_is_logged(self, tmp_path: Path, stream: bool) -> None:
        """Whether the next request carries it is the runtime's; it does as in the plain run."""

        async def five() -> str:
            """Say five."""
            return "5"

        script = [
            Reply(None, [("five", {})], reasoning="two and three"),
            Reply("It is five.", reasoning="as told"),
        ]
        done = self.play(tmp_path, script, "How many?", stream=stream, tools=[five])
        said = [(t.text, t.reasoning, t.trainable) for t in done.turns]
        assert said == [(None, "two and three", True), ("It is five.", "as told", True)]
        assert [t.messages for t in done.turns] == [r["messages"] for r in done.requests]

    def test_objects_that_do_not_serialise(self, tmp_path: Path) -> None:
        odd = {"schema": Answer, "path": Path("a/b"), "when": datetime.datetime(2026, 1, 2)}
        around = {"task": Answer, "metadata": odd}
        script = ['{"number": 5}']
        done = self.play(tmp_path, script, "How many?", answer=Answer, around=around)
        (episode,) = done.episodes
        assert [t.text for t in episode.turns] == script
        assert set(episode.metadata) >= set(odd) and "2026-01-02" in done.raw


__all__ = ["KEY", "Answer", "Played", "RuntimeCases", "Tool", "both"]
