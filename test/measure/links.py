"""Loss over seconds on slow links: DiLoCo beside data parallelism, plain, with fp16 and with PowerSGD, on two hosts.

In test/: `python -m measure.links --rate 50mbit`. The hosts are simulated, so it needs root (test/harness/hosts.py),
and PyTorch. A character model of 5.5 million parameters learns the text of Python's help. The ranks of a host are an
island of DiLoCo. Frames take 25 ms from one host to the other, so a round trip takes 50 ms. All ways take the same
steps with the same batches of each rank.

A step of data parallelism computes the same on any link. So its losses come from a run without a limit, and its seconds
from some steps on the slow link: `steps x seconds of a step`. DiLoCo trains on the slow link from the first to the last
step. Evaluations are not part of the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from harness.hosts import HostsUnavailable, SimulatedHosts, simulated_hosts

from measure.hosts import result_of_ranks

CHARACTERS, CONTEXT = 128, 16
ONE_WAY_S = 0.025
DATA_PARALLEL = ("plain", "fp16", "PowerSGD, rank 4")
DILOCO: dict[str, dict[str, Any]] = {
    "DiLoCo": {},
    "DiLoCo fp16, 4 fragments": {"fragments": 4, "overlap": 2, "compression": "fp16"},
    "DiLoCo int8, 4 fragments": {"fragments": 4, "overlap": 2, "compression": "int8"},
    "DiLoCo int4, 4 fragments": {"fragments": 4, "overlap": 2, "compression": "int4"},
}


class Run(NamedTuple):
    """The result of one way; `points` are (steps, seconds, loss in bits per character) of each evaluation."""

    points: list[tuple[int, float, float]]
    step_s: float
    megabytes: float  # that the first host sent for each step


# --- one rank ---------------------------------------------------------------------------------------------------------


def train(way: str, steps: int, options: argparse.Namespace) -> None:
    """Runs on each rank; rank 0 prints what it has seen."""
    import torch

    import ringtrain.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(CHARACTERS, 32),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * CONTEXT, 2048),
        torch.nn.GELU(),
        torch.nn.Linear(2048, 2048),
        torch.nn.GELU(),
        torch.nn.Linear(2048, CHARACTERS),
    )
    adam = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer: Any
    if way in DATA_PARALLEL:
        of_way = {"plain": hvd.Compression.none, "fp16": hvd.Compression.fp16}
        compression = of_way.get(way) or hvd.Compression.powersgd(rank=4)
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), compression=compression)
    else:
        how = dict(DILOCO[way])
        how["compression"] = getattr(hvd.Compression, how.get("compression", "none"))
        optimizer = hvd.DiLoCo(adam, options.every, **how)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.total_steps)
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = characters.unfold(0, CONTEXT + 1, 1)
    held_out, training = windows[-30_000::10], windows[:-30_000]
    random = torch.Generator().manual_seed(hvd.rank())
    points, of_steps, seconds = [], [], 0.0
    for step in range(steps + 1):
        if step % options.evaluate_every == 0 or step == steps:
            with torch.no_grad():
                logits = model(held_out[:, :-1])
                bits = torch.nn.functional.cross_entropy(logits, held_out[:, -1]).item() / 0.6931471805599453
            points.append((step, seconds, bits))
            hvd.barrier()
        if step == steps:
            break
        began = time.perf_counter()
        batch = training[torch.randint(len(training), (options.batch,), generator=random)]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        of_steps.append(time.perf_counter() - began)
        seconds += of_steps[-1]
    if hvd.rank() == 0:
        print("RESULT", json.dumps({"points": points, "step_s": statistics.mean(of_steps[2:])}), flush=True)


# --- all ways ---------------------------------------------------------------------------------------------------------


def run_on(hosts: SimulatedHosts, way: str, steps: int, options: argparse.Namespace) -> Run:
    """Train by one of the ways on two hosts."""
    command = [
        *("-m", "measure.links", "--rank", way, "--steps", str(steps)),
        *("--every", str(options.every), "--batch", str(options.batch), "--lr", str(options.lr)),
        *("--evaluate-every", str(options.evaluate_every), "--total-steps", str(options.steps)),
    ]
    before = hosts.bytes_sent(0)
    result = result_of_ranks(hosts, options.ranks, way, command)
    return Run(result["points"], result["step_s"], (hosts.bytes_sent(0) - before) / steps / 1e6)


def seconds_to(run: Run, bits: float) -> float | None:
    """When the loss was that low for the first time."""
    return next((seconds for _, seconds, loss in run.points if loss <= bits), None)


def report(rate: str, runs: dict[str, Run]) -> list[str]:
    """The table of one rate; the loss to reach is the highest final one."""
    goal = max(run.points[-1][2] for run in runs.values())
    plain = seconds_to(runs["plain"], goal)
    lines = [
        f"{rate}, 50 ms: seconds until {goal:.3f} bits per character",
        "| way | ms a step | MB a step | final loss | of plain | seconds | times sooner |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way, run in runs.items():
        seconds, final = seconds_to(run, goal), run.points[-1][2]
        assert seconds is not None and plain is not None
        lines.append(
            f"| {way} | {1e3 * run.step_s:.0f} | {run.megabytes:.2f} | {final:.3f} | "
            f"{100 * (final / runs['plain'].points[-1][2] - 1):+.2f} % | {seconds:.0f} | {plain / seconds:.1f} |"
        )
    return lines


def plot(file: str, rate: str, runs: dict[str, Run]) -> None:
    """Draw the loss over seconds of all ways at one rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.figure(figsize=(7, 3.5))
    for way, run in runs.items():
        later = [point for point in run.points if point[1] > 0]
        pyplot.plot([seconds for _, seconds, _ in later], [bits for *_, bits in later], label=way)
    pyplot.xscale("log")
    pyplot.xlabel(f"seconds, on links of {rate} and 50 ms")
    pyplot.ylabel("bits per character")
    pyplot.legend()
    pyplot.tight_layout()
    pyplot.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)  # the same file each time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", nargs="+", default=["10mbit", "50mbit", "100mbit"], help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--timed-steps", type=int, default=12, help="of data parallelism on the link (%(default)s)")
    parser.add_argument("--every", type=int, default=10, metavar="H", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="of each rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--evaluate-every", type=int, default=25, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of each host (default: %(default)s)")
    parser.add_argument("--beside", nargs="*", default=DATA_PARALLEL[1:], help="ways of data parallelism beside plain")
    parser.add_argument("--ways", nargs="*", default=list(DILOCO), help="of DiLoCo (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write all points there, too")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss over seconds at the last rate")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # the way to train by, on each rank
    parser.add_argument("--total-steps", type=int, help=argparse.SUPPRESS)  # of the learning rates
    options = parser.parse_args()
    if options.rank:
        train(options.rank, options.steps, options)
        return 0
    try:
        with simulated_hosts(2) as hosts:
            unlimited = {way: run_on(hosts, way, options.steps, options) for way in ("plain", *options.beside)}
        content = {}
        for rate in options.rate:
            with simulated_hosts(2, rate) as hosts, hosts.bad_cable(ONE_WAY_S):
                runs = {}
                for way, fast in unlimited.items():
                    slow = run_on(hosts, way, options.timed_steps, options)
                    points = [(step, step * slow.step_s, bits) for step, _, bits in fast.points]
                    runs[way] = Run(points, slow.step_s, fast.megabytes)
                for way in options.ways:
                    runs[way] = run_on(hosts, way, options.steps, options)
            print("\n".join(report(rate, runs)), flush=True)
            content[rate] = {way: run._asdict() for way, run in runs.items()}
    except HostsUnavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    if options.plot:
        plot(options.plot, rate, runs)
    if options.json:
        Path(options.json).write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
