"""A real browser for tests: Chromium, over the pipe of its debugging protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page, driven over the pipe of Chromium's debugging protocol: JSON messages that end with a zero byte."""

    def __init__(self, profile: Path) -> None:
        to_child, self._commands = os.pipe()
        self._answers, from_child = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
        ]
        flags += ["--hide-scrollbars", "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
        # Chromium reads commands from 3 and answers on 4; descriptors from 10 on avoid conflicts.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_child, from_child)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, ends), str(CHROMIUM), *flags, "--remote-debugging-pipe"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_child, from_child, *ends):
            os.close(end)
        self._read = b""
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        page = self._first_page()
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Log.enable")
        self._ask("Page.enable")

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever the expression gives
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> Any:  # noqa: ANN401 - whatever the expression gives
        deadline = time.monotonic() + DEADLINE_S
        while not (value := self._evaluate_between_pages(expression)):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText"), self.errors)
        return value

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Show pages as on a screen of this size."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Save what the screen shows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._commands)
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        os.close(self._answers)

    def _first_page(self) -> str:
        """It may arrive after the reply to the first command."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            targets = self._ask("Target.getTargets")["targetInfos"]
            for target in targets:
                if target["type"] == "page":
                    return str(target["targetId"])
            assert time.monotonic() < deadline, targets

    def _evaluate_between_pages(self, expression: str) -> Any:  # noqa: ANN401 - whatever the expression gives
        """None also if the page was replaced during the evaluation, because the address leads to another one."""
        answer = self._answer("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"]["result"].get("value") if "result" in answer else None

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        answer = self._answer(method, **parameters)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _answer(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                readable, _, _ = select.select([self._answers], [], [], DEADLINE_S)
                assert readable, f"the browser did not answer {method} within {DEADLINE_S} s"
                chunk = os.read(self._answers, 1 << 16)
                assert chunk, "the browser ended"
                self._read += chunk
            raw, _, self._read = self._read.partition(b"\0")
            answer: dict[str, Any] = json.loads(raw)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                return answer
