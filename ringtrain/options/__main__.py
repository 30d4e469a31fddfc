"""`python -m ringtrain.options` prints docs/options.md, `python -m ringtrain.options keywords` keywords.py."""

import sys

from ringtrain.options import table

if sys.argv[1:] == ["keywords"]:
    print(table.typed(), end="")
else:
    print("# Options\n\nGenerated from the table in the core by `make docs`.\n")
    print((table.__doc__ or "").split("\n\n", 1)[1])
    print(table.markdown(), end="")
