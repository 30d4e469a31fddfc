"""Errors inside jit: the same words as outside, on every rank, and the next step works."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from exact_jax import raises
from harness.exact import require_equal
from harness.frameworks import on_demand
from harness.socket_ranks import started

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")
ffi = on_demand("ringtrain.jax.ffi")


@pytest.mark.ranks(2, fast=[2])
def test_a_mismatch_is_told_in_the_same_words_on_all_ranks_and_the_next_step_works():
    step = jax.jit(lambda tree: hvd.allreduce(tree, hvd.Sum, "model"))
    tree = {f"layer{number}": jnp.ones(31) for number in range(4)}
    wrong = {**tree, "layer3": jnp.ones(31 + hvd.rank())}
    with raises(hvd.MismatchError) as seen:
        jax.block_until_ready(step(wrong))
    assert seen.text == (
        'allreduce "model.layer3": rank 0 sent float64[31], rank 1 sent float64[32]. Do all ranks build the same model?'
    )
    require_equal(step(tree)["layer3"], np.full(31, 2.0))


@pytest.mark.ranks(2, 3)
def test_an_error_is_of_one_class_on_all_ranks_whatever_jax_makes_of_it():
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, "raw"))
    step(jnp.ones(4)).block_until_ready()
    is_odd = hvd.rank() == hvd.size() - 1
    for _ in range(3):  # that rank compiles a program first, and JAX raises another class
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as seen:
            step(jnp.ones(4 + is_odd)).block_until_ready()
        assert type(hvd.error_of(seen.value)) is hvd.MismatchError
        with raises(hvd.MismatchError):
            step(jnp.ones(4 + is_odd)).block_until_ready()
    require_equal(step(jnp.ones(4)), np.full(4, float(hvd.size())))


@pytest.mark.ranks(2)
def test_an_error_has_the_one_of_jax_as_its_cause():
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, "cause"))
    try:
        with hvd.errors():
            step(jnp.ones(2 + hvd.rank())).block_until_ready()
    except hvd.MismatchError as error:
        assert isinstance(error.__cause__, RuntimeError) and "ringtrain.MismatchError" in str(error.__cause__)
        assert type(hvd.error_of(error.__cause__)) is hvd.MismatchError
    assert hvd.error_of(RuntimeError("out of memory")) is None
    with pytest.raises(RuntimeError, match="of the script"), hvd.errors():
        raise RuntimeError("of the script")


@pytest.mark.ranks(2)
def test_a_program_that_fails_leaves_nothing_behind():
    """Of two operations one fails, and the other one is over before XLA frees its memory."""
    step = jax.jit(lambda x, y: (hvd.allreduce(x, hvd.Sum, "good"), hvd.allreduce(y, hvd.Sum, "bad")))
    for _ in range(3):
        with raises(hvd.MismatchError):
            jax.block_until_ready(step(jnp.ones(100_000), jnp.ones(2 + hvd.rank())))
        require_equal(step(jnp.ones(100_000), jnp.ones(2))[0], np.full(100_000, 2.0))


def failing_beside_a_loop(bad, x):
    failed = hvd.allreduce(bad, hvd.Sum, "beside").sum()
    return rounds_of(x, jnp.ones(2)), failed


def failing_behind_a_loop(bad, x):
    sums = rounds_of(x, jnp.ones(2))
    return sums, hvd.allreduce(bad, hvd.Sum, "behind").sum()


def failing_in_a_loop(bad, x):
    sums = rounds_of(x, bad)
    return sums, hvd.allreduce(x, hvd.Sum, "last").sum()


def rounds_of(x, other):
    """The sums of x over the ranks, three times."""

    def body(carry, _):
        work = jnp.sort(jnp.arange(20_000, dtype=jnp.float32) - carry)  # for a while
        summed = hvd.allreduce((x + 0 * work[0], other), hvd.Sum, "round")[0]
        return summed, summed

    return jax.lax.scan(body, x, None, length=3)[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "program", [failing_beside_a_loop, failing_behind_a_loop, pytest.param(failing_in_a_loop, marks=pytest.mark.fast)]
)
def test_after_a_mismatch_beside_a_loop_no_rank_takes_an_operation_for_one_of_another_step(program):
    step = jax.jit(program)
    fails, own = np.random.default_rng(0), np.random.default_rng(hvd.rank())
    for number in range(40):
        is_wrong = fails.random() < 0.5
        time.sleep(own.random() * 0.002)
        bad, x = jnp.ones(2 + (hvd.rank() if is_wrong else 0)), jnp.float32(number)
        if is_wrong:
            with raises(hvd.MismatchError):
                jax.block_until_ready(step(bad, x))
        else:
            require_equal(step(bad, x)[0], np.full(3, 2 * number, np.float32))


@pytest.mark.ranks(2)
def test_a_failed_program_waits_for_what_else_it_has_started_however_late_the_others_come():
    """Until then ringtrain reads and writes memory that XLA would free."""
    late_s = 2.5
    if hvd.rank() == 0:
        step = jax.jit(lambda x, y: (hvd.allreduce(x, hvd.Sum, "late"), hvd.allreduce(y, hvd.Sum, "wrong")))
        begun = time.monotonic()
        with raises(hvd.MismatchError):
            jax.block_until_ready(step(jnp.ones(100_000), jnp.ones(2)))
        assert time.monotonic() - begun >= late_s
    else:
        with raises(hvd.MismatchError):
            hvd.allreduce(jnp.ones(3), hvd.Sum, "wrong")
        time.sleep(late_s)
        require_equal(hvd.allreduce(jnp.ones(100_000), hvd.Sum, "late"), np.full(100_000, 2.0))


@pytest.mark.ranks(2)
def test_arrays_on_several_devices_of_a_rank_are_taken_outside_of_programs():
    code = """
import jax, numpy as np, optax, ringtrain, ringtrain.jax as hvd
from jax.sharding import Mesh, NamedSharding, PartitionSpec
hvd.init()
mesh = Mesh(np.array(jax.devices()), ("local",))
for spec in (("local",), ()):
    x = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec(*spec)))
    reduced = [hvd.allreduce(x), hvd.grouped_allreduce([x])[0], ringtrain.allreduce(x), hvd.broadcast(x, 0)]
    moved = [hvd.allgather(x), hvd.alltoall(x), hvd.reducescatter(x), hvd.broadcast_parameters({"x": x})["x"]]
    transformation = hvd.distribute(optax.sgd(1.0))
    updated = -transformation.update(x, transformation.init(x), x)[0]
    for result in (*reduced, *moved, updated):
        assert np.array_equal(result, x) and result.sharding == x.sharding, (result, result.sharding)
    hvd.check_replicas({"x": x})
    assert hvd.allgather(x[:3]).shape == (3,) and hvd.allreduce(x.sum()) == 6
try:
    jax.jit(hvd.allreduce)(x)
except ValueError as error:
    print(str(error).partition(":")[0])
"""
    if hvd.rank() == 0:
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        refusal = "an operation over the ranks inside a program for 2 devices of this rank"
        assert done.stdout.splitlines() == [refusal], done.stdout + done.stderr
    hvd.barrier()


@pytest.mark.ranks(2, isolated=True)
def test_without_init_the_program_says_so():
    with pytest.raises(hvd.NotInitializedError):
        hvd.allreduce(jnp.ones(2))
    hvd.init()
    step = jax.jit(hvd.allreduce)
    require_equal(step(jnp.ones(2)), np.ones(2))
    hvd.barrier()
    hvd.shutdown()
    with raises(hvd.NotInitializedError) as seen:
        step(jnp.ones(2)).block_until_ready()
    assert "call init() again" in seen.text
    hvd.init()
    require_equal(step(jnp.ones(2)), np.ones(2))


KILLED = """
import os, signal, time
import jax, jax.numpy as jnp
import ringtrain.jax as hvd

hvd.init()
step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum))
step(jnp.ones(2)).block_until_ready()
if hvd.rank() == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with hvd.errors():
        step(jnp.ones(2)).block_until_ready()
except hvd.PeerLostError as error:
    print("rank 1" in str(error), time.time(), flush=True)
"""


def test_a_killed_rank_ends_the_step_of_the_others(tmp_path):
    with started(KILLED, 2, tmp_path) as ranks:
        ranks.processes[1].wait(60)
        killed_at = time.time()
        told, told_at = ranks.outputs([0, -signal.SIGKILL])[0].splitlines()[-1].split()
    assert told == "True" and float(told_at) - killed_at < 5  # and not after the 10 s of peer_timeout_s


LEAVES = """
import os, time
import jax, jax.numpy as jnp
import ringtrain.jax as hvd

hvd.init()
square = jnp.ones((500, 500))
step = jax.jit(lambda x: hvd.allreduce(x @ x, hvd.Sum))  # too much for JAX to do it before it returns
step(square).block_until_ready()
late = hvd.rank() == 1
if late:
    while not os.path.exists("ends"): time.sleep(0.01)
    time.sleep(0.5)
x = step(square)
if late:
    print(x[0, 0])
else:  # the step is under way when the script of rank 0 ends
    print("ready" if x.is_ready() else "under way")
    open("ends", "w")
"""


def test_a_script_may_end_with_a_step_under_way(tmp_path):
    program = LEAVES.replace('"ends"', repr(str(tmp_path / "ends")))
    with started(program, 2, tmp_path) as ranks:
        assert ranks.outputs() == ["under way\n", "1000.0\n"]


@pytest.mark.slow
def test_a_script_ends_although_nobody_takes_its_last_step(tmp_path):
    alone = LEAVES.replace("x = step(square)", "x = square if late else step(square)")
    alone = alone.replace('"ends"', repr(str(tmp_path / "ends"))).replace("sleep(0.5)", "sleep(8)")
    with started(alone, 2, tmp_path) as ranks:
        begin = time.monotonic()
        ranks.processes[0].wait(60)
        ended = time.monotonic()
        ranks.outputs()
    assert ended - begin < 20


HEADER = "#define XLA_FFI_API_MAJOR {}\n#define XLA_FFI_API_MINOR {}\n"


def test_a_version_of_xla_that_does_not_fit_is_an_import_error():
    for minor in (1, 2, 3, 9):
        assert ffi.api_version(HEADER.format(0, minor)) == 1
    for major, minor in ((1, 0), (0, 0)):
        with pytest.raises(ImportError, match=re.escape(f"has {major}.{minor}: install")):
            ffi.api_version(HEADER.format(major, minor))
    with pytest.raises(ImportError, match=r"has -1\.-1"):
        ffi.api_version("")
