"""Jobs of servers and workers whose processes die, stop or vanish at random, and what must come out of them."""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
from kvstore_jobs import Job, Process, job

# Processes that wait for one that is gone must end within this time.
_LIMITS = {
    "RINGTRAIN_KV_HEARTBEAT_S": "0.5",
    "RINGTRAIN_KV_TIMEOUT_S": "3",
    "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "8",
    "RINGTRAIN_START_TIMEOUT_S": "12",
    "PYTHONFAULTHANDLER": "1",  # a crash shows where
}
_ENDS_WITHIN_S = 40.0


class Storm(AssertionError):
    """Returns what did not end as it must."""


def _program(folder: Path, text: str) -> list[str]:
    (file := folder / "program.py").write_text(text)
    return [str(file)]


def _require_ends(processes: list[Process], what: str, one: Job) -> None:
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while any(process.popen.poll() is None for process in processes):
        if time.monotonic() > deadline:
            late = [process.name for process in processes if process.popen.poll() is None]
            raise Storm(f"{what}: {', '.join(late)} did not end\n{_ends_of(one)}")
        time.sleep(0.02)


def _ends_of(one: Job) -> str:
    """The last lines of all."""
    return "\n".join(
        f"--- {process.name} ({process.popen.poll()})\n" + "\n".join(process.output().splitlines()[-40:])
        for process in one.processes
    )


# Trains, and counts its own pushes in a second store: after each one, every element is one more than before.
_OF_STORMS = """
import pathlib, sys, time
import numpy as np
from ringtrain import kvstore
least, returns = int(sys.argv[1]), sys.argv[2] == "servers return"
with np.load(sys.argv[5]) as digits:
    inputs, labels = digits["inputs"], digits["labels"]
training = kvstore.create("dist_async", elastic=True)
training.set_optimizer("sgd", learning_rate=0.5)
counting = kvstore.create("dist_async", elastic=True)
counting.set_optimizer("test", rescale_grad=1.0)
training.init("weights", np.zeros((64, 10), np.float32))
task = training.rank
names = [f"of {worker}" for worker in range(int(sys.argv[3]))]
counting.init(names, [np.zeros(200_000, np.float32)] * len(names))
print("began", training.is_recovery, flush=True)
chance = np.random.default_rng()
value = np.array(counting.pull(names[task]))
pushes = 0
while (value < least).any():
    batch = chance.integers(0, 1400, 32)
    weights = np.array(training.pull("weights"))
    scores = np.exp(inputs[batch] @ weights)
    wrong = scores / scores.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[labels[batch]]
    training.push("weights", (inputs[batch].T @ wrong / 32).astype(np.float32))
    one_more = (value < least).astype(np.float32)
    counting.push(names[task], one_more)
    pushes += 1
    now = np.array(counting.pull(names[task]))
    # The first push of one that came back is dropped where that of the former one was taken.
    is_right = (now == value + one_more) | ((pushes == 1) & training.is_recovery & (now == value))
    if not returns and not is_right.all():
        where = np.flatnonzero(~is_right)
        print("counted wrongly", pushes, where[:3], value[where[:3]], now[where[:3]], flush=True)
        sys.exit(9)
    value = now
weights = np.array(training.pull("weights"))
right = ((inputs[1400:] @ weights).argmax(1) == labels[1400:]).mean()
print("done", int(value.min()), int(value.max()), f"accuracy {right:.3f}", flush=True)
# a process that comes again must find another one
while not pathlib.Path(sys.argv[4]).exists():
    time.sleep(0.02)
"""


def storm(
    folder: Path, seed: int, memory: str, servers_return: bool, least_pushes: int = 400
) -> tuple[Counter[str], float]:
    """Kill workers of an asynchronous training, and maybe servers that have snapshots, and start them again, until all
    have pushed so often. Returns who was killed how often, and the least accuracy of a worker. Raises Storm.
    """
    chance = random.Random(seed)
    workers, servers = 3, 2
    kills: Counter[str] = Counter()
    variables = {**_LIMITS, "RINGTRAIN_SHARED_MEMORY": memory, "RINGTRAIN_KV_REJOIN_S": "20"}
    variables["RINGTRAIN_START_TIMEOUT_S"] = "60"  # their imports take long on a busy machine
    if servers_return:
        (snapshots := folder / "snapshots").mkdir()
        variables |= {"RINGTRAIN_KV_SNAPSHOT_DIR": str(snapshots), "RINGTRAIN_KV_SNAPSHOT_S": "0.5"}
    kept = "servers return" if servers_return else "servers stay"
    words = [str(least_pushes), kept, str(workers), str(folder / "stop"), str(_digits(folder))]
    program = [*_program(folder, _OF_STORMS), *words]
    what = f"seed {seed}, shared memory {memory}, {kept}"
    with job(folder, workers, servers, **variables) as one:
        one.scheduler()
        of_servers = [one.server(DMLC_TASK_ID=str(task)) for task in range(servers)]
        of_workers = [one.start("worker", program, DMLC_TASK_ID=str(task)) for task in range(workers)]
        attempts: Counter[str] = Counter()
        for worker in of_workers:
            _wait_for_start(worker, what, one)
        deadline, servers_from = time.monotonic() + 120, time.monotonic() + 3
        while not all("done" in worker.output() for worker in of_workers):
            if time.monotonic() > deadline:
                raise Storm(f"{what}: it did not end after {dict(kills)}\n{_ends_of(one)}")
            time.sleep(chance.choice([0.05, 0.2, 0.5]))
            _require_nobody_failed([*of_workers, *of_servers], what, one)
            training = [worker for worker in of_workers if "began" in worker.output()]
            victims = [worker for worker in training if "done" not in worker.output()]
            # a job that has no worker any more is over, and a server that has saved nothing comes back empty
            if servers_return and time.monotonic() > servers_from and chance.random() < 0.3:
                victims, servers_from = of_servers, time.monotonic() + 3
            if not victims or len(training) < 2 or sum(kills.values()) >= 30:
                continue
            of_kind = of_servers if victims is of_servers else of_workers
            task = of_kind.index(chance.choice(victims))
            of_kind[task].kill()
            role = "server" if of_kind is of_servers else "worker"
            kills[role] += 1
            attempts[f"{role} {task}"] += 1
            told = {"DMLC_TASK_ID": str(task), "DMLC_NUM_ATTEMPT": str(attempts[f"{role} {task}"])}
            time.sleep(chance.choice([0.0, 0.1]))
            of_kind[task] = one.server(**told) if role == "server" else one.start("worker", program, **told)
        (folder / "stop").touch()
        for process in one.processes:
            if process.popen.returncode != -signal.SIGKILL:
                _require_ends([process], what, one)
                if process.popen.returncode != 0:
                    raise Storm(f"{what}: {process.name} ended with {process.popen.returncode}\n{_ends_of(one)}")
        ends = [
            re.findall(r"^done (\d+) (\d+) accuracy (\S+)$", worker.output(), re.MULTILINE) for worker in of_workers
        ]
        if any(len(end) != 1 or end[0][:2] != (str(least_pushes),) * 2 for end in ends):
            raise Storm(f"{what}: {ends} is not what was pushed\n{_ends_of(one)}")
    return kills, min(float(end[0][2]) for end in ends)


def _digits(folder: Path) -> Path:
    """A file with scikit-learn's digits: no worker that starts has to import scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(file := folder / "digits.npz", inputs=(digits.data / 16).astype(np.float32), labels=digits.target)
    return file


def _wait_for_start(worker: Process, what: str, one: Job) -> None:
    deadline = time.monotonic() + 60
    while "began" not in worker.output():
        if worker.popen.poll() is not None or time.monotonic() > deadline:
            raise Storm(f"{what}: {worker.name} did not begin\n{_ends_of(one)}")
        time.sleep(0.01)


def _require_nobody_failed(processes: list[Process], what: str, one: Job) -> None:
    for process in processes:
        if process.popen.poll() not in (None, 0):
            raise Storm(f"{what}: {process.name} ended with {process.popen.returncode}\n{_ends_of(one)}")
