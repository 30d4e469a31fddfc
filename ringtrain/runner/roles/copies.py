"""The current folder on other hosts: `rsync` copies what they do not have yet."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from ringtrain.runner.allocation.hosts import UsageError, is_this_host
from ringtrain.runner.launchers.remote_shell import remote_shell
from ringtrain.runner.roles.addresses import Address


class CopyFailed(Exception):
    """The folder is not on all hosts; the message names one. What is wrong rsync has said."""


def copy_folder(to: str, hosts: Sequence[Address], environ: Mapping[str, str]) -> None:
    """Copy the current folder to `to` on all hosts at the same time.

    Raises UsageError where there is no rsync, and CopyFailed.
    """
    with contextlib.ExitStack() as copies:
        started = {}
        for host in dict.fromkeys(hosts):
            try:
                copy = subprocess.Popen(command_of_copy(to, host, environ), stdin=subprocess.DEVNULL)
            except FileNotFoundError as error:
                raise UsageError("--sync-dst-dir wants rsync, here and on the hosts; install it") from error
            copies.callback(_end, copy)
            started[host] = copy
        for host, copy in started.items():
            code = copy.wait()
            if code != 0:
                reason = f"rsync ended with exit code {code}"
                raise CopyFailed(f"the current folder cannot be copied to {to} on {host.host}: {reason}")


def command_of_copy(to: str, host: Address, environ: Mapping[str, str]) -> list[str]:
    """The folder itself becomes `to`; what is there already stays."""
    words = ["rsync", "-az", "--exclude", ".git"]
    if is_this_host(host.host):
        return [*words, "./", f"{to}/"]
    shell = remote_shell(environ, ssh_options_of(host))
    name = f"[{host.host}]" if ":" in host.host else host.host
    return [*words, "-e", shlex.join(shell), "./", f"{name}:{to}/"]


def ssh_options_of(host: Address) -> list[str]:
    return [] if host.port is None else [f"-p{host.port}"]


def _end(copy: subprocess.Popen[bytes]) -> None:
    """Also where another one has failed, or this process is interrupted."""
    copy.kill()
    copy.wait()
