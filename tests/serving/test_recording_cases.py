"""Real failures of real users whose app is recorded by the gateway, by address alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from marft_agents.log import LogReader, LogWriter
from marft_agents.recording import MarftRecorder
from marft_agents.serving.access import Access
from marft_agents.serving.calls import tls
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.gateway import Gateway, GatewaySettings
from marft_agents.serving.recording import Recording
from marft_agents.serving.replica import Replica
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream
from tests.recording.kit import CASES
from tests.runtimes.cases import KEY, Answer, RuntimeCases, Tool, both
from tests.serving.recording_kit import recording_stage
from tests.serving.stage import OPERATOR_KEY, House, make_house, running_app, running_stage

EDITED = "edited by a human"


@pytest.fixture(scope="module")
def shared_swapper(tmp_path_factory: pytest.TempPathFactory) -> Generator[Swapper]:
    """One that knows the version ``planner@v1``."""
    house = make_house(tmp_path_factory.mktemp("house"))
    house.publish("planner", untrained=True)
    with running_stage(house) as stage:
        yield stage.gateway.swapper


class App:
    """An app on the openai SDK that runs its own tools."""

    def __init__(self, url: str, stream: bool, tools: Sequence[Tool], answer: Any) -> None:
        self.url = url
        self.stream = stream
        self.tools = {tool.__name__: tool for tool in tools}
        schema = {"name": "answer", "schema": answer.model_json_schema()} if answer else None
        self.options: dict[str, Any] = {}
        if schema:
            self.options["response_format"] = {"type": "json_schema", "json_schema": schema}
        if tools:
            functions = [{"name": name, "parameters": {}} for name in self.tools]
            self.options["tools"] = [{"type": "function", "function": f} for f in functions]

    async def run(self, message: Any) -> list[Any]:
        messages: list[Any] = [{"role": "user", "content": message}]
        seen: list[Any] = []
        async with openai.AsyncOpenAI(base_url=self.url, api_key=KEY) as client:
            while calls := await self._ask(client, messages, seen):
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                for done in asyncio.as_completed([self._use(call) for call in calls]):
                    messages.append(await done)
        return seen

    async def _use(self, call: Any) -> Any:
        result = await self.tools[call["function"]["name"]]()
        return {"role": "tool", "tool_call_id": call["id"], "content": result}

    async def _ask(self, client: Any, messages: list[Any], seen: list[Any]) -> list[Any]:
        """The calls of a reply, which is put into ``seen`` as it comes."""
        create: Any = client.chat.completions.create
        if not self.stream:
            reply = await create(model="planner", messages=messages, **self.options)
            seen.append(reply.model_dump(exclude_none=True))
            return seen[-1]["choices"][0]["message"].get("tool_calls") or []
        calls: list[Any] = []
        async for chunk in await create(
            model="planner", messages=messages, stream=True, **self.options
        ):
            seen.append(chunk.model_dump(exclude_none=True))
            for choice in seen[-1]["choices"]:
                calls += choice["delta"].get("tool_calls") or []
        return [{k: v for k, v in call.items() if k != "index"} for call in calls]


class TestAddress(RuntimeCases):
    """The plain app asks the gateway's own address, the recorded one that of an episode."""

    swapper: Swapper

    @pytest.fixture(autouse=True)
    def _swapper(self, shared_swapper: Swapper) -> None:
        self.swapper = shared_swapper

    def make(
        self, url: str, *, stream: bool, tools: Sequence[Tool] = (), answer: type[Any] | None = None
    ) -> App:
        return App(url, stream, tools, answer)

    async def say(self, app: App, message: Any, *, stream: bool) -> list[Any]:
        return await app.run(message)

    def picture(self, text: str, url: str) -> Any:
        return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]

    @contextmanager
    def gateway(self, url: str, recording: Recording | None = None) -> Generator[str]:
        fleet = Fleet([Replica("engine-0", self.swapper.fleet.replicas[0].loader, Upstream(url))])
        settings = GatewaySettings(Access(OPERATOR_KEY))
        gateway = Gateway(Swapper(fleet, self.swapper.aliases), settings, recording)
        with running_app(gateway.app()) as address:
            yield address

    def plain(self, url: str, messages: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        with self.gateway(url) as address:
            return super().plain(f"{address}/v1", messages, options)

    def recorded(
        self,
        logs: Path,
        url: str,
        messages: Sequence[Any],
        around: dict[str, Any] | None,
        options: dict[str, Any],
    ) -> list[Any]:
        recording, seen = Recording(MarftRecorder(logs, inject="always")), list[Any]()
        with self.gateway(url, recording) as address, httpx.Client(verify=tls()) as http:
            for message in messages:
                begun = http.post(f"{address}/episodes", json={"task": message}).json()
                app = self.make(begun["base_urls"]["planner"], **options)
                seen += self._seen(app, [message], options["stream"])
                reason = "failed" if isinstance(seen[-1], tuple) else "terminated"
                http.post(f"{address}/episodes/{begun['id']}/end", json={"reason": reason})
        return seen

    @both
    def test_case_38_versions_are_those_of_the_call(self, tmp_path: Path, stream: bool) -> None:
        """The gateway itself decides on the version, and keeps to it until a stream has ended."""
        done = self.play(tmp_path, ["Alpha"], "A?", stream=stream)
        assert done.requests[0]["model"] == "planner@v1"
        versions = [(t.adapter_start, t.adapter_end, t.trainable) for t in done.turns]
        assert versions == [("planner@v1", "planner@v1", True)]

    def test_objects_that_do_not_serialise(self, tmp_path: Path) -> None:
        """Only JSON comes over the wire: the schema of a class, and no class."""
        done = self.play(tmp_path, ['{"number": 5}'], "How many?", answer=Answer)
        assert [(t.text, t.sampling.grammar) for t in done.turns] == [('{"number": 5}', True)]


@pytest.mark.parametrize("alive", [True, False], ids=["same server", "another server"])
def test_case_32_people_speak_and_change_what_was_said(
    house: House, tmp_path: Path, alive: bool
) -> None:
    """Two lines of a human, one of them in an assistant's role, and an edited reply."""
    data = [json.loads(line) for line in (CASES / "32-human.jsonl").read_text().splitlines()]
    first, reply, second, after, reward = data
    with recording_stage(house, log=LogWriter(tmp_path)) as desk:
        desk.post("/episodes/e32/edits", {"turn_id": "t", "text": "nothing yet"})
        assert desk.post("/episodes", {"id": "e32", "task": "write"}).status_code == 201
        human = {"text": first["text"], "name": first["agent"]}
        assert desk.post("/episodes/e32/humans", human).status_code == 200
        turn = desk.ask("writer", "e32", messages=reply["messages"]).headers["X-Marft-Turn"]
        edit = {"turn_id": turn, "text": reply["edited_text"], "editor": "human"}
        if alive:
            assert desk.post("/episodes/e32/edits", edit).json()["known"] is True
        desk.post("/episodes/e32/humans", human | {"text": second["text"]})
        desk.ask("writer", "e32", messages=after["messages"])
        desk.post("/episodes/e32/rewards", {"value": reward["value"]})
        desk.post("/episodes/e32/end", {})
    if not alive:
        with recording_stage(house, log=LogWriter(tmp_path)) as desk:
            assert desk.post("/episodes/e32/edits", edit).json()["known"] is False
    (episode,) = LogReader(tmp_path).episodes()
    edited, last = episode.turns
    assert (edited.edited_text, edited.untrainable_reason) == ("Short clear text", EDITED)
    assert edited.text not in (None, edited.edited_text) and edited.token_ids
    assert last.trainable and last.messages == after["messages"]
    assert not alive or last.depends_on == [edited.turn_id]
    assert [(h.name, h.text) for h in episode.humans] == [
        ("human", "Make it shorter."),
        ("human", "Fine, ship it."),
    ]
    assert last.step == edited.step + 1


def test_case_29_calls_of_a_nested_chat_name_the_turn_that_began_it(
    house: House, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in (CASES / "29-nested.jsonl").read_text().splitlines()]
    calls = [record for record in records if record["kind"] == "call"]
    began = ""
    with recording_stage(house, log=LogWriter(tmp_path)) as desk:
        for call in calls:
            inner = {"X-Marft-Parent-Turn": began} if "parent" in call else {}
            more = {"model": "writer", "messages": call["messages"]}
            answer = desk.ask(call["agent"], "e29", headers=inner, **more)
            began = began or answer.headers["X-Marft-Turn"]
        odd = desk.ask("writer", "e29", headers={"X-Marft-Parent-Turn": "no turn"})
        assert odd.status_code == 400 and "X-Marft-Turn of the reply" in odd.text
        desk.post("/episodes/e29/rewards", {"value": 1.0})
        desk.post("/episodes/e29/end", {})
    (episode,) = LogReader(tmp_path).episodes()
    named = [(t.agent, t.parent_agent, t.parent_turn) for t in episode.turns]
    assert named == [
        (c["agent"], "planner", began) if "parent" in c else (c["agent"], None, None) for c in calls
    ]
    assert len(calls) == 5 and all(t.trainable for t in episode.turns)
    assert episode.team_reward == 1.0
