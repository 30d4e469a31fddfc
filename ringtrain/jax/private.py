"""The names of JAX that are not public and that ringtrain.jax uses. test_jax_private.py has a test for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lax import lax
from jax.extend.core import Primitive

# How JAX compiles its own primitives: for all platforms, and for one.
LOWERINGS: Mapping[Primitive, Any] = mlir._lowerings
PLATFORM_LOWERINGS: Mapping[str, Mapping[Primitive, Any]] = mlir._platform_specific_lowerings


def with_weak_type(array: Any) -> Any:
    """Returns the array as one whose dtype gives way to others, as that of a number does."""
    return lax._convert_element_type(array, weak_type=True)


def kept_with_program(ctx: Any) -> dict[Any, Any]:
    """Returns what JAX keeps while it compiles one program, by the context of a rule."""
    kept: dict[Any, Any] = ctx.module_context.cached_primitive_lowerings
    return kept


def caches_of(ctx: Any) -> list[dict[Any, Any]]:
    """Returns where JAX looks for functions that it has compiled in this program. Older versions have one of them."""
    names = ("cached_primitive_lowerings", "lowering_cache")
    return [getattr(ctx.module_context, name) for name in names if hasattr(ctx.module_context, name)]


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """Returns for which platforms the program is compiled."""
    return tuple(ctx.module_context.platforms)


def count_devices(ctx: Any) -> int:
    """Returns for how many devices it is, however this version of JAX says it; what it does not say is one."""
    context = ctx.module_context.axis_context
    mesh, environment = getattr(context, "mesh", None), getattr(context, "axis_env", None)
    return max(
        int(getattr(mesh, "size", 1)),
        int(getattr(environment, "nreps", 1)),
        int(getattr(context, "num_devices", 1) or 1),
    )


def is_per_device(ctx: Any) -> bool:
    """Whether the lines that are compiled now say what each device does, as those within shard_map do."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(context.manual_axes) == set(mesh.axis_names)


def after_compiling(check: Callable[[Any, list[Any]], None]) -> None:
    """Have check(executable, devices) called in the thread that has compiled a program, or read it from the cache."""
    compiled = compiler.compile_or_get_cached

    @functools.wraps(compiled)
    def compile_or_get_cached(backend: Any, computation: Any, devices: Any, *rest: Any, **named: Any) -> Any:
        executable = compiled(backend, computation, devices, *rest, **named)
        check(executable, list(devices.flatten()))
        return executable

    compiler.compile_or_get_cached = compile_or_get_cached
