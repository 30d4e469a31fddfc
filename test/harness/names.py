"""Names that pages, docstrings and comments give in backticks, and whether what they name exists.

Nothing is imported: the names of Python are those that its sources define, so frameworks need not be installed. A name
whose first word belongs to another library, such as `torch.Tensor`, is not looked at.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
FACES = ("ringtrain", "ringtrain.torch", "ringtrain.jax", "ringtrain.mxnet")  # `hvd` in a script
_LIBRARIES = {"dask", "horovod", "jax", "mxnet", "ray", "spark", "torch"}  # have folders here, and names of their own
# Of other programs.
_FOREIGN = {
    *("--gpus-per-task", "--nnodes", "--rdzv-endpoint", "tools/launch.py"),
    *("ReduceOp.PREMUL_SUM", "split_group()", "_into_tensor", "set_extra_state", "orthogonalization_epsilon"),
    *("JAX_CUDA_VISIBLE_DEVICES", "MXNET_KVSTORE_REDUCTION_NTHREADS", "MPI_COMM_WORLD", "MPI_Allreduce"),
    *("doc/PERFORMANCE.md", "slurm.h", "immintrin.h", "dlpack.h", "xla/ffi/api/c_api.h", "pthread_exit()"),
    *("--kill-on-bad-exit", "KillOnBadExit", "TimeoutStopSec", "named_children()"),
    *("GLIBC_TUNABLES", "os_sync_wait_on_address", "shm_open", "NOTE_EXIT"),
}
_OF_HOROVOD = "docs/migrating.md"  # names what Horovod has

_CODE = re.compile(r"``?([^`\n]+?)``?")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_IDENTIFIER = re.compile(r"[A-Z]\w+::\w+|_?[A-Za-z]+_\w+|[A-Za-z_]\w*\(\)|[A-Z][a-z]+[A-Z]\w+")
_FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|h|cc|md|toml|yml|sh)|(?:[\w-]+/)+")
_FLAG = re.compile(r"--[a-z][\w-]+")
_TARGET = re.compile(r"make ([a-z][\w-]*)")
# In comments also without backticks: a file, a member of a class, a function.
_PLAIN = re.compile(r"(?<![\w/.`<-])((?:[\w-]+/)*[\w-]+\.(?:py|h|cc|md)|[A-Z]\w+::\w+|[a-z]\w*_\w+\(\))(?![\w/`]|\.\w)")
_VARIABLE = re.compile(r"RINGTRAIN_[A-Z0-9_]+")


class Named(NamedTuple):
    """A name in backticks."""

    page: str
    line: int
    name: str


# --- where names are --------------------------------------------------------------------------------------------------


def named_in(root: Path) -> Iterator[Named]:
    """All names in backticks: of pages, and of docstrings and comments of the package and the core."""
    for page in (path for pattern in PAGES for path in sorted(root.glob(pattern))):
        yield from _named(str(page.relative_to(root)), 1, page.read_text())
    for file in sorted((root / "ringtrain").rglob("*.py")):
        text = file.read_text()
        for line, words in [*_docstrings(text), *_comments(text)]:
            yield from _named(str(file.relative_to(root)), line, words)
            yield from _plain(str(file.relative_to(root)), line, words)
    for file in sorted([*(root / "csrc").rglob("*.h"), *(root / "csrc").rglob("*.cc")]):
        for line, words in enumerate(file.read_text().split("\n"), 1):
            if "//" in words:
                comment = words.partition("//")[2]
                yield from _named(str(file.relative_to(root)), line, comment)
                yield from _plain(str(file.relative_to(root)), line, comment)


def _named(page: str, first: int, text: str) -> Iterator[Named]:
    for line, words in enumerate(text.split("\n"), first):
        if "`" in words:
            yield from (Named(page, line, code) for code in _CODE.findall(words))


def _plain(page: str, first: int, text: str) -> Iterator[Named]:
    for line, words in enumerate(text.split("\n"), first):
        yield from (Named(page, line, name) for name in _PLAIN.findall(words))


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


# --- what exists ------------------------------------------------------------------------------------------------------


class Package:
    """The names that the sources of ringtrain define, by module and by class."""

    def __init__(self, root: Path) -> None:
        self._modules: dict[str, set[str]] = defaultdict(set)
        self._classes: dict[str, set[str]] = defaultdict(set)  # of all classes of one name
        self._members: set[str] = set()  # of any class
        for file in sorted((root / "ringtrain").rglob("*.py*")):
            if file.suffix not in (".py", ".pyi"):
                continue
            module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            parent, _, own = module.rpartition(".")
            self._modules[parent].add(own)
            self._add(self._modules[module], ast.parse(file.read_text()).body)

    def _add(self, names: set[str], body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
                own = self._classes[node.name]
                own.update(_last(base) for base in node.bases)
                self._add(own, node.body)
                own.update(
                    one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and type(one.ctx) is ast.Store
                )
                self._members |= own
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names.update(_imported(node))
            elif isinstance(node, ast.If):  # a class that only some versions of a library can have
                self._add(names, [*node.body, *node.orelse])
            else:
                for one in ast.walk(node):
                    if isinstance(one, ast.Name) and type(one.ctx) is ast.Store:
                        names.add(one.id)
                    elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                        names.add(one.value)  # of `__all__`, of names that `__getattr__` finds
                    elif isinstance(one, ast.Import | ast.ImportFrom):
                        names.update(_imported(one))

    def has(self, dotted: str) -> bool:
        """Whether a dotted name exists; also if its first word is not of this package.

        Variables have the names of modules, such as `optimizer.step`: their attribute may be one of any class.
        """
        first, *rest = dotted.removesuffix("()").split(".")
        if first == "hvd":
            return any(self._has_in_module(face, rest) for face in FACES)
        if first == "ringtrain":
            return self._has_in_module(first, rest)
        if first in _LIBRARIES:
            return True
        homes = [name for name in self._modules if name.rpartition(".")[2] == first]
        if first in self._classes:
            return self._has_in_class(first, rest[0])
        may_be_variable = len(rest) == 1 and rest[0] in self._members
        return not homes or may_be_variable or any(self._has_in_module(home, rest) for home in homes)

    def _has_in_module(self, module: str, rest: list[str]) -> bool:
        if rest and f"{module}.{rest[0]}" in self._modules:
            return self._has_in_module(f"{module}.{rest[0]}", rest[1:])
        names = self._modules[module]
        if not rest or rest[0].startswith("__"):
            return True
        stars = [name[1:] for name in names if name.startswith("*")]
        if any(home not in self._modules or self._has_in_module(home, rest) for home in stars):
            return True
        return rest[0] in names and (len(rest) == 1 or self._has_in_class(rest[0], rest[1]))

    def _has_in_class(self, name: str, attribute: str) -> bool:
        """Of a class with a base from elsewhere everything may exist."""
        if name not in self._classes or attribute in self._classes[name]:
            return True
        bases = self._classes[name] & (set(self._classes) | {"Module", "Optimizer", "Trainer"})
        return any(base != name and self._has_in_class(base, attribute) for base in bases)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields the names that a module gets by it: of `from x import *` the word `*x`."""
    for alias in node.names:
        own = alias.asname or alias.name.partition(".")[0]
        yield f"*{node.module}" if own == "*" and isinstance(node, ast.ImportFrom) else own


def _last(base: ast.expr) -> str:
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base).rpartition(".")[2]


class Project:
    """Files, targets of make, variables, flags and words of the code, for names to be found among."""

    def __init__(self, root: Path, options: list[str]) -> None:
        self._package = Package(root)
        folders = [path for path in root.iterdir() if path.is_dir() and path.name not in (".git", "build")]
        files = [path for folder in folders if not folder.name.startswith(".venv") for path in folder.rglob("*")]
        paths = [*(path for path in files if path.is_file()), *(path for path in root.iterdir() if path.is_file())]
        self._paths = {f"/{path.relative_to(root)}" for path in paths}
        self._paths |= {f"{parent}/" for path in list(self._paths) for parent in Path(path).parents}
        self._paths |= {f"/{line}" for line in (root / ".gitignore").read_text().split()}
        self._targets = set(re.findall(r"^([a-z][\w-]*)\b.*?:", (root / "Makefile").read_text(), re.M))
        code = [_code_of(path) for path in paths if path.suffix in (".py", ".pyi", ".cc", ".h", ".sh", ".yml")]
        code.append((root / "Makefile").read_text())
        self._words = {word for text in code for word in _WORD.findall(text)}
        self._variables = {word for word in self._words if word.startswith("RINGTRAIN_")}
        self._variables |= {f"RINGTRAIN_{option.upper()}" for option in options}
        self._flags = {flag for text in code for flag in _FLAG.findall(text)}
        self._flags |= {f"--{option.replace('_', '-')}" for option in options}

    def lacks(self, named: Named) -> bool:
        """Whether there is nothing of this name."""
        name = named.name
        if name in _FOREIGN or name.startswith("horovod/"):
            return False
        if _FILE.fullmatch(name):
            is_placeholder = any(part.isupper() for part in name.split("/"))
            return not is_placeholder and not any(path.endswith(f"/{name}") for path in self._paths)
        if _DOTTED.fullmatch(name):
            is_checked = name.startswith("ringtrain.") or named.page != _OF_HOROVOD
            return is_checked and not named.page.startswith("csrc/") and not self._has_dotted(name)
        if _IDENTIFIER.fullmatch(name):
            return named.page != _OF_HOROVOD and not set(_WORD.findall(name)) <= self._words
        words = [*_VARIABLE.findall(name), *(set(_FLAG.findall(name)) - _FOREIGN)]
        return any(word not in self._variables | self._flags for word in words) or any(
            target not in self._targets for target in (_TARGET.findall(name) if name.startswith("make ") else ())
        )

    def _has_dotted(self, name: str) -> bool:
        first, _, rest = name.partition(".")
        is_flag = first == "arguments" and f"--{rest.replace('_', '-')}" in self._flags
        return is_flag or self._package.has(name)


def _code_of(path: Path) -> str:
    """The text of a source without its comments and docstrings."""
    text = path.read_text(errors="replace")
    if path.suffix in (".cc", ".h"):
        return re.sub(r"//.*", "", text)
    if path.suffix not in (".py", ".pyi"):
        return text
    text = re.sub(r'^\s*r?"""(?:.|\n)*?"""', "", text, flags=re.M)
    return re.sub(r"(?:^|\s)# .*", "", text)


def gone(root: Path, options: list[str]) -> list[str]:
    """Returns each name that does not exist, with the place that gives it. `options`: their names."""
    project = Project(root, options)
    return [f"{named.page}:{named.line}: {named.name}" for named in named_in(root) if project.lacks(named)]
