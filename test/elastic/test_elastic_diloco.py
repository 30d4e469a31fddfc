"""Elastic jobs of DiLoCo: ranks that are killed, and ranks that join, between outer steps.

A rank prints each step and each beginning of a generation. From these the restatement of the algorithm computes what
the parameters must be at the end, and the test compares with `==`.
"""

import hashlib
import re

import diloco_reference
import numpy as np
import pytest
from elastic_ranks import elastic_job
from harness.forked import forks_of
from harness.hosts import hosts_or_skip

forks = forks_of("torch", "ringtrain.torch")

EVERY, STEPS, LR = 4, 28, 0.25
CODES = ("none", "int8")

_BEGIN = """
import hashlib, os, signal, time
import numpy as np
CODE = "CODE_"
RANKS_WANTED = int(os.environ.get("RANKS_WANTED", "1"))
EVERY, STEPS, LR = 4, 28, 0.25

def start():
    return [np.arange(6.0).reshape(2, 3), np.ones(5)]

def gradient(rank, step, parameters):
    random = np.random.default_rng([rank, step])
    return [random.integers(-4, 5, one.shape) * 1.5 for one in parameters]

def note(*words):
    print(*words, flush=True)

def keep(state):
    if "CHECKPOINT" in os.environ:
        state.save_to(os.environ["CHECKPOINT"], every_s=0)
"""

NUMPY = (
    _BEGIN
    + """
import ringtrain as hvd
from ringtrain import optim

hvd.init()
weights = start()
how = {"compression": getattr(hvd.Compression, CODE), "islands": "rank"}
optimizer = hvd.DiLoCo(optim.SGD(lr=LR), weights, EVERY, outer=optim.SGD(lr=0.5, momentum=0.5, nesterov=True), **how)

@hvd.elastic.run
def train(state):
    note("begins", state.optimizer.inner_steps, hvd.size(), hvd.elastic.generation())
    while state.optimizer.inner_steps < STEPS:
        time.sleep(0.03)
        if state.optimizer.inner_steps == 12 and hvd.size() < RANKS_WANTED:
            state.commit()
            continue
        outer_steps = state.optimizer.outer_steps
        state.optimizer.step(state.weights, gradient(hvd.rank(), state.optimizer.inner_steps, state.weights))
        note("step", state.optimizer.inner_steps, "of", hvd.size())
        if state.optimizer.outer_steps > outer_steps:
            state.commit()

state = hvd.elastic.ArrayState(weights=weights, optimizer=optimizer)
keep(state)
train(state)
note("result", hashlib.sha256(b"".join(one.tobytes() for one in state.weights)).hexdigest())
"""
)

TORCH = (
    _BEGIN
    + """
import torch
import ringtrain.torch as hvd
from ringtrain import optim

hvd.init()
torch.set_num_threads(1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.from_numpy(one)) for one in start()])

model = Model()
how = {"compression": getattr(hvd.Compression, CODE), "islands": "rank"}
sgd = torch.optim.SGD(model.parameters(), lr=LR)
optimizer = hvd.DiLoCo(sgd, EVERY, outer=optim.SGD(lr=0.5, momentum=0.5, nesterov=True), **how)

@hvd.elastic.run
def train(state):
    note("begins", optimizer.inner_steps, hvd.size(), hvd.elastic.generation())
    while optimizer.inner_steps < STEPS:
        time.sleep(0.03)
        if optimizer.inner_steps == 12 and hvd.size() < RANKS_WANTED:
            state.commit()
            continue
        outer_steps = optimizer.outer_steps
        gradients = gradient(hvd.rank(), optimizer.inner_steps, [one.detach().numpy() for one in model.parts])
        for parameter, values in zip(model.parts, gradients):
            parameter.grad = torch.from_numpy(values)
        optimizer.step()
        note("step", optimizer.inner_steps, "of", hvd.size())
        if optimizer.outer_steps > outer_steps:
            state.commit()

state = hvd.elastic.TorchState(model, optimizer)
keep(state)
train(state)
note("result", hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parts)).hexdigest())
"""
)


# Both run the same code for a compression; with one, PyTorch's has errors to keep, too.
PROGRAMS_AND_CODES = pytest.mark.parametrize(
    ("program", "code"), [(NUMPY, "none"), (NUMPY, "int8"), (TORCH, "int8")], ids=["numpy-none", "numpy-int8", "torch"]
)


def start(size=5):
    return [np.arange(6.0).reshape(2, 3), np.ones(size)]


def gradient(rank, step, parameters):
    random = np.random.default_rng([rank, step])
    return [random.integers(-4, 5, one.shape) * 1.5 for one in parameters]


def generations_of(text):
    """(inner steps, ranks) at the beginning of each generation that a rank has seen."""
    return [(int(step), int(size)) for step, size in re.findall(r"begins (\d+) (\d+)", text)]


def former_ranks(job):
    """Of each rank of the second generation the one that it had in the first; None for a newcomer."""
    before = job.formed(1).members
    return [before.index(member) if member in before else None for member in job.formed(2).members]


def expected(generations, former, code, overlap=0, steps=STEPS, every=EVERY, begins=0, values=5):
    """The digests of the parameters of the ranks at the end of a training with these two generations.

    The second one begins so many steps after the one in which a difference is sent.
    """
    (first, size), (again, ranks) = generations
    assert first == 0 and again % every == begins and len(former) == ranks
    parameters = diloco_reference.train(
        start(values),
        gradient,
        [[rank] for rank in range(size)],
        steps,
        every=every,
        inner_lr=LR,
        outer_lr=0.5,
        momentum=0.5,
        overlap=overlap,
        mixing=0.5 if overlap else 0.0,
        code=code,
        changes={again: former},
    )
    return [hashlib.sha256(b"".join(one.tobytes() for one in of_rank)).hexdigest() for of_rank in parameters]


def forks_for(program, forks):
    """PyTorch alone takes so long to import."""
    return forks if program is TORCH else None


def result_of(text):
    return re.findall(r"result (\w+)", text)[-1]


@PROGRAMS_AND_CODES
def test_a_killed_island_costs_at_most_one_outer_step(forks, tmp_path, program, code):
    with elastic_job(program.replace("CODE_", code), tmp_path, 3, forks=forks_for(program, forks)) as job:
        victim = job.process(job.formed(1).members[1])
        victim.wait_for("step 10 ")
        victim.kill()
        texts = [process.ends() for process in job.processes if process is not victim]
        former = former_ranks(job)
    for text in texts:
        generations = generations_of(text)
        assert [size for _, size in generations] == [3, 2]
        done = max(int(step) for step in re.findall(r"step (\d+) of 3", text))
        assert done - generations[1][0] <= EVERY
        assert result_of(text) == expected(generations, former, code)[0]


@pytest.mark.parametrize("code", CODES)
def test_a_difference_that_was_under_way_at_the_commit_arrives_after_a_death(tmp_path, code):
    program = NUMPY.replace("CODE_", code).replace('"islands": "rank"', '"islands": "rank", "overlap": 2')
    program = program.replace("state.optimizer.outer_steps > outer_steps", "state.optimizer.inner_steps % EVERY == 1")
    program = program.replace("EVERY, STEPS, LR = 4, 28", "EVERY, STEPS, LR = 4, 27")  # nothing is under way at the end
    with elastic_job(program, tmp_path, 3) as job:
        victim = job.process(job.formed(1).members[2])
        victim.wait_for("step 10 ")
        victim.kill()
        texts = [job.process(member).ends() for member in job.formed(2).members]
        former = former_ranks(job)
    (generations, same) = map(generations_of, texts)
    assert generations == same and [size for _, size in generations] == [3, 2]
    assert [result_of(text) for text in texts] == expected(generations, former, code, 2, 27, begins=1)


@PROGRAMS_AND_CODES
def test_a_newcomer_gets_the_outer_state(forks, tmp_path, program, code):
    forks = forks_for(program, forks)
    with elastic_job(program.replace("CODE_", code), tmp_path, 2, forks=forks, RANKS_WANTED="3") as job:
        job.process(job.formed(1).members[0]).wait_for("step 6 ")
        (newcomer,) = job.start()
        texts = [process.ends() for process in job.processes]
        former = former_ranks(job)
    (whole, *_) = [generations_of(text) for text in texts if generations_of(text)[0][0] == 0]
    assert [size for _, size in whole] == [2, 3]
    assert generations_of(newcomer.output()) == whole[1:]
    assert {result_of(text) for text in texts} == {expected(whole, former, code)[0]}


@pytest.mark.parametrize("program", (NUMPY, TORCH), ids=("numpy", "torch"))
def test_after_the_loss_of_all_ranks_one_rank_goes_on_with_the_errors_of_the_file(forks, tmp_path, program):
    how = {"forks": forks_for(program, forks), "CHECKPOINT": str(tmp_path / "state")}
    program = program.replace("CODE_", "int8")
    with elastic_job(program, tmp_path, 2, **how) as job:
        job.process(job.formed(1).members[0]).wait_for("step 10 ")
        for process in job.processes:
            process.kill()
    (tmp_path / "again").mkdir()
    with elastic_job(program, tmp_path / "again", 2, **how) as job:
        texts = [job.process(member).ends() for member in job.formed(1).members]
    (generations, same) = map(generations_of, texts)
    assert generations == same and generations[0][0] >= 8
    assert [result_of(text) for text in texts] == expected([(0, 2), *generations], [0, None], "int8")


@pytest.mark.parametrize("code", ("none", pytest.param("int8", marks=pytest.mark.slow)))
def test_an_island_dies_while_a_difference_is_on_a_slow_link(tmp_path, code):
    # 1 MiB takes more than 300 ms at 50 Mbit/s and 50 ms
    values, every, overlap = {"none": 1 << 17, "int8": 1 << 20}[code], 8, 6
    program = NUMPY.replace("CODE_", code).replace('"islands": "rank"', f'"islands": "rank", "overlap": {overlap}')
    program = program.replace("EVERY, STEPS, LR = 4, 28", f"EVERY, STEPS, LR = {every}, 30").replace(
        "np.ones(5)", f"np.ones({values})"
    )
    program = program.replace(
        "        if state.optimizer.outer_steps >",
        "        if state.optimizer.inner_steps == 18 and hvd.elastic.generation() == 1 and hvd.rank() == 1:\n"
        "            note('under way', state.optimizer.is_transferring)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        if state.optimizer.outer_steps >",
    )
    with (
        hosts_or_skip(3, rate="50mbit") as hosts,
        hosts.bad_cable(delay_s=0.025),
        elastic_job(program, tmp_path, 3, hosts=hosts) as job,
    ):
        victim = job.process(job.formed(1).members[1])
        texts = [job.process(member).ends() for member in job.formed(2).members]
        former = former_ranks(job)
    assert "step 18 of 3\nunder way True\n" in victim.output()  # sent in step 16
    (generations, same) = map(generations_of, texts)
    assert generations == same and [size for _, size in generations] == [3, 2]
    # the commit after the difference of step 8, or that of step 16 where the machine was so busy that it had arrived
    assert generations[1][0] in (8 + overlap, 16 + overlap)
    how = {"steps": 30, "every": every, "begins": overlap, "values": values}
    assert [result_of(text) for text in texts] == expected(generations, former, code, overlap, **how)


ISLANDS = """
import os, time
import numpy as np
import ringtrain as hvd
from ringtrain import optim

hvd.init()
weights = [np.zeros(4)]
pairs = lambda: [list(range(first, min(first + 2, hvd.size()))) for first in range(0, hvd.size(), 2)]
optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, 4, outer=optim.SGD(lr=1.0), islands=pairs)

@hvd.elastic.run
def train(state):
    print("begins", optimizer.inner_steps, hvd.size(), flush=True)
    while optimizer.inner_steps < 24:
        time.sleep(0.03)
        before = optimizer.outer_steps
        optimizer.step(weights, [np.full(4, float(hvd.rank()))])
        print("step", optimizer.inner_steps, weights[0][0], flush=True)
        if optimizer.outer_steps > before:
            state.commit()

train(hvd.elastic.ArrayState(weights=weights, optimizer=optimizer))
"""


def test_islands_of_several_ranks_form_again_without_a_killed_rank(tmp_path):
    with elastic_job(ISLANDS, tmp_path, 4) as job:
        victim = job.process(job.formed(1).members[3])
        victim.wait_for("step 10 ")
        victim.kill()
        texts = [process.ends() for process in job.processes if process is not victim]
    generations = {tuple(generations_of(text)) for text in texts}
    ((first, second),) = generations
    assert first == (0, 4) and second[1] == 3 and second[0] % 4 == 0
    # four ranks follow the mean 1.5; then [0, 1] and [2] do, by their numbers of ranks: the mean is 1
    end = -0.5 * (1.5 * second[0] + 1.0 * (24 - second[0]))
    for text in texts:
        assert float(re.findall(r"step 24 (\S+)", text)[-1]) == pytest.approx(end, abs=1e-12)
        inside = [float(value) for value in re.findall(rf"step {second[0] + 1} (\S+)", text)][-1:]
        assert inside[0] + 0.75 * second[0] in (-0.25, -1.0)  # half of the mean of ranks 0 and 1, or of rank 2
