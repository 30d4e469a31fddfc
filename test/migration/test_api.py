"""The public names: each one exists, is called as in Horovod, and is used by a test."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import horovod_api
import pytest
from harness.rooms import TEST_FOLDER

import ringtrain

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = _ROOT / "ringtrain"

# The only public names that are not called.
VALUES = {"Adasum", "Average", "Max", "Min", "Product", "Sum", "global_process_set"}

# Names that Horovod does not have, for arrays of any library and for torch.
OWN = {
    *("Compression", "Compressor", "Handle", "check_replicas", "empty", "get_process_set_ids_and_ranks", "metrics"),
    *("grouped_alltoall", "grouped_alltoall_async", "grouped_broadcast", "grouped_broadcast_"),
    *("grouped_broadcast_async", "grouped_broadcast_async_"),
    *("DiLoCo", "SpeedSampler", "exit_preempted", "new_group", "preempted"),
    *("recv", "recv_async", "send", "send_async", "time_limit"),
}
# Of these the arguments are not those of Horovod's functions: `DistributedOptimizer` wraps optimizers of arrays, which
# Horovod does not have, and `run` takes fewer.
OWN_OF_ARRAYS = {*OWN, "DistributedOptimizer", "run"}
OWN_OF_TORCH = {*OWN, "Join", "SparseHandle", "broadcast_object_fn", "clip_grad_norm_"}
OF_ARRAYS = {**horovod_api.TORCH, **horovod_api.TENSORFLOW, **horovod_api.MXNET}


def tree_of(module):
    return ast.parse(Path(module.__file__).read_text())


def module_named(name):
    if name.startswith("ringtrain.torch"):
        pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    if name.startswith("ringtrain.mxnet"):
        pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")
    if name.startswith("ringtrain.ray"):
        pytest.importorskip("ray", reason="Ray is not installed in this environment: see `make ray`")
    importlib.import_module(name)
    return sys.modules[name]  # `ringtrain.run` is a function


def modules_with_names():
    """Those that say what is public."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        if re.search(r"^ *__all__\b.* = ", path.read_text(), re.MULTILINE):
            parts = path.relative_to(_ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def defining(module, name):
    """The module that makes what another one has under a name."""
    if module is ringtrain and name not in ringtrain._HOMES:
        module = module_named("ringtrain.face")
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            if not node.module.startswith("ringtrain") or node.module == "ringtrain._core":
                return module
            (original,) = (alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return defining(module_named(node.module), original)
    return module


def load_all_modules(package):
    """The next import of one could hide a name. Not what needs another package, or cannot be imported."""
    for found in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if found.name not in ("__main__", "run", "torch", "mxnet", "horovod", "dask", "ray", "spark"):
            importlib.import_module(f"{package.__name__}.{found.name}")


@pytest.mark.parametrize("name", list(modules_with_names()))
def test_every_public_name_is_what_its_module_defines(name):
    module = module_named(name)
    load_all_modules(module)
    for public in module.__all__:
        thing = getattr(module, public)
        assert not inspect.ismodule(thing), f"{name}.{public} is a module"
        assert thing is getattr(defining(module, public), public), f"{name}.{public} is not the one of its module"
        assert callable(thing) == (public not in VALUES), f"{name}.{public}"
    assert list(module.__all__) == sorted(set(module.__all__))


def test_public_names_are_listed_alike():
    assert {"ringtrain", "ringtrain.torch"} <= set(modules_with_names())


@pytest.mark.parametrize("package", ["", ".torch", ".jax", ".mxnet", ".elastic", ".kvstore"])
def test_completion_shows_the_public_names_alone(package):
    pytest.importorskip(package[1:] if package in (".torch", ".jax", ".mxnet") else "ringtrain", exc_type=ImportError)
    module = importlib.import_module(f"ringtrain{package}")
    shown = {name for name in dir(module) if not name.startswith("_")}
    own_modules = {"elastic"} if package in ("", ".torch", ".jax") else set()
    own_modules |= {"distributed"} if package == ".jax" else set()
    assert shown == {*module.__all__, *own_modules}
    assert {"__all__", "__doc__", "__file__", "__name__"} <= set(dir(module))


def test_the_package_lists_all_that_it_loads_when_it_is_asked():
    face = vars(module_named("ringtrain.face"))
    loaded = [public for public, it in face.items() if not public.startswith("_") and not inspect.ismodule(it)]
    assert sorted([*loaded, *ringtrain._HOMES]) == ringtrain.__all__
    assert {*ringtrain.__all__, "elastic"} <= set(dir(ringtrain))


def test_launchers_import_neither_numpy_nor_the_modules_of_ranks():
    unwanted = {"numpy", "ringtrain.face", "ringtrain.ops"}
    script = f"import sys, MODULE; print(sorted({unwanted} & {{*sys.modules}}))"
    for module in ("ringtrain", "ringtrain.runner.command", "ringtrain.runner.start.starter"):
        arguments = [sys.executable, "-c", script.replace("MODULE", module)]
        assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "[]\n", module


# They take as long to import as all that a rank does need.
FEW_RANKS_NEED = {
    *("ringtrain.kvstore", "ringtrain.torch", "ringtrain.training", "ringtrain.job.rendezvous.generations"),
    *("concurrent.futures", "dataclasses", "difflib", "glob", "hashlib", "ipaddress", "ml_dtypes", "numpy.ma"),
    *("numpy.typing", "pathlib", "pkgutil", "random", "secrets", "shutil", "subprocess", "tempfile", "urllib"),
}


def test_a_rank_that_trains_imports_nothing_that_few_ranks_need():
    script = (
        "import sys, numpy; of_numpy = {*sys.modules}; import ringtrain as hvd; hvd.init(); "
        f"hvd.allreduce(numpy.ones(3)); print(sorted({FEW_RANKS_NEED} & {{*sys.modules}} - of_numpy))"
    )
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert asked.stdout == "[]\n"


def test_bfloat16_needs_no_import_in_the_script():
    script = (
        "import numpy, ringtrain as hvd; hvd.init(); array = hvd.empty(3, 'bfloat16'); array[:] = 1.5; "
        "half = numpy.full(3, 0.5, numpy.float32); "
        "print(hvd.allreduce(array).tolist(), hvd.allreduce(half, compression=hvd.Compression.bf16).tolist())"
    )
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert asked.stdout == "[1.5, 1.5, 1.5] [0.5, 0.5, 0.5]\n"


def test_init_by_another_name_loads_all_that_has_a_part_in_it():
    script = "import sys; from ringtrain.job.session import init; init(); print('ringtrain.face' in sys.modules)"
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert asked.stdout == "True\n"


def test_the_modules_of_the_package_are_there_without_another_import():
    script = "import ringtrain; print(ringtrain.errors.PeerLostError.__name__, ringtrain.ops.allreduce.__name__)"
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert asked.stdout == "PeerLostError allreduce\n"


@pytest.mark.parametrize("module", ["ops", "timeline.recording", "elastic", "errors", "face"])
def test_any_module_may_be_the_first_that_is_imported(module):
    subprocess.run([sys.executable, "-c", f"import ringtrain.{module}; ringtrain.init()"], check=True)


def test_a_name_that_the_package_has_not_is_an_error():
    with pytest.raises(AttributeError, match="module 'ringtrain' has no attribute 'alreduce'"):
        ringtrain.alreduce  # noqa: B018


def looked_up(module, name):
    """Returns what "Class.method" is."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def called_with(function, name):
    """The parameters without `self`."""
    parameters = list(inspect.signature(function).parameters.values())
    is_method = "." in name and not name.startswith("Compressor")
    return parameters[1:] if is_method else parameters


def differences(ours, theirs):
    """In words, what a call that fits `theirs` would find."""
    positional = [one for one in ours if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if [one.name for one in positional] != [one.name for one in theirs]:
        yield f"takes {[one.name for one in positional]} by position, and Horovod {[one.name for one in theirs]}"
        return
    for own, other in zip(positional, theirs, strict=True):
        if own.kind is own.POSITIONAL_ONLY:
            yield f"does not take {own.name} by its name"
        # An argument that Horovod needs from everybody may have a default here.
        if other.default is not other.empty and own.default != other.default:
            yield f"has {own.name}={own.default}, and Horovod {other.default}"
    for own in ours[len(positional) :]:
        if own.kind is own.VAR_POSITIONAL or (own.kind is own.KEYWORD_ONLY and own.default is own.empty):
            yield f"needs {own}"


def check_arguments(module, name, thing, arguments):
    # Horovod's defaults, as the package has them.
    theirs = eval(f"lambda {arguments}: None", {**vars(module_named("ringtrain.face")), **vars(module)})
    found = list(differences(called_with(thing, name), list(inspect.signature(theirs).parameters.values())))
    assert not found, f"{module.__name__}.{name} {'; '.join(found)}"


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arguments_are_those_of_horovod(name):
    if name.partition(".")[0] in ringtrain.__all__ and name not in OWN_OF_ARRAYS:
        check_arguments(ringtrain, name, looked_up(ringtrain, name), OF_ARRAYS[name])
    else:
        assert name in OWN_OF_ARRAYS or name.startswith(("SyncBatchNorm", "broadcast_optimizer", "sparse_"))


@pytest.mark.parametrize("name", horovod_api.TORCH)
def test_arguments_are_those_of_horovod_for_torch(name):
    hvd = module_named("ringtrain.torch")
    check_arguments(hvd, name, looked_up(hvd, name), horovod_api.TORCH[name])


@pytest.mark.parametrize("name", horovod_api.TORCH_ELASTIC)
def test_arguments_are_those_of_horovod_for_elastic(name):
    elastic = module_named("ringtrain.torch.elastic")
    check_arguments(elastic, name, looked_up(elastic, name), horovod_api.TORCH_ELASTIC[name])


@pytest.mark.parametrize("name", horovod_api.TORCH_OPTIMIZER)
def test_a_distributed_optimizer_is_called_as_that_of_horovod(name):
    module = module_named("ringtrain.torch.optimizer")
    arguments = horovod_api.TORCH_OPTIMIZER[name]
    own = called_with(getattr(module.Distributed, name), f"Distributed.{name}")
    expected = inspect.signature(eval(f"lambda {arguments}: None")).parameters
    assert [one.name for one in own][: len(expected)] == list(expected)
    assert all(one.default is not one.empty for one in own[len(expected) :])


def is_error(thing):
    return isinstance(thing, type) and issubclass(thing, BaseException)


@pytest.mark.parametrize(
    "package, table, own",
    [("ringtrain", OF_ARRAYS, OWN_OF_ARRAYS), ("ringtrain.torch", horovod_api.TORCH, OWN_OF_TORCH)],
    ids=["ringtrain", "ringtrain.torch"],
)
def test_every_public_name_is_compared_with_horovod_or_is_our_own(package, table, own):
    module = module_named(package)
    public = {name for name in module.__all__ if name not in VALUES and not is_error(getattr(module, name))}
    assert sorted(public - own - set(table)) == []
    assert sorted(own - public) == []


def names_used(path):
    """(module, name) of all that a test takes from ringtrain."""
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("on_demand("):
            modules[ast.unparse(node.targets[0])] = node.value.args[0].value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield modules[ast.unparse(node.value)], node.attr


@pytest.mark.parametrize("package", ["ringtrain", "ringtrain.torch"])
def test_every_public_name_is_used_by_a_test(package):
    own = Path(__file__)
    used = {use for path in TEST_FOLDER.rglob("*.py") if path != own for use in names_used(path)}
    unused = [name for name in module_named(package).__all__ if (package, name) not in used]
    assert not unused, f"no test takes from {package}: {', '.join(unused)}"


@pytest.mark.parametrize("name", ["compression", "functions", "mpi_ops"])
def test_a_module_of_horovods_has_what_its_package_has(name):
    package, module = module_named("ringtrain.torch"), module_named(f"ringtrain.torch.{name}")
    shared = [public for public in module.__all__ if public in package.__all__]
    assert shared
    for public in shared:
        assert getattr(module, public) is getattr(package, public), f"hvd.{name}.{public} is not hvd.{public}"


def test_the_command_does_not_hide_the_function():
    with pytest.raises(ImportError, match="write `from ringtrain import run`"):
        importlib.import_module("ringtrain.run")
    assert ringtrain.run.__module__ == "ringtrain.runner.function"
    asked = subprocess.run([sys.executable, "-m", "ringtrain.run", "--version"], capture_output=True, text=True)
    assert asked.returncode == 0 and ringtrain.__version__ in asked.stdout


ONE = ["allgather", "allreduce", "allreduce_", "alltoall", "broadcast", "broadcast_", "reducescatter"]
BLOCKING = [*ONE, *(f"grouped_{name}" for name in ONE), "barrier", "join"]


@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("package", ["ringtrain", "ringtrain.torch"])
def test_help_says_what_an_operation_takes_gives_and_raises(package, name):
    operation = getattr(module_named(package), name)
    source = inspect.getsource(operation)
    assert source.startswith(f"def {name}(") and not hasattr(operation, "__wrapped__"), "made by another function"
    text = inspect.getdoc(operation)
    documented = re.findall(r"^(\w+):$", text, re.MULTILINE)
    sections = ["Args", *(["Returns"] if name != "barrier" else []), "Raises"]
    assert documented in (sections, [*sections, "Examples"])
    told = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert [one for one in inspect.signature(operation).parameters if one not in told] == []
    assert inspect.signature(operation).return_annotation not in ("Any", inspect.Signature.empty) or "alltoall" in name


@pytest.mark.parametrize("name", ["allgather_async", "allreduce_async_", "broadcast_async"])
def test_a_handle_says_what_it_gives(name):
    assert inspect.signature(getattr(ringtrain, name)).return_annotation == "Handle[Array]"
