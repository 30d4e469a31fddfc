"""JAX's own sharding over ringtrain: every collective of XLA, meshes of all kinds, and what goes wrong."""

import contextlib
import ctypes
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness.exact import require_equal
from harness.frameworks import need, on_demand
from harness.ringrun_job import ROOT, ringrun
from harness.socket_ranks import free_port, started

import ringtrain
import ringtrain._core as _core
from ringtrain.runner.supervise import rank_wrapper

distributed = on_demand("ringtrain.jax.distributed")  # before jax, which looks for the core when it is loaded
hvd = on_demand("ringtrain.jax")
jax = on_demand("jax")
lax = on_demand("jax.lax")
sharding = on_demand("jax.sharding")
multihost_utils = on_demand("jax.experimental.multihost_utils")

REAL = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64", "bfloat16")
COMPLEX = ("complex64", "complex128")
MOVED = ("bool", "float16")  # XLA does not reduce them, nor gather float16


def spec(*axes):
    return sharding.PartitionSpec(*axes)


def shard_map(function, mesh, into, out):
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_rep=False)


def placed(array, mesh, into):
    return jax.make_array_from_callback(array.shape, sharding.NamedSharding(mesh, into), lambda place: array[place])


def require_result(function, array, wanted, mesh, out, into=None):
    into = spec("i") if into is None else into
    result = jax.jit(shard_map(function, mesh, into, out))(placed(array, mesh, into))
    for shard in result.addressable_shards:
        require_equal(np.asarray(shard.data), np.asarray(wanted)[shard.index])


def mesh_of(devices, *axes):
    return sharding.Mesh(np.array(devices), axes)


def numbers(shape, dtype, seed=1):
    """Whose sums and products are exact in every dtype."""
    dtype = jax.numpy.dtype(dtype)
    values = np.random.default_rng(seed).integers(1, 3, shape)
    if dtype.kind == "b":
        return values == 1
    return (values + 1j * values[::-1]).astype(dtype) if dtype.kind == "c" else values.astype(dtype)


def require_collectives(mesh, dtype):
    """Over the axis "i" of a mesh of all devices."""
    size = mesh.size
    array = numbers((2 * size * size, 3), dtype)
    parts = array.reshape(size, 2 * size, 3)
    everywhere, by_rows = spec(), spec("i")
    around = [(source, (source + 1) % size) for source in range(size)]
    if dtype not in MOVED:
        total = parts.sum(0, dtype=array.dtype)
        require_result(lambda x: lax.psum(x, "i"), array, total, mesh, everywhere)
        require_result(lambda x: lax.psum_scatter(x, "i", tiled=True), array, total, mesh, by_rows)
    if dtype in REAL:
        require_result(lambda x: lax.pmax(x, "i"), array, parts.max(0), mesh, everywhere)
        require_result(lambda x: lax.pmin(x, "i"), array, parts.min(0), mesh, everywhere)
    if dtype != "float16":
        require_result(lambda x: lax.all_gather(x, "i", tiled=True), array, array, mesh, everywhere)
    require_result(
        lambda x: lax.ppermute(x, "i", around), array, np.roll(parts, 1, 0).reshape(array.shape), mesh, by_rows
    )
    exchanged = parts.reshape(size, size, 2, 3).transpose(1, 0, 2, 3).reshape(array.shape)
    require_result(lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), array, exchanged, mesh, by_rows)


def require_other_collectives(mesh):
    """Those that XLA makes of the ones above, and groups of an axis."""
    size = mesh.size
    array = numbers((2 * size, 3), "float32")
    parts = array.reshape(size, 2, 3)
    numbered = (parts + np.arange(size, dtype="f")[:, None, None]).reshape(array.shape)
    require_result(lambda x: lax.pmean(x * size, "i"), array, parts.sum(0), mesh, spec())
    require_result(lambda x: x + lax.axis_index("i"), array, numbered, mesh, spec("i"))
    backwards = [*reversed(range(size))]
    require_result(lambda x: lax.pshuffle(x, "i", backwards), array, parts[::-1].reshape(array.shape), mesh, spec("i"))
    if size == 4:
        groups = [[0, 2], [1, 3]]
        sums = np.concatenate([parts[0] + parts[2], parts[1] + parts[3]] * 2)
        require_result(lambda x: lax.psum(x, "i", axis_index_groups=groups), array, sums, mesh, spec("i"))


def require_resharding(mesh):
    rows, columns, everywhere = (sharding.NamedSharding(mesh, s) for s in (spec("i"), spec(None, "i"), spec()))
    array = numbers((4 * mesh.size, 3 * mesh.size), "float32")
    by_columns = jax.jit(lambda x: x, out_shardings=columns)(placed(array, mesh, spec("i")))
    require_equal(np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(by_columns).addressable_data(0)), array)
    back = jax.jit(lambda x: x, out_shardings=rows)(by_columns)
    for shard in back.addressable_shards:
        require_equal(np.asarray(shard.data), array[shard.index])


def require_helpers(rank, size):
    """Those of JAX for several processes, and pmap."""
    gathered = multihost_utils.process_allgather(np.arange(3) + rank)
    require_equal(np.asarray(gathered).reshape(size, 3), np.arange(3) + np.arange(size)[:, None])
    require_equal(multihost_utils.broadcast_one_to_all(np.arange(4.0) * (rank + 1)), np.arange(4.0))
    multihost_utils.sync_global_devices("here")
    array = numbers((size, 5), "float32")
    total = jax.pmap(lambda x: lax.psum(x, "ranks"), axis_name="ranks")(array[rank : rank + 1])
    require_equal(np.asarray(total.addressable_data(0))[0], array.sum(0))


def require_other_meshes(size):
    array = numbers((size * size, 6), "float32")
    backwards = mesh_of(jax.devices()[::-1], "i")
    require_result(lambda x: lax.all_gather(x, "i", tiled=True), array, array, backwards, spec())
    total = array.reshape(size, size, 6).sum(0)
    require_result(lambda x: lax.psum_scatter(x, "i", tiled=True), array, total, backwards, spec("i"))
    sent = np.zeros((size, 6), "float32")
    sent[-1] = array[0]
    require_result(lambda x: lax.ppermute(x, "i", [(0, size - 1)]), array[:size], sent, backwards, spec("i"))
    if size != 4:
        return
    square = mesh_of(np.array(jax.devices()).reshape(2, 2), "a", "b")
    parts = array.reshape(2, 8, 2, 3)
    both = spec("a", "b")
    require_result(lambda x: lax.psum(x, "a"), array, parts.sum(0).reshape(8, 6), square, spec(None, "b"), both)
    require_result(lambda x: lax.psum(x, "b"), array, parts.sum(2).reshape(16, 3), square, spec("a", None), both)
    require_result(
        lambda x: lax.psum_scatter(lax.all_gather(x, "b", axis=1, tiled=True), "a", tiled=True),
        *(array, array.reshape(2, 8, 6).sum(0), square, spec("a"), both),
    )


def require_own_operations_beside(mesh, rank, size):
    """While programs of XLA are under way."""
    step = jax.jit(shard_map(lambda x: lax.psum(x, "i"), mesh, spec("i"), spec()))
    array = placed(numbers((size, 5000), "float32"), mesh, spec("i"))
    wanted = numbers((size, 5000), "float32").sum(0)
    inside = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name="inside"))
    total = np.full(300, size * (size - 1) // 2, "f")
    for _ in range(50):
        result = step(array)
        own = ringtrain.allreduce(np.full(300, rank, "f"), name="own", op=ringtrain.Sum)
        require_equal(own, total)
        require_equal(np.asarray(inside(np.full(300, rank, "f"))), total)
        require_equal(np.asarray(result.addressable_data(0))[0], wanted)


def require_all(dtypes):
    jax.config.update("jax_enable_x64", True)
    distributed.init()
    distributed.init()  # changes nothing
    rank, size = ringtrain.rank(), ringtrain.size()
    assert (jax.process_index(), jax.device_count(), jax.local_device_count()) == (rank, size, 1)
    mesh = mesh_of(jax.devices(), "i")
    for dtype in dtypes:
        require_collectives(mesh, dtype)
    require_other_collectives(mesh)
    require_resharding(mesh)
    require_helpers(rank, size)
    require_other_meshes(size)
    require_own_operations_beside(mesh, rank, size)


@pytest.mark.ranks(2, isolated=True, timeout=120)
def test_every_collective_of_xla_is_exact_in_every_dtype():
    require_all((*REAL, *COMPLEX, *MOVED))


@pytest.mark.ranks(1, 4, isolated=True, slow=[4], timeout=120)
def test_every_collective_of_xla_is_exact_on_any_number_of_ranks():
    require_all(("float32", "complex64"))


@pytest.mark.ranks(
    3, isolated=True, timeout=120, env={"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
)
def test_every_collective_of_xla_is_exact_over_sockets():
    require_all(("float32",))


@pytest.mark.ranks(4, isolated=True, hosts=(2, 2), timeout=120)
def test_every_collective_of_xla_is_exact_over_two_hosts():
    require_all(("float32",))


@pytest.mark.ranks(2, isolated=True, timeout=120)
def test_ranks_that_differ_are_told_so_in_typed_words_and_the_next_program_works():
    distributed.init()
    mesh = mesh_of(jax.devices(), "i")
    rank = ringtrain.rank()
    reductions = (lambda x: lax.psum(x, "i"), lambda x: lax.pmax(x, "i"))
    steps = [jax.jit(shard_map(reduce, mesh, spec("i"), spec())) for reduce in reductions]
    array = placed(np.ones((2, 7), "float32"), mesh, spec("i"))
    for step in steps:
        step(array).block_until_ready()
    with pytest.raises((RuntimeError, ValueError)) as seen:
        steps[rank](array).block_until_ready()
    error = hvd.error_of(seen.value)
    assert type(error) is ringtrain.MismatchError
    text = re.sub(r"#[0-9a-f]{4}", "#", str(error))
    assert text == (
        'allreduce "mesh 1 of ranks 0,1 #": rank 0 used op=Sum, rank 1 used op=Max. Give the same op on all ranks.'
    )
    require_equal(np.asarray(steps[0](array).addressable_data(0))[0], np.full(7, 2.0, "float32"))


@pytest.mark.ranks(
    2,
    isolated=True,
    timeout=120,
    env={"RINGTRAIN_STALL_WARNING_TIME_S": "2", "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "5"},
)
def test_a_rank_that_does_not_use_a_mesh_is_named_with_the_rule_about_first_uses(tmp_path):
    distributed.init()
    mesh = mesh_of(jax.devices(), "i")
    is_over = tmp_path / "over"
    if ringtrain.rank() == 1:
        deadline = time.monotonic() + 100
        while not is_over.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return
    step = jax.jit(shard_map(lambda x: lax.psum(x, "i"), mesh, spec("i"), spec()))
    with contextlib.ExitStack() as ending:
        ending.callback(is_over.touch)
        with pytest.raises(ringtrain.StalledError) as seen, hvd.errors():
            step(placed(np.ones((2, 3), "float32"), mesh, spec("i"))).block_until_ready()
    text = str(seen.value)
    assert text.startswith('allgather "mesh 1": waited ') and ", rank 1 did not" in text
    assert "rank 0 submitted it (at the first use of a mesh of devices, for which ringtrain needs all ranks" in text


@pytest.mark.ranks(4, isolated=True)
def test_a_mesh_of_some_ranks_that_exchange_values_is_refused_with_the_road_that_works():
    distributed.init()
    rank, devices = ringtrain.rank(), jax.devices()
    if rank < 2:
        some = mesh_of(devices[:2], "i")
        array = placed(np.ones((2, 3), "float32"), some, spec("i"))
        alone = jax.jit(shard_map(lambda x: 2 * x, some, spec("i"), spec("i")))(array)
        require_equal(np.asarray(alone.addressable_data(0)), np.full((1, 3), 2, "float32"))
        with pytest.raises(
            NotImplementedError, match="a program for the devices of ranks 0, 1 exchanges values"
        ) as seen:
            jax.jit(shard_map(lambda x: lax.psum(x, "i"), some, spec("i"), spec()))(array)
        assert "Mesh(np.array(jax.devices()).reshape(2, -1), ('group', 'data'))" in str(seen.value)
    both = sharding.Mesh(np.array(devices).reshape(2, -1), ("group", "data"))
    rows = np.arange(4, dtype="float32")[:, None]
    sums = jax.jit(shard_map(lambda x: lax.psum(x, "data"), both, spec(("group", "data")), spec("group")))(
        placed(rows, both, spec(("group", "data")))
    )
    require_equal(np.asarray(sums.addressable_data(0)), np.full((1, 1), 1 if rank < 2 else 5, "float32"))


FAILING = """
import os, pathlib, signal, sys, time
import jax, numpy as np  # before ringtrain: ringrun has told jaxlib where the core is
import ringtrain.jax as hvd
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

hvd.distributed.init()
rank = hvd.rank()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ringrun sends when another rank has failed
devices = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P("i"))
array = jax.make_array_from_callback((hvd.size(), 4), devices, lambda place: np.ones((hvd.size(), 4), "f")[place])
total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(devices.mesh, P()))
total(array).block_until_ready()
try:
    for step in range(10**6):
        if rank == 1 and step == 100:
            HAPPENS
        total(array).block_until_ready()
except (RuntimeError, ValueError) as error:
    if rank == 1:
        raise
    words = hvd.error_of(error).__class__.__name__ + " " + str(error)
    pathlib.Path(sys.argv[1], f"{rank}.new").write_text(words)
    pathlib.Path(sys.argv[1], f"{rank}.new").rename(pathlib.Path(sys.argv[1], f"{rank}.heard"))
    sys.exit(3)
"""


def what_others_hear(folder, happens, ranks=3):
    """Runs FAILING, in which `happens` happens in rank 1; returns what the other ranks heard, and what ringrun did."""
    program = folder / "program.py"
    program.write_text(FAILING.replace("HAPPENS", happens))
    done = ringrun("-np", str(ranks), "--network", "sockets", sys.executable, str(program), str(folder))
    heard = {int(path.stem): path.read_text() for path in folder.glob("*.heard")}
    assert sorted(heard) == [rank for rank in range(ranks) if rank != 1], done.stdout + done.stderr
    assert done.returncode != 0 and "did not end within" not in done.stderr, done.stdout + done.stderr
    return heard, done


@pytest.mark.parametrize(
    ("happens", "kind", "words"),
    [
        ('raise ValueError("my data is broken")', "RemoteError", "ValueError: my data is broken"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "PeerLostError", "rank 1 (host "),
        ("sys.exit(0)", "ShutDownError", "rank 1 will never submit it: the script has ended there"),
        ("sys.exit(4)", "ShutDownError", "Do the ranks have different numbers of batches? JAX's own sharding"),
    ],
    ids=["raises", "killed", "ends", "fails"],
)
def test_all_ranks_hear_what_became_of_another_one_and_the_job_ends(tmp_path, happens, kind, words):
    heard, _ = what_others_hear(tmp_path, happens)
    for text in heard.values():
        assert text.startswith(f"{kind} ") and f"ringtrain.{kind}" in text and words in text


ENDING = (
    FAILING[: FAILING.index("try:")]
    + """
for step in range(20):
    total(array)  # its result is not kept
    sums = total(array)
    array = jax.jit(lambda one, all: one + all)(array, sums)
if hvd.rank() == 0:
    print("the sums are", np.asarray(sums.addressable_data(0)), flush=True)
jax.config.update("jax_transfer_guard", "disallow")
"""
)


def test_a_rank_whose_script_has_ended_still_does_its_part_for_the_others(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENDING)
    done = ringrun("-np", "2", sys.executable, str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the sums are" in done.stdout and "Traceback" not in done.stderr


PLAIN = "import os, runpy; runpy.run_path(os.environ['PLAIN'], run_name='__main__')"
JOIN_BY_RINGTRAIN = "import ringtrain.jax as hvd; hvd.distributed.init()"
JOIN_BY_GLOO = """
import os, jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(os.environ["RINGTRAIN_RANK"])
jax.distributed.initialize(os.environ["COORDINATOR"], 4, rank, cluster_detection_method="deactivate")
"""


def losses_in(printed):
    found = re.findall(r"^(\w+): loss ([\d.]+) on 4 devices$", printed, re.MULTILINE)
    return {parallel: float(loss) for parallel, loss in found}


@pytest.mark.slow
def test_a_plain_program_has_the_losses_that_it_has_with_gloo(tmp_path):
    need("jax")
    plain = {"PLAIN": str(Path(__file__).with_name("plain_transformer.py")), "OPENBLAS_NUM_THREADS": "1"}
    ringrun_words = [sys.executable, "-m", "ringtrain.run", "-np", "4", "--no-prefix-output"]
    done = subprocess.run(
        [*ringrun_words, sys.executable, "-c", f"{JOIN_BY_RINGTRAIN}; {PLAIN}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), ROOT]),
            **plain,
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with started(JOIN_BY_GLOO + PLAIN, 4, tmp_path, COORDINATOR=f"127.0.0.1:{free_port()}", **plain) as ranks:
        of_gloo = losses_in("".join(ranks.outputs(within_s=300)))
    losses = losses_in(done.stdout)
    assert set(losses) == set(of_gloo) == {"data", "tensor"}
    for parallel, loss in losses.items():  # the order of additions differs
        assert abs(loss - of_gloo[parallel]) <= 1e-5 * loss
    assert losses["data"] < 3.9


REFUSED = """
import os
os.environ.pop("MPITRAMPOLINE_LIB", None)
import jax
import ringtrain.jax as hvd
from ringtrain.job import elastic_client

def refusal():
    try:
        hvd.distributed.init()
    except hvd.RingtrainError as error:
        return str(error)

print(refusal())
os.environ["MPITRAMPOLINE_LIB"] = "/opt/libmpiwrapper.so"
print(refusal())
elastic_client.is_elastic = lambda: True
print(refusal())
print(hvd.is_initialized())
"""


def test_an_impossible_init_is_refused_before_the_job_is_joined():
    need("jax")
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60)
    late, foreign, elastic, joined = done.stdout.splitlines()
    assert late.startswith("jaxlib was loaded before ringtrain") and late.endswith(
        f"MPITRAMPOLINE_LIB={_core.__file__}"
    )
    assert foreign.startswith("MPITRAMPOLINE_LIB=/opt/libmpiwrapper.so gives jaxlib another MPI than ringtrain")
    assert elastic.startswith("JAX's own sharding cannot be elastic: XLA compiles programs")
    assert joined == "False"


def test_ringrun_tells_jaxlib_where_the_core_is_unless_the_user_names_another_library():
    assert rank_wrapper.variable_of_jaxlib({}) == {"MPITRAMPOLINE_LIB": _core.__file__}
    assert rank_wrapper.variable_of_jaxlib({"MPITRAMPOLINE_LIB": "/opt/libmpiwrapper.so"}) == {}


def test_the_core_has_every_name_that_this_jaxlib_looks_up():
    need("jax")
    import importlib.util

    folder = Path(importlib.util.find_spec("jaxlib").origin).parent
    library = max(folder.glob("*.so"), key=lambda path: path.stat().st_size)
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        names = {
            name.decode() for name in re.findall(rb"\0(MPIX?ABI_\w+|mpiwrapper_\w+|mpiabi_version_\w+)(?=\0)", text)
        }
    core = ctypes.CDLL(_core.__file__)
    assert len(names) > 600
    assert [name for name in sorted(names) if not hasattr(core, name)] == []
