"""A support-triage duo on AutoGen: a router names the department, a writer answers and signs.

This is the application as its owner wrote it. Nothing in it knows about recording or training;
each agent asks for a model of its own name.
"""

from __future__ import annotations

from dataclasses import dataclass

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import SourceMatchTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, LLMMessage, ModelFamily, ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.support_triage.tasks import Ticket

ROUTER_PROMPT = "You route customer messages. Answer with one word: billing, delivery or technical."
WRITER_PROMPT = "You answer customers in one short sentence and sign with the department."
SAMPLES = (
    ("I paid twice for one lamp.", "billing", "Sorry, we will check the payment. - billing"),
    ("My lamp flickers.", "technical", "Sorry, we will help you fix it. - technical"),
    ("My lamp is late.", "delivery", "Sorry, we will trace the parcel. - delivery"),
)


@dataclass(frozen=True)
class Models:
    """One model client per agent, shared by all conversations of one event loop."""

    router: OpenAIChatCompletionClient
    writer: OpenAIChatCompletionClient

    async def close(self) -> None:
        await self.router.close()
        await self.writer.close()


def make_models(base_url: str, *, api_key: str = "none", temperature: float) -> Models:
    """Each agent asks for the model that carries its own name."""
    return Models(
        router=_client("router", base_url, api_key, temperature, max_tokens=6),
        writer=_client("writer", base_url, api_key, temperature, max_tokens=24),
    )


def make_team(models: Models) -> RoundRobinGroupChat:
    """A fresh team for one conversation."""
    router = AssistantAgent(
        "router",
        model_client=models.router,
        system_message=ROUTER_PROMPT,
        model_context=UnboundedChatCompletionContext(_router_samples()),
    )
    writer = AssistantAgent(
        "writer",
        model_client=models.writer,
        system_message=WRITER_PROMPT,
        model_context=UnboundedChatCompletionContext(_writer_samples()),
    )
    return RoundRobinGroupChat(
        [router, writer], termination_condition=SourceMatchTermination(["writer"])
    )


def routed(ticket: Ticket, result: TaskResult) -> bool:
    """Whether the router named the right department, and only that."""
    return _said(result, "router").rstrip(".").lower() == ticket.department


def signed(ticket: Ticket, result: TaskResult) -> bool:
    """Whether the customer's answer is signed with the right department."""
    answer, _, signature = _said(result, "writer").rstrip(".").rpartition(" - ")
    return bool(answer.strip()) and signature.lower() == ticket.department


def reward(ticket: Ticket, result: TaskResult) -> float:
    """The team's verified reward in [0, 1]: half for the routing, half for the signature."""
    return 0.5 * routed(ticket, result) + 0.5 * signed(ticket, result)


def success(ticket: Ticket, result: TaskResult) -> bool:
    """Routed right and signed right."""
    return routed(ticket, result) and signed(ticket, result)


def _said(result: TaskResult, agent: str) -> str:
    return "".join(m.to_text() for m in result.messages if m.source == agent).strip()  # pyright: ignore[reportAttributeAccessIssue] every message of this team is a chat message


def _client(
    model: str, base_url: str, api_key: str, temperature: float, *, max_tokens: int
) -> OpenAIChatCompletionClient:
    info = ModelInfo(
        vision=False,
        function_calling=False,
        json_output=False,
        structured_output=False,
        family=ModelFamily.UNKNOWN,
    )
    return OpenAIChatCompletionClient(
        model=model,
        base_url=base_url,
        api_key=api_key,
        model_info=info,
        temperature=temperature,
        max_tokens=max_tokens,
    )


def _router_samples() -> list[LLMMessage]:
    samples: list[LLMMessage] = []
    for message, department, _ in SAMPLES:
        samples.append(UserMessage(content=message, source="user"))
        samples.append(AssistantMessage(content=department, source="router"))
    return samples


def _writer_samples() -> list[LLMMessage]:
    samples: list[LLMMessage] = []
    for message, department, answer in SAMPLES:
        samples.append(UserMessage(content=message, source="user"))
        samples.append(UserMessage(content=department, source="router"))
        samples.append(AssistantMessage(content=answer, source="writer"))
    return samples
