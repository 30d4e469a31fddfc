"""The names that scripts for Horovod 0.28.1 rely on: facts, read from the sources that PyPI has of it.

Arguments are written as Python writes them, without annotations and `self`; names such as `Average` are those of the
package. The arguments of a class are under its name, those of a method under "Class.method".
"""

from __future__ import annotations

# horovod/torch/mpi_ops.py, functions.py, optimizer.py, compression.py, sync_batch_norm.py; horovod/common/basics.py,
# process_sets.py
_ALLREDUCE = (
    "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set"
)
_COMPRESSED_ALLREDUCE = _ALLREDUCE.replace("op=None", "compression=Compression.none, op=None")
_SCATTER = "name=None, op=Average, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0"
_COMPRESSED_SCATTER = _SCATTER.replace("op=Average", "compression=Compression.none, op=Average")
_GATHER = "name=None, process_set=global_process_set"

TORCH = {
    "Compressor.compress": "tensor",
    "Compressor.decompress": "tensor, ctx",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=Compression.none, "
    "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
    "sparse_as_dense=False, process_set=global_process_set",
    "ProcessSet": "ranks_or_comm",
    "ProcessSet.included": "",
    "ProcessSet.rank": "",
    "ProcessSet.size": "",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "SyncBatchNorm.forward": "input",
    "add_process_set": "process_set",
    "allgather": f"tensor, {_GATHER}",
    "allgather_async": f"tensor, {_GATHER}",
    "allgather_object": "obj, name=None",
    "allreduce": f"tensor, {_COMPRESSED_ALLREDUCE}",
    "allreduce_": f"tensor, {_ALLREDUCE}",
    "allreduce_async": f"tensor, {_ALLREDUCE}",
    "allreduce_async_": f"tensor, {_ALLREDUCE}",
    "alltoall": f"tensor, splits=None, {_GATHER}",
    "alltoall_async": f"tensor, splits=None, {_GATHER}",
    "barrier": "process_set=global_process_set",
    "broadcast": f"tensor, root_rank, {_GATHER}",
    "broadcast_": f"tensor, root_rank, {_GATHER}",
    "broadcast_async": f"tensor, root_rank, {_GATHER}",
    "broadcast_async_": f"tensor, root_rank, {_GATHER}",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=global_process_set",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_parameters": "params, root_rank",
    "ccl_built": "",
    "cross_rank": "",
    "cross_size": "",
    "cuda_built": "",
    "ddl_built": "",
    "gloo_built": "",
    "gloo_enabled": "",
    "grouped_allgather": f"tensors, {_GATHER}",
    "grouped_allgather_async": f"tensors, {_GATHER}",
    "grouped_allreduce": f"tensors, {_COMPRESSED_ALLREDUCE}",
    "grouped_allreduce_": f"tensors, {_ALLREDUCE}",
    "grouped_allreduce_async": f"tensors, {_ALLREDUCE}",
    "grouped_allreduce_async_": f"tensors, {_ALLREDUCE}",
    "grouped_reducescatter": f"tensors, {_COMPRESSED_SCATTER}",
    "grouped_reducescatter_async": f"tensors, {_SCATTER}",
    "init": "comm=None, process_sets=None",
    "is_homogeneous": "",
    "is_initialized": "",
    "join": "device=-1",
    "local_rank": "",
    "local_size": "",
    "mpi_built": "",
    "mpi_enabled": "",
    "mpi_threads_supported": "",
    "nccl_built": "",
    "poll": "handle",
    "rank": "",
    "reducescatter": f"tensor, {_COMPRESSED_SCATTER}",
    "reducescatter_async": f"tensor, {_SCATTER}",
    "remove_process_set": "process_set",
    "rocm_built": "",
    "shutdown": "",
    "size": "",
    "sparse_allreduce_async": "tensor, name, op, process_set=global_process_set",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "synchronize": "handle",
}
# horovod/torch/optimizer.py: what the optimizer has that DistributedOptimizer returns.
TORCH_OPTIMIZER = {
    "set_backward_passes_per_step": "passes",
    "skip_synchronize": "",
    "step": "closure=None",
    "synchronize": "",
    "zero_grad": "",
}
# horovod/torch/elastic/__init__.py, state.py and sampler.py; horovod/common/elastic.py and exceptions.py
TORCH_ELASTIC = {
    "ElasticSampler": "dataset, shuffle=True, seed=0",
    "ElasticSampler.load_state_dict": "state_dict",
    "ElasticSampler.record_batch": "batch_idx, batch_size",
    "ElasticSampler.reset": "",
    "ElasticSampler.set_epoch": "epoch",
    "ElasticSampler.state_dict": "",
    "HostsUpdatedInterrupt": "skip_sync",
    "ModelStateHandler": "model",
    "ObjectState": "bcast_object, get_rank",
    "OptimizerStateHandler": "optimizer",
    "SamplerStateHandler": "sampler",
    "State": "bcast_object, get_rank",
    "State.check_host_updates": "",
    "State.commit": "",
    "State.on_hosts_updated": "timestamp, update_res",
    "State.on_reset": "",
    "State.register_reset_callbacks": "callbacks",
    "State.reset": "",
    "State.restore": "",
    "State.save": "",
    "State.sync": "",
    "StateHandler": "value",
    "StateHandler.restore": "",
    "StateHandler.save": "",
    "StateHandler.set_value": "value",
    "StateHandler.sync": "",
    "TorchState": "model=None, optimizer=None",
    "get_handler_registry": "",
    "run": "func",
    "run_fn": "func, reset",
    "set_handler_registry": "registry",
}
# horovod/tensorflow/functions.py
TENSORFLOW = {
    "allgather_object": "obj, session=None, name=None, process_set=global_process_set",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set=global_process_set",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=global_process_set",
}
# horovod/mxnet/__init__.py
MXNET = {
    "broadcast_parameters": "params, root_rank=0, prefix=None",
}
