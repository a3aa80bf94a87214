"""Who goes first. The scheduler asks a Policy for one key a request and does everything else by that order.

The same order serves three questions: who of the waiting is admitted next, who of the running gets tokens and pages
first, and (from its end) who is preempted when pages run out. So the first of the order can always finish.

Fair share between tenants is another Policy: start-time fair queueing gives each request its tenant's virtual time on
arrival as the second element of the key. Keys do not change while a request lives.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol

from ..core import Request


class Policy(Protocol):
    def key(self, request: Request) -> tuple:
        """Called once, when a request is added. Unique; smaller goes first."""
        ...


class PriorityThenArrival:
    """Lower priority numbers first, then first come, first served."""

    def __init__(self) -> None:
        self._count = count()

    def key(self, request: Request) -> tuple:
        return (request.priority, request.arrival_time, next(self._count))
