"""Stacks for each module of these tests, and the uninterrupted runs that their jobs are compared with."""

from __future__ import annotations

from support.servers.stack_fixtures import make_stack, reference

__all__ = ["make_stack", "reference"]
