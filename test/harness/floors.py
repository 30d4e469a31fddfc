"""Which file may include or import which: the floors of the architecture, read from the text of the sources.

In csrc/ an arrow points to its own floor or to a lower one, in ringtrain/ to its own folder or to a lower floor.
Nothing is compiled or imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

# lowest first
CPP_FLOORS = (
    {"base"},
    {"kernels"},
    {"gpu"},
    {"memory"},
    {"network"},
    {"coordination"},
    {"record"},
    {"collectives"},
    {"runtime"},
    {"kvstore", "mpi_abi", "mxnet", "xla"},
    {"python"},
)
# Within a folder: what is named here stands above its other files. Rooms of one floor do not see each other.
CPP_ROOMS = {
    "collectives": ({"shm", "network"}, {"gpu"}, {"choose"}),
    "kvstore": ({"store"}, {"wire"}, {"server", "worker"}),
}
PYTHON_FLOORS = (
    {"_core", "version"},
    {"errors", "failure", "optim", "options", "pickling"},
    {"arrays", "record"},
    {"engine"},
    {"job"},
    {"ops", "runner"},
    {"dask", "doctor", "flight", "kvstore", "ray", "spark", "timeline", "training"},
    {"elastic", "face", "mxnet"},
    {"__init__", "horovod", "jax", "torch"},
    # These stand where users stand.
    {"bench", "launch", "run", "__main__"},
)
# The same within a package of ringtrain: its `__init__.py` may see all of it.
PYTHON_ROOMS = {"ringtrain.torch.distributed": ({"patches"}, {"__init__"})}
# A name of `ringtrain` that is no module of it is one of its face.
_FACE = "__init__"

_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy", "mxnet": "mxnet", "horovod": "horovod"}
# what ringtrain is measured against may be any framework
_PEERS = ("ringtrain", "bench", "peers")
# beginnings of headers -> the only folder that may include them
_FOREIGN_HEADERS = {"nanobind/": "python", "Python.h": "python", "mpi.h": None, "cuda": None, "nccl": None}

MAX_LINES = 900


class Violation(NamedTuple):
    """One broken rule; `line` is 1 where the whole file is meant."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def check(file: str, text: str, modules: Collection[str] = ()) -> list[Violation]:
    """The rules that one file breaks.

    Args:
        file: its path from the root of the repository, with slashes.
        text: what is in it.
        modules: of the `__init__.py` of a package the names of its modules and folders that can be imported.
    """
    rules = _check_cpp if file.startswith("csrc/") else _check_python
    broken = [*rules(PurePosixPath(file), text), *_check_length(text), *_check_names(file, text, modules)]
    return [Violation(file, *one) for one in broken]


_Broken = Iterator[tuple[int, str]]


def _check_length(text: str) -> _Broken:
    lines = len(text.splitlines())
    if lines > MAX_LINES:
        yield 1, f"{lines} lines, more than {MAX_LINES}: move its second idea to a file of its own"


def _floor(part: str, floors: tuple[set[str], ...]) -> int | None:
    return next((number for number, parts in enumerate(floors) if part in parts), None)


def _check_cpp(file: PurePosixPath, text: str) -> _Broken:
    folder = file.parts[1] if len(file.parts) > 2 else ""
    own = _floor(folder, CPP_FLOORS)
    if own is None:
        yield 1, f'the folder "{folder}" is on no floor of csrc/'
        return
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)', line)
        if match is None:
            continue
        message = _check_foreign(folder, match[2]) if match[1] == "<" else _check_own(file, own, match[2])
        if message:
            yield number, message


def _check_foreign(folder: str, header: str) -> str | None:
    for beginning, home in _FOREIGN_HEADERS.items():
        if header.startswith(beginning) and folder != home:
            return f"<{header}> may be included {f'in {home}/ only' if home else 'nowhere: csrc/ compiles without it'}"
    return None


def _check_own(file: PurePosixPath, own: int, header: str) -> str | None:
    folder, target = file.parts[1], header.split("/")[0] if "/" in header else ""
    floor = _floor(target, CPP_FLOORS)
    if floor is None:
        return f'"{header}" is on no floor of csrc/; write its folder, as in "base/dtype.h"'
    if floor > own:
        return f'{folder}/ includes "{header}", which is a higher floor'
    return _check_room(folder, "/".join(file.parts[2:]), header) if target == folder else None


def _check_room(folder: str, file: str, header: str) -> str | None:
    """The same inside a folder, of a file and a header in it."""
    own, target = (re.split(r"[/.]", name)[0] for name in (file, header.split("/", 1)[1]))
    if _may_see(own, target, CPP_ROOMS.get(folder, ())):
        return None
    return f'{folder}/{own} includes "{header}", which is no lower floor of {folder}/'


def _may_see(own: str, target: str, floors: tuple[set[str], ...]) -> bool:
    own_floor, floor = _floor(own, floors), _floor(target, floors)
    return floor is None or own == target or (own_floor is not None and own_floor > floor)


def _check_python(file: PurePosixPath, text: str) -> _Broken:
    part = file.parts[1].split(".")[0]
    own = _floor(part, PYTHON_FLOORS)
    if own is None:
        yield 1, f'"{part}" is on no floor of ringtrain/'
        return
    for number, module in _imports(file, ast.parse(text)):
        message = _check_framework(file, module)
        if module.split(".")[0] == "ringtrain":
            message = _check_import(part, own, module) or _check_python_room(file, module)
        if message:
            yield number, message


def _check_names(file: str, text: str, modules: Collection[str]) -> _Broken:
    """An import of a module, from anywhere, makes it an attribute of its package, over what had that name."""
    if not modules:
        return
    for line, name in _names_of_package(PurePosixPath(file), ast.parse(text)):
        if name in modules:
            yield line, f'the module "{name}" of this package hides what is called so; give the module another name'


def can_be_imported(text: str) -> bool:
    """Whether a module is for more than `python -m`: it hides no name of its package if importing it fails."""
    tests = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.If)]
    return not any(test.startswith("if __name__ != '__main__':\n    raise ImportError(") for test in tests)


def _names_of_package(file: PurePosixPath, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of all that a module has, but for the modules of its own package that it imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom) and _absolute(file, node) != ".".join(file.parts[:-1]):
            yield from ((node.lineno, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def _check_framework(file: PurePosixPath, module: str) -> str | None:
    framework = _FRAMEWORKS.get(module.split(".")[0])
    is_at_home = framework is not None and (framework in file.parts[1:-1] or file.name.startswith(f"{framework}_"))
    if framework is None or is_at_home or file.parts[1:] == ("arrays", f"{framework}.py"):
        return None
    if file.parts[: len(_PEERS)] == _PEERS:
        return None
    return f"{module} is imported outside {framework}/ and arrays/{framework}.py"


def _check_import(part: str, own: int, module: str) -> str | None:
    target = module.split(".")[1] if "." in module else _FACE
    floor = _floor(target, PYTHON_FLOORS)
    if floor is None:
        target, floor = _FACE, _floor(_FACE, PYTHON_FLOORS)
    assert floor is not None
    if target == part or floor < own:
        return None
    return f"{part} imports {module}, which is {'a higher floor' if floor > own else 'beside it on the same floor'}"


def _check_python_room(file: PurePosixPath, module: str) -> str | None:
    """The same inside a package that has rooms, of a file and a module in it."""
    own = [*file.parts[:-1], file.stem]
    for package, floors in PYTHON_ROOMS.items():
        path = package.split(".")
        target = module.split(".")
        if own[: len(path)] != path or target[: len(path)] != path:
            continue
        room = target[len(path)] if len(target) > len(path) else "__init__"
        if not _may_see(own[len(path)], room, floors):
            return f"{own[len(path)]} imports {module}, which is no lower floor of {package}"
    return None


def _imports(file: PurePosixPath, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that is imported anywhere in a module, functions and importlib included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(file, node)
            # from ringtrain import ops, objects
            has_rooms = base in ("ringtrain", *PYTHON_ROOMS)
            names = [f"{base}.{alias.name}" for alias in node.names] if has_rooms else [base]
            for name in names:
                yield node.lineno, name
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def _absolute(file: PurePosixPath, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = file.parts[:-1][: len(file.parts) - node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")
