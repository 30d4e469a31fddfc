"""`python -m measure`, in test/: as `python -m ringtrain.bench`, with measurements of our own."""

import sys
from collections.abc import Sequence

from measure.faults.soak import Faults
from measure.gpu.measurement import Gpu
from measure.idle import Idle
from measure.jax.step import JaxStep
from measure.kvstore_job import KVStoreJob
from measure.negotiation import Negotiation
from measure.overlap import Overlap
from measure.parameters import Parameters
from measure.pending import Pending
from measure.scale import Scale
from measure.submission import Submission
from ringtrain.bench import cli

MEASUREMENTS = (
    Gpu(),
    Negotiation(),
    Scale(),
    Faults(),
    Idle(),
    Submission(),
    Parameters(),
    Pending(),
    Overlap(),
    JaxStep(),
    KVStoreJob(),
)
EXAMPLES = """\
examples:
  python -m measure gpu -np 2 --json gpu.json
  python -m measure negotiation --max-ranks 4096
  python -m measure scale --ranks 1024 10000
  python -m measure faults --count 200
  python -m measure submission -np 2 --launches 3
  python -m measure jax -np 2 --models mlp --rounds 21
  python -m measure.hosts --hosts 2 --ranks 2 -- python -m measure faults --over {hosts}
"""


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(argv, MEASUREMENTS, "measure", EXAMPLES)


if __name__ == "__main__":
    sys.exit(main())
