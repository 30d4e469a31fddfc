"""The names of JAX that are not public and that ringtrain.jax uses: each does what ringtrain needs."""

import ast
from pathlib import Path

import pytest
from harness.frameworks import on_demand

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
mlir = on_demand("jax.interpreters.mlir")
core = on_demand("jax.extend.core")
private = on_demand("ringtrain.jax.private")


def lowered(look):
    """Returns what look(ctx) returns while a program is compiled."""
    seen = []
    primitive = core.Primitive("looks")
    primitive.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        seen.append(look(ctx))
        return [x]

    mlir.register_lowering(primitive, rule)
    jax.jit(primitive.bind).lower(jnp.ones(2))
    return seen[0]


@pytest.mark.ranks(1)
def test_only_one_file_has_names_that_are_not_public():
    folder = Path(private.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            assert path.name == "private.py" or not module.startswith("jax._"), (path, module)


@pytest.mark.ranks(1)
def test_rules_of_primitives_are_in_tables():
    assert jax.lax.while_p in private.LOWERINGS
    assert isinstance(private.PLATFORM_LOWERINGS["cpu"], dict) and "cuda" in private.PLATFORM_LOWERINGS


@pytest.mark.ranks(1)
def test_an_array_gets_a_weak_type():
    weak = private.with_weak_type(jnp.ones(2, jnp.float32))
    assert weak.weak_type and (weak + jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.ranks(1)
def test_a_program_has_a_place_for_what_is_kept_with_it():
    assert isinstance(lowered(private.kept_with_program), dict)
    caches = lowered(private.caches_of)
    assert caches and all(isinstance(cache, dict) for cache in caches)


@pytest.mark.ranks(1)
def test_a_program_knows_its_platforms_and_devices():
    assert lowered(private.platforms_of) == ("cpu",)
    assert lowered(private.count_devices) == 1
    assert not lowered(private.is_per_device)


@pytest.mark.ranks(1)
def test_a_program_of_shard_map_says_what_each_device_does():
    seen = []
    primitive = core.Primitive("looks_per_device")
    primitive.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        seen.append((private.is_per_device(ctx), private.count_devices(ctx)))
        return [x]

    mlir.register_lowering(primitive, rule)
    if hasattr(jax, "shard_map"):
        mapped, unchecked = jax.shard_map, {"check_vma": False}
    else:
        from jax.experimental.shard_map import shard_map as mapped

        unchecked = {"check_rep": False}
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("i",))
    spec = jax.sharding.PartitionSpec("i")
    jax.jit(mapped(primitive.bind, mesh=mesh, in_specs=spec, out_specs=spec, **unchecked)).lower(jnp.ones(2))
    assert seen == [(True, 1)]


@pytest.mark.ranks(1)
def test_a_check_sees_each_program_that_is_compiled():
    from jax._src import compiler

    before, seen = compiler.compile_or_get_cached, []
    private.after_compiling(lambda executable, devices: seen.append((executable, devices)))
    try:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(5))
    finally:
        compiler.compile_or_get_cached = before
    executable, devices = seen[-1]
    assert devices == jax.devices()[:1]
    assert "[5]" in executable.hlo_modules()[0].to_string()
