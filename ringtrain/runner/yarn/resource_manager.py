"""YARN's ResourceManager by its REST interface: what has become of an application, and its end."""

from __future__ import annotations

import getpass
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.runner.allocation.hosts import UsageError

ADDRESS_VARIABLE = "RINGTRAIN_YARN_RESOURCE_MANAGER"
_FOLDER_VARIABLES = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_USUAL_FOLDER = "/etc/hadoop/conf"
_ANSWER_S = 5.0
# No proxy stands between a user and the cluster.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Status(NamedTuple):
    """What YARN says of an application: `state` is such as ACCEPTED, RUNNING or FAILED, `diagnostics` its own words.

    `outcome` is what the application itself has said at its end.
    """

    state: str
    outcome: str
    diagnostics: str

    @property
    def has_ended(self) -> bool:
        return self.state in ("FINISHED", "FAILED", "KILLED")

    def __str__(self) -> str:
        state = f"{self.state}, {self.outcome}" if self.state == "FINISHED" else self.state
        return f"{state}: {self.diagnostics}" if self.diagnostics else state


class ResourceManager:
    """One of `addresses` is the active one. Nothing raises: what cannot be asked is not known."""

    def __init__(self, addresses: Sequence[str]):
        self._addresses = addresses

    def status(self, application: str) -> Status | None:
        answer = self._ask("GET", application)
        if answer is None or "app" not in answer:
            return None
        told = answer["app"]
        fields = [str(told.get(name, "")).strip() for name in ("state", "finalStatus", "diagnostics")]
        return Status(*fields)

    def kill(self, application: str) -> bool:
        """Returns whether the ResourceManager has heard it."""
        return self._ask("PUT", f"{application}/state", {"state": "KILLED"}) is not None

    def _ask(self, method: str, path: str, content: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        # without Kerberos, this is how YARN learns who asks
        query = urllib.parse.urlencode({"user.name": os.environ.get("HADOOP_USER_NAME") or getpass.getuser()})
        for address in self._addresses:
            request = urllib.request.Request(
                f"{address}/ws/v1/cluster/apps/{path}?{query}",
                data=json.dumps(content).encode() if content is not None else None,
                headers={"Accept": "application/json", "Content-Type": "application/json"},
                method=method,
            )
            try:
                with _OPENER.open(request, timeout=_ANSWER_S) as response:
                    answer: dict[str, Any] = json.loads(response.read() or b"{}")
                    return answer
            except (OSError, ValueError):  # a standby, or none that is up
                continue
        return None


def addresses_of(environ: Mapping[str, str]) -> list[str]:
    """Those of the cluster's ResourceManagers: what the user has named, else of yarn-site.xml. Raises UsageError."""
    named = environ.get(ADDRESS_VARIABLE)
    if named:
        return [address.strip().rstrip("/") for address in named.split(",")]
    folder = next((environ[name] for name in _FOLDER_VARIABLES if environ.get(name)), _USUAL_FOLDER)
    path = Path(folder, "yarn-site.xml")
    remedy = f"set {ADDRESS_VARIABLE}, as in http://rm.example.org:8088"
    try:
        settings = _settings_of(path)
    except (OSError, ElementTree.ParseError) as error:
        raise UsageError(f"where is YARN's ResourceManager? {path} cannot be read: {error}; {remedy}") from error
    found = _web_addresses(settings)
    if not found:
        raise UsageError(f"where is YARN's ResourceManager? {path} does not say; {remedy}")
    return found


def _settings_of(path: Path) -> dict[str, str]:
    found = {}
    for entry in ElementTree.parse(path).getroot().iter("property"):
        found[(entry.findtext("name") or "").strip()] = (entry.findtext("value") or "").strip()
    return found


def _web_addresses(settings: Mapping[str, str]) -> list[str]:
    is_safe = settings.get("yarn.http.policy") == "HTTPS_ONLY"
    setting = f"yarn.resourcemanager.webapp.{'https.' if is_safe else ''}address"
    ids = settings.get("yarn.resourcemanager.ha.rm-ids", "")
    found = []
    for ending in [f".{name.strip()}" for name in ids.split(",")] if ids else [""]:
        host = settings.get(f"yarn.resourcemanager.hostname{ending}", "")
        usual = f"{host}:{8090 if is_safe else 8088}" if host else ""
        address = settings.get(f"{setting}{ending}", usual)
        # one value may stand in another one
        address = re.sub(r"\$\{([\w.-]+)\}", lambda match: settings.get(match[1], ""), address)
        if address:
            found.append(f"{'https' if is_safe else 'http'}://{address}")
    return found
