"""Finds what `import horovod...` asks for among ringtrain's modules."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ringtrain.runner import installed

# The modules of Horovod that ringtrain has under another name: of small ones, one for all of a package. The longest
# beginning of a name that is here decides; the rest of the name stays.
_MODULES = {
    "horovod": "ringtrain.horovod",
    "horovod.torch": "ringtrain.torch",
    "horovod.mxnet": "ringtrain.mxnet",
    "horovod.spark": "ringtrain.spark",
    "horovod.spark.runner": "ringtrain.spark",
    **{f"horovod.{name}": "ringtrain.ray" for name in ("ray", "ray.runner", "ray.elastic", "ray.elastic_v2")},
    "horovod.common.process_sets": "ringtrain.engine.process_sets",
    **{f"horovod.common.{name}": "ringtrain.horovod.common" for name in ("basics", "elastic", "exceptions", "util")},
    "horovod.data.data_loader_base": "ringtrain.horovod.data",
    **{f"horovod.runner.{name}": "ringtrain.horovod.runner" for name in ("launch", "mpi_run")},
}

# Modules that Horovod 0.28.1 has and ringtrain lacks, and the sentence about each. Their submodules are meant too.
_ABSENT = {
    "horovod.tensorflow": "TensorFlow does not come; PyTorch, CuPy and NumPy are there",
    "horovod.keras": "Keras does not come; PyTorch, CuPy and NumPy are there",
    "horovod._keras": "Keras does not come; PyTorch, CuPy and NumPy are there",
    **{
        f"horovod.spark.{name}": "estimators and stores do not come; ringtrain.spark.run_on(data_frame, function) "
        "trains on the partitions of a DataFrame"
        for name in ("common", "data_loaders", "keras", "lightning", "tensorflow", "torch")
    },
}

# Packages and modules of Horovod's launcher that ringtrain has not. Each has what ringtrain offers instead.
_GLOO = "ringrun starts the ranks and brings them together, also without MPI (--network sockets); there is no gloo"
_SERVICES = "ringrun and ringtrain.run() start the ranks, and there are no services beside them"
_ABSENT_OF_RUNNER = {
    "horovod.runner.gloo_run": _GLOO,
    "horovod.runner.http": _GLOO,
    "horovod.runner.js_run": "ringrun --launcher srun starts the ranks with Slurm; there is no jsrun of LSF",
    "horovod.runner.driver": _SERVICES,
    "horovod.runner.task": _SERVICES,
    "horovod.runner.run_task": "ringtrain.run(function) calls a function on all ranks",
    "horovod.runner.task_fn": "ringtrain.run(function) calls a function on all ranks",
    "horovod.runner.service": _SERVICES,
    "horovod.runner.common": f"{_SERVICES}. Hosts are named by -H and --hostfile, ranks by hvd.rank() and hvd.size(); "
    "the arguments of ringtrain.run() and --config-file have the settings; use pickle and secrets for the rest",
    "horovod.runner.util": "use subprocess.run(), threading and socket; nothing is kept from one start to the next",
    "horovod.runner.elastic": "ringrun --min-np, or ringtrain.run(min_num_proc=...), starts an elastic job, with "
    "--host-discovery-script",
}


def install(package: str) -> None:
    """Give the name `horovod` to a package of ringtrain, in this process and in those that it starts.

    Raises:
        ImportError: a Horovod is imported already, or installed and not to be replaced.
    """
    other = sys.modules.get("horovod")
    own = sys.modules[package]
    if other is not None and other is not own and not _is_of_ringtrain(other):
        raise ImportError(
            f"{other.__name__} is imported already, from {other.__file__ or 'a folder'}; import {package}, which is in "
            f"{own.__file__}, before it"
        )
    installed.require_free_name()
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules["horovod"] = own
    # multiprocessing hands it to what it spawns
    if installed.HOROVOD_FOLDER not in sys.path:
        sys.path.append(installed.HOROVOD_FOLDER)


def _is_of_ringtrain(module: ModuleType) -> bool:
    """Whether it is the file on the import path that is importing ringtrain, also where another copy has put it."""
    return installed.is_folder_of_a_copy(os.path.dirname(module.__file__ or ""))


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # `from horovod import torch` looks for it under the name that the package has
        name_in_horovod = name.removeprefix("ringtrain.")
        beginning, rest = _longest_beginning(name_in_horovod, _ABSENT)
        if beginning:
            # a spec, as where Horovod was built without this framework: only the import fails
            sentence = f"{name_in_horovod} is not part of ringtrain: {_ABSENT[beginning]}"
            return ModuleSpec(name, _Absent(ImportError(sentence, name=name)), is_package=True)
        beginning, rest = _longest_beginning(name_in_horovod, _ABSENT_OF_RUNNER)
        if beginning:
            sentence = f"{name_in_horovod} is not part of ringtrain: {_ABSENT_OF_RUNNER[beginning]}"
            raise ModuleNotFoundError(sentence, name=name)
        beginning, rest = _longest_beginning(name_in_horovod, _MODULES)
        real_name = _MODULES[beginning] + rest if beginning else name
        return _alias(name, real_name) if real_name != name else None


def _longest_beginning(name: str, table: dict[str, str]) -> tuple[str, str]:
    """The longest of the table's names that is this one or a package above it, and what is left; "" if none is."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        beginning = ".".join(words[:count])
        if beginning in table:
            return beginning, name.removeprefix(beginning)
    return "", name


def _alias(name: str, real_name: str) -> ModuleSpec | None:
    real = importlib.util.find_spec(real_name)
    if real is None:
        return None
    spec = ModuleSpec(name, _Alias(real_name), origin=real.origin)
    spec.submodule_search_locations = real.submodule_search_locations
    return spec


class _Alias(Loader):
    """Loads a module as another one, which there is only once, under both names."""

    def __init__(self, real_name: str):
        self._real_name = real_name
        self._real_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real_name)
        if self._real_name == "ringtrain.torch":
            _add_private_names(module)
        self._real_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # it has been executed; but the import system has just given it the spec of its other name
        module.__spec__ = self._real_spec


def _add_private_names(module: ModuleType) -> None:
    """To `horovod.torch` those that other code imports from there, and that are of no use without Horovod's name."""
    common = importlib.import_module("ringtrain.horovod.common")
    vars(module)["check_extension"] = common.check_extension
    vars(module)["mpi_ops"]._basics = common.HorovodBasics()


class _Absent(Loader):
    def __init__(self, error: ImportError):
        self._error = error

    def create_module(self, spec: ModuleSpec) -> None:
        raise self._error

    def exec_module(self, module: ModuleType) -> None:
        raise NotImplementedError
