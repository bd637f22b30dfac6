"""One recorded chat on a real server: ``python -m tests.runtimes.classic.play URL LOGS``.

A planner and a coder talk twice, once streamed.
"""

from __future__ import annotations

import sys
from typing import Any

from autogen import ConversableAgent

from marft_agents import MarftRecorder


def agent(name: str, url: str, *, stream: bool) -> ConversableAgent:
    entry: dict[str, Any] = {"model": name, "base_url": url, "api_key": "none"}
    entry |= {"max_tokens": 8, "temperature": 1.0, "stream": stream}
    return ConversableAgent(
        name,
        system_message=f"You are the {name}. Answer in one short sentence.",
        llm_config={"config_list": [entry], "cache_seed": None},
        human_input_mode="NEVER",
        code_execution_config=False,
    )


def play(url: str, logs: str) -> None:
    with MarftRecorder(logs) as recorder:
        for stream in (False, True):
            planner, coder = (agent(name, url, stream=stream) for name in ("planner", "coder"))
            recorder.wrap([planner, coder])
            with recorder.episode(metadata={"stream": stream}) as episode:
                planner.initiate_chat(coder, message="How do I sort a list?", max_turns=2)
                episode.reward(1.0)


if __name__ == "__main__":
    play(*sys.argv[1:3])
