"""A replica that has changed by mistake: after a commit all ranks go on with what most of them have."""

import numpy as np
import pytest
from harness.logged import messages

import ringtrain as hvd


def synchronized(weights, commits=1):
    """Returns what a rank has after so many commits, a change to these weights and a sync, and what was said."""
    state = hvd.elastic.ArrayState(weights=np.zeros(100, np.float32))
    for _ in range(commits):
        state.commit()
    state.weights[:] = weights
    with messages() as said:
        state.sync()
    return state.weights, said


@pytest.mark.ranks(3)
def test_most_ranks_overrule_the_first_one():
    weights, said = synchronized(7 if hvd.rank() == 0 else 1)
    assert (weights == 1).all()
    text = 'elastic: "weights" differs on rank 0 from ranks 1-2. All go on with that of rank 1'
    assert said == [text] * (hvd.rank() == 0)


@pytest.mark.ranks(4)
def test_a_tie_is_said_and_the_first_rank_is_taken():
    weights, said = synchronized(hvd.rank() // 2)
    assert (weights == 0).all()
    assert len(said) == (hvd.rank() == 0) and all(
        "; as many have one value as another. All go on" in one for one in said
    )


@pytest.mark.ranks(4)
def test_ranks_without_the_newest_commit_have_no_vote():
    weights, said = synchronized(hvd.rank(), commits=3 if hvd.rank() == 3 else 1)
    assert (weights == 3).all() and said == []


@pytest.mark.ranks(3)
def test_before_the_first_commit_the_first_rank_is_right():
    weights, said = synchronized(0 if hvd.rank() == 0 else 1, commits=0)
    assert (weights == 0).all() and said == []
