"""Jobs that go on when ranks are lost and when others come. Mirrors `horovod.elastic`.

@hvd.elastic.run
def train(state):
    while state.step < 1000:
        ...
        state.step += 1
        state.commit()

train(hvd.elastic.ArrayState(weights=weights, step=0))

running     run(): again and again, in one generation of ranks after the other
states      what a state is, one of Python objects, and one of arrays; files of them; which parts differ between ranks
"""

import typing

from ringtrain.elastic.running import generation as generation, run as run, run_fn as run_fn
from ringtrain.elastic.states import ArrayState as ArrayState, ObjectState as ObjectState, State as State
from ringtrain.errors import (
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from ringtrain.ops.faces import face as _face

if not typing.TYPE_CHECKING:  # what checks types knows the names from the imports
    __all__, __dir__, __getattr__ = _face(globals())
