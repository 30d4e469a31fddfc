"""Arrays of every kind, of which an operation gives back the same kind: keys, float8, int4, weak types."""

import numpy as np
import pytest
from harness.exact import require_equal
from harness.frameworks import on_demand

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def data_of(keys):
    return np.asarray(jax.random.key_data(keys))


@pytest.mark.ranks(2, fast=[2])
def test_one_key_of_each_rank_is_a_row():
    rank, size = hvd.rank(), hvd.size()
    own, right = jax.random.key(rank), np.stack([data_of(jax.random.key(of)) for of in range(size)])
    for gather in (hvd.allgather, jax.jit(hvd.allgather)):
        require_equal(data_of(gather(own)), right)
        both = gather({"key": own, "loss": jnp.float32(rank)})
        require_equal(data_of(both["key"]), right)
        require_equal(np.asarray(both["loss"]), np.arange(size, dtype=np.float32))
    of_batch = jax.jit(jax.vmap(hvd.allgather))(jax.random.split(own, 3))
    assert of_batch.shape == (3, size)
    rows = hvd.alltoall(jax.random.split(own, size))
    require_equal(data_of(rows), np.stack([data_of(jax.random.split(jax.random.key(of), size))[rank] for of in (0, 1)]))
    with pytest.raises(ValueError, match="reducescatter"):
        hvd.reducescatter(own, hvd.Sum)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4", "bfloat16", "complex64"])
def test_elements_that_only_move_keep_their_bits(dtype):
    rank = hvd.rank()
    of_ranks = [jnp.asarray(np.arange(4) + of, dtype) for of in range(2)]
    first, own = np.asarray(of_ranks[0]), of_ranks[rank]
    for broadcast in (hvd.broadcast, jax.jit(hvd.broadcast, static_argnums=1)):
        result = broadcast(own, 0)
        assert result.dtype == own.dtype and np.asarray(result).tobytes() == first.tobytes()
    gathered = hvd.allgather(own)
    assert np.asarray(gathered).tobytes() == np.concatenate([np.asarray(one) for one in of_ranks]).tobytes()
    state = hvd.broadcast_parameters({"moments": own})["moments"]
    assert state.dtype == own.dtype and np.asarray(state).tobytes() == first.tobytes()
    hvd.check_replicas({"moments": state})


@pytest.mark.ranks(2)
def test_a_weak_type_stays_weak():
    weak = jnp.asarray(float(hvd.rank()))
    assert weak.weak_type
    for result in (hvd.allreduce(weak), jax.jit(hvd.allreduce)(weak), hvd.broadcast_parameters({"x": weak})["x"]):
        assert result.weak_type and (result + jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.ranks(2)
def test_a_program_can_be_exported():
    from jax import export

    calls = [export.DisabledSafetyCheck.custom_call(name) for name in ("ringtrain_start", "ringtrain_finish")]
    exported = export.export(jax.jit(lambda x: hvd.allreduce(x, hvd.Sum)), disabled_checks=calls)(jnp.ones(3))
    result = exported.call(jnp.full(3, hvd.rank() + 1.0))
    require_equal(np.asarray(result), np.full(3, 3.0, result.dtype))
