"""A headless Chromium for tests of pages: what the page is once its scripts have run, and what the console said.

No driver and no protocol: Chromium runs with its clock sped up and prints the document it ends with. A test that wants
to know more adds a script to a copy of the page. Skipped, with the reason, where there is no Chromium or no axe-core:
`make browser` gets both.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_RUN_AXE = """
const until = setInterval(async () => {
  if (!document.documentElement.dataset.drawn) return;
  clearInterval(until);
  const found = await axe.run(document, { resultTypes: ["violations"] });
  const told = document.createElement("pre");
  told.id = "axe";
  told.textContent = JSON.stringify(found.violations.map((v) => ({
    id: v.id, impact: v.impact, nodes: v.nodes.map((n) => n.html.slice(0, 200)) })));
  document.body.append(told);
}, 50);
"""


class Seen(NamedTuple):
    """The document as it is at the end, and the lines of the console."""

    dom: str
    console: list[str]


def look(url: str, folder: Path, *, dark: bool = False, width: int = 1280, seconds: int = 8) -> Seen:
    """Opens `url` and waits until `seconds` of the page's own time have gone by."""
    chromium = next((found for name in _CHROMIUM if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("there is no Chromium here to open pages with; make browser installs it")
    command = [
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={folder / 'chromium'}", f"--window-size={width},2000", "--enable-logging=stderr", "--v=0",
        f"--virtual-time-budget={seconds * 1000}", "--dump-dom",
    ]  # fmt: skip
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    ran = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=True)
    return Seen(ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line])


def judged(page: Path, folder: Path, script: str = "", **options: Any) -> tuple[list[dict[str, Any]], Seen]:
    """What axe finds serious or worse in a copy of the page with one more script, and the page itself."""
    if not AXE.is_file():
        pytest.skip("axe-core is not here to judge pages with; make browser installs it where there is npm")
    copy = folder / f"judged-{page.name}"
    scripts = "".join(f"<script>{text}</script>" for text in (AXE.read_text("utf-8"), script, _RUN_AXE))
    copy.write_text(page.read_text("utf-8").replace("</body>", f"{scripts}</body>"), "utf-8")
    seen = look(copy.as_uri(), folder, **options)
    found = re.search(r'<pre id="axe">(.*?)</pre>', seen.dom, re.DOTALL)
    assert found is not None, seen.console
    findings = json.loads(html.unescape(found.group(1)))
    return [finding for finding in findings if finding["impact"] in ("serious", "critical")], seen
