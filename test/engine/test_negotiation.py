"""Agreement among simulated ranks: real coordinators over wires in memory, no MPI and no tensors."""

import random

import pytest
from harness.simulation import Request, Simulation, death, steps

from ringtrain._core import DTYPES, OpKind, ReduceOp

FLOAT64 = DTYPES["float64"]


def names(plans):
    return [[part[0] for part in plan] for plan in plans]


def errors(plans):
    return [part[1] for plan in plans for part in plan]


def everybody(size, *requests):
    return [list(requests) for _ in range(size)]


def settle(simulation, fresh):
    """The plans of a round and of those that ranks come to by themselves after it, such as after an eviction."""
    plans = []
    for _ in range(5):
        rounds = simulation.round(fresh)
        assert all(one == rounds[0] for one in rounds)
        plans += rounds[0]
        if not simulation.is_due():
            return plans
        fresh = everybody(len(fresh))
    raise AssertionError("the ranks find no end")


def gradient(name, count=16, **arguments):
    return Request(OpKind.ALLREDUCE, name, shape=[count], **arguments)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_operations_that_all_ranks_submit_are_planned_once_on_every_rank(size):
    simulation = Simulation(size)
    first = simulation.round(everybody(size, gradient("a"), gradient("b")))
    assert all(plans == first[0] for plans in first)
    assert names(first[0]) == [["a", "b"]]
    assert simulation.round(everybody(size)) == [[]] * size


@pytest.mark.parametrize("size", [2, 5, 1000])
def test_nothing_is_planned_before_the_last_rank_has_submitted_it(size):
    simulation = Simulation(size)
    fresh = everybody(size, gradient("a"))
    fresh[size - 1] = []
    for _ in range(2):  # the second time from the cache
        assert simulation.round(fresh) == [[]] * size
        last = everybody(size)
        last[size - 1] = [gradient("a")]
        assert [names(plans) for plans in simulation.round(last)] == [[["a"]]] * size


def test_ranks_submit_in_different_orders_over_many_rounds():
    size, count = 16, 40
    order = random.Random(1)
    simulation = Simulation(size, cache_capacity=16)
    for step in range(5):
        # some names come once only, so others lose their place while they are pending
        names_of_step = [f"g{i}" if i % 2 else f"g{i} of {step}" for i in range(count)]
        left = [order.sample(names_of_step, count) for _ in range(size)]
        planned = []
        while len(planned) < count:
            fresh = []
            for names_left in left:
                take = order.randint(0, 5)
                fresh.append([gradient(name) for name in names_left[:take]])
                del names_left[:take]
            rounds = simulation.round(fresh)
            assert all(plans == rounds[0] for plans in rounds)
            planned += [name for plan in names(rounds[0]) for name in plan]
        assert sorted(planned) == sorted(names_of_step)


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 1024])
def test_a_cache_of_any_capacity_agrees_on_the_same(capacity):
    size = 5
    simulation = Simulation(size, cache_capacity=capacity)
    for step in range(6):
        order = [gradient(f"g{(i + step) % 4}") for i in range(4)]
        fresh = [order[rank % 4 :] + order[: rank % 4] for rank in range(size)]
        planned = [name for plan in names(settle(simulation, fresh)) for name in plan]
        assert sorted(planned) == ["g0", "g1", "g2", "g3"]


def test_a_repeated_operation_costs_no_gather():
    size = 64
    simulation = Simulation(size)
    fresh = everybody(size, *[gradient(f"g{i}") for i in range(200)])
    simulation.round(fresh)
    before = simulation.messages_handled()
    simulation.round(fresh)
    handled = [after - early for after, early in zip(simulation.messages_handled(), before, strict=True)]
    # one each way between a rank and its parent and each of its four children; rank 0 has no parent
    assert (handled[0], max(handled)) == (2 * 4, 2 * 5)


@pytest.mark.parametrize(("size", "come"), [(2, True), (7, True), (8, True), (9, False)])
def test_small_values_of_up_to_eight_ranks_travel_in_the_messages_of_the_bits(size, come):
    simulation = Simulation(size)
    too_long = 16 * 1024 // (size - 1) ** 2 + 1  # elements of 4 bytes
    small, large = (everybody(size, gradient(name, elements)) for name, elements in [("a", 300), ("b", too_long)])
    for fresh in (small, large):
        simulation.round(fresh)
    for fresh, values in [(small, int(come)), (large, 0), (small, int(come))]:
        told, before = simulation.messages_handled(), simulation.came_with_values()
        simulation.round(fresh)
        handled = [after - early for after, early in zip(simulation.messages_handled(), told, strict=True)]
        # each sends to each of the others, or to its parent and its children
        others, all_sent = (size - 1, size * (size - 1)) if come else (4, 2 * (size - 1))
        assert handled[0] == 2 * others and sum(handled) == 2 * all_sent
        assert simulation.came_with_values() == [values + early for early in before]


def test_the_news_of_a_death_grow_with_the_logarithm_of_the_ranks():
    few, many = death(64), death(512)
    # both ways: to a parent and four children, and to the ranks at each power of two in the circle on both sides
    assert (few.messages, many.messages) == (32, 44)
    assert many.bytes < 1.5 * few.bytes < 2000


def test_equal_announcements_travel_once():
    def bytes_of_first_step(size):
        simulation = Simulation(size)
        simulation.round(everybody(size, *[gradient(f"gradient{i}") for i in range(100)]))
        return max(simulation.bytes_handled())

    # rank 0 hears of its 6 children as much as of one rank, and less than as much again for the 58 others together
    assert bytes_of_first_step(64) < 7 * bytes_of_first_step(2)


def bytes_of(simulation, *rounds):
    """Of the busiest rank in these rounds."""
    before = simulation.bytes_handled()
    for fresh in rounds:
        simulation.round(fresh)
    return max(after - early for after, early in zip(simulation.bytes_handled(), before, strict=True))


def bytes_of_rounds(size):
    """Bytes of the busiest of so many ranks in the first step, at the end, and so on."""

    def learned():
        simulation = Simulation(size)
        step = everybody(size, *[gradient(f"gradient{i}") for i in range(161)])
        return simulation, step, bytes_of(simulation, step)

    simulation, step, first = learned()
    end = bytes_of(simulation, everybody(size, Request(OpKind.BARRIER, "<end>")))
    # half of the ranks join, and the others go on
    simulation, step, _ = learned()
    joining = [[join()] if rank % 2 else step[rank] for rank in range(size)]
    joined = bytes_of(simulation, joining, everybody(size))
    # each rank waits for half of the gradients, of which the others have submitted the other half
    simulation, step, _ = learned()
    simulation.round([of_rank[:80] if rank % 2 else of_rank[80:] for rank, of_rank in enumerate(step)])
    say_blocked(simulation, *range(size))
    simulation.pass_time(BLOCKED_S)
    deadlock = bytes_of(simulation, everybody(size), everybody(size))
    return first, end, joined, deadlock


def test_an_end_a_join_and_a_deadlock_say_at_most_twice_what_a_first_step_says():
    of_64, of_512 = bytes_of_rounds(64), bytes_of_rounds(512)
    for first, *others in (of_64, of_512):
        assert max(others) < 2 * first
    # a few bytes for each rank and what all say once, not the one times the other
    assert of_512[0] < 2 * of_64[0]


@pytest.mark.parametrize("size", [2, 64, 1000])
def test_no_rank_handles_more_than_a_logarithm_of_messages(size):
    simulation = Simulation(size)
    simulation.round(everybody(size, gradient("a")))
    steps = (size - 1).bit_length()
    # the bits, and a tree each for gather and broadcast with two messages (length, content) for each neighbour
    assert max(simulation.messages_handled()) <= 2 * steps + 2 * 2 * steps


def test_fusion_keeps_to_the_threshold():
    simulation = Simulation(2, fusion_threshold_bytes=100)
    plans = simulation.round(everybody(2, *[gradient(f"g{i}", 10) for i in range(5)], gradient("large", 1000)))[0]
    assert names(plans) == [["g0", "g1"], ["g2", "g3"], ["g4"], ["large"]]
    assert names(Simulation(2, fusion_threshold_bytes=0).round(everybody(2, gradient("a"), gradient("b")))[0]) == [
        ["a"],
        ["b"],
    ]


def test_only_what_fits_together_is_fused():
    requests = [
        gradient("float"),
        gradient("double", dtype=FLOAT64),
        gradient("largest", op=ReduceOp.Max),
        gradient("float too"),
        Request(OpKind.BROADCAST, "weight", shape=[16]),
        gradient("double too", dtype=FLOAT64),
        Request(OpKind.BROADCAST, "weight of another", shape=[16], root=1),
        Request(OpKind.BROADCAST, "bias", dtype=FLOAT64, shape=[]),
        Request(OpKind.ALLGATHER, "rows", shape=[2, 3]),
        Request(OpKind.BROADCAST, "elsewhere", shape=[16], root=1),
        Request(OpKind.ALLGATHER, "more rows", dtype=FLOAT64, shape=[0]),
        Request(OpKind.REDUCESCATTER, "scattered", shape=[4]),
        Request(OpKind.REDUCESCATTER, "scattered doubles", dtype=FLOAT64, shape=[4]),
        Request(OpKind.REDUCESCATTER, "smallest scattered", shape=[4], op=ReduceOp.Min),
        Request(OpKind.REDUCESCATTER, "scattered too", shape=[5, 2]),
    ]
    plans = Simulation(3).round(everybody(3, *requests))[0]
    gradients = [["float", "float too"], ["double", "double too"], ["largest"]]
    weights = [["weight", "bias"], ["weight of another", "elsewhere"]]
    scattered = [["scattered", "scattered too"], ["scattered doubles"], ["smallest scattered"]]
    assert names(plans) == [*gradients, *weights, ["rows", "more rows"], *scattered]


def test_the_input_of_all_ranks_to_an_allgather_counts_for_the_threshold():
    def rows(rank, count):
        return Request(OpKind.ALLGATHER, f"rows {count}", shape=[rank * count, 2])

    # 8 bytes a row: 0 + 10, 0 + 2 and 0 + 1 rows of the two ranks
    fresh = [[rows(rank, count) for count in (10, 2, 1)] for rank in range(2)]
    plans = Simulation(2, fusion_threshold_bytes=96).round(fresh)[0]
    assert names(plans) == [["rows 10", "rows 2"], ["rows 1"]]


def test_the_most_urgent_goes_first():
    requests = [gradient("last", priority=-1), gradient("first", priority=5), gradient("second", priority=5)]
    plans = Simulation(2, fusion_threshold_bytes=0).round(everybody(2, *requests))[0]
    assert names(plans) == [["first"], ["second"], ["last"]]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (gradient("x", 31), gradient("x", 32), ["float32[31]", "float32[32]", "Do all ranks build the same model?"]),
        (gradient("x"), gradient("x", dtype=FLOAT64), ["float32[16]", "float64[16]"]),
        (gradient("x"), gradient("x", op=ReduceOp.Max), ["op=Sum", "op=Max"]),
        (gradient("x"), Request(OpKind.BROADCAST, "x", shape=[16]), ["called allreduce", "called broadcast"]),
        (
            Request(OpKind.BROADCAST, "x", shape=[16]),
            Request(OpKind.BROADCAST, "x", shape=[16], root=1),
            ["root_rank=0", "root_rank=1"],
        ),
    ],
)
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_mismatch_names_who_sent_what_and_the_next_one_works(one, other, words, is_cached):
    size = 5
    simulation = Simulation(size)
    if is_cached:
        simulation.round(everybody(size, one))
    fresh = everybody(size, one)
    fresh[3] = [other]
    (message,) = [part[1] for plan in settle(simulation, fresh) for part in plan]
    for word in [*words, '"x"', "ranks 0-2, 4", "rank 3"]:
        assert word in message
    assert errors(simulation.round(everybody(size, other))[0]) == [""]


def test_allgather_knows_the_rows_of_every_rank():
    size = 4
    simulation = Simulation(size)
    fresh = [[Request(OpKind.ALLGATHER, "g", shape=[rank, 3])] for rank in range(size)]
    for _ in range(2):
        assert simulation.round(fresh)[2] == [[("g", "", [0, 1, 2, 3], 0, [])]]
    fresh[1] = [Request(OpKind.ALLGATHER, "g", shape=[7, 3])]
    assert settle(simulation, fresh) == [[("g", "", [0, 7, 2, 3], 0, [])]]


def join(unnamed=0):
    return Request(OpKind.JOIN, "<join>", numbers=[unnamed])


def test_a_joined_rank_counts_as_ready_until_all_have_joined():
    simulation = Simulation(3)
    simulation.round(everybody(3, gradient("a")))
    assert names(settle(simulation, [[gradient("a")], [join()], [gradient("a")]])) == [["a"]]
    assert names(simulation.round([[gradient("new")], [], [gradient("new")]])[1]) == [["new"]]
    assert simulation.round([[join()], [], []])[0] == []
    assert simulation.round([[], [], [join()]])[1] == [[("<join>", "", [], 2, [])]]
    assert simulation.round(everybody(3)) == [[]] * 3


def test_joined_ranks_are_part_of_an_agreement():
    simulation = Simulation(3)
    step = everybody(3, gradient("a"), gradient("b"))
    for _ in range(2):
        assert simulation.round(step)[0] == [[("a", "", [], 0, []), ("b", "", [], 0, [])]]
    step[1] = [join()]
    for _ in range(3):  # in full, then twice by a bit
        assert settle(simulation, step) == [[("a", "", [], 0, [1]), ("b", "", [], 0, [1])]]
        step[1] = []
    step[0] = [gradient("b"), join()]  # b is still its own
    step[2] = [gradient("a"), gradient("b")]
    assert settle(simulation, step) == [[("a", "", [], 0, [0, 1]), ("b", "", [], 0, [1])]]
    assert settle(simulation, [[], [], [join()]]) == [[("<join>", "", [], 2, [])]]
    step = everybody(3, gradient("a"), gradient("b"))
    for _ in range(3):
        parts = [part for plan in settle(simulation, step) for part in plan]
        assert sorted(parts) == [("a", "", [], 0, []), ("b", "", [], 0, [])]


def test_a_joined_rank_that_submits_all_the_same_contributes_its_own_values():
    simulation = Simulation(2)
    simulation.round(everybody(2, gradient("a")))
    simulation.round([[], [join(), gradient("a")]])
    assert settle(simulation, [[gradient("a")], []]) == [[("a", "", [], 0, [])]]
    simulation.round([[], [gradient("a")]])
    assert settle(simulation, [[gradient("a")], []]) == [[("a", "", [], 0, [])]]
    assert settle(simulation, [[gradient("a")], []]) == [[("a", "", [], 0, [1])]]


def test_a_joined_rank_cannot_take_part_in_everything():
    simulation = Simulation(2)
    gather = Request(OpKind.ALLGATHER, "g", shape=[1])
    simulation.round(everybody(2, gather))
    (message,) = errors(settle(simulation, [[join()], [gather]]))
    assert 'allgather "g"' in message and "rank 0 called join()" in message
    (message,) = errors(simulation.round([[], [gradient("x", op=ReduceOp.Max)]])[0])
    assert "rank 0 called join()" in message


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("ends_first", [False, True])
def test_operations_that_need_an_ended_rank_fail_and_the_others_go_on(ends_first, is_cached):
    simulation = Simulation(3)
    opened = Request(OpKind.OPEN_PROCESS_SET, "open", numbers=[0, 1])
    simulation.round([[opened], [opened], []])
    all_do, some_do = gradient("all"), gradient("some", process_set=1)
    if is_cached:
        simulation.round([[all_do, some_do], [all_do, some_do], [all_do]])
    end = Request(OpKind.BARRIER, "<end>")
    submitted = [[all_do], [all_do], []]
    for fresh in ([[], [], [end]], submitted) if ends_first else (submitted, [[], [], [end]]):
        plans = settle(simulation, fresh)
    (message,) = errors(plans)
    assert message.startswith('allreduce "all": rank 2 will never submit it: the script has ended there')
    for _ in range(2):
        assert settle(simulation, [[some_do], [some_do], []]) == [[("some", "", [], 0, [])]]
    assert settle(simulation, [[end], [end], []]) == [[("<end>", "", [], 0, [])]]


def test_an_ended_rank_waits_for_the_others_without_a_warning(capfd):
    simulation = Simulation(2, stall_warning_s=0.01, stall_shutdown_s=0.02)
    end = Request(OpKind.BARRIER, "<end>")
    assert simulation.round([[], [end]]) == [[]] * 2
    simulation.pass_time(0.05)
    assert not simulation.is_due()
    assert simulation.round(everybody(2)) == [[]] * 2
    assert names(simulation.round([[end], []])[1]) == [["<end>"]]
    assert capfd.readouterr().err == ""


def test_process_sets_get_their_plans_in_one_order_on_all_ranks():
    size = 6
    simulation = Simulation(size)
    added = Request(OpKind.ADD_PROCESS_SET, "add", numbers=[1, 3, 5])
    assert simulation.round(everybody(size, added))[0] == [[("add", "", [], 1, [])]]
    for _ in range(2):
        fresh = [[gradient("odd", process_set=1)] if rank % 2 else [] for rank in range(size)]
        rounds = simulation.round(fresh)
        assert all(names(plans) == [["odd"]] for plans in rounds)
    simulation.round(everybody(size, Request(OpKind.REMOVE_PROCESS_SET, "remove", numbers=[1])))
    assert simulation.round(everybody(size)) == [[]] * size


def test_members_alone_open_a_process_set_that_all_ranks_know():
    simulation = Simulation(4)
    opened = Request(OpKind.OPEN_PROCESS_SET, "open 1,3", numbers=[1, 3])
    assert simulation.round([[], [opened], [], []]) == [[]] * 4
    assert simulation.round([[], [], [], [opened]]) == [[[("open 1,3", "", [], 1, [])]]] * 4
    odd = gradient("odd", process_set=1)
    assert all(names(plans) == [["odd"]] for plans in simulation.round([[], [odd], [], [odd]]))
    added = Request(OpKind.ADD_PROCESS_SET, "add", numbers=[0, 1])
    assert simulation.round(everybody(4, added))[2] == [[("add", "", [], 2, [])]]


def end_of_message(rank, source, destination):
    """One end, which `rank` announces while the other one does not come."""
    name = f"<message of {rank}>"
    return Request(OpKind.TRANSFER, name, shape=[4], numbers=[source, destination, 7, 0])


def test_an_end_of_a_message_waits_for_its_other_rank_alone(capfd):
    simulation = Simulation(3, stall_warning_s=WARNING_S, stall_shutdown_s=20 * WARNING_S)
    assert simulation.round([[end_of_message(0, 0, 2)], [], []]) == [[]] * 3
    wait_until_warned(simulation, 3)
    assert "rank 0 submitted it, rank 2 did not" in capfd.readouterr().err
    assert simulation.round([[], [], [end_of_message(2, 0, 2)]]) == [[]] * 3  # their words have not met
    simulation.pass_time(40 * WARNING_S)
    failed = simulation.round(everybody(3))[0]
    assert sorted(names(failed)) == [["<message of 0>"], ["<message of 2>"]]
    assert simulation.round(everybody(3, gradient("after")))[0] == [[("after", "", [], 0, [])]]


def test_a_receiver_from_any_rank_waits_for_all_of_its_process_set(capfd):
    simulation = Simulation(3, stall_warning_s=WARNING_S, stall_shutdown_s=0)
    assert simulation.round([[], [], [end_of_message(2, -1, 2)]]) == [[]] * 3
    wait_until_warned(simulation, 3)
    assert "rank 2 submitted it, ranks 0-1 did not" in capfd.readouterr().err


def test_an_end_of_a_message_fails_if_its_other_rank_has_ended():
    simulation = Simulation(3)
    end = Request(OpKind.BARRIER, "<end>")
    assert simulation.round([[end], [end_of_message(1, 0, 1)], [end_of_message(2, 1, 2)]])[0][0][0][1].startswith(
        'transfer "message from rank 0 to 1, tag 7": rank 0 will never submit it'
    )
    assert settle(simulation, everybody(3)) == []


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_stalled_operation_is_reported_and_then_fails_everywhere(is_cached, capfd):
    simulation = Simulation(3, stall_warning_s=0.1, stall_shutdown_s=0.4)
    if is_cached:
        simulation.round(everybody(3, gradient("slow")))
    simulation.round([[gradient("slow")], [], [gradient("slow")]])
    simulation.pass_time(0.15)
    for _ in range(2):
        assert simulation.round(everybody(3)) == [[]] * 3
    simulation.pass_time(0.35)
    messages = []
    for _ in range(2):
        rounds = simulation.round(everybody(3))
        assert all(plans == rounds[0] for plans in rounds)
        messages += errors(rounds[0])
    (message,) = messages
    assert 'allreduce "slow"' in message and "ranks 0, 2 submitted it" in message and "rank 1 did not" in message
    assert 'allreduce "slow"' in capfd.readouterr().err


WARNING_S = 0.2


def warnings_of(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("ringtrain warning: ")]


def wait_until_warned(simulation, ranks):
    """Has the ranks come to rounds as they do by themselves, until nobody is asked or warned any more."""
    for _ in range(60):
        if simulation.is_due():
            assert simulation.round(everybody(ranks)) == [[]] * ranks
        simulation.pass_time(WARNING_S / 20)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("absent", [0, 1, 3])
def test_a_stall_warning_names_no_rank_that_has_submitted(is_cached, absent, capfd):
    simulation = Simulation(4, stall_warning_s=WARNING_S)
    if is_cached:
        simulation.round(everybody(4, gradient("slow")))
    for rank in {0, 1, 2, 3} - {absent}:
        simulation.round([[gradient("slow")] if rank == one else [] for one in range(4)])
        simulation.pass_time(WARNING_S / 8)
    wait_until_warned(simulation, 4)
    (warning,) = warnings_of(capfd)
    ready = {0: "ranks 1-3", 1: "ranks 0, 2-3", 3: "ranks 0-2"}[absent]
    assert f"{ready} submitted it, rank {absent} did not." in warning


@pytest.mark.parametrize("is_cached", [False, True])
def test_no_warning_is_given_of_what_becomes_complete_when_the_ranks_are_asked(is_cached, capfd):
    simulation = Simulation(3, stall_warning_s=WARNING_S)
    if is_cached:
        simulation.round(everybody(3, gradient("slow")))
    simulation.round([[gradient("slow")], [], [gradient("slow")]])
    simulation.pass_time(1.5 * WARNING_S)
    assert names(settle(simulation, [[], [gradient("slow")], []])) == [["slow"]]
    assert warnings_of(capfd) == []


@pytest.mark.parametrize("is_cached", [False, True])
def test_many_operations_that_wait_for_one_rank_are_one_warning(is_cached, capfd):
    simulation = Simulation(2, stall_warning_s=WARNING_S)
    many = [gradient(f"layer {number}") for number in range(20)]
    if is_cached:
        simulation.round(everybody(2, *many))
    for request in many:
        simulation.round([[request], []])
    wait_until_warned(simulation, 2)
    simulation.round([[gradient("later")], []])
    wait_until_warned(simulation, 2)
    (warning,) = warnings_of(capfd)
    assert '20 operations wait; the first is allreduce "layer 0": waited' in warning and "rank 1 did not." in warning


def test_operations_that_wait_for_different_ranks_are_different_warnings(capfd):
    simulation = Simulation(2, stall_warning_s=WARNING_S)
    simulation.round([[gradient("a"), gradient("b")], [gradient("c")]])
    wait_until_warned(simulation, 2)
    first, second = sorted(warnings_of(capfd), key=lambda text: "rank 1 did not" in text)
    assert 'allreduce "c"' in first and "rank 1 submitted it, rank 0 did not" in first
    assert '2 operations wait; the first is allreduce "a"' in second


def test_a_warning_and_an_error_say_where_the_missing_ranks_are(capfd):
    simulation = Simulation(4, stall_warning_s=WARNING_S, stall_shutdown_s=5 * WARNING_S)
    simulation.round([[gradient("slow")], [], [], [gradient("slow")]])
    simulation.pass_time(WARNING_S)
    simulation.round(everybody(4))  # asks
    simulation.answer(2, "in load() at train.py:17")
    simulation.answer(1, "in save() at train.py:31")
    simulation.round(everybody(4))
    where = "ranks 1-2 did not: rank 1 is in save() at train.py:31, rank 2 is in load() at train.py:17."
    (warning,) = warnings_of(capfd)
    assert where in warning
    simulation.pass_time(4 * WARNING_S)
    plans = settle(simulation, everybody(4))
    assert [where in message for message in errors(plans)] == [True]


def test_a_rank_that_comes_as_the_time_of_the_others_ends_is_not_too_late():
    simulation = Simulation(2, stall_shutdown_s=0.1)
    simulation.round(everybody(2, gradient("x")))
    simulation.round([[gradient("x")], []])
    simulation.pass_time(0.15)
    assert settle(simulation, [[], [gradient("x")]]) == [[("x", "", [], 0, [])]]
    assert not simulation.is_due()
    assert simulation.round([[gradient("x")], []]) == [[], []]  # nothing is left of what has ended
    assert simulation.round([[], [gradient("x")]]) == [[[("x", "", [], 0, [])]]] * 2


BLOCKED_S = 1.0  # for so long nothing happens before a rank tells that it is blocked


def say_blocked(simulation, *ranks):
    for rank in ranks:
        simulation.say_blocked(rank, True)


@pytest.mark.parametrize(("size", "is_cached"), [(2, False), (2, True), (5, True)])
def test_ranks_that_are_all_blocked_are_told_what_each_waits_for(size, is_cached):
    simulation = Simulation(size)
    own = [gradient(f"of {rank}") for rank in range(size)]
    fresh = [[request] for request in own]
    if is_cached:
        simulation.round(everybody(size, *own))
    assert settle(simulation, fresh) == []
    say_blocked(simulation, *range(size))
    assert not simulation.is_due()
    simulation.pass_time(BLOCKED_S)
    assert simulation.is_due()
    messages = errors(settle(simulation, everybody(size)))
    assert len(messages) == size
    for message in messages:
        assert message.startswith("deadlock: every rank waits")
        assert all(f'rank {rank} for allreduce "of {rank}"' in message for rank in range(size))
    again = gradient("of 0")
    assert names(settle(simulation, everybody(size, again))) == [["of 0"]]


def test_a_rank_that_becomes_blocked_in_a_round_tells_in_the_next_one():
    simulation = Simulation(2)
    simulation.round(everybody(2, gradient("q")))
    simulation.pass_time(BLOCKED_S)
    say_blocked(simulation, 0)
    simulation.begin(0, [gradient("q")])
    simulation.begin(1, [gradient("q")])
    say_blocked(simulation, 1)
    assert simulation.finish() == [[[("q", "", [], 0, [])]]] * 2


def test_a_rank_that_waits_no_longer_is_not_blocked():
    simulation = Simulation(2)
    say_blocked(simulation, 0)
    simulation.pass_time(BLOCKED_S)
    assert settle(simulation, [[gradient("of 0")], []]) == []
    simulation.say_blocked(0, False)  # a signal, say
    say_blocked(simulation, 1)
    assert settle(simulation, [[], [gradient("of 1")]]) == []
    say_blocked(simulation, 0)
    (message, _) = errors(settle(simulation, everybody(2)))
    assert 'rank 0 for allreduce "of 0"; rank 1 for allreduce "of 1"' in message


def test_a_rank_that_waits_no_longer_in_the_middle_of_a_round_is_not_blocked():
    simulation = Simulation(2)
    simulation.round([[gradient("of 0")], [gradient("of 1")]])
    say_blocked(simulation, 0, 1)
    simulation.pass_time(BLOCKED_S)
    simulation.begin(0, [])
    simulation.say_blocked(0, False)
    simulation.begin(1, [])
    assert simulation.finish() == [[], []]
    assert settle(simulation, [[gradient("of 1")], []]) == [[("of 1", "", [], 0, [])]]
    assert names(settle(simulation, [[], [gradient("of 0")]])) == [["of 0"]]


def test_a_rank_that_waits_during_a_long_plan_waits_for_that_plan():
    size = 3
    simulation = Simulation(size)
    simulation.round(everybody(size, Request(OpKind.ADD_PROCESS_SET, "add", numbers=[0, 1])))
    long = gradient("long", process_set=1)
    cached = gradient("cached")
    simulation.round(everybody(size, cached))
    simulation.round([[long], [long], []])
    say_blocked(simulation, 0, 1)
    for rank in (0, 1):
        simulation.begin(rank, [long, cached])
    simulation.begin(2, [])
    assert names(simulation.finish(plan_s=BLOCKED_S + 0.1)[0]) == [["long"]]
    say_blocked(simulation, 2)
    assert settle(simulation, [[], [], [cached]]) == [[("cached", "", [], 0, [])]]


def test_cached_operations_stay_cached_while_some_wait():
    size = 2
    simulation = Simulation(size)
    fresh = everybody(size, gradient("step"), gradient("of another thread"))
    simulation.round(fresh)
    before = simulation.messages_handled()
    simulation.round([[gradient("of another thread")], []])
    say_blocked(simulation, 0)
    rounds = 1
    for _ in range(2):
        for rank in range(size):
            simulation.begin(rank, [gradient("step")])
        assert names(simulation.finish(plan_s=BLOCKED_S + 0.1)[0]) == [["step"]]
        simulation.round(everybody(size))
        rounds += 2
    assert names(simulation.round([[], [gradient("of another thread")]])[0]) == [["of another thread"]]
    handled = [after - early for after, early in zip(simulation.messages_handled(), before, strict=True)]
    assert handled == [2 * (rounds + 1)] * size  # one each way, and none that gathers


def step_of(simulation, sequence, per_round=1):
    """How many rounds of a step of these names had to gather, all ranks submitting them in this order."""
    gathered = 0
    for first in range(0, len(sequence), per_round):
        names_of_round = sequence[first : first + per_round]
        before = simulation.messages_handled()[0]
        plans = simulation.round(everybody(2, *map(gradient, names_of_round)))[0]
        assert sorted(name for plan in names(plans) for name in plan) == sorted(names_of_round)
        gathered += simulation.messages_handled()[0] - before > 2
    return gathered


def bytes_of_empty_round(simulation):
    before = simulation.bytes_handled()[0]
    assert simulation.round(everybody(2)) == [[], []]
    return simulation.bytes_handled()[0] - before


@pytest.mark.parametrize("per_round", [1, 4, 400])
@pytest.mark.parametrize("operations", [16, 17, 100, 256])
def test_all_that_comes_again_is_cached(operations, per_round):
    simulation = Simulation(2, cache_capacity=16)
    sequence = [f"gradient{i}" for i in range(operations)]
    for _ in range(2):
        step_of(simulation, sequence, per_round)
    assert [step_of(simulation, sequence, per_round) for _ in range(3)] == [0, 0, 0]


def test_more_operations_than_a_cache_can_hold_find_it_full_of_them():
    simulation = Simulation(2, cache_capacity=2)  # 32 at most
    sequence = [f"gradient{i}" for i in range(40)]
    for _ in range(2):
        step_of(simulation, sequence)
    assert [step_of(simulation, sequence) for _ in range(3)] == [8, 8, 8]
    other_model = [f"other {name}" for name in sequence]
    for _ in range(2):
        step_of(simulation, other_model)
    assert [step_of(simulation, other_model) for _ in range(3)] == [8, 8, 8]


def test_names_that_never_come_again_take_no_more_room():
    simulation = Simulation(2, cache_capacity=16)
    gradients = [f"gradient{i}" for i in range(40)]
    for step in range(3):
        step_of(simulation, [*gradients, f"loss {step}"])
    row = bytes_of_empty_round(simulation)
    for step in range(3, 200):
        assert step_of(simulation, [*gradients, f"loss {step}"], per_round=41) == 1  # for the loss
    assert step_of(simulation, gradients) == 0
    assert bytes_of_empty_round(simulation) == row
    names_only = Simulation(2, cache_capacity=64)
    for step in range(2000):
        step_of(names_only, [f"loss {step}"])
    # the number of words, the row of a full cache, and the slot and the size of no value, there and back
    assert bytes_of_empty_round(names_only) == 2 * (8 + (2 + 1) * 8 + 8)


PENDING = {
    "allreduces": gradient,
    "alltoalls": lambda name: Request(OpKind.ALLTOALL, name, shape=[2]),
}


def cost_of_rounds(simulation, of_rank_0, of_rank_1):
    """One round after the other, each with one operation of each rank and one that is new to both."""
    begin = steps()
    for number, (one, other) in enumerate(zip(of_rank_0, of_rank_1, strict=True)):
        simulation.round([[gradient(f"new {number}"), *one], [gradient(f"new {number}"), *other]])
    return steps() - begin


@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize("kind", PENDING)
def test_a_round_costs_the_same_whatever_is_pending(kind, is_cached):
    def cost(pending):
        requests = [PENDING[kind](f"p{i}") for i in range(pending)]
        simulation = Simulation(2, cache_capacity=2 * pending)
        if is_cached:
            settle(simulation, everybody(2, *requests))
        simulation.round([requests, []])
        return cost_of_rounds(simulation, [[]] * 20, [[one] for one in requests[:20]])

    assert cost(2000) < 2 * cost(40)


def test_a_round_of_as_many_kinds_as_operations_costs_as_much_for_each():
    def cost(count):
        simulation = Simulation(2)
        begin = steps()
        simulation.round(everybody(2, *(gradient(f"g{i}", prescale=1.0 + i) for i in range(count))))
        return steps() - begin

    assert cost(2000) < 2.5 * cost(1000)
