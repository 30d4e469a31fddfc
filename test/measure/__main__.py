"""`python -m measure`, in test/: as `python -m ringtrain.bench`, with measurements of our own."""

import sys
from collections.abc import Sequence

from measure.faults.soak import Faults
from measure.gpu.measurement import Gpu
from measure.negotiation import Negotiation
from ringtrain.bench import command

MEASUREMENTS = (Gpu(), Negotiation(), Faults())
EXAMPLES = """\
examples:
  python -m measure gpu -np 2 --json gpu.json
  python -m measure negotiation --max-ranks 4096
  python -m measure faults --count 200
  python -m measure.hosts --hosts 2 --ranks 2 -- python -m measure faults --over {hosts}
"""


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(argv, MEASUREMENTS, "measure", EXAMPLES)


if __name__ == "__main__":
    sys.exit(main())
