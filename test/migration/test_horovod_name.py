"""`import horovod` finds ringtrain, however the script was started, and never in place of a Horovod that is there."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness.frameworks import need

import ringtrain

need("torch")

TIMEOUT_S = 100
ON_TWO_RANKS = ["-m", "ringtrain.run", "--no-prefix-output", "-np", "2"]

# what Horovod 0.28.1's users and libraries import of it
IMPORTS = [
    "import horovod.torch as hvd; hvd.mpi_ops.Sum",
    "import horovod.torch.mpi_ops as m; m.rank, m.Average, m.poll, m.is_homogeneous",
    "from horovod.torch import DistributedOptimizer, SyncBatchNorm, join",
    "from horovod.torch.mpi_ops import allreduce_async_, synchronize, global_process_set, HorovodInternalError",
    "from horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters",
    "from horovod.torch.optimizer import DistributedOptimizer",
    "from horovod.torch.compression import Compression, Compressor, NoneCompressor, FP16Compressor",
    "from horovod.torch.sync_batch_norm import SyncBatchNorm",
    "from horovod.common.util import env, split_list, nccl_built, extension_available, gpu_available",
    "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt",
    "from horovod.common.process_sets import ProcessSet, add_process_set, remove_process_set",
    "from horovod.common import process_sets, util, exceptions, basics; process_sets.ProcessSet",
    "from horovod import torch as hvd, common, runner; hvd.allreduce, runner.run",
    "from horovod.common.basics import HorovodBasics; HorovodBasics(__file__, 'mpi_lib_v2').init",
    "from horovod.runner import run",
    "from horovod import run",
    "import horovod; assert horovod.__version__ == '0.28.1'",
]


def python(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def printed(*arguments, cwd, **environment):
    """Returns what it printed, as Python values, one of each line."""
    done = python(*arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def test_modules_that_users_of_horovod_import_exist(tmp_path):
    done = python("-c", "import ringtrain.horovod\n__file__ = 'x'\n" + "\n".join(IMPORTS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_module_is_there_once_under_its_two_names(tmp_path):
    code = """
import ringtrain.horovod
import horovod.torch.mpi_ops, horovod.torch.optimizer, horovod.common.util
import ringtrain.torch.mpi_ops, ringtrain.torch.optimizer, ringtrain.engine.process_sets
import importlib, horovod.common.process_sets
assert horovod is ringtrain.horovod and horovod.torch is ringtrain.torch
assert horovod.torch.mpi_ops is ringtrain.torch.mpi_ops and horovod.torch.optimizer is ringtrain.torch.optimizer
assert horovod.common.process_sets is ringtrain.engine.process_sets
from horovod.torch.elastic.state import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
assert horovod.torch.elastic is ringtrain.torch.elastic and horovod.torch.elastic.TorchState is TorchState
assert HostsUpdatedInterrupt is ringtrain.elastic.HostsUpdatedInterrupt and State is ringtrain.elastic.State
assert horovod.torch.__spec__.name == horovod.torch.__name__ == "ringtrain.torch"
assert importlib.reload(horovod.torch.functions) is ringtrain.torch.functions
"""
    assert printed("-c", code, cwd=tmp_path) == []


def test_looking_for_a_framework_imports_nothing_of_it(tmp_path):
    code = """
import ringtrain.horovod, sys
from importlib.util import find_spec
print([find_spec(name) is not None for name in ("horovod", "horovod.torch", "horovod.nothing")])
print("torch" in sys.modules)
print(find_spec("horovod.torch.mpi_ops") is not None)
"""
    assert printed("-c", code, cwd=tmp_path) == [[True, True, False], False, True]


ABSENT = {
    "import horovod.tensorflow.keras": "horovod.tensorflow is not part of ringtrain: TensorFlow does not come",
    "import horovod.keras": "Keras does not come",
    "import horovod.ray": "No module named 'ray'",
    "import horovod.mxnet": "No module named 'mxnet'",
    "import horovod.nothing": "No module named 'horovod.nothing'",
    "import horovod.torch.nothing": "No module named 'horovod.torch.nothing'",
    # how ignite tells the Horovod of 2019 from later ones
    "from horovod.run.runner import run": "No module named 'horovod.run'",
}


def test_missing_modules_say_so(tmp_path):
    code = f"""
import ringtrain.horovod
for statement in {list(ABSENT)}:
    try:
        exec(statement)
        print(repr(statement + " works"))
    except ImportError as error:
        print(repr(str(error)))
"""
    for message, sentence in zip(printed("-c", code, cwd=tmp_path), ABSENT.values(), strict=True):
        assert sentence in message


SCRIPT = """\
import sys, helper
print((sys.argv, sys.path[0], __name__, __spec__ and __spec__.name, helper.size))
"""
HELPER = "import horovod.torch as hvd\nhvd.init()\nsize = hvd.size()\n"


@pytest.fixture
def folder(tmp_path):
    """A script beside a module that imports Horovod, neither of which knows of ringtrain."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.py").write_text(SCRIPT)
    (tmp_path / "train" / "helper.py").write_text(HELPER)
    return tmp_path / "train"


def test_a_script_sees_what_it_would_see_under_python(folder):
    (seen,) = printed("-m", "ringtrain.horovod", "train/train.py", "--flag", "-m", "x", cwd=folder.parent)
    assert seen == (["train/train.py", "--flag", "-m", "x"], str(folder), "__main__", None, 1)
    (seen,) = printed("-m", "ringtrain.horovod", "-m", "train", "a", cwd=folder)
    assert seen == ([str(folder / "train.py"), "a"], str(folder), "__main__", "train", 1)
    code = "import horovod, sys; print((sys.argv, sys.path[0], sys.flags.optimize, sys.flags.utf8_mode))"
    for options in (["-O", "-m", "ringtrain.horovod"], ["-Omringtrain.horovod"], ["-Om", "ringtrain.horovod"]):
        (seen,) = printed("-X", "utf8", *options, "-c", code, "b", cwd=folder)
        assert seen == (["-c", "b"], "", 1, 1)


def test_a_script_fails_as_it_does_under_python(folder):
    (folder / "fails.py").write_text("import horovod\nraise SystemExit(7)\n")
    assert python("-m", "ringtrain.horovod", "fails.py", cwd=folder).returncode == 7
    (folder / "fails.py").write_text("import horovod\n1 / 0\n")
    done = python("-m", "ringtrain.horovod", "fails.py", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0:2] == [
        "Traceback (most recent call last):",
        f'  File "{folder / "fails.py"}", line 2, in <module>',
    ]


def test_python_m_without_a_script_says_how(tmp_path):
    done = python("-m", "ringtrain.horovod", cwd=tmp_path)
    assert done.returncode == 2 and "python -m ringtrain.horovod train.py" in done.stdout


def test_ringrun_gives_the_name_to_its_ranks(folder):
    seen = printed(*ON_TWO_RANKS, "--horovod", sys.executable, "train/train.py", cwd=folder.parent)
    assert seen == [(["train/train.py"], str(folder), "__main__", None, 2)] * 2


PROCESSES = """\
import multiprocessing, pickle
{first_line}
import horovod.runner

def version():
    return horovod.__version__

if __name__ == "__main__":
    print([multiprocessing.get_context(how).Pool(1).apply(version) for how in ("fork", "spawn", "forkserver")])
    import horovod.torch as hvd
    assert pickle.loads(pickle.dumps(hvd.allreduce)) is hvd.allreduce
"""


@pytest.mark.parametrize("first_line", ["", pytest.param("import ringtrain.horovod", marks=pytest.mark.slow)])
def test_processes_of_the_script_have_the_name_too(tmp_path, first_line):
    (tmp_path / "train.py").write_text(PROCESSES.replace("{first_line}", first_line))
    start = [] if first_line else ["-m", "ringtrain.horovod"]
    assert printed(*start, "train.py", cwd=tmp_path) == [["0.28.1"] * 3]


def test_a_program_that_the_script_starts_has_the_name_too(tmp_path):
    (tmp_path / "train.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import horovod; print(repr(horovod.__version__))'], check=True)\n"
    )
    assert printed("-m", "ringtrain.horovod", "train.py", cwd=tmp_path) == ["0.28.1"]


@pytest.fixture
def other_horovod(tmp_path):
    """A Horovod that is installed."""
    package = tmp_path / "site" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.0'\n")
    return package


def test_a_horovod_that_is_installed_keeps_its_name(tmp_path, other_horovod):
    site = {"PYTHONPATH": os.pathsep.join([str(other_horovod.parent), *sys.path])}
    ask = "import horovod; print(repr(horovod.__version__))"
    for command in (
        ["-c", f"import ringtrain.horovod; {ask}"],
        ["-m", "ringtrain.horovod", "-c", ask],
        [*ON_TWO_RANKS, "--horovod", sys.executable, "-c", ask],
    ):
        refused = python(*command, cwd=tmp_path, **site)
        assert refused.returncode != 0
        assert f"Horovod is installed at {other_horovod / '__init__.py'}" in refused.stderr
        assert "RINGTRAIN_REPLACE_HOROVOD=1" in refused.stderr
        assert set(printed(*command, cwd=tmp_path, **site, RINGTRAIN_REPLACE_HOROVOD="1")) == {"0.28.1"}


def test_a_horovod_that_is_imported_stays(tmp_path, other_horovod):
    code = "import horovod\ntry: import ringtrain.horovod\nexcept ImportError as error: print(repr(str(error)))"
    (message,) = printed("-c", code, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(other_horovod.parent), *sys.path]))
    assert message.startswith(f"horovod is imported already, from {other_horovod}")


def test_a_folder_of_that_name_is_no_horovod(tmp_path):
    (tmp_path / "horovod").mkdir()
    assert printed("-c", "import ringtrain.horovod, horovod; print(repr(horovod.__version__))", cwd=tmp_path) == [
        "0.28.1"
    ]


def test_util_does_what_horovods_does(monkeypatch):
    from ringtrain.horovod.common import util

    assert util.split_list(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.9.0")
    assert not util.is_version_greater_equal_than("1.13.1", "2.0.0")
    for version, target in [(2, "1.0.0"), ("2.0", "1.0")]:
        with pytest.raises(ValueError, match="must be"):
            util.is_version_greater_equal_than(version, target)
    assert util.check_installed_version("torch", "0.1") is None
    extension = util.get_extension_full_path("/package/__init__.py", "torch", "mpi_lib")
    assert extension == "/package/torch/mpi_lib" + util.get_ext_suffix()
    assert [number for number in range(9) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    calls = []
    double = util._cache(lambda number: calls.append(number) or 2 * number)
    assert [double(1), double(1), double(2), calls] == [2, 2, 4, [1, 2]]
    monkeypatch.setenv("KEPT", "before")
    with util.env(KEPT="within", NEW="1", NONE=None):
        assert (os.environ["KEPT"], os.environ["NEW"], os.environ.get("NONE")) == ("within", "1", None)
    assert (os.environ["KEPT"], os.environ.get("NEW")) == ("before", None)
    assert util.extension_available("torch") and not util.extension_available("tensorflow")
    with pytest.raises(ImportError, match=r"horovod\.mxnet is not there"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")


def test_the_folder_on_the_path_holds_that_name_only():
    from ringtrain.runner import installed

    assert [path.name for path in Path(installed.HOROVOD_FOLDER).glob("*.py")] == ["horovod.py"]


@pytest.fixture
def tree(tmp_path):
    """The sources of ringtrain without the core, as a checkout has them before it is built."""
    here = Path(ringtrain.__file__).parent
    shutil.copytree(here, tmp_path / "tree" / "ringtrain", ignore=shutil.ignore_patterns("_core*.so", "__pycache__"))
    (tmp_path / "tree" / "train.py").write_text("import horovod.torch as hvd; hvd.init(); print(hvd.size())\n")
    return tmp_path / "tree"


def build(tree):
    for core in Path(ringtrain.__file__).parent.glob("_core*.so"):
        (tree / "ringtrain" / core.name).symlink_to(core)


def test_a_source_tree_in_the_current_folder_that_is_not_built_says_so(tree):
    here = Path(ringtrain.__file__).parent
    paths = os.pathsep.join([str(here.parent), sysconfig.get_path("purelib")])
    # without the finder of an editable install, which finds the core of another copy
    done = python("-S", "-m", "ringtrain.horovod", "train.py", cwd=tree, PYTHONPATH=paths)
    sentence = done.stderr.splitlines()[-1]
    assert f"ringtrain was imported from {tree}/ringtrain, a source tree whose core is not built" in sentence
    assert f"run `pip install -e {tree}`, or start Python in another folder to use the copy in {here}" in sentence


def test_a_source_tree_in_the_current_folder_may_start_a_script_that_imports_another_copy(tree, folder):
    build(tree)
    (seen,) = printed("-m", "ringtrain.horovod", str(folder / "train.py"), cwd=tree)
    assert seen[-1] == 1
    code = "import sys, horovod, ringtrain; print((horovod.__file__, ringtrain.__file__))"
    (folder / "where.py").write_text(code)
    ((package, other),) = printed("-m", "ringtrain.horovod", str(folder / "where.py"), cwd=tree)
    assert (package, other) == (str(Path(ringtrain.__file__).parent / "horovod" / "__init__.py"), ringtrain.__file__)


def test_ringrun_in_a_source_tree_may_start_a_script_that_imports_another_copy(tree, folder):
    build(tree)
    done = python(*ON_TWO_RANKS, "--horovod", "python", str(folder / "train.py"), cwd=tree)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr


# what code outside Horovod imports of its launcher, its loaders and its private names
MORE_IMPORTS = """
from horovod.runner.launch import run_commandline
from horovod.runner.mpi_run import is_intel_mpi, is_mpich, is_open_mpi, mpi_available
from horovod.runner import run
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.common.util import _cache, check_extension, check_installed_version
from horovod.torch import check_extension
from horovod.torch.mpi_ops import (
    HorovodAllgather, HorovodAllreduce, HorovodAlltoall, HorovodBroadcast, HorovodGroupedAllgather,
    HorovodGroupedAllreduce, HorovodGroupedReducescatter, HorovodReducescatter, _basics,
)
from horovod.torch.optimizer import _DistributedOptimizer
"""


def test_private_names_and_modules_of_the_launcher_are_there(tmp_path):
    done = python("-c", f"import ringtrain.horovod\n{MORE_IMPORTS}\nassert _basics.size and _basics.init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


OF_RUNNER = [
    *("gloo_run", "js_run", "run_task", "task_fn", "http", "http.http_server", "http.http_client"),
    *("driver", "driver.driver_service", "task.task_service", "common.service", "common.service.driver_service"),
    *("common.service.task_service", "common.service.compute_service", "common.util.network"),
    *("common.util.config_parser", "common.util.settings", "common.util.safe_shell_exec"),
    *("common.util.tiny_shell_exec", "util.cache", "util.lsf", "util.remote", "util.streams", "elastic"),
    *("elastic.constants", "elastic.discovery", "elastic.driver", "elastic.registration", "elastic.rendezvous"),
    *("elastic.settings", "elastic.worker"),
]


def test_a_module_of_the_launcher_that_ringtrain_has_not_says_what_to_use(tmp_path):
    code = f"""
import ringtrain.horovod, importlib
for name in {OF_RUNNER}:
    try:
        importlib.import_module(f"horovod.runner.{{name}}")
    except ModuleNotFoundError as error:
        print((error.name, str(error)))
"""
    found = printed("-c", code, cwd=tmp_path)
    for name, (missing, message) in zip(OF_RUNNER, found, strict=True):
        assert f"horovod.runner.{name}".startswith(missing)  # the package, where that is missing
        assert message.startswith(f"{missing} is not part of ringtrain: ")
    assert "--network sockets" in dict(found)["horovod.runner.http"]


def test_a_loader_loads_ahead_in_a_thread(tmp_path):
    code = """
import threading
import ringtrain.horovod
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

class Loader(BaseDataLoader):
    def __len__(self):
        return 3
    def _iterate(self):
        self.names = {*getattr(self, "names", ()), threading.current_thread().name}
        yield from range(3)
    def _process_batch(self, batch):
        return batch * 10

class Ahead(AsyncDataLoaderMixin, Loader):
    pass

class Fails(AsyncDataLoaderMixin, Loader):
    def _iterate(self):
        yield 1
        raise LookupError("no more")

print(list(Loader()))
for size in (0, 1, 64):
    loader = Ahead(async_loader_queue_size=size)
    print([list(loader), list(loader), loader.names == {"MainThread" if size == 0 else "ringtrain loader"}])
    loader.close_async_loader()
    assert loader.thread is None
fails = iter(Fails())
print(next(fails))
try:
    next(fails)
except LookupError as error:
    print(repr(str(error)))
"""
    twice = [[0, 10, 20], [0, 10, 20], True]
    assert printed("-c", code, cwd=tmp_path) == [[0, 10, 20], twice, twice, twice, 10, "no more"]


def test_a_loader_that_has_failed_fails_again_in_each_loop(tmp_path):
    code = """
import ringtrain.horovod
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

class Base(BaseDataLoader):
    def __init__(self, error):
        self.error = error
    def __len__(self):
        return 3
    def _iterate(self):
        yield from range(3)
        raise self.error

class Ahead(AsyncDataLoaderMixin, Base):
    pass

def loop(loader):
    try:
        return list(loader)
    except BaseException as error:
        return repr(error)

for size in (0, 1, 2, 64):
    for error in (LookupError("no more"), SystemExit(3)):
        loader = Ahead(size, error)
        both = [iter(loader), iter(loader)]
        print([loop(loader), loop(loader), loop(both[0]), loop(both[1])])
        loader.close_async_loader()
"""
    lines = printed("-c", code, cwd=tmp_path)
    assert lines == [["LookupError('no more')"] * 4, ["SystemExit(3)"] * 4] * 4


def test_a_loader_takes_debug_data_loader_in_each_way_of_horovod(tmp_path):
    code = """
import ringtrain.horovod
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

class Base(BaseDataLoader):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def _iterate(self):
        yield from range(self.n)

class Loader(AsyncDataLoaderMixin, Base):
    pass

for made in (Loader(2, 3), Loader(2, False, 3), Loader(async_loader_queue_size=2, debug_data_loader=False, n=3)):
    print(list(made))
print("-")
Loader(0, True, 3)
list(Loader(2, debug_data_loader=True, n=1))
"""
    said, _, debug = python("-c", code, cwd=tmp_path).stdout.partition("-\n")
    assert said == "[0, 1, 2]\n" * 3
    loads = "Loader: loads {} batches ahead\n"
    assert debug == loads.format(0) + loads.format(2) + "Loader: begins an epoch\n"


HOROVODRUN = "import sys; from ringtrain.runner.command import main_of_horovodrun; sys.exit(main_of_horovodrun())"


def test_horovodrun_is_ringrun_with_horovods_name(folder):
    words = ["-np", "2", "--gloo", "--cycle-time-ms", "5", "--no-prefix-output", sys.executable, "train.py"]
    done = python("-c", HOROVODRUN, *words, cwd=folder)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr
    assert "horovodrun: " in done.stderr and "ringrun: " not in done.stderr
    assert python("-c", HOROVODRUN, "-np", "2", cwd=folder).stderr.startswith("horovodrun: there is no command to run")


def test_horovodrun_is_that_of_an_installed_horovod(tmp_path):
    (tmp_path / "horovod" / "runner").mkdir(parents=True)
    for package in ("horovod", "horovod/runner"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "horovod" / "runner" / "launch.py").write_text("def run_commandline(): print(\"'its own'\")\n")
    assert printed("-c", HOROVODRUN, "-np", "2", cwd=tmp_path, PYTHONPATH=str(tmp_path)) == ["its own"]
