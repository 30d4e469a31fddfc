"""A notebook: a real kernel of Jupyter, in which cells run on several ranks."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest
from jupyter_client.manager import KernelManager

_PATIENCE_S = 120


class Notebook:
    """One kernel. Its cells run one after the other."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_PATIENCE_S)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def begin(self, cell: str) -> None:
        self._cell, self.output, self.error = self._client.execute(cell), "", ""
        self.streams: set[str] = set()

    def read_until(self, text: str | None) -> None:
        """Reads what the cell prints until there is the text in it, or until the cell ends."""
        deadline = time.monotonic() + _PATIENCE_S
        while text is None or text not in self.output:
            try:
                message = self._client.get_iopub_msg(timeout=deadline - time.monotonic())
            except queue.Empty:
                raise AssertionError(f"the cell did not end, or print {text!r}, but:\n{self.output}") from None
            if message["parent_header"].get("msg_id") != self._cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                self.output += content["text"]
                self.streams.add(content["name"])
            if message["msg_type"] == "error":
                self.error = f"{content['ename']}: {content['evalue']}\n" + "\n".join(content["traceback"])
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                assert text is None, f"the cell has ended without {text!r}:\n{self.output}\n{self.error}"
                return

    def run(self, cell: str) -> str:
        self.begin(cell)
        self.read_until(None)
        return self.output

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    made.run("%load_ext ringtrain")
    assert not made.error
    yield made
    made.close()


_AVERAGE = """%%ringtrain -np 2 --in start --out total, seen
import numpy as np
import ringtrain as hvd
hvd.init()
total = hvd.allreduce(np.full(3, start + hvd.rank()), op=hvd.Sum)
seen = [type(start).__name__, __name__]
print("rank", hvd.rank(), "of", hvd.size())
"""


def test_a_cell_runs_on_ranks_and_gives_variables_back(notebook: Notebook) -> None:
    notebook.run("start = 10")
    output = notebook.run(_AVERAGE)
    assert not notebook.error and "[0] rank 0 of 2" in output and "[1] rank 1 of 2" in output
    assert notebook.run("print(total.tolist(), seen)") == "[21, 21, 21] ['int', '__main__']\n"


def test_a_class_of_the_notebook_travels_both_ways(notebook: Notebook) -> None:
    notebook.run("class Point:\n    x = 1\npoint = Point()")
    notebook.run("%%ringtrain -np 2 --in point --out point\npoint.x += 4")
    assert not notebook.error and notebook.run("print(point.x)") == "5\n"


def test_a_progress_bar_leaves_no_blank_line(notebook: Notebook) -> None:
    """Jupyter shows each change of the stream as a new block, so all of a cell is in one."""
    bar = r"sys.stderr.write(f'\r{10 * step}%'); sys.stderr.flush()"
    tell = "if step % 5 == 0: print('step', step, flush=True)"
    loop = f"for step in range(11):\n    {bar}\n    time.sleep(0.15)\n    {tell}"
    notebook.run(f"%%ringtrain -np 2\nimport sys, time\n{loop}")
    assert not notebook.error and notebook.streams == {"stdout"}
    shown = [line.rpartition("\r")[2] for line in notebook.output.removesuffix("\n").split("\n")]
    assert sorted(shown) == sorted(
        f"[{rank}] {what}" for rank in (0, 1) for what in ("step 0", "step 5", "step 10", "100%")
    )


def test_an_exception_of_a_rank_shows_the_line_of_the_cell(notebook: Notebook) -> None:
    notebook.run("%%ringtrain -np 2\nimport ringtrain as hvd\nhvd.init()\nassert hvd.rank() == 0, 'of rank 1'")
    assert notebook.error.startswith("AssertionError: of rank 1") and "assert hvd.rank() == 0" in notebook.error


def test_output_comes_while_the_cell_runs_and_a_stuck_cell_can_be_interrupted(notebook: Notebook) -> None:
    says_pid = "import os, time\nprint('pid', os.getpid(), 'end', flush=True)\n"
    notebook.begin(f"%%ringtrain -np 2\n{says_pid}while True:\n    time.sleep(1)")
    for rank in range(2):
        notebook.read_until(f"[{rank}] pid")
    notebook.read_until("end")
    pids = [line.split()[2] for line in notebook.output.splitlines() if " pid " in line]
    begin_s = time.monotonic()
    notebook.interrupt()
    notebook.read_until(None)
    assert notebook.error.startswith("KeyboardInterrupt") and time.monotonic() - begin_s < 30
    assert len(pids) == 2
    gone = f"import os\nprint([pid for pid in {pids} if os.path.exists(f'/proc/{{pid}}')])"
    assert notebook.run(gone) == "[]\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "the following arguments are required: -np/--num-proc"),
        ("-np two", "argument -np/--num-proc: invalid int value: 'two'"),
        ("-np 0", "num_proc must be at least 1, not 0"),
        ("-np 2 --in nothing", "--in names nothing, which the notebook does not have"),
        ("-np 2 --in a.b", "'a.b' is not the name of a variable"),
        ("-np 1 --out unset", "--out names unset, which the cell did not set"),
        ("-np 2 'open", "No closing quotation: -np 2 'open"),
        ("-np 2 train.py", "unrecognized arguments: train.py"),
    ],
)
def test_a_wrong_line_is_refused(notebook: Notebook, line: str, sentence: str) -> None:
    notebook.run(f"%%ringtrain {line}\npass")
    assert sentence in notebook.error.splitlines()[0] + notebook.error.splitlines()[1]
