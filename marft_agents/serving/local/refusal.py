"""What the engine says no to, as the error reply that goes out."""

from __future__ import annotations

from typing import Any

from marft_agents.errors import MarftError


class Refusal(MarftError, ValueError):
    """A request that is not run. ``status`` is the HTTP status, ``kind`` the error's ``type``."""

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or {404: "NotFoundError", 500: "InternalServerError"}.get(
            status, "BadRequestError"
        )
        self.param = param

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }


def unknown_model(name: str) -> Refusal:
    """The reply for a model name that is neither the base nor a loaded adapter."""
    return Refusal(404, f"The model `{name}` does not exist.", param="model")
