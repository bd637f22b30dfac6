"""Many versions of a few agents, clients that never pause, and a judge of who answered what.

Every version's adapter is random and large enough that its log-probabilities are its fingerprint:
a reply belongs to a version when plain transformers + PEFT with that version's adapter gives the
same log-probability for every token, and no other version does.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# reason: transformers and peft ship no complete types
from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from marft_agents.registry import Registry, describe_base
from marft_agents.registry.base import module_shapes
from marft_agents.schema import Probe, parse_served_name, served_name
from tests.tiny_model import make_tiny_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK = 8
SAME, OTHER = 2e-3, 2e-2
"""Largest difference (nats) to the version that answered; smallest to any other one."""
PROBE_PROMPT, PROBE_REPLY = [1, 40, 41, 42, 43], [50, 60, 70, 80, 90, 100]


class Versions:
    """A base, a registry full of versions, and what each of them must answer."""

    def __init__(self, root: Path, agents: Sequence[str], each: int, *, hidden: int = 128) -> None:
        self.model = make_tiny_model(root / "model", hidden=hidden)
        self.base = describe_base(self.model)
        self.registry = Registry(root / "adapters")
        self.agents = tuple(agents)
        self._staged = root / "staged"
        self._plain: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        self._plain.eval()
        self._tuned: Any = None
        self._active: str | None = None
        self._base_probe = self._score(self._plain, PROBE_PROMPT, PROBE_REPLY)
        for number in range(1, each + 1):
            for agent in self.agents:
                self._publish(agent, number)

    def _publish(self, agent: str, number: int) -> None:
        name = served_name(agent, number)
        folder = self._staged / name
        draw = torch.Generator().manual_seed(hash_of(name))
        tensors: dict[str, torch.Tensor] = {}
        for module, (out, into) in module_shapes(self.model, TARGETS).items():
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, into, generator=draw) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.1
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
        config |= {"target_modules": list(TARGETS), "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        probe = Probe(
            prompt_token_ids=PROBE_PROMPT,
            token_ids=PROBE_REPLY,
            logprobs=self.logprobs(name, folder, PROBE_PROMPT, PROBE_REPLY),
            base_logprobs=self._base_probe,
        )
        self.registry.publish(agent, folder, base=self.base, parent=None, probe=probe)

    def logprobs(
        self, name: str, folder: Path, prompt: Sequence[int], reply: Sequence[int]
    ) -> list[float]:
        """Log-probability (L,) of each reply token under one version."""
        if self._tuned is None:
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            self._tuned = cast(
                Any, PeftModel.from_pretrained(model, folder, adapter_name=_key(name))
            )
            self._tuned.eval()
        if _key(name) not in self._tuned.peft_config:
            self._tuned.load_adapter(str(folder), adapter_name=_key(name))
        if self._active != name:  # slow with many adapters at hand
            self._tuned.set_adapter(_key(name))
            self._active = name
        return self._score(self._tuned, prompt, reply)

    def check(self, answers: Iterable[Answer], *, alike: float = 0.0) -> None:
        """Each is of the version that its header names, and of no other one near it.

        ``alike``: share of them that one near it could have given, too, as trained ones can.
        """
        told: dict[str, list[Answer]] = {}
        for answer in answers:
            assert answer.version is not None and answer.version[0] == answer.agent
            assert answer.tokens and len(answer.tokens) == len(answer.logprobs)
            agent, number = answer.version
            for near in (number - 1, number, number + 1):
                if near in self.registry.versions(agent):
                    told.setdefault(served_name(agent, near), []).append(answer)
        others: list[tuple[str, float, Answer]] = []
        for name, some in told.items():
            for answer in some:
                gap = self._gap(answer, name)
                if name == served_name(answer.agent, (answer.version or ("", 0))[1]):
                    assert gap < SAME, (name, gap, answer)
                else:
                    others.append((name, gap, answer))
        like = [other for other in others if other[1] <= OTHER]
        assert len(like) <= alike * len(others), like[:3]

    def _gap(self, answer: Answer, name: str) -> float:
        """Largest difference (nats) of an answer's log-probabilities to a version's."""
        agent, number = parse_served_name(name) or ("", 0)
        folder = self.registry.path(agent, number)
        expected = self.logprobs(name, folder, answer.prompt, answer.tokens)
        return max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))

    @staticmethod
    def _score(model: Any, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
        ids = torch.tensor([[*prompt, *reply]])
        with torch.inference_mode():
            logprobs = model(ids).logits[0].float().log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(reply) - 1)
        return [float(logprobs[p, t]) for p, t in zip(places, reply, strict=True)]


def processes(*words: str) -> dict[int, list[str]]:
    """Command lines of running processes that hold all these words, by process id."""
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if all(any(word in part for part in argv) for word in words):
                found[int(entry.name)] = argv
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes together, pages that they share counted once each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def family(pid: int) -> list[int]:
    """All processes that came from this one."""
    found, parents = [pid], dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1])
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def hash_of(name: str) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(name.encode()[-7:], "big")


def _key(name: str) -> str:
    return name.replace("@", "-")


@dataclass
class Answer:
    """One reply as a client saw it."""

    agent: str
    episode: str | None
    streamed: bool
    status: int
    version: tuple[str, int] | None = None
    prompt: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    problem: str | None = None

    def read(self, body: dict[str, Any]) -> None:
        """Take in a reply or one of its chunks."""
        if "error" in body:
            self.problem = json.dumps(body["error"])
            return
        self.prompt = body.get("prompt_token_ids") or self.prompt
        for choice in body["choices"]:
            self.tokens += choice.get("token_ids") or []
            content = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [entry["logprob"] for entry in content]


class Clients:
    """Tasks that ask again as soon as they are answered, until they are told to stop.

    Half of them stream; half of them stay in an episode for a few calls.
    """

    def __init__(self, url: str, agents: Sequence[str], count: int, *, max_tokens: int) -> None:
        self.url = url
        self.agents = agents
        self.max_tokens = max_tokens
        self.answers: list[Answer] = []
        self.ended: list[str] = []
        """Episodes that are over."""
        self._stop = asyncio.Event()
        self._count = count
        self._episodes = itertools.count()

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._count)
        async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, i) for i in range(self._count)))

    def stop(self) -> None:
        self._stop.set()

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(number)
        episode: str | None = None
        left = 0
        while not self._stop.is_set():
            if left == 0:
                if episode is not None:
                    self.ended.append(episode)
                left = draw.randint(1, 4)
                episode = f"e{next(self._episodes)}" if number % 4 < 2 else None
            left -= 1
            agent = draw.choice(self.agents)
            answer = Answer(agent, episode, streamed=number % 2 == 0, status=0)
            self.answers.append(answer)
            await self._ask(http, answer, draw)

    async def _ask(self, http: httpx.AsyncClient, answer: Answer, draw: random.Random) -> None:
        text = draw.choice(["ship on friday?", "two tests fail.", "please answer in one line."])
        body: dict[str, Any] = {
            "model": answer.agent,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "logprobs": True,
            "return_token_ids": True,
            "stream": answer.streamed,
        }
        headers = {} if answer.episode is None else {"X-Marft-Episode": answer.episode}
        url = f"{self.url}/v1/chat/completions"
        try:
            async with http.stream("POST", url, json=body, headers=headers) as response:
                answer.status = response.status_code
                answer.version = parse_served_name(response.headers.get("x-marft-adapter", ""))
                if answer.streamed and response.is_success:
                    async for line in response.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            answer.read(json.loads(line[6:]))
                else:
                    answer.read(json.loads(await response.aread()))
        except httpx.HTTPError as error:
            answer.problem = f"{type(error).__name__}: {error}"
