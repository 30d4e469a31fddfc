"""A double of YARN: the REST interface of its ResourceManager, and a stand-in for `hadoop` that knows DistributedShell.

    with yarn_double(folder, hosts=["n1", "n2"]) as cluster:
        subprocess.run(["ringrun", "--launcher", "yarn", ...], env={**os.environ, **cluster.environment})

Containers are processes of this machine with the names of the cluster's hosts. The fake knows of YARN what
Hadoop 3.3 documents and its client's source shows. No Hadoop was at hand to compare it with.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from harness.hosts import HostsUnavailable

JAR = "share/hadoop/yarn/hadoop-yarn-applications-distributedshell-3.3.6.jar"
# In the environment of each container: the folder of the cluster.
OF_CLUSTER = "YARN_DOUBLE"
CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
# From SIGTERM to SIGKILL, as of a NodeManager.
_KILL_S = 0.25
_ON_HOST = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec bash "$1"']
# `hadoop fs`, and `hadoop jar` with DistributedShell's client, which looks what has become of its application.
_HADOOP = """\
#!{python}
import json, os, pathlib, shutil, sys, time, urllib.request
files = pathlib.Path({files!r})
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
tool, *words = sys.argv[1:]
if tool == "fs":
    where = files / words[-1]
    if words[0] == "-mkdir":
        where.mkdir(parents=True)
    elif words[0] == "-chmod":
        where.chmod(int(words[1], 8))
    else:
        shutil.rmtree(where)
    sys.exit()
assert words[1] == {client!r}, words
asked = dict(zip(words[2::2], words[3::2]))
if asked.get("-queue", "default") != "default":
    print("ERROR distributedshell.Client: no queue", asked["-queue"])
    sys.exit(1)
def ask(method, path, content=None):
    data = None if content is None else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request({address!r} + path, data, method=method)) as answer:
        return json.load(answer)
where = files / asked["-appname"]
(where / "ExecScript.sh").write_text(pathlib.Path(asked["-shell_script"]).read_text())
app = ask("POST", "/double/submit", {{"script": str(where / "ExecScript.sh"), "asked": asked}})["id"]
print("INFO impl.YarnClientImpl: Submitted application", app, flush=True)
while (now := ask("GET", "/ws/v1/cluster/apps/" + app)["app"])["state"] not in ("FINISHED", "KILLED"):
    time.sleep(0.1)
print("INFO distributedshell.Client: yarnAppState=" + now["state"])
sys.exit(0 if now["finalStatus"] == "SUCCEEDED" else 2)
"""


class YarnDouble:
    """One application at a time. `room` is how many containers there is place for."""

    def __init__(self, folder: Path, hosts: list[str]):
        self.room = 100
        self.asked: dict[str, str] = {}
        self.modes: list[int] = []  # of the folder that the script lay in
        self.app: dict[str, str] = {}
        self._folder = folder
        self._hosts = hosts
        self._containers: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        (folder / "files").mkdir(parents=True)
        (folder / "log").touch()
        (folder / JAR).parent.mkdir(parents=True)
        (folder / JAR).touch()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._write_hadoop()

    @property
    def environment(self) -> dict[str, str]:
        """For ringrun, over that of this process."""
        return {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "HADOOP_HOME": str(self._folder),
            "HADOOP_CONF_DIR": str(self._folder / "conf"),
        }

    @property
    def commands(self) -> list[list[str]]:
        """All command lines of hadoop."""
        return [json.loads(line) for line in (self._folder / "log").read_text().splitlines()]

    @property
    def files(self) -> list[str]:
        """Returns the files in the user's home in the cluster's file system."""
        return [path.name for path in (self._folder / "files").iterdir()]

    @property
    def containers(self) -> list[int]:
        """Process ids of those that run."""
        return [process.pid for process in self._containers if process.poll() is None]

    def kill(self) -> None:
        """As `yarn application -kill`, or the REST interface."""
        with self._lock:
            if self.app["state"] in ("FINISHED", "KILLED"):
                return
            self.app |= {"state": "KILLED", "finalStatus": "KILLED", "diagnostics": "Application killed by user."}
        for number, pause_s in ((signal.SIGTERM, _KILL_S), (signal.SIGKILL, 0)):
            for process in self._containers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            time.sleep(pause_s)

    def close(self) -> None:
        if self.app:
            self.kill()
        self._server.shutdown()
        self._server.server_close()

    def _submit(self, script: str, asked: dict[str, str]) -> str:
        self.asked = asked
        self.modes.append(Path(script).parent.stat().st_mode & 0o777)
        identity = f"application_1700000000000_{len(self.modes):04}"
        self.app = {"id": identity, "state": "ACCEPTED", "finalStatus": "UNDEFINED", "diagnostics": "[no room yet]"}
        self._containers = []
        wanted = int(asked["-num_containers"])
        for number in range(min(wanted, self.room)):
            self._containers.append(self._start(script, number))
        if wanted <= self.room:
            self.app |= {"state": "RUNNING", "diagnostics": ""}
            threading.Thread(target=self._finish, daemon=True).start()
        return identity

    def _start(self, script: str, number: int) -> subprocess.Popen[bytes]:
        (folder := self._folder / f"container{len(self.modes)}_{number}").mkdir()
        with open(folder / "stderr", "wb") as log:
            return subprocess.Popen(
                [*_ON_HOST, self._hosts[number % len(self._hosts)], script],
                cwd=folder,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(folder),
                    "CONTAINER_ID": f"container_{number}",
                    OF_CLUSTER: str(self._folder),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _finish(self) -> None:
        codes = [process.wait() for process in self._containers]
        with self._lock:
            if self.app["state"] == "RUNNING":
                final = "FAILED" if any(codes) else "SUCCEEDED"
                self.app |= {"state": "FINISHED", "finalStatus": final, "diagnostics": f"codes={codes}"}

    def _write_hadoop(self) -> None:
        words = {"files": str(self._folder / "files"), "log": str(self._folder / "log"), "address": self.address}
        for name, text in (
            ("bin/hadoop", _HADOOP.format(python=sys.executable, client=CLIENT, **words)),
            ("conf/yarn-site.xml", site({"yarn.resourcemanager.webapp.address": self.address.removeprefix("http://")})),
        ):
            (path := self._folder / name).parent.mkdir(exist_ok=True)
            path.write_text(text)
        (self._folder / "bin" / "hadoop").chmod(0o755)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = double.app if double.app and urlsplit(self.path).path.endswith(double.app["id"]) else {}
                self._answer(200 if known else 404, {"app": known})

            def do_PUT(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                # a ResourceManager without Kerberos lets nobody end anything who does not say who it is
                if "user.name" not in parse_qs(urlsplit(self.path).query) or content != {"state": "KILLED"}:
                    self._answer(403, {})
                    return
                double.kill()
                self._answer(202, {"state": "KILLING"})

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(200, {"id": double._submit(content["script"], content["asked"])})

            def _answer(self, code: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None:
                pass

        return Handler


def site(settings: dict[str, str]) -> str:
    """A yarn-site.xml."""
    entries = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
    )
    return f"<?xml version='1.0'?><configuration>{entries}</configuration>"


@contextlib.contextmanager
def yarn_double(folder: Path, hosts: list[str]) -> Iterator[YarnDouble]:
    """Raises HostsUnavailable where nobody may give a process another name of its host."""
    if subprocess.run(["unshare", "--uts", "hostname", "n1"], capture_output=True, check=False).returncode != 0:
        raise HostsUnavailable("unshare --uts is not allowed here")
    double = YarnDouble(folder, hosts)
    try:
        yield double
    finally:
        double.close()
