"""A page as a real browser shows it, and what the page asks for meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_FLAGS = [
    "--headless",
    "--no-sandbox",  # root may not have one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # so that nothing is reached
    "--enable-logging=stderr",
]
# The browser asks its maker for things too, but on nobody's behalf.
_THE_BROWSER_ITSELF = "not an origin"


class BrowserUnavailable(Exception):
    """There is no browser; the message says what installs one."""


class Shown(NamedTuple):
    """The document after it was loaded, what the console says, and the addresses that the page has asked for."""

    document: str
    console: list[str]
    requests: set[str]


def show(page: Path, folder: Path) -> Shown:
    """Open a page in Chromium; `folder` is for what it writes.

    Raises:
        BrowserUnavailable: there is no Chromium.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise BrowserUnavailable("there is no chromium; `make browser` installs it")
    log = folder / "requests.json"
    own = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--dump-dom", page.as_uri()]
    ended = subprocess.run([chromium, *_FLAGS, *own], capture_output=True, text=True, timeout=100, check=True)
    console = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    return Shown(ended.stdout, console, _requests(log))


def _requests(log: Path) -> set[str]:
    told = (event.get("params", {}) for event in json.loads(log.read_text())["events"])
    return {one["url"] for one in told if one.get("initiator", _THE_BROWSER_ITSELF) != _THE_BROWSER_ITSELF}
