"""The subcommand: what the project promises of GPUs, each figure beside its peer or its floor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

import ringtrain as hvd
import ringtrain._core as _core
from measure.gpu.library import NAMES, Library, load
from measure.gpu.part import Part
from measure.gpu.staged import Staged
from measure.gpu.step import Step
from measure.gpu.submission import Submission
from measure.gpu.training import Training
from ringtrain import doctor
from ringtrain.arrays.adapter import adapter_for
from ringtrain.bench import peers
from ringtrain.bench.arguments import parse_bytes, some_of
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.ranks import Job
from ringtrain.bench.report import count_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.step import add_model_flags

_NO_GPU = "the CUDA driver is missing or shows no GPU; see python -m ringtrain.doctor"

PARTS: tuple[Part, ...] = (Submission(), Step(), Staged(), Training())

peers.MODULES["nccl"] = "measure.torch.nccl"


class Gpu:
    name = "gpu"
    help = "a step, an allreduce through host memory and a training step on GPUs, beside torch.distributed with NCCL"
    peers = ("nccl",)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        everything = ",".join(part.name for part in PARTS)
        add = parser.add_argument
        add(
            "--parts",
            type=some_of([part.name for part in PARTS], "parts", False),
            default=everything,
            metavar="LIST",
            help="default: %(default)s",
        )
        add("--library", choices=NAMES, default="torch", help="whose arrays; only torch has all parts (%(default)s)")
        add_model_flags(parser)
        add("--steps", type=int, default=5, metavar="N", help="in each timing (default: %(default)s)")
        add("--lead-ms", type=float, default=10.0, metavar="MS", help="head start of the host in `step` (%(default)s)")
        add("--staged-bytes", type=parse_bytes, default="64M", metavar="SIZE", help="default: %(default)s")
        add("--batch-size", type=int, default=64, metavar="N", help="of a rank, in training (default: %(default)s)")
        add("--image-size", type=int, default=224, metavar="PIXELS", help="in training (default: %(default)s)")

    def library(self, arguments: argparse.Namespace) -> str:
        name: str = arguments.library
        return name

    def require_here(self) -> None:
        if _core.gpu_count() == 0:
            raise CannotMeasure(f"gpu cannot be measured here: {_NO_GPU}")

    def measure(self, session: Session) -> list[Row]:
        library = load(session.arguments.library)
        _require_gpus(session.job, library)
        session.init()
        session.facts.append(_machine(session.job, library))
        reasons = {part: part.why_not(session, library) for part in PARTS if part.name in session.arguments.parts}
        session.notes += [f"{part.name} is left out: {reason}" for part, reason in reasons.items() if reason]
        parts = [part for part, reason in reasons.items() if not reason]
        session.expect(len(parts))
        return [part.measure(session, library) for part in parts]

    def table(self, result: Result) -> list[str]:
        lines = list(_machine_text(result))
        for row in result.rows:
            (part,) = (one for one in PARTS if one.name == row.key["part"])
            lines += ["", *part.table(row)]
        return lines


def _require_gpus(job: Job, library: Library) -> None:
    own = library.trouble() if _core.gpu_count() else _NO_GPU
    for rank, trouble in enumerate(job.gather(own)):
        if trouble:
            raise CannotMeasure(f"gpu cannot be measured on rank {rank}: {trouble}")


def _machine(job: Job, library: Library) -> dict[str, object]:
    array = library.zeros((1,), np.dtype(np.float32))
    for name in ("first", "second"):  # the first connects the ranks, which may take longer than --patience
        hvd.allreduce_(array, name=name)
    way = _core.last_operations()[-1]["group"]
    driver = doctor.cuda()
    gpu = driver["gpus"][_core.gpu_of(adapter_for(array).view(array)[0])]
    names = job.gather(f"{gpu['name']}, {gpu['uuid']}")
    versions = {"cuda": driver["driver"], "nccl": doctor.nccl()["version"]}
    return {"gpus": names, **versions, "library": f"{library.name} {library.version}", "way": way}


def _machine_text(result: Result) -> Iterator[str]:
    fact = result.facts[0]
    for gpu in dict.fromkeys(fact["gpus"]):
        yield f"{gpu}: {count_text(fact['gpus'].count(gpu), 'rank')}"
    nccl = f"NCCL {fact['nccl']}" if fact["nccl"] else "no NCCL"
    yield f"driver for CUDA {fact['cuda']}, {nccl}, arrays of {fact['library']}"
