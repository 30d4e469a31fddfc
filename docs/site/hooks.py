"""Hooks of mkdocs: a page of reference for each module that users import, with all its public names, and what
pages link to outside of docs/."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MODULES = {
    "ringtrain": "For NumPy, CuPy, DLPack arrays and numbers, and for PyTorch's tensors as well.",
    "ringtrain.torch": "The additions for PyTorch: autograd, optimizers, modules.",
    "ringtrain.jax": "Operations over the ranks inside jit.",
    "ringtrain.elastic": "Jobs that go on when ranks are lost, and when others come.",
    "ringtrain.torch.elastic": "The same for PyTorch's modules and optimizers.",
    "ringtrain.jax.elastic": "The same for JAX's pytrees and compiled steps.",
    "ringtrain.kvstore": "Key-value stores, with the interface of MXNet's.",
    "ringtrain.training.loggers": "Loggers for TensorBoard, Weights & Biases and MLflow.",
    "ringtrain.optim": "SGD, Adam and AdamW for arrays.",
    "ringtrain.errors": "The errors of the library.",
}

# A search finds the pages for users before these.
INSIDE = ("design.md", "simulation.md", "CONTRIBUTING.md", "performance.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{module: f"reference/{module}.md"} for module in MODULES]
    config.nav = [{"Reference": pages} if "Reference" in entry else entry for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "CONTRIBUTING.md", content=_of_site(Path("CONTRIBUTING.md").read_text())))
    for example in (*Path("examples").glob("*.py"), *Path("examples/kubernetes").iterdir()):
        files.append(File.generated(config, example.as_posix(), content=example.read_text()))
    written: set[str] = set()
    for module, about in MODULES.items():
        files.append(File.generated(config, f"reference/{module}.md", content=_page(module, about, written)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.src_uri in INSIDE:
        page.meta["search"] = {"boost": 0.2}
    return _of_site(markdown)


def _of_site(markdown: str) -> str:
    """With links to the copies of files outside of docs/ on the site, for the pages are read in the repository, too."""
    inside = markdown.replace("](../examples/", "](examples/").replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")
    return inside.replace("](docs/", "](")


def _page(module: str, about: str, written: set[str]) -> str:
    """The Markdown of a module. Names that are `written` on a page before are only mentioned."""
    parts, again, values = [f"# {module}", about], [], []
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
        # read from the source where it is defined, under the name by which users know it
        parts.append(f"::: {place}\n    options:\n      heading: {name}\n      toc_label: {name}")
    if values:
        parts.insert(2, f"Values: {', '.join(values)}.")
    if again:
        parts.insert(2, f"It also has {', '.join(again)}.")
    return "\n\n".join(parts) + "\n"


def _public_names(module: Any) -> list[str]:
    """Those of `__all__`, or else what the module itself defines."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return sorted(getattr(module, "__all__", own))
