"""Where the processes of a job meet: the address that this host listens at, and by which the other hosts reach it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ringtrain.job.host import address_towards, addresses_of, usual_address
from ringtrain.runner.hosts import is_this_host, without_user


class Meeting:
    """Has the address where the server listens, and the one by which the processes of each host reach it."""

    def __init__(self, hosts: Sequence[str], interfaces: str, may_others_come: bool = False):
        """
        Args:
            interfaces: those that the user has named, if any.
            may_others_come: whether processes may come from hosts that are not known yet.
        """
        self._remote = [host for host in hosts if not is_this_host(host)]
        self._named = ""
        # this host may have none of them where it has no ranks
        with contextlib.suppress(ValueError):
            self._named = "".join(addresses_of(interfaces)[:1])
        self._is_alone = not self._remote and not may_others_come

    @property
    def listens_at(self) -> str:
        if self._is_alone:
            return "127.0.0.1"
        is_of_6 = any(":" in self.address_for(host) for host in self._remote)
        return self._named or ("::" if is_of_6 else "0.0.0.0")

    def address_for(self, host: str) -> str:
        if self._is_alone:
            return "127.0.0.1"
        if self._named:
            return self._named
        if not is_this_host(host):
            return _address_towards(host)
        # ranks that others are to reach tell them the address that they have met at
        return _address_towards(self._remote[0]) if self._remote else usual_address()


def _address_towards(host: str) -> str:
    try:
        return address_towards(without_user(host))
    except OSError:
        return usual_address()  # ssh will say what is wrong
