"""What the parts of the gateway note of a request for whoever observes it.

Invariant: without an observer nothing is noted and nothing fails.
"""

from __future__ import annotations

from starlette.requests import Request

VISIT = "marft.visit"
"""Where a request's scope keeps its visit."""
WRITE = "marft.write"
"""Where it keeps a short cut to the client for parts of a body, if the web server has one."""


def name_client(request: Request, name: str) -> None:
    """Say whose key the request bears."""
    if (visit := request.scope.get(VISIT)) is not None:
        visit.client = name


def note_problem(request: Request, problem: str) -> None:
    """Say why the request was turned away."""
    if (visit := request.scope.get(VISIT)) is not None:
        visit.problem = problem
