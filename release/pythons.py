"""Where the Pythons of this machine are, of the versions that ringtrain is for.

python release/pythons.py 3.10    prints the path of one
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# One wheel for each of these; that of the last one is for all that come after it, too.
OF_WHEELS = ("3.10", "3.11", "3.12")
ALL = (*OF_WHEELS, "3.13")


class PythonNotFound(Exception):
    """There is none of that version; the message says how to get one."""


def find(version: str) -> str:
    """The path of a Python such as "3.10": on PATH, of pyenv or of uv. Raises PythonNotFound."""
    for path in _candidates(version):
        if _version_of(path) == version:
            return path
    raise PythonNotFound(f"there is no Python {version}; try `uv python install {version}`, or pyenv")


def _candidates(version: str) -> Iterator[str]:
    if "{}.{}".format(*sys.version_info) == version:
        yield sys.executable
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    yield from sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))
    uv = shutil.which("uv")
    if uv is not None:
        yield _printed_by(uv, "python", "find", version)


def _version_of(path: str) -> str:
    """Nothing where it is no Python, or a shim of pyenv for one that is not there."""
    return _printed_by(path, "-c", "import sys; print('{}.{}'.format(*sys.version_info))") if path else ""


def _printed_by(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    try:
        print(find(sys.argv[1]))
    except PythonNotFound as error:
        sys.exit(f"pythons.py: {error}")
