"""Hooks of mkdocs: a page of reference for each module that users import, with all its public names, and what
pages link to outside of docs/."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MODULES = {
    "ringtrain": "For NumPy, CuPy, DLPack arrays and numbers, and for PyTorch's tensors as well.",
    "ringtrain.torch": "The additions for PyTorch: autograd, optimizers, modules.",
    "ringtrain.torch.distributed": "A backend of torch.distributed.",
    "ringtrain.jax": "Operations over the ranks inside jit.",
    "ringtrain.jax.distributed": "JAX's own sharding over the ranks.",
    "ringtrain.mxnet": "For MXNet: operations, trainers and stores.",
    "ringtrain.elastic": "Jobs that go on when ranks are lost, and when others come.",
    "ringtrain.torch.elastic": "The same for PyTorch's modules and optimizers.",
    "ringtrain.jax.elastic": "The same for JAX's pytrees and compiled steps.",
    "ringtrain.kvstore": "Key-value stores, with the interface of MXNet's.",
    "ringtrain.training.loggers": "Loggers for TensorBoard, Weights & Biases and MLflow.",
    "ringtrain.optim": "SGD, Adam and AdamW for arrays.",
    "ringtrain.dask": "Ranks on the workers of a Dask cluster.",
    "ringtrain.spark": "Ranks that are tasks of Spark.",
    "ringtrain.ray": "Ranks that are actors of Ray.",
    "ringtrain.errors": "The errors of the library.",
}

# The names of a page by what they are for; others follow under "More".
GROUPS = {
    "ringtrain": {
        "Begin and end": ("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "run"),
        "Save before the time is over": ("preempted", "exit_preempted"),
        "Train": (
            *("DistributedOptimizer", "broadcast_parameters", "check_replicas", "join", "empty"),
            *("SpeedSampler", "DiLoCo"),
        ),
        "Exchange arrays": ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"),
        "In place": ("allreduce_", "broadcast_"),
        "Without waiting": (
            *("allreduce_async", "allreduce_async_", "allgather_async", "broadcast_async", "broadcast_async_"),
            *("alltoall_async", "reducescatter_async", "synchronize", "poll", "Handle"),
        ),
        "Exchange Python objects": ("broadcast_object", "broadcast_object_fn", "allgather_object"),
        "Send less": ("Compression", "Compressor"),
        "Some of the ranks": ("ProcessSet", "add_process_set", "remove_process_set", "get_process_set_ids_and_ranks"),
        "Observe": ("metrics", "start_timeline", "stop_timeline"),
    }
}

# Modules that need a package that the site does without, and their public names.
NOT_IMPORTED = {
    "ringtrain.dask": ("run",),
    "ringtrain.spark": ("run", "run_elastic", "run_on"),
    "ringtrain.torch.distributed": ("patches.monitored_barrier.monitored_barrier", "patches.gloo.replace_gloo"),
    "ringtrain.ray": ("RayExecutor", "ElasticRayExecutor", "Settings", "RayHostDiscovery", "train.RingtrainConfig"),
    "ringtrain.mxnet": (
        *("DistributedTrainer", "DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state"),
        *("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "broadcast", "broadcast_"),
        *("alltoall", "reducescatter", "broadcast_object", "allgather_object", "replace_kvstore"),
    ),
}

# A search finds the pages for users before these.
INSIDE = ("design.md", "inside/simulation.md", "inside/targets.md", "CONTRIBUTING.md")

# Where pages are now that were there alone.
MOVED = {
    "dask": "engines.html#dask",
    "spark": "engines.html#spark",
    "ray": "engines.html#ray",
    "servers": "kvstore.html#workers-and-servers",
    "loggers": "timeline.html#tensorboard-weights-biases-and-mlflow",
    "mxnet": "migrating.html#mxnet",
    "without-mpi": "clusters.html#without-mpi",
    "simulation": "inside/simulation.html",
    "troubleshooting": "faults.html",
    "targets": "inside/targets.html",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{module: f"reference/{module}.md"} for module in MODULES]
    config.nav = [{"Reference": pages} if "Reference" in entry else entry for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "CONTRIBUTING.md", content=_of_site(Path("CONTRIBUTING.md").read_text())))
    for example in (*Path("examples").glob("*.py"), *Path("examples/kubernetes").iterdir()):
        files.append(File.generated(config, f"{example.as_posix()}.md", content=_of_example(example)))
    written: set[str] = set()
    for module, about in MODULES.items():
        files.append(File.generated(config, f"reference/{module}.md", content=_page(module, about, written)))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    for old, new in MOVED.items():
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={new}"><a href="{new}">{new}</a>\n'
        (Path(config.site_dir) / f"{old}.html").write_text(page)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.src_uri in INSIDE:
        page.meta["search"] = {"boost": 0.2}
    return _of_site(markdown)


def _of_site(markdown: str) -> str:
    """With links to the copies of files outside of docs/ on the site, for the pages are read in the repository, too."""
    inside = re.sub(r"\]\((?:\.\./)?(examples/[\w./]+)\)", r"](\1.md)", markdown)
    inside = inside.replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")
    return inside.replace("](../../CONTRIBUTING.md", "](../CONTRIBUTING.md").replace("](docs/", "](")


def _of_example(path: Path) -> str:
    """A page with the picture and the source of an example, which a search does not find before the pages about it."""
    language = {".py": "python", ".yaml": "yaml"}.get(path.suffix, "docker")
    picture = f"![What it prints](../pictures/{path.stem}.svg)\n\n" if path.suffix == ".py" else ""
    code = f"````{language}\n{path.read_text()}````\n"
    return f"---\nsearch: {{boost: 0.2}}\n---\n\n# {path.name}\n\n`{path}`\n\n{picture}{code}"


def _page(module: str, about: str, written: set[str]) -> str:
    """The Markdown of a module. Names that are `written` on a page before are only mentioned."""
    if module in NOT_IMPORTED:
        found = [_entry(f"{module}.{name}", name.rpartition(".")[2], 2) for name in NOT_IMPORTED[module]]
        return "\n\n".join([f"# {module}", about, *found]) + "\n"
    entries, again, values = {}, [], []
    imported = importlib.import_module(module)
    for name in _public_names(imported):
        value = getattr(imported, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            values.append(f"`{name}`")
            continue
        place = f"{value.__module__}.{value.__qualname__}"
        if place in written:
            again.append(f"[`{name}`][{place}]")
            continue
        written.add(place)
        entries[name] = _entry(place, name, 3 if module in GROUPS else 2)
    parts = [f"# {module}", about]
    if again:
        parts.append(f"It also has {', '.join(again)}.")
    if values:
        parts.append(f"Values: {', '.join(values)}.")
    return "\n\n".join([*parts, *_grouped(GROUPS.get(module, {}), entries)]) + "\n"


def _entry(place: str, name: str, level: int) -> str:
    """Read from the source where it is defined, under the name by which users know it."""
    return f"::: {place}\n    options:\n      heading: {name}\n      toc_label: {name}\n      heading_level: {level}"


def _grouped(groups: dict[str, tuple[str, ...]], entries: dict[str, str]) -> list[str]:
    """The entries under the headings of their groups; without groups all of them in turn."""
    parts = []
    for heading, names in groups.items():
        parts += [f"## {heading}", *(entries.pop(name) for name in names)]
    errors = {name: entries.pop(name) for name in list(entries) if groups and name.endswith("Error")}
    if errors:
        parts += ["## Errors", *errors.values()]
    if groups and entries:
        parts.append("## More")
    return [*parts, *entries.values()]


def _public_names(module: Any) -> list[str]:
    """Those of `__all__`, or else what the module itself defines."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return sorted(getattr(module, "__all__", own))
