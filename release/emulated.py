"""Installs an AArch64 wheel and Python that run on this processor by QEMU, without changing the system.

    python release/emulated.py build/aarch64 dist/ringtrain-...-cp311-cp311-manylinux_2_28_aarch64.whl

Python 3.11 and its libraries are packages of Debian 12 that apt downloads into the folder and dpkg-deb unpacks there;
NumPy and the other packages are AArch64 wheels from PyPI. The result is a virtual environment, build/aarch64/env, whose
bin/python is a script that starts QEMU. Needs apt, Debian's keys and qemu-user; no root and no binfmt.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "3.11"
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main"
OF_DEBIAN = (f"python{VERSION}-minimal", f"libpython{VERSION}-stdlib", "libstdc++6")
OF_TESTS = ("pytest>=8,<9.2", "pytest-xdist>=3.5")
# pip takes each name of a platform by itself.
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def main(folder: str, wheel: str) -> int:
    """Leaves nothing in `folder` of what was installed there before."""
    into = Path(folder).resolve()
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    _install_python(into)
    _install_packages(into, wheel)
    _run(str(into / "env" / "bin" / "python"), "-c", "import ringtrain, platform; print(platform.machine())")
    return 0


def _install_python(into: Path) -> None:
    """With the packages that apt keeps in folders of its own: those of this machine stay as they are."""
    apt = into / "apt"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"{SOURCE}\n")
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Dir::State": f"{apt}/state",
        "Dir::State::status": f"{apt}/status",
        "Dir::Cache": f"{apt}/cache",
        "Dir::Etc::sourcelist": f"{apt}/sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
    }
    options = [f"--option={name}={value}" for name, value in settings.items()]
    _run("apt-get", "--quiet=2", *options, "update")
    words = ("--quiet=2", "--yes", "--download-only", "--no-install-recommends")
    _run("apt-get", *words, *options, "install", *OF_DEBIAN)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(into / "root"))
    shutil.rmtree(apt)


def _install_packages(into: Path, wheel: str) -> None:
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        raise FileNotFoundError("qemu-aarch64 is not on PATH; `make qemu` installs it")
    root, environment = into / "root", into / "env"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\ninclude-system-site-packages = false\n")
    words = shlex.join([emulator, "-L", str(root), "-0"]), shlex.quote(f"{root}/usr/bin/python{VERSION}")
    # sys.executable is the name that QEMU passes on: what this Python starts as itself is emulated, too.
    python.write_text(f'#!/bin/sh\nexec {words[0]} "$0" {words[1]} "$@"\n')
    python.chmod(0o755)
    packages = environment / "lib" / f"python{VERSION}" / "site-packages"
    of_pip = ("--quiet", "--only-binary=:all:", f"--python-version={VERSION}", f"--target={packages}")
    platforms = [f"--platform={name}" for name in PLATFORMS]
    _run(sys.executable, "-m", "pip", "install", *of_pip, *platforms, wheel, *OF_TESTS)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except FileNotFoundError as error:
        sys.exit(f"emulated.py: {error}")
