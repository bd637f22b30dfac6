"""Append-only event log: one writer a segment, a reader that outlives damage.

Invariant: what ``LogWriter.write`` returned from is on its way to disk whole and in one line; what
the reader yields is a whole record of a known type, and everything else is counted with its place.
"""

from __future__ import annotations

from marft_agents.log.reader import LogReader
from marft_agents.log.records import Place, Skipped
from marft_agents.log.retention import Retention
from marft_agents.log.segment import append_event
from marft_agents.log.writer import LogWriter

__all__ = ["LogReader", "LogWriter", "Place", "Retention", "Skipped", "append_event"]
