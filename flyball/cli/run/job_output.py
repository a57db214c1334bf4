"""The output of a job's ranks on the terminal of the command that launched it."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from flyball.cli.logs.console import LogFollower
from flyball.cli.logs.log_mirror import RankZeroElsewhere
from flyball.cli.reach import this_host
from flyball.cli.run.own_terminal import OwnTerminal, wish_of
from flyball.cli.show.messages import beside_output, say

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient
    from flyball.contracts.cluster import JobSpec
    from flyball.launch.launcher import RunRequest


class JobOutput:
    """Shows it until `stack` is closed. With --output json stdout is for the result."""

    def __init__(self, request: RunRequest, spec: JobSpec, stack: ExitStack) -> None:
        self._request = request
        self._spec = spec
        self._stack = stack
        self._out = sys.stderr if request.output == "json" else sys.stdout
        self._terminal: OwnTerminal | None = None

    def lend_terminal(self, host_dir: Path | None) -> None:
        """Have the workers on this machine get what they are to have of this terminal; before the job is submitted."""
        wish = wish_of(
            self._request.console,
            self._spec.nproc_per_node,
            os.environ,
            out=self._out,
            err=sys.stderr,
            one_rank=self._spec.world_size == 1,
        )
        if wish is not None and host_dir is not None and os.access(host_dir, os.W_OK):
            self._terminal = OwnTerminal(host_dir, self._spec.job, wish)
            self._stack.enter_context(self._terminal.lent())

    def follow(self, logs: Path, *, after: int) -> None:
        """Show the ranks of this machine. `after`: the generation up to which all was shown."""
        follower = self._follower(logs, after)
        self._stack.enter_context(beside_output(follower.own_line))
        self._stack.callback(follower.close)
        if self._terminal:
            self._stack.callback(self._terminal.drain)
        follower.start()

    def follow_rank_zero(self, client: ApiClient, *, after: int, also_here: bool) -> None:
        """Show rank 0 if all ranks are on other hosts, or, with `also_here`, wherever they are."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="flyball-logs-")))
        follower = self._follower(folder, after)
        self._stack.callback(follower.close)
        follower.start()
        host_id = "" if also_here else self._request.host_id or this_host.host_id()
        elsewhere = RankZeroElsewhere(client, self._spec.job, host_id, folder)
        self._stack.callback(elsewhere.close)
        elsewhere.start()

    def _follower(self, logs: Path, after: int) -> LogFollower:
        return LogFollower(
            logs,
            self._request.console,
            nproc=self._spec.nproc_per_node,
            role=self._request.role,
            out=self._out.buffer,
            err=sys.stderr.buffer,
            on_broken_pipe=lambda: say(f"nobody reads the output any more; training goes on, its logs are in {logs}"),
            begins_at=lambda _path, generation, _rank: 0 if generation > after else None,
        )
