"""Every runtime on vLLM and real weights: ids, log-probabilities and text of each call agree.

Each plays in its own environment, against one server; what they logged is checked here. So is what
the same server says of itself: an engine's start is the slowest part of these tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.support_triage import base_model
from marft_agents.log import LogReader
from marft_agents.schema import Turn
from marft_agents.serving import ServerProcess
from tests.end_to_end.loop import largest_gap
from tools.runtimes import environment

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ("planner", "coder", "selector")
PLAYS: dict[str, str | None] = {
    "agentchat": None,
    "classic": "classic",
    "agent_framework": "agent-framework",
    "ag2": "ag2",
    "openai_agents": "openai-agents",
}
"""Runtime to its environment; ``None``: this one."""
SHOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\nFunctions:{% for tool in tools %}\n{{ tool | tojson }}"
    '{% endfor %}\nCall one: <tool_call>{"name": name, "arguments": object}</tool_call>'
    "<|im_end|>\n{% endif %}"
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None and not os.environ.get("CI"),
        reason="vLLM has no build for this machine",
    ),
]


@pytest.fixture(scope="module")
def model() -> str:
    return str(base_model.prepare())


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    adapters = tmp_path_factory.mktemp("adapters")
    template = adapters.parent / "tools.jinja"
    own = (Path(model) / "chat_template.jinja").read_text(encoding="utf-8")
    template.write_text(SHOWS_TOOLS + own, encoding="utf-8")
    engine = ["--engine", "vllm", "--max-lora-rank", "8", "--max-model-len", "1024"]
    engine += ["--chat-template", str(template)]
    with ServerProcess(adapters, model=model, agents=AGENTS, extra=engine) as running:
        yield running


def rescored(url: str, turn: Turn) -> list[float]:
    """Log-probability (L,) of the turn's tokens when the server reads them as a prompt."""
    assert turn.prompt_token_ids is not None and turn.token_ids is not None
    body = {
        "model": turn.model,
        "prompt": turn.prompt_token_ids + turn.token_ids,
        "max_tokens": 1,
        "prompt_logprobs": 0,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0).raise_for_status().json()
    scored = reply["choices"][0]["prompt_logprobs"][len(turn.prompt_token_ids) :]
    return [entry[str(t)]["logprob"] for entry, t in zip(scored, turn.token_ids, strict=True)]


@pytest.mark.parametrize("runtime", PLAYS)
def test_ids_log_probabilities_and_text_agree(
    runtime: str, server: ServerProcess, model: str, tmp_path: Path
) -> None:
    name = PLAYS[runtime]
    python = sys.executable if name is None else str(environment(name))
    module = f"tests.runtimes.{runtime}.play"
    done = subprocess.run(
        [python, "-m", module, f"{server.url}/v1", str(tmp_path / "logs")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    episodes = list(LogReader(tmp_path / "logs").episodes())
    assert {e.metadata["stream"] for e in episodes} == {False, True}
    for episode in episodes:
        assert len(episode.turns) >= 2
        for turn in episode.turns:
            assert turn.error is None and turn.token_ids and turn.prompt_token_ids
            assert turn.logprobs and len(turn.logprobs) == len(turn.token_ids)
            text = tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            assert text.strip() == (turn.text or "").strip()
            prompt = tokenizer.decode(turn.prompt_token_ids)
            for message in turn.messages:
                assert str(message["content"]).strip() in prompt
            assert turn.adapter_start == turn.adapter_end == f"{turn.model}@v1"
            assert largest_gap(turn.logprobs, rescored(server.url, turn)) < 0.05
        assert any(t.trainable for t in episode.turns)


def chat(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {
        "model": "planner",
        "messages": [{"role": "user", "content": "Name three colours of the rainbow."}],
        "max_tokens": 24,
        "return_token_ids": True,
        "logprobs": True,
    }
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=120.0)
    assert reply.status_code == 200, reply.text
    return reply


def test_tools_reach_the_model_that_was_given_a_template_for_them(
    server: ServerProcess, model: str
) -> None:
    """The parser was chosen by that template; without one the engine answers 400."""
    function = {"name": "paint_it", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    reply = chat(server, tools=tools, tool_choice="auto").json()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    assert "paint_it" in tokenizer.decode(reply["prompt_token_ids"])
    assert reply["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_the_announced_mode_is_what_is_served(server: ServerProcess, model: str) -> None:
    temperature = 0.7
    reply = chat(server, temperature=temperature, top_p=1.0, seed=3)
    assert reply.headers["X-Marft-Logprobs-Mode"] == "processed_logprobs"
    assert json.loads(reply.headers["X-Marft-Sampling-Defaults"])["temperature"] == 1.0
    answer = reply.json()
    (choice,) = answer["choices"]
    served = [token["logprob"] for token in choice["logprobs"]["content"]]
    prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = base(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]

    def scores(divisor: float) -> list[float]:
        picked = torch.tensor(ids).unsqueeze(1)
        return (logits / divisor).log_softmax(-1).gather(1, picked).squeeze(1).tolist()

    assert largest_gap(served, scores(temperature)) < 1e-3
    assert largest_gap(served, scores(1.0)) > 1e-2
