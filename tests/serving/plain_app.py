"""A two-agent application without any SDK: ``plain_app.py SERVER TASKS``; urllib and nothing else.

The router thinks, the writer answers; a shorter answer scores more. Every second task is streamed.
"""

import json
import sys
import urllib.request
from typing import Any


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def ask(base_url: str, agent: str, messages: list[Any], stream: bool) -> tuple[str, str]:
    body = {"model": agent, "messages": messages, "max_tokens": 12, "stream": stream}
    with post(f"{base_url}/chat/completions", body) as reply:
        turn_id = reply.headers["X-Marft-Turn"]
        if not stream:
            return json.load(reply)["choices"][0]["message"]["content"], turn_id
        text = ""
        for line in reply:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
        return text, turn_id


def main(server: str, tasks: int) -> None:
    for number in range(tasks):
        task = {"number": number, "question": f"ship on friday? {number} tests fail."}
        with post(f"{server}/episodes", {"task": task}) as reply:
            episode = json.load(reply)
        urls = episode["base_urls"]
        question = {"role": "user", "content": task["question"]}
        stream = number % 2 == 1
        plan, _ = ask(urls["router"], "router", [question], stream)
        told = {"role": "user", "content": f"the router says: {plan}"}
        answer, turn_id = ask(urls["writer"], "writer", [question, told], stream)
        here = f"{server}/episodes/{episode['id']}"
        value = 1.0 / (1.0 + (len(plan) + len(answer)) / 20.0)
        post(f"{here}/rewards", {"value": value}).close()
        post(f"{here}/rewards", {"value": 0.0, "turn_id": turn_id, "source": "style"}).close()
        post(f"{here}/end", {"reason": "terminated"}).close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
