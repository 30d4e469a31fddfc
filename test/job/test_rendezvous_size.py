"""How the cost of a rendezvous grows with the number of ranks: messages and bytes of the process that serves."""

import pytest
from measure.scale_rendezvous import measure

FEW, MANY = 64, 512
# Of each rank in the answer to another one, compressed: its pid, its port, the mark of its GPU, and what repeats.
MOST_SENT_FOR_EACH_PAIR = 40


@pytest.fixture(scope="module")
def rows():
    return [measure(ranks) for ranks in (FEW, MANY)]


def test_a_rank_needs_as_many_messages_among_many_as_among_few(rows):
    for few, many in zip(*rows, strict=True):
        if few.what != "its beats, each second":  # some of which came before
            assert many.messages / MANY <= 1.2 * few.messages / FEW, (few, many)


def test_an_answer_has_few_bytes_of_each_rank(rows):
    for row in rows[1]:
        assert row.sent_bytes <= MOST_SENT_FOR_EACH_PAIR * MANY**2, row


def test_a_message_to_all_is_encoded_once(rows):
    """Where each is told its own place, that is a message of its own."""
    own = {"elastic generation": 1, "a death": 1, "meeting of": 1, "their init()": 2}
    for few, many in zip(*rows, strict=True):
        messages_of_each = next((number for begin, number in own.items() if few.what.startswith(begin)), 0)
        grown = many.encoded - few.encoded
        assert grown <= messages_of_each * (MANY - FEW) + 40, (few, many)
