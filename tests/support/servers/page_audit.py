"""Accessibility of pages, by axe-core: a script that npm fetches once, and no part of the repository."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

from support.servers.browser import Browser

VERSION = "4.14.1"
RUN = """
window.audit = null;
axe.run(document, {resultTypes: ["violations"]}).then((found) => {
  const serious = found.violations.filter((one) => ["serious", "critical"].includes(one.impact));
  const nodes = (one) => one.nodes.map((node) => [node.target.join(" "), node.failureSummary]);
  window.audit = JSON.stringify(serious.map((one) => ({rule: one.id, nodes: nodes(one)})));
}); 0
"""


def axe_core(kept: Path) -> str:
    """Return the script; '' if npm cannot fetch it here, with a warning."""
    packed = kept / f"axe-core-{VERSION}.tgz"
    if not packed.exists():
        with tempfile.TemporaryDirectory(dir=kept) as folder:  # other workers of xdist see it once it is whole
            fetch = ["npm", "pack", f"axe-core@{VERSION}", "--pack-destination", folder]
            try:
                subprocess.run(fetch, check=True, capture_output=True, timeout=60.0)
            except (OSError, subprocess.SubprocessError) as error:
                warnings.warn(f"pages are not checked by axe-core, which npm did not fetch: {error}", stacklevel=2)
                return ""
            (Path(folder) / packed.name).replace(packed)
    with tarfile.open(packed) as tar:
        member = tar.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def serious_findings(browser: Browser, axe: str) -> list[dict[str, Any]]:
    """Return the serious and critical findings on the page that is open."""
    if not axe:
        return []
    browser.evaluate(f"{axe}; 0")
    browser.evaluate(RUN)
    found: list[dict[str, Any]] = json.loads(browser.until("window.audit"))
    return found
