"""init() and shutdown() call one list of functions, whatever a script imports first."""

import re
from pathlib import Path

import pytest

import ringtrain
from ringtrain.job import lifecycle

SOURCES = Path(ringtrain.__file__).parent


@pytest.mark.parametrize("call, listed", [("at_init", lifecycle.AT_INIT), ("at_shutdown", lifecycle.AT_SHUTDOWN)])
def test_every_module_that_has_a_part_is_in_the_list_once(call, listed):
    found = {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        for path in SOURCES.rglob("*.py")
        if re.search(rf"session\.{call}\(", path.read_text())
    }
    assert found == set(listed) and len(listed) == len(set(listed))


def registered(monkeypatch, register, functions, modules):
    """Returns the modules in the order in which their functions are called; they register in the order given."""
    monkeypatch.setattr(lifecycle, functions, [])
    for module in modules:
        function = lambda *_: None  # noqa: E731
        function.__module__ = module
        register(function)
    return [function.__module__ for function in getattr(lifecycle, functions)]


def test_the_order_is_that_of_the_list_and_not_of_imports(monkeypatch):
    modules = ["__main__", *(f"ringtrain.{name}" for name in reversed(lifecycle.AT_INIT)), "train"]
    in_order = registered(monkeypatch, lifecycle.at_init, "_beginnings", modules)
    assert in_order == [*(f"ringtrain.{name}" for name in lifecycle.AT_INIT), "__main__", "train"]
    modules = [f"ringtrain.{name}" for name in reversed(lifecycle.AT_SHUTDOWN)]
    assert registered(monkeypatch, lifecycle.at_shutdown, "_endings", modules) == modules[::-1]
