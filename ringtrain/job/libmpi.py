"""The MPI library that is mapped into this process."""

from __future__ import annotations

import re

# IBM's has a name of its own, Cray's is called after the compiler. Not libmpi_cxx and the like, which lie beside them.
_LIBRARY = re.compile(r"/libmpi(ch|_(abi|ibm|(cray|gnu|intel|nvidia|amd|aocc)\w*))?\.so[.\d]*$")


def loaded_library() -> str | None:
    """Path of the libmpi that is mapped into this process, or None."""
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps]
    return next((path for path in paths if _LIBRARY.search(path)), None)
