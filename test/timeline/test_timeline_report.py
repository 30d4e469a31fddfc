"""The report of a timeline: jobs whose figures are known beforehand, real jobs, and the page in a real browser."""

import json
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from harness import browser
from harness.timelines import Gradient, MadeUpJob

import ringtrain as hvd
from ringtrain.optim import SGD
from ringtrain.timeline.__main__ import main
from ringtrain.timeline.report.figures import figures_of, judge
from ringtrain.timeline.report.trace import Part, TraceError, read

MS = 1_000_000
# With four ranks at 1 GB/s a gradient of 200,000 bytes takes 300 us.
SMALL = [Gradient("layer2", 200_000, 50), Gradient("layer1", 200_000, 100)]


def slow_rank():
    """Rank 2 needs 9.4 ms where the others need 7, but for seven steps of a hundred."""
    return MadeUpJob(4, 100, lambda rank, step: 9_400 if rank == 2 and step > 7 else 7_000, SMALL)


def slow_network():
    """Each gradient takes 9 ms, and the compute of the step 10 ms."""
    large = [gradient._replace(bytes=6_000_000) for gradient in SMALL]
    return MadeUpJob(4, 20, lambda rank, step: 10_000, large, hosts=["node1", "node1", "node2", "node2"])


def compute_bound():
    """A hundred milliseconds of compute, of which 350 us are left to wait for."""
    return MadeUpJob(4, 20, lambda rank, step: 100_000, SMALL)


def figures_of_job(job, tmp_path, **options):
    job.write(tmp_path / "timeline.json")
    return figures_of(tmp_path / "timeline.json", **options)


def parts_of_step(parts, count):
    return [ns / count / MS for ns in parts.as_list()]


def test_a_slow_rank_is_named_and_its_cost_is_right(tmp_path):
    figures = figures_of_job(slow_rank(), tmp_path)
    verdict = judge(figures)
    assert verdict.limit == "straggler" and verdict.rank == 2
    # Of each of 93 steps of 9.75 ms the others wait 2.4 ms; the seven others take 7.35 ms.
    assert verdict.sentence == (
        "Rank 2 is the slowest in 93 of 100 steps and costs the others 23 % of a step: look at what it computes."
    )
    assert round(100 * 93 * 2.4 / (93 * 9.75 + 7 * 7.35)) == 23
    for rank in figures.ranks:
        compute = 0.93 * 9.4 + 0.07 * 7 if rank.rank == 2 else 7
        waits = 0 if rank.rank == 2 else 0.93 * 2.4
        assert parts_of_step(rank.parts, 100) == pytest.approx([compute - 0.3, 0.3, 0.3, 0.05, waits])
        assert rank.slowest_in_steps == (93 if rank.rank == 2 else 0)
        assert rank.kept_waiting_ns == (93 * 2.4 * MS if rank.rank == 2 else 0)
    assert [step.slowest_rank for step in figures.steps] == [None] * 7 + [2] * 93
    # All of the waiting is for the gradient that is submitted at the end.
    assert figures.operations[0].name == "layer1" and figures.operations[0].slowest_ns == 93 * 2.4 * MS * 3 / 4


def test_a_slow_network_is_the_limit(tmp_path):
    figures = figures_of_job(slow_network(), tmp_path, link_gbit_per_s=10)
    verdict = judge(figures)
    assert verdict.limit == "communication"
    # 5.05 ms of compute, the first gradient behind 4.95 ms of it, then the rest of both.
    assert parts_of_step(figures.parts, 20 * 4) == pytest.approx([5.05, 4.95, 13.05, 0, 0])
    assert verdict.sentence.startswith("The network is the limit: 57 % of a step is communication that nothing hides")
    assert "Compression" in " ".join(verdict.advice)
    assert figures.bandwidth.achieved_gb_per_s == pytest.approx(1)
    assert figures.bandwidth.best_gb_per_s == pytest.approx(1)
    # Between two hosts 2(2-1)/2 of the bytes; 6 MB in 9 ms are 5.33 Gbit/s.
    assert figures.bandwidth.link_used == pytest.approx(0.533, abs=0.001)
    assert {cost.name for cost in figures.operations} == {"layer1", "layer2"}
    assert figures.operations[0].name == "layer1" and figures.operations[0].exposed_ns == 20 * 9 * MS
    assert figures.operations[1].exposed_ns == pytest.approx(20 * 4.05 * MS)
    assert figures.operations[0].site == "train.py:7" and figures.operations[0].bytes == 6_000_000


def test_a_job_that_computes_is_compute_bound(tmp_path):
    figures = figures_of_job(compute_bound(), tmp_path)
    verdict = judge(figures)
    assert verdict.limit == "compute"
    assert verdict.sentence == "Compute-bound: > 99 % of a step is compute; more ranks will scale."
    assert parts_of_step(figures.parts, 20 * 4) == pytest.approx([99.7, 0.3, 0.3, 0.05, 0])


def test_ranks_that_take_turns_are_not_called_stragglers(tmp_path):
    job = MadeUpJob(4, 40, lambda rank, step: 9_400 if step % 4 == rank else 7_000, SMALL)
    figures = figures_of_job(job, tmp_path)
    assert judge(figures).limit == "turns"
    assert [rank.slowest_in_steps for rank in figures.ranks] == [10] * 4


def test_agreeing_may_be_the_limit(tmp_path):
    figures = figures_of_job(MadeUpJob(2, 10, lambda rank, step: 1_000, SMALL, negotiation_us=900), tmp_path)
    assert judge(figures).limit == "negotiation"


@pytest.mark.parametrize("job", [slow_rank(), slow_network(), compute_bound()], ids=["rank", "network", "compute"])
def test_the_parts_are_the_whole_step_to_the_nanosecond(job, tmp_path):
    path = tmp_path / "timeline.json"
    figures = figures_of_job(job, tmp_path)
    trace = read(path)
    for at, number in enumerate(trace.steps):
        whole = sum(rank.steps[number + 1] - rank.steps[number] for rank in trace.ranks)
        assert figures.steps[at].parts.total_ns == whole
    for lane in figures.median_step.lanes:
        begin = [piece[0] for piece in lane.pieces]
        assert begin[1:] == [piece[1] for piece in lane.pieces][:-1]


def test_operations_meet_again_after_one_rank_missed_some(tmp_path):
    """As after join(), or where a timeline began while an operation was under way."""
    job = slow_rank()
    parts = job.parts()
    lines = parts[1].decode().splitlines()
    first = next(at for at, line in enumerate(lines) if '"name":"ALLREDUCE"' in line)
    parts[1] = "\n".join(lines[:first] + lines[first + 5 :]).encode()
    path = tmp_path / "timeline.json"
    for rank, part in enumerate(parts):
        path.with_name(path.name if rank == 0 else f"{path.name}.rank-{rank}").write_bytes(part)
    assert judge(figures_of(path)).sentence.startswith("Rank 2 is the slowest in 93 of 100 steps")


def test_the_parts_of_a_killed_job_are_read_as_they_are(tmp_path):
    path = tmp_path / "timeline.json"
    for rank, part in enumerate(slow_rank().parts()):
        cut = part[: len(part) * 2 // 3]  # in the middle of a line
        path.with_name(path.name if rank == 0 else f"{path.name}.rank-{rank}").write_bytes(cut)
    figures = figures_of(path)
    assert 50 < len(figures.steps) < 80 and judge(figures).rank == 2
    assert any("was killed, or is still running" in note for note in figures.notes)


ONE_RANK = MadeUpJob(1, 3, lambda rank, step: 1_000, SMALL)
ONE_STEP = MadeUpJob(2, 0, lambda rank, step: 1_000, SMALL)
MISTAKES = {
    "empty": (b"", "is empty"),
    "only begun": (b"[\n", "is empty"),
    "something else": (b"hello\nworld\n", "is not a timeline of ringtrain"),
    "another program's": (b'[{"ph":"X"}]', "is not a timeline of ringtrain"),
    "other events": (b'[\n{"ph":"X"},\n{"ph":"X"}\n]\n', "is not a timeline of ringtrain"),
    "numbers": (b"[\n1,\n2\n]\n", "is not a timeline of ringtrain"),
    "bytes": (bytes(range(256)) * 9, "is not a timeline of ringtrain"),
    "one rank": (ONE_RANK.parts()[0], "has one rank only"),
}


@pytest.mark.parametrize(("content", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_file_that_tells_nothing_is_refused_in_one_sentence(content, message, tmp_path, capsys):
    path = tmp_path / "timeline.json"
    path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m ringtrain.timeline: {path}") and message in said
    assert said.count("\n") == 1
    assert not path.with_suffix(".html").exists()


def test_a_timeline_without_steps_and_a_missing_file_are_refused(tmp_path, capsys):
    ONE_STEP.write(tmp_path / "timeline.json")
    with pytest.raises(TraceError, match="has no whole step"):
        figures_of(tmp_path / "timeline.json")
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("speed", ["0", "-1", "abc", "inf", "nan"])
def test_a_link_without_a_speed_is_refused(speed, capsys):
    with pytest.raises(SystemExit):
        main(["report", "--link-gbit", speed, "timeline.json"])
    assert f'--link-gbit: must be a number above 0, not "{speed}"' in capsys.readouterr().err


def test_json_has_the_figures_of_the_page(tmp_path, capsys):
    path = tmp_path / "timeline.json"
    slow_rank().write(path)
    assert main(["report", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"]["limit"] == "straggler" and told["verdict"]["rank"] == 2
    assert told["ranks"][2]["slowest_in_steps"] == 93
    assert sum(told["parts"].values()) == 4 * (93 * 9_750_000 + 7 * 7_350_000)
    assert not path.with_suffix(".html").exists()


# ----------------------------------------------------------------------------------------------------------- real jobs


def train(path, steps, sleeps_s):
    """A few steps of an optimizer, each after as much sleep as its rank would need to compute."""
    hvd.init(timeline_filename=str(path))
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.1))
    params = [np.ones((256, 256), np.float32), np.ones(10, np.float32)]
    for _ in range(steps):
        time.sleep(sleeps_s[hvd.rank()])
        optimizer.step(params, [np.ones_like(param) for param in params])
    hvd.stop_timeline()
    hvd.barrier()


@pytest.mark.fast
@pytest.mark.ranks(2, initialised=False)
def test_a_real_job_gets_a_report(tmp_path):
    path = tmp_path / "timeline.json"
    train(path, steps=12, sleeps_s=(0.01, 0.01))
    if hvd.rank() == 0:
        assert main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 0
        figures = figures_of(path)
        assert [step.number for step in figures.steps] == list(range(1, 12))
        assert figures.parts.share(Part.COMPUTE, Part.HIDDEN) > 0.3
        digests = (5 + 2) * 2 * 8  # seven of each rank, which the first step compares
        options = 12 * 4 * 8  # the numbers that each step compares
        assert figures.bandwidth.bytes == 12 * 4 * (256 * 256 + 10) + digests + options
        page = (tmp_path / "report.html").read_text()
        assert judge(figures).sentence in page and "test_timeline_report.py:" in page
        made_up = tmp_path / "made up.json"
        slow_rank().write(made_up)
        assert shapes_of(made_up) <= shapes_of(path)
    hvd.barrier()


def shapes_of(path):
    """Returns the form of the events, without their content."""
    return {
        (event["ph"], event["name"] if event["ph"] == "M" else event["tid"] > 0, *event, *event.get("args", ()))
        for event in json.loads(path.read_text())
    }


@pytest.mark.ranks(2, initialised=False)
def test_a_rank_that_sleeps_is_the_straggler(tmp_path):
    path = tmp_path / "timeline.json"
    train(path, steps=15, sleeps_s=(0.005, 0.03))
    if hvd.rank() == 0:
        figures = figures_of(path)
        verdict = judge(figures)
        assert verdict.limit == "straggler" and verdict.rank == 1
        assert figures.ranks[1].slowest_in_steps >= 12
        waits = figures.ranks[1].kept_waiting_ns / len(figures.steps)
        assert 0.015e9 < waits < 0.035e9
    hvd.barrier()


# -------------------------------------------------------------------------------------------------------------- browser


class Texts(HTMLParser):
    """The text of the elements with an id."""

    def __init__(self):
        super().__init__()
        self.by_id, self._id = {}, None

    def handle_starttag(self, tag, attrs):
        self._id = dict(attrs).get("id")

    def handle_data(self, data):
        if self._id:
            self.by_id[self._id] = data
            self._id = None


@pytest.mark.parametrize("job", [slow_rank(), slow_network(), compute_bound()], ids=["rank", "network", "compute"])
def test_the_page_asks_for_nothing(job, tmp_path):
    path = tmp_path / "timeline.json"
    job.write(path)
    assert main(["report", str(path)]) == 0
    page = path.with_suffix(".html").read_text()
    assert not re.search(r"https?:|<script|@import|url\(|\bsrc=", page)
    assert len(page) < 500_000


def test_names_of_a_script_cannot_become_markup(tmp_path):
    path = tmp_path / "timeline.json"
    gradients = [Gradient('<b>"&', 200_000, 100, site="<i>.py:1")]
    MadeUpJob(2, 5, lambda rank, step: 1_000, gradients, hosts=["<u>", "<u>"]).write(path)
    assert main(["report", str(path)]) == 0
    page = path.with_suffix(".html").read_text()
    assert "&lt;b&gt;&#34;&amp;" in page and not re.search("<b>|<i>|<u>", page)


def shown_in_a_browser(page, tmp_path):
    try:
        return browser.show(page, tmp_path)
    except browser.BrowserUnavailable as reason:
        pytest.skip(str(reason))


def test_a_browser_shows_the_page(tmp_path):
    path = tmp_path / "timeline.json"
    slow_rank().write(path)
    assert main(["report", str(path)]) == 0
    shown = shown_in_a_browser(path.with_suffix(".html"), tmp_path)
    texts = Texts()
    texts.feed(shown.document)
    assert texts.by_id["verdict"] == judge(figures_of(path)).sentence
    assert shown.document.count("<svg") == 3
    assert shown.console == []
    assert shown.requests == set()


def test_a_page_that_asks_for_something_would_be_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<!DOCTYPE html><img src="http://example.invalid/a.png"><script>console.error("oh")</script>')
    shown = shown_in_a_browser(page, tmp_path)
    assert shown.requests == {"http://example.invalid/a.png"} and "oh" in shown.console[0]
