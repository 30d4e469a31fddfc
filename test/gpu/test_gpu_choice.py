"""Which GPU a rank works on, and which NCCL it takes: on the fake driver, with stand-ins for the libraries."""

import contextlib
import ctypes
import os
import subprocess
import sys
import types
from unittest import mock

import pytest
from harness import gpu_double

import ringtrain as hvd
from ringtrain import _core
from ringtrain.job import gpus, launched_by
from ringtrain.job.gpus import Choice

FOUR_GPUS = gpu_double.environment(gpus=4)


class Library(types.ModuleType):
    """A stand-in for CuPy or PyTorch, as init() sees it; `used` are the GPUs that it made current."""

    def __init__(self, name, cuda="12.8"):
        super().__init__(name)
        self.used = []
        self.version = types.SimpleNamespace(cuda=cuda)
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            set_device=self.used.append,
            _lazy_call=lambda call: call(),
            Device=lambda device: types.SimpleNamespace(use=lambda: self.used.append(device)),
        )


def load(name, **settings):
    sys.modules[name] = Library(name, **settings)
    return sys.modules[name]


@contextlib.contextmanager
def loaded(*names, **settings):
    """For a test in a job that others share."""
    try:
        yield [load(name, **settings) for name in names]
    finally:
        for name in names:
            del sys.modules[name]


@contextlib.contextmanager
def jax_for_gpus(folder, seen="all"):
    """A stand-in for JAX with its plugin for CUDA, as init() sees it: yields its settings."""
    settings = {"jax_cuda_visible_devices": seen}
    (folder / "jax_cuda12_plugin.py").touch()
    found = types.ModuleType("jax")
    found.config = types.SimpleNamespace(read=settings.__getitem__, update=settings.__setitem__)
    with mock.patch.dict(sys.modules, jax=found), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        yield settings


def make_context(device, is_current=False):
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuInit(0) == driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert not is_current or driver.cuCtxSetCurrent(context) == 0


def own_rank():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


def reduce_on(device):
    """Makes the core take `device` for this rank: an allreduce of four floats there."""
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong()
    make_context(device, is_current=True)
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(16)) == 0
    view = (address.value, _core.DTYPES["float32"], (4,), device, 0)
    handle = _core.allreduce_in_place(view, "x", _core.ReduceOp.Sum, 1.0, 1.0, 0, 0, True, _core.Site(""))
    assert _core.wait(handle, 30)


# --- in a job ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, initialised=False, env=FOUR_GPUS)
@pytest.mark.parametrize("seen", ["all", "3"])
def test_jax_sees_the_gpu_of_its_rank_alone_unless_the_script_has_chosen(tmp_path, seen):
    with jax_for_gpus(tmp_path, seen) as settings:
        hvd.init()
        assert settings == {"jax_cuda_visible_devices": seen if seen != "all" else str(hvd.local_rank())}
        hvd.shutdown()


@pytest.mark.ranks(2, 3, initialised=False, env=FOUR_GPUS)
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_each_rank_takes_the_gpu_of_its_local_rank(library):
    with loaded(library) as (of_gpus,):
        hvd.init()
        assert of_gpus.used == [hvd.local_rank()]
        assert gpu_double.control().count("contexts") == 0
        hvd.shutdown()


@pytest.mark.ranks(2, initialised=False, env=FOUR_GPUS | {"RINGTRAIN_GPUS_PER_RANK": "2"})
def test_a_rank_with_several_gpus_takes_the_first_of_them():
    with loaded("cupy", "torch") as libraries:
        hvd.init()
        assert [library.used for library in libraries] == [[2 * hvd.local_rank()]] * 2
        hvd.shutdown()


@pytest.mark.ranks(3, isolated=True, env=FOUR_GPUS | {"CUDA_VISIBLE_DEVICES": "3,1"})
def test_gpus_are_counted_among_the_visible_ones():
    library = load("cupy")
    hvd.init()
    assert library.used == [hvd.local_rank() % 2]
    hvd.shutdown()


@pytest.mark.ranks(2, isolated=True, env=FOUR_GPUS)
def test_a_gpu_that_the_script_has_taken_stays_its_own():
    library = load("cupy")
    make_context(3 - own_rank())
    hvd.init()
    assert library.used == []
    hvd.shutdown()


@pytest.mark.ranks(2, isolated=True, env=FOUR_GPUS)
def test_without_a_library_that_uses_gpus_the_driver_is_left_alone(tmp_path):
    gpu_double.control().set_log(tmp_path)
    load("torch", cuda=None)
    hvd.init()
    hvd.shutdown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(1, isolated=True, env=FOUR_GPUS)
def test_a_job_of_one_rank_leaves_the_choice_to_the_script():
    library = load("cupy")
    hvd.init()
    assert library.used == []
    hvd.shutdown()


# --- what is said -----------------------------------------------------------------------------------------------------


def warnings_of(code, size=2, **variables):
    """Returns the output of a job of `code`, which may use the stand-ins of this file and ends with shutdown()."""
    gpu_double.prepare(FOUR_GPUS)
    beginning = f"import sys; sys.path[:0] = {sys.path!r}; import ringtrain as hvd\n"
    program = f"{beginning}from test_gpu_choice import *\n{code}\nhvd.shutdown()"
    result = subprocess.run(
        [sys.executable, "-m", "ringtrain.run", "-np", str(size), "--no-prefix-output", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **FOUR_GPUS, **variables},
    )
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    # that NCCL does not connect ranks of one GPU is another matter
    return [line for line in lines if line.startswith("ringtrain") and "pass through host memory" not in line]


needs_mpi = pytest.mark.skipif(
    launched_by.detect() is not None, reason="a launcher cannot be started by a rank of another one"
)
EVERYTHING_ON_GPU_0 = "load('cupy'); make_context(0); hvd.init(); reduce_on(0)"


@needs_mpi
def test_everything_on_gpu_0_is_told_once_by_init():
    (sentence,) = warnings_of(EVERYTHING_ON_GPU_0, 3)
    assert sentence == (
        "ringtrain: ranks 0 and 1 share GPU 0, although they see 4 GPUs: rank 1 had a CUDA context there before "
        "init(), although its local rank is 1; call ringtrain.init() before anything is put on a GPU, or choose the "
        "GPU before that (torch.cuda.set_device, cupy.cuda.Device.use)"
    )


@needs_mpi
def test_everything_on_gpu_0_after_init_is_told_once_by_the_first_operation():
    (sentence,) = warnings_of("hvd.init(); reduce_on(0)")
    assert "ranks 0 and 1 share GPU-" in sentence and "local_rank()" in sentence


@needs_mpi
@pytest.mark.parametrize(
    "code",
    [
        "load('torch'); hvd.init(); reduce_on(hvd.local_rank())",
        "load('torch'); make_context(own_rank()); hvd.init(); reduce_on(hvd.local_rank())",
        "load('torch'); make_context(3 - own_rank()); hvd.init(); reduce_on(3 - hvd.local_rank())",
        "load('torch'); hvd.init(); reduce_on(3 - hvd.local_rank())",
        "hvd.init(); reduce_on(3 - hvd.local_rank())",
    ],
    ids=["that of init", "the same before init", "another before init", "another after init", "after init"],
)
def test_a_rank_on_a_gpu_of_its_own_is_not_warned(code):
    assert warnings_of(code) == []


@needs_mpi
def test_ranks_that_see_one_gpu_are_not_warned():
    assert warnings_of(EVERYTHING_ON_GPU_0, CUDA_VISIBLE_DEVICES="2") == []


@needs_mpi
def test_slurm_shows_each_rank_its_own_gpu_as_the_first():
    code = f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = str(launched_by.detect().rank); {EVERYTHING_ON_GPU_0}"
    assert warnings_of(code) == []


# --- who shares what --------------------------------------------------------------------------------------------------


def on(device, uuid=None, visible=4, is_kept=False):
    return Choice(device, uuid or f"GPU-{device}", visible, is_kept)


@pytest.mark.parametrize(
    ("nodes", "choices", "sentence"),
    [
        ([0, 0], [on(0), on(1)], ""),
        ([0, 0], [on(0), gpus.NO_CHOICE], ""),
        ([0, 0], [gpus.NO_CHOICE, gpus.NO_CHOICE], ""),
        ([0, 1], [on(0), on(0)], ""),
        ([0, 0, 0], [on(0, visible=2), on(1, visible=2), on(0, visible=2)], ""),
        ([0, 0], [on(0, "a", visible=1), on(0, "b", visible=1)], ""),
        (
            [0, 0, 0],
            [on(0), on(2), on(0)],
            "ranks 0 and 2 share GPU 0, although they see 4 GPUs: look at gpus_per_rank",
        ),
        ([0, 0, 0], [on(0, visible=2), on(0, visible=2), gpus.NO_CHOICE], "ranks 0 and 1 share GPU 0"),
        ([0, 0], [on(1, is_kept=True), on(1)], "rank 0 had a CUDA context there"),
        (
            [0, 0, 1, 1],
            [on(0), on(1), on(0), on(0, is_kept=True)],
            "rank 3 had a CUDA context there before init(), alt",
        ),
    ],
)
def test_ranks_that_need_not_share_a_gpu_are_named(nodes, choices, sentence):
    local_ranks = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    found = gpus.describe_sharing(nodes, local_ranks, choices)
    assert sentence in found if sentence else found == ""


# --- NCCL -------------------------------------------------------------------------------------------------------------


def install_nccl(folder, cuda, size):
    """A package of NCCL as pip leaves it, but for what is in its library."""
    path = folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    record = folder / f"nvidia_nccl_cu{cuda}-2.27.3.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f"nvidia/nccl/include/nccl.h,sha256=x,1\nnvidia/nccl/lib/libnccl.so.2,sha256=x,{size}\n")
    return str(path)


def test_packages_of_nccl_are_found_the_newest_cuda_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b"), "no such folder", str(tmp_path / "a")])
    assert gpus.nccl_candidates() == []
    older, newer = install_nccl(tmp_path / "a", 12, 100), install_nccl(tmp_path / "b", 13, 200)
    assert gpus.nccl_candidates() == [(newer, 13), (older, 12)]


def test_of_two_packages_in_one_place_the_last_one_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install_nccl(tmp_path, 13, 200)
    path = install_nccl(tmp_path, 12, 100)
    assert gpus.nccl_candidates() == [(path, 12)]


def ask(expression, **settings):
    """Returns its value in a process of its own that finds the fake."""
    variables = gpu_double.environment(**settings)
    gpu_double.prepare(variables)
    imports = "import sys, ringtrain as hvd; from ringtrain import _core; from ringtrain.job import gpus"
    code = f"{imports}; print({expression})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )
    return result.stdout.strip() or result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({}, "(True, 22703)"),
        ({"nccl_version": 23003}, "(True, 23003)"),
        ({"nccl_version": 21705}, "(True, 0)"),
        ({"gpus": 0}, "(False, 0)"),
        ({"driver_version": 11020}, "(False, 0)"),
    ],
)
def test_the_fakes_of_cuda_and_nccl_are_found(settings, answer):
    assert ask("(hvd.cuda_built(), hvd.nccl_built())", **settings) == answer


def test_without_a_driver_there_is_neither_cuda_nor_nccl():
    if _core.gpu_count() > 0:
        pytest.skip("there is a GPU")
    assert (hvd.cuda_built(), hvd.nccl_built()) == (False, 0)


def test_a_package_for_a_newer_cuda_than_the_driver_speaks_is_not_taken():
    older, newer = ("/no/cu12/libnccl.so.2", 12), ("/no/cu13/libnccl.so.2", 13)
    said = ask(f"_core.nccl_version([{newer}, {older}])", driver_version=12080, left_out=["ncclCommSplit"])
    assert f"{newer[0]} was built for CUDA 13, but the driver speaks CUDA 12.8: pip install nvidia-nccl-cu12" in said
    assert f"cannot open {older[0]}" in said


def test_a_package_comes_before_what_the_loader_finds(tmp_path):
    library = gpu_double.build() / "libnccl.so.2"
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(library.read_bytes())
    assert ask(f"_core.nccl_version([({str(path)!r}, 12)])[1]") == str(path)
    loaded = f"__import__('ctypes').CDLL('libnccl.so.2') and _core.nccl_version([({str(path)!r}, 12)])[1]"
    assert ask(loaded) == str(library)
