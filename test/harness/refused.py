"""Calls that operations refuse in the same way whatever library an array is of."""

import ringtrain


def bad_arguments(hvd, ones, some):
    """Calls that are refused on the caller's line, as (call, class of the error, pattern of its message) by name.

    Args:
        hvd: the face whose operations are called.
        ones: makes an array of the library, of a shape and, by name, a dtype.
        some: returns an array of ones, float32[4, 2].
    """
    of_value = {
        "root out of range": (lambda: hvd.broadcast(some(), 99), "root_rank 99 is not one of the ranks"),
        "root out of range, in place": (lambda: hvd.broadcast_(some(), 99), "root_rank 99"),
        "negative root": (lambda: hvd.broadcast(some(), -1), "root_rank -1"),
        "splits of the wrong sum": (lambda: hvd.alltoall(some(), [1] * hvd.size()), "do not add up to the 4"),
        "splits of the wrong length": (lambda: hvd.alltoall(some(), [4] * 9), "one for each rank"),
        "negative splits": (lambda: hvd.alltoall(some(), [5] + [-1] * (hvd.size() - 1)), "do not add up"),
        "splits that are no integers": (lambda: hvd.alltoall(some(), [0.5] * hvd.size()), "integers"),
        "a number to scatter": (lambda: hvd.reducescatter(ones((), "float32")), "no first dimension"),
        "average of bool": (lambda: hvd.allreduce(ones(2, "bool")), r"Average is for numbers, not for (torch\.)?bool"),
        "average of bool, in place": (lambda: hvd.allreduce_(ones(2, "bool")), "is for numbers, not for"),
        "average of bool, scattered": (lambda: hvd.reducescatter(ones(2, "bool")), "is for numbers, not for"),
        "op and average": (lambda: hvd.allreduce(some(), average=True, op=hvd.Sum), "not both"),
        "an empty group": (lambda: hvd.grouped_allreduce([]), "at least one"),
        "an empty group, in place": (lambda: hvd.grouped_allreduce_([]), "at least one"),
    }
    process_set = r"process_set must be a ProcessSet, not \[0\]; call add_process_set\(\[0\]\)"
    compression = "compression must be a Compressor, .*, not 'fp16'; write compression=Compression.fp16"
    of_type = {
        "a root that is a float": (
            lambda: hvd.broadcast(some(), 0.0),
            "broadcast: root_rank must be an integer in 0.*, not 0.0",
        ),
        "a string": (lambda: hvd.allreduce("text"), "cannot send a str"),
        "a list": (lambda: hvd.allreduce([some()]), "cannot send a list"),
        "an op in words": (lambda: hvd.allreduce(some(), op="mean"), "op must be one of .*; write op=Average"),
        "an op that is none": (lambda: hvd.allreduce_(some(), op="median"), "op must be one of .*'median'$"),
        "a group that is an array": (lambda: hvd.grouped_allreduce(some()), "list of tensors"),
        "a process set that is a list": (lambda: hvd.allreduce(some(), process_set=[0]), process_set),
        "a process set that is a list, in place": (lambda: hvd.allreduce_(some(), process_set=[0]), process_set),
        "a process set that is a list, of splits": (lambda: hvd.alltoall(some(), process_set=[0]), process_set),
        "the number of a process set": (
            lambda: hvd.allreduce(some(), process_set=0),
            "not 0; pass what add_process_set returned",
        ),
        "a compression by name": (lambda: hvd.allreduce(some(), compression="fp16"), compression),
        "a compression by name, in place": (lambda: hvd.allreduce_async_(some(), compression="fp16"), compression),
        "a factor that is text": (
            lambda: hvd.allreduce(some(), prescale_factor="x"),
            "prescale_factor must be a number, not 'x'",
        ),
        "a factor that is text, in place": (
            lambda: hvd.allreduce_(some(), postscale_factor="2"),
            "postscale_factor must be a number, not '2'",
        ),
        "a number as a name": (lambda: hvd.broadcast(some(), 0, name=5), "a str or None, not 5"),
        "a number as a name, in place": (lambda: hvd.allreduce_async_(some(), name=5), "a str or None, not 5"),
        "a handle that is a number": (
            lambda: hvd.synchronize(3),
            "synchronize needs the Handle that an operation such as allreduce_async returned, not 3",
        ),
        "an array in the place of its handle": (lambda: hvd.poll(some()), "poll needs the Handle"),
    }
    return {
        name: (call, error, message)
        for error, table in ((ValueError, of_value), (TypeError, of_type))
        for name, (call, message) in table.items()
    }


def disagreements(hvd, ones):
    """Calls by which the last rank disagrees with the others, as (call, pattern of the message on all ranks) by name.

    `hvd` and `ones` as of `bad_arguments`. A call takes whether its rank is the last one.
    """

    def bad(operation, shape=(4, 2), *rest, dtype="float32", **named):
        return getattr(hvd, operation)(ones(shape, dtype), *rest, name="bad", **named)

    def group(is_last):
        return hvd.grouped_allreduce([ones((4, 2), "float32")] * (2 if is_last else 1), name="bad")

    def nameless(is_last):
        array = ones((4, 2), "float32")
        return hvd.broadcast(array, 0) if is_last else hvd.allreduce(array)

    shapes = r"float32\[4, 2\].*float32\[4, 3\].*build the same model"
    dtypes = r"float32\[4, 2\].*float64\[4, 2\]"
    return {
        "shape": (lambda is_last: bad("allreduce", (4, 3 if is_last else 2)), shapes),
        "dtype": (lambda is_last: bad("allreduce_", dtype="float64" if is_last else "float32"), dtypes),
        "op": (lambda is_last: bad("allreduce", op=hvd.Max if is_last else hvd.Sum), "op=Sum.*op=Max"),
        "root": (lambda is_last: bad("broadcast", (4, 2), int(is_last)), "root_rank=0.*root_rank=1"),
        "kind": (lambda is_last: bad("allgather" if is_last else "allreduce"), "called allreduce.*called allgather"),
        "kind, without a name": (nameless, "called allreduce.*called broadcast"),
        "scale": (
            lambda is_last: bad("allreduce", prescale_factor=2.0 if is_last else 1.0),
            "prescale_factor=1 .*prescale_factor=2 ",
        ),
        "rows": (
            lambda is_last: bad("allgather", (ringtrain.rank(), 3 if is_last else 2)),
            r"float32\[0, 2\].*, 3\]",
        ),
        "length of a group": (group, r"sent float32\[4, 2\], .*sent float32\[4, 2\] and float32\[4, 2\]"),
    }
