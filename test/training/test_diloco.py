"""DiLoCo for arrays: real ranks beside the restatement of the algorithm, compared with `==`."""

import pickle
import re
import subprocess

import diloco_reference
import numpy as np
import pytest

import ringtrain as hvd
from ringtrain import optim
from ringtrain.engine.compression import Compression
from ringtrain.job.world import tournament
from ringtrain.training import difference_codes

CODES = ("none", "fp16", "bf16", "int8", "int4")
SHAPES = ((3, 40), (7,), (2, 5, 6), ())


def start(dtype="float32"):
    """The parameters that all ranks begin with."""
    random = np.random.default_rng(3)
    return [random.integers(-8, 9, shape).astype(dtype) for shape in SHAPES]


def gradient(rank, step, parameters):
    """Depends on all three; multiples of 3 / 4, so that means over three ranks are exact, too."""
    random = np.random.default_rng([rank, step])
    return [(0.75 * random.integers(-5, 6, one.shape)).astype(one.dtype) for one in parameters]


def rough_gradient(rank, step, parameters):
    """Values with all their bits, which two ranks alone can average exactly."""
    random = np.random.default_rng([rank, step])
    return [(random.normal(size=one.shape) + one / 8).astype(one.dtype) for one in parameters]


def outer(lr=0.5, momentum=0.5):
    return optim.SGD(lr=lr, momentum=momentum, nesterov=momentum > 0)


def train(optimizer, weights, steps, first=0, of=gradient):
    for step in range(first, first + steps):
        optimizer.step(weights, of(hvd.rank(), step, weights))
    return weights


def require_trained(weights, steps, islands=None, of=gradient, dtype="float32", **how):
    """The weights are those that the restatement of the algorithm comes to on this rank, or on its island."""
    lists = alone() if islands is None else islands
    expected = diloco_reference.train(start(dtype), of, lists, steps, **how)
    require_equal(weights, expected[next(place for place, ranks in enumerate(lists) if hvd.rank() in ranks)])


def require_equal(weights, expected):
    assert len(weights) == len(expected)
    for own, right in zip(weights, expected, strict=True):
        assert own.dtype == right.dtype
        assert (own == right).all(), (own, right)


def close(optimizer):
    """Gives back the process set of the island: the tests share a job."""
    hvd.remove_process_set(optimizer._local_steps.islands.of_rank)


def alone():
    return [[rank] for rank in range(hvd.size())]


def _in_words(given):
    """A name for pytest that is the same in each process, whatever the address of an object is."""
    return " and ".join(given) if isinstance(given, dict) else str(given)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("momentum", (0.0, 0.5))
def test_ranks_train_as_the_restatement_does(momentum):
    weights = start()
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 3, outer=outer(momentum=momentum), islands="rank")
    train(optimizer, weights, 11)
    require_trained(weights, 11, every=3, inner_lr=0.5, outer_lr=0.5, momentum=momentum)
    assert (optimizer.inner_steps, optimizer.outer_steps) == (11, 3)


# By rank, in even and in odd steps: all sums of islands are powers of two, and so is that of all ranks.
WEIGHTS = {2: ([6, 2], [0, 8]), 3: ([4, 2, 2], [2, 4, 2]), 4: ([2, 2, 3, 1], [4, 8, 1, 3])}


def weight_of(rank, step):
    return WEIGHTS[hvd.size()][step % 2][rank]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("code", ["none", "fp16", "int8"])
def test_ranks_train_by_weight_as_the_restatement_does(code):
    islands = [[0], [1], [2, 3]] if hvd.size() == 4 else alone()
    if code == "fp16" and hvd.size() != 3:
        pytest.skip("a weight of 1.5 times the mean rounds in 16 bits")
    weights = start()
    how = {"outer": outer(), "compression": getattr(Compression, code), "islands": islands}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 3, **how)
    for step in range(8):
        optimizer.set_weight(weight_of(hvd.rank(), step))
        train(optimizer, weights, 1, step)
    how = {"every": 3, "inner_lr": 0.5, "outer_lr": 0.5, "momentum": 0.5, "code": code}
    require_trained(weights, 8, islands, weight=weight_of, **how)
    optimizer.set_weight(None)
    train(optimizer, weights, 1, 8)  # the outer step is one of equal ranks again
    close(optimizer)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("code", ["none", "int8"])
def test_weights_of_differences_on_some_ranks_only_and_of_0_fail_on_all(code):
    how = {"compression": getattr(Compression, code), "islands": "rank"}
    for weight, message in (
        (3 if hvd.rank() == 0 else None, "rank 0 gave a weight, rank.* gave no weight"),
        (0, "the weights of all ranks are 0"),
    ):
        weights = start()
        optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 1, **how)
        optimizer.set_weight(weight)
        with pytest.raises(hvd.MismatchError, match=message):
            train(optimizer, weights, 1)
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="DiLoCo: weight must be a finite number that is not negative, not"):
            optimizer.set_weight(weight)
    with pytest.raises(TypeError, match="DiLoCo: weight must be a number, not 'many'"):
        optimizer.set_weight("many")


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing"),
    [
        ([[0], [1, 2], [3]], 0, 0.0),
        ([[0, 1, 2, 3]], 2, 0.5),
        ([[3, 0], [2, 1]], 3, 0.25),
        ([[0], [1], [2], [3]], 1, 0.0),
    ],
)
def test_fragments_arrive_in_turn_and_late(fragments, overlap, mixing):
    weights = start("float64")
    how = {"overlap": overlap, "mixing": mixing}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.3), weights, 4, fragments=fragments, islands="rank", **how)
    train(optimizer, weights, 15, of=rough_gradient)
    how["fragments"] = [sorted(one) for one in fragments]
    require_trained(weights, 15, of=rough_gradient, dtype="float64", every=4, inner_lr=0.3, **how)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", CODES)
def test_the_rounding_error_is_added_to_the_next_difference(code):
    weights = start()
    how = {"compression": getattr(Compression, code), "islands": "rank"}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.3), weights, 2, outer=outer(), overlap=1, mixing=0.5, **how)
    train(optimizer, weights, 12, of=rough_gradient)
    how = {"every": 2, "inner_lr": 0.3, "outer_lr": 0.5, "momentum": 0.5, "overlap": 1, "mixing": 0.5, "code": code}
    require_trained(weights, 12, of=rough_gradient, **how)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_values_beyond_float16_arrive_in_several_parts():
    weights = start()
    how = {"compression": Compression.fp16, "islands": "rank"}
    optimizer = hvd.DiLoCo(optim.SGD(lr=1e5), weights, 1, outer=outer(lr=1.0, momentum=0), **how)
    train(optimizer, weights, 1)
    for _ in range(9):
        optimizer.step(weights, [np.zeros_like(one) for one in weights])

    def gradient_at_first(rank, step, parameters):
        return gradient(rank, step, parameters) if step == 0 else [np.zeros_like(one) for one in parameters]

    how = {"every": 1, "inner_lr": 1e5, "outer_lr": 1.0, "momentum": 0.0, "code": "fp16"}
    require_trained(weights, 10, of=gradient_at_first, **how)
    assert max(np.abs(one).max() for one in weights) > 1.5e5


@pytest.mark.ranks(4)
@pytest.mark.parametrize("code", ("none", "int8"))
@pytest.mark.parametrize("lists", ([[0, 1], [2, 3]], [[0, 3], [1], [2]], [[0, 1, 2, 3]]))
def test_an_island_averages_each_step_and_sends_one_difference(lists, code):
    weights = start("float64")
    how = {"compression": getattr(Compression, code), "islands": lists}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 3, outer=outer(), fragments=2, overlap=1, mixing=0.5, **how)
    train(optimizer, weights, 10)
    how = {"every": 3, "inner_lr": 0.5, "outer_lr": 0.5, "momentum": 0.5, "overlap": 1, "mixing": 0.5, "code": code}
    require_trained(weights, 10, lists, dtype="float64", fragments=optimizer._local_steps._plan.fragments, **how)
    close(optimizer)


@pytest.mark.ranks(4, hosts=(2, 2))
def test_the_ranks_of_a_host_are_an_island():
    weights = start("float64")
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 3, outer=outer())
    train(optimizer, weights, 7)
    how = {"every": 3, "inner_lr": 0.5, "outer_lr": 0.5, "momentum": 0.5}
    require_trained(weights, 7, [[0, 1], [2, 3]], dtype="float64", **how)
    close(optimizer)


@pytest.mark.ranks(3, hosts=(1, 1, 1))
def test_hosts_with_links_alike_are_one_island():
    weights = start("float64")
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 3, islands="links")
    assert optimizer._local_steps.islands.lists == [[0, 1, 2]]
    close(optimizer)


@pytest.mark.ranks(3, hosts=(1, 1, 1), slow=[3])
def test_a_host_with_a_slow_link_is_an_island_of_its_own():
    is_slow = hvd.rank() == 2
    qdisc = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "1mbit", "burst", "16k", "latency", "9s"]
    if is_slow:
        subprocess.run(qdisc, check=True)
    try:
        optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), [np.ones(2)], 3, islands="links")
    finally:
        if is_slow:
            subprocess.run([*qdisc[:2], "del", *qdisc[3:6]], check=True)
    assert optimizer._local_steps.islands.lists == [[0, 1], [2]]
    close(optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("saver", (0, 1))
def test_one_rank_of_an_island_saves_while_a_difference_is_under_way(saver):
    weights = start("float64")
    how = {"overlap": 2, "compression": Compression.int8, "islands": [[0, 1], [2, 3]]}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 4, **how)
    train(optimizer, weights, 5)
    assert optimizer.is_transferring
    if hvd.rank() == saver:
        optimizer.state_dict()  # the other ranks go on, and wait for this one in the next step
    train(optimizer, weights, 5, 5)
    hvd.check_replicas(weights, optimizer._local_steps.islands.of_rank)
    close(optimizer)


@pytest.mark.parametrize("players", range(1, 10))
def test_in_a_tournament_each_two_players_meet_once(players):
    rounds = tournament(players)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (one, other) for one in range(players) for other in range(one + 1, players)
    ]
    for pairs in rounds:
        seated = [player for pair in pairs for player in pair]
        assert len(set(seated)) == len(seated)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_local_sgd_averages_the_parameters():
    weights = [np.full(5, 4.0)]
    optimizer = hvd.DiLoCo(optim.SGD(lr=1.0), weights, 2, outer=optim.SGD(lr=1.0), islands="rank")
    seen = []
    for _ in range(4):
        optimizer.step(weights, [np.full(5, float(hvd.rank()))])
        seen.append(weights[0].tolist())
    own = hvd.rank()
    assert seen == [[value] * 5 for value in (4.0 - own, 3.0, 3.0 - own, 2.0)]


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_an_outer_step_at_the_end_leaves_all_ranks_with_the_same_parameters():
    weights = start()
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.3), weights, 4, fragments=2, overlap=2, islands="rank")
    train(optimizer, weights, 7, of=rough_gradient)
    assert optimizer.is_transferring
    with pytest.raises(hvd.ReplicaError):
        hvd.check_replicas(weights)
    optimizer.outer_step(weights)
    assert not optimizer.is_transferring
    hvd.check_replicas(weights)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("steps", (0, 5, 6, 7))
def test_a_checkpoint_resumes_exactly(code, steps):
    def new(weights):
        how = {"compression": getattr(Compression, code), "islands": "rank"}
        inner = optim.AdamW(lr=0.1)
        return hvd.DiLoCo(inner, weights, 4, fragments=2, overlap=2, mixing=0.5, **how)

    weights = start()
    optimizer = new(weights)
    train(optimizer, weights, steps, of=rough_gradient)
    saved = pickle.dumps((weights, optimizer.state_dict()))
    train(optimizer, weights, 10, steps, of=rough_gradient)

    again, state = pickle.loads(saved)
    other = new(again)
    other.load_state_dict(state)
    assert other.inner_steps == steps
    train(other, again, 10, steps, of=rough_gradient)
    require_equal(again, weights)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", ("fp16", "int4"))
@pytest.mark.parametrize("steps", (8, 9, 11))  # a difference is under way after 9
def test_a_file_of_one_rank_gives_its_errors_to_that_rank_alone(code, steps):
    def new(weights):
        how = {"compression": getattr(Compression, code), "islands": "rank"}
        return hvd.DiLoCo(optim.SGD(lr=0.3), weights, 4, outer=outer(), overlap=2, mixing=0.5, **how)

    weights = start()
    optimizer = new(weights)
    train(optimizer, weights, steps, of=rough_gradient)
    weights, state = hvd.broadcast_object((weights, optimizer.state_dict()))
    other = new(weights)
    other.load_state_dict(state)
    train(other, weights, 12, steps, of=rough_gradient)
    how = {"every": 4, "inner_lr": 0.3, "outer_lr": 0.5, "momentum": 0.5, "overlap": 2, "mixing": 0.5, "code": code}
    require_trained(weights, steps + 12, of=rough_gradient, changes={steps: [0, None]}, **how)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("code", ("none", "fp16", "int8"))
def test_ranks_that_form_an_island_go_on_with_the_mean_of_their_errors(code):
    def new(weights, islands):
        how = {"compression": getattr(Compression, code), "islands": islands}
        return hvd.DiLoCo(optim.SGD(lr=0.3), weights, 4, outer=outer(), fragments=2, **how)

    def errors_of(optimizer):
        return optimizer.state_dict()["diloco"]["errors"]["fragments"]

    weights = start()
    optimizer = new(weights, "rank")
    train(optimizer, weights, 6, of=rough_gradient)
    of_ranks = hvd.allgather_object(errors_of(optimizer))
    weights, state = hvd.broadcast_object(weights), optimizer.state_dict()

    lists = [[0, 3], [1, 2]]
    other = new(weights, lists)
    other.load_state_dict(state)
    train(other, weights, 1, 6, of=rough_gradient)
    (one, two) = next(ranks for ranks in lists if hvd.rank() in ranks)
    assert (of_ranks[0][0] is None) == (code == "none")
    for own, first, second in zip(errors_of(other), of_ranks[one], of_ranks[two], strict=True):
        if code == "none":
            assert own is None
        else:
            assert (first != second).any() and (own == (first + second) / 2).all()
    # the next file of either rank is for both
    state = hvd.broadcast_object(other.state_dict(), root_rank=one, process_set=other._local_steps.islands.of_rank)
    other.load_state_dict(state)
    train(other, weights, 1, 7, of=rough_gradient)
    assert pickle.dumps(errors_of(other)) == pickle.dumps(hvd.allgather_object(errors_of(other))[one])
    close(other)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", ("none", "int4"))
@pytest.mark.parametrize("savers", ((), (1,), (0, 1)))
def test_a_difference_under_way_arrives_in_the_next_job_only_if_all_ranks_have_its_mean(code, savers):
    weights = start()
    how = {"overlap": 2, "mixing": 0.5, "compression": getattr(Compression, code), "islands": "rank"}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.3), weights, 4, outer=outer(), **how)
    train(optimizer, weights, 9, of=rough_gradient)
    assert optimizer.is_transferring
    if hvd.rank() in savers:
        optimizer.state_dict()
    hvd.allreduce(np.zeros(1))  # all ranks still take part in the transfer
    hvd.shutdown()
    hvd.init()
    train(optimizer, weights, 12, 9, of=rough_gradient)
    how = {"every": 4, "inner_lr": 0.3, "outer_lr": 0.5, "momentum": 0.5, "overlap": 2, "mixing": 0.5, "code": code}
    require_trained(weights, 21, of=rough_gradient, lost=() if len(savers) == 2 else (9,), **how)


@pytest.mark.fast
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("of_last_rank", "message"),
    [
        ({"every": 5}, "rank 0 has every=4, rank 2 has every=5"),
        ({"overlap": 2}, "rank 0 has overlap=1, rank 2 has overlap=2"),
        ({"mixing": 0.25}, "rank 0 has mixing=0.5, rank 2 has mixing=0.25"),
        ({"fragments": 2}, "rank 0 has fragments="),
        ({"compression": Compression.int8}, "compression=NoneCompressor, rank 2 has compression=Compression.int8"),
        ({"outer": optim.SGD(lr=0.5)}, "rank 2 has outer=SGD(lr=0.5"),
        ({"islands": [[0, 1, 2]]}, "rank 0 has islands=[[0], [1], [2]], rank 2 has islands=[[0, 1, 2]]"),
        (
            {"params": [np.ones(3), np.ones((2, 3))]},
            'parameter "1" is float64[2, 2] on rank 0 and float64[2, 3] on rank 2',
        ),
        ({"params": [np.ones(3)]}, 'parameter "1" is float64[2, 2] on rank 0 and missing on rank 2'),
    ],
    ids=_in_words,
)
def test_ranks_that_disagree_are_told_on_all_of_them(of_last_rank, message):
    how = {"params": [np.ones(3), np.ones((2, 2))], "every": 4, "overlap": 1, "islands": "rank"}
    if hvd.rank() == hvd.size() - 1:
        how.update(of_last_rank)
    with pytest.raises(hvd.MismatchError, match=re.escape(message)):
        hvd.DiLoCo(optim.SGD(lr=0.5), **how)


@pytest.mark.fast
@pytest.mark.ranks(3)
def test_ranks_that_begin_with_other_parameters_are_told_on_all_of_them():
    weights = [np.full(3, float(hvd.rank() == 1))]
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 4, islands="rank")
    with pytest.raises(hvd.ReplicaError, match="rank 1 and rank 0 have different outer parameters"):
        optimizer.step(weights, [np.ones(3)])


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_ranks_that_resume_at_other_steps_are_told_on_all_of_them():
    weights = [np.ones(3)]
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 4, islands="rank")
    optimizer.step(weights, [np.ones(3)])
    state = optimizer.state_dict()
    state["diloco"]["inner_steps"] += hvd.rank()
    optimizer.load_state_dict(state)
    with pytest.raises(hvd.ReplicaError, match=re.escape("different numbers of inner steps, [1, 2]")):
        optimizer.step(weights, [np.ones(3)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", (0, 2))
def test_a_state_from_before_the_first_step_has_no_errors_of_later_ones(overlap):
    weights = start()
    how = {"overlap": overlap, "compression": Compression.int4, "islands": "rank"}
    optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 3, **how)
    beginning = optimizer.state_dict()
    first = [one.copy() for one in train(optimizer, weights, 10, of=rough_gradient)]
    optimizer.load_state_dict(beginning)
    assert not optimizer.is_transferring
    for one, value in zip(weights, start(), strict=True):
        one[...] = value
    require_equal(train(optimizer, weights, 10, of=rough_gradient), first)
    close(optimizer)


@pytest.mark.fast
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 2.5}, TypeError, "every must be an integer"),
        ({"every": True}, TypeError, "every must be an integer"),
        ({"overlap": 4}, ValueError, "overlap must be in 0..3, below every=4, but is 4"),
        ({"overlap": -1}, ValueError, "overlap must be in 0..3"),
        ({"mixing": 1.0}, ValueError, "mixing must be in [0, 1), but is 1.0"),
        ({"mixing": float("nan")}, ValueError, "mixing must be in [0, 1)"),
        ({"mixing": "half"}, TypeError, "mixing must be a number"),
        ({"outer": 0.7}, TypeError, "outer must be an optimizer of ringtrain.optim"),
        ({"compression": Compression.two_bit()}, TypeError, "must be Compression.none, fp16, bf16, int8 or int4"),
        ({"compression": "int8"}, TypeError, "must be Compression.none, fp16, bf16, int8 or int4"),
        ({"fragments": 1.5}, TypeError, "fragments must be a number, or a list of lists of parameters, not 1.5"),
        ({"fragments": "abc"}, TypeError, "fragments must be a number, or a list of lists of parameters, not 'abc'"),
        ({"fragments": ["a", "b", "c"]}, TypeError, "fragments must be a number, or a list of lists of parameters"),
        ({"fragments": 0}, ValueError, "fragments must be in 1..3, the number of parameters, but is 0"),
        ({"fragments": 4}, ValueError, "fragments must be in 1..3"),
        ({"fragments": [["a"], ["b"]]}, ValueError, 'fragments must have each parameter once, but "c" is in none'),
        ({"fragments": [["a", "b"], ["b", "c"]]}, ValueError, '"b" is in several'),
        ({"fragments": [["a", "b", "c", "d"]]}, ValueError, 'there is no parameter "d"'),
        ({"fragments": [["a", "b", "c"], []]}, ValueError, "each list needs at least one parameter"),
        ({"every": 2, "fragments": 3}, ValueError, "3 fragments need at least as many inner steps, but every=2"),
        ({"islands": "ranks"}, ValueError, 'islands must be "host", "rank", "links"'),
        ({"islands": 3}, TypeError, 'islands must be "host", "rank", "links"'),
        ({"islands": [[0, 1]]}, ValueError, "islands must have each of the ranks 0..0 once"),
        ({"params": {"a": np.ones(2, np.int64)}}, TypeError, 'parameter "a" is int64'),
        ({"params": []}, ValueError, "at least one parameter"),
        (
            {"optimizer": hvd.DistributedOptimizer(optim.SGD(lr=1.0))},
            ValueError,
            "this optimizer is distributed already",
        ),
        ({"optimizer": object()}, TypeError, "object is not an optimizer with step(params, grads)"),
    ],
    ids=_in_words,
)
def test_bad_arguments_are_refused_on_the_line_of_the_caller(how, error, message):
    usual = {"optimizer": optim.SGD(lr=1.0), "params": {name: np.ones(2) for name in "abc"}, "every": 4}
    with pytest.raises(error, match=re.escape(message)):
        hvd.DiLoCo(**{**usual, **how})


@pytest.mark.fast
@pytest.mark.ranks(1)
def test_diloco_is_not_distributed_again_and_loads_only_its_own_states():
    weights = [np.ones(2), np.ones(3)]
    optimizer = hvd.DiLoCo(optim.SGD(lr=1.0), weights, 4)
    with pytest.raises(ValueError, match="of DiLoCo"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DiLoCo(optimizer, weights, 4)
    with pytest.raises(ValueError, match="not the state of DiLoCo"):
        optimizer.load_state_dict(optim.SGD(lr=1.0).state_dict())
    optimizer.step(weights, [np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="1 parameters, but DiLoCo was constructed for 2"):
        optimizer.step(weights[:1], [np.ones(2)])
    with pytest.raises(ValueError, match="give DiLoCo the fragments= of the run"):
        hvd.DiLoCo(optim.SGD(lr=1.0), weights, 4, fragments=2).load_state_dict(optimizer.state_dict())
    other = [np.ones(2), np.ones(4)]
    with pytest.raises(ValueError, match='of "0", "1" has 5 values in the checkpoint and 6 in this model'):
        hvd.DiLoCo(optim.SGD(lr=1.0), other, 4).load_state_dict(optimizer.state_dict())
    optimizer.lr = 0.5  # of the inner optimizer
    assert optimizer.state_dict()["inner"]["hyperparameters"]["lr"] == 0.5


@pytest.mark.fast
@pytest.mark.ranks(1)
def test_codes_of_blocks_are_for_diloco_alone():
    with pytest.raises(TypeError, match=r"compression must be a Compressor, .* not Compression\.int8"):
        hvd.allreduce(np.ones(3), compression=Compression.int8)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("count", (0, 1, 255, 256, 257, 1000))
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_code_is_the_nearest_multiple_of_the_scale_of_its_block(bits, count, dtype):
    values = np.random.default_rng(count).normal(size=count).astype(dtype)
    message = difference_codes.encode(values, bits)
    assert message.dtype == np.uint8 and message.size == difference_codes.message_bytes(count, bits)
    decoded = difference_codes.decode(message, count, bits)
    assert decoded.dtype == np.float32
    assert (decoded.astype(dtype) == diloco_reference.rounded(values, f"int{bits}")).all()


@pytest.mark.parametrize("bits", (4, 8))
def test_a_block_with_a_value_that_is_not_finite_becomes_nan(bits):
    values = np.ones(600, np.float32)
    values[300] = np.inf
    decoded = difference_codes.decode(difference_codes.encode(values, bits), 600, bits)
    assert np.isnan(decoded[256:512]).all()
    assert (decoded[:256] == 1).all() and (decoded[512:] == 1).all()
