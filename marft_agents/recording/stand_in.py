"""An object in place of another one, for integrations that put an identity in front of it.

Invariant: to the app and its runtime it is the object that it stands for: same class, same
attributes, and copies and pickles are of that object.
"""

from __future__ import annotations

from typing import Any


class StandIn:
    """Stands for ``inner``; ``own``: attributes of the stand-in itself, named ``_marft_…``."""

    _marft_inner: Any

    def __init__(self, inner: Any, **own: Any) -> None:
        self.__dict__.update(_marft_inner=inner, **own)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] read-only
        return type(self._marft_inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_marft_"):
            raise AttributeError(name)
        return getattr(self._marft_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._marft_inner, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._marft_inner.__reduce_ex__(protocol)
