"""Sentences that readers have to read twice: patterns that no message, page, comment or docstring may have.

Each pattern comes with the reason and the better wording. Only text is read: comments, strings and docstrings of
sources, and pages without their code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


class Pattern(NamedTuple):
    """`wrong` matches the worst words; `better` says what to write instead."""

    wrong: re.Pattern[str]
    better: str


def _sentence(beginning: str) -> re.Pattern[str]:
    """A statement, not a question, that begins so."""
    return re.compile(rf"(?:^|(?<=[.:;|] )|(?<=[.:;|] \*\*))(?:{beginning})\b(?![^.:;?]*\?)")


def _word(words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{words})\b", re.IGNORECASE)


PATTERNS = (
    Pattern(_sentence("What"), 'a clause is the subject: name the thing ("Files of ...", "Returns ...")'),
    Pattern(_sentence("Who"), 'a clause is the subject: name it ("A rank that ...", "Threads that ...")'),
    Pattern(_word("whoever|whomever"), 'name it: "any rank that", "the thread that", "the caller"'),
    Pattern(_word("that which"), 'name it: "the value that"'),
    Pattern(_word("(?:for|by|to|of|with) whom?"), 'name it: "for the rank that", "by the caller"'),
    Pattern(
        _sentence("(?:Let|Have) (?:the|a|an|all|each|this|these|another|what)"),
        'begin with the verb: "Makes", "Registers"',
    ),
    Pattern(
        re.compile(r"\b(?:lie|lies) (?:in|on|at|beside|behind|there|within)\b|\bwhere (?:\w+ )+lies?\b"),
        'memory and files do not lie: "is in", "are on", "is aligned to"',
    ),
    Pattern(
        re.compile(r"\b(?:NCCL|XLA|MPI|ringtrain|key|server|chunk|node|dtype|side|algorithm) wants\b"),
        'things do not want: "needs", "requires", "asks for"',
    ),
    Pattern(_word("in vain"), 'say what failed: "the wait failed", "for nothing"'),
    Pattern(_word("knows? no"), 'a negation without a verb: "does not know", "uses no"'),
    Pattern(_word("roster|tether|courier|chronicle|roll call"), "a private metaphor: membership, client, sender, log"),
    Pattern(_word("on (?:the )?doubles"), '"against a fake driver"'),
    Pattern(re.compile(r"\d[eE]\+\d"), "a figure that nobody reads: 1048576, or 1 MiB"),
)


class Text(NamedTuple):
    """Words that belong together, such as a comment of several lines. `lines` are the numbers of its words."""

    words: str
    lines: list[int]

    def line_at(self, place: int) -> int:
        return self.lines[self.words.count(" ", 0, place)]


TEST_OF_CLAUSE = re.compile(r"def (test_(?:what|who|whoever|whatever)_\w*)")


def check(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields line and message of each sentence of a file that has to be read twice."""
    if file.endswith(".py"):
        for number, line in _numbered(text):
            if match := TEST_OF_CLAUSE.search(line):
                yield number, f"{match[1]}: name a test by a statement, such as test_a_killed_rank_fails_every_handle"
    for one in _texts(file, text):
        for wrong, better in PATTERNS:
            for match in wrong.finditer(one.words):
                around = one.words[match.start() : match.start() + 40]
                yield one.line_at(match.start()), f'"{around}": {better}'


def _texts(file: str, text: str) -> Iterator[Text]:
    if file.endswith(".md"):
        yield from _of_page(text)
    elif file.endswith((".py", ".pyi")):
        yield from _of_python(text)
    elif file.endswith((".h", ".cc")):
        yield from _of_cpp(text)
    else:
        yield from _blocks((number, line.partition("#")[2]) for number, line in _numbered(text))


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text.splitlines(), start=1)


def _text(lines: list[tuple[int, str]]) -> Text:
    words = [(word, number) for number, line in lines for word in line.split()]
    return Text(" ".join(word for word, _ in words), [number for _, number in words])


def _blocks(lines: Iterator[tuple[int, str]]) -> Iterator[Text]:
    """Lines that follow each other; an empty one, or one that is none of the file's next, ends a block."""
    block: list[tuple[int, str]] = []
    for number, line in lines:
        if block and (not line.strip() or number != block[-1][0] + 1):
            yield _text(block)
            block = []
        if line.strip():
            block.append((number, line))
    if block:
        yield _text(block)


def _of_page(text: str) -> Iterator[Text]:
    """Paragraphs, items of lists and rows of tables, without code."""
    is_code = False
    lines: list[tuple[int, str]] = []
    for number, line in _numbered(text):
        if line.startswith("```"):
            is_code = not is_code
            continue
        plain = "" if is_code else re.sub(r"`[^`]*`", "`", line)
        if plain.startswith("#"):
            plain = ""  # a title may be a clause
        if re.match(r"\s*(?:[-*|]|\d+\.) ?", plain):
            yield from _blocks(iter(lines))
            lines = []
            plain = re.sub(r"^\s*(?:[-*]+|\d+\.) +", "", plain)
        lines.append((number, plain))
    yield from _blocks(iter(lines))


def _of_python(text: str) -> Iterator[Text]:
    """Comments, and strings with what they are made of: f-strings without their values."""
    comments = ((number, comment) for number, line in _numbered(text) if (comment := _comment_of(line)))
    yield from _blocks(comments)
    tree = ast.parse(text)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            words = node.value
        else:
            continue
        yield from _blocks((number + node.lineno - 1, line) for number, line in _numbered(words))


def _comment_of(line: str) -> str:
    """Returns the comment of a line of Python, which is the whole line or behind two spaces."""
    return line.strip().lstrip("# ") if line.lstrip().startswith("#") else line.partition("  # ")[2]


def _of_cpp(text: str) -> Iterator[Text]:
    comments = []
    for number, line in _numbered(text):
        code, slashes, comment = line.partition("//")
        if slashes and code.count('"') % 2 == 0:
            comments.append((number, comment))
        for words in re.findall(r'"((?:[^"\\]|\\.)+)"', code):
            yield _text([(number, words)])
    yield from _blocks(iter(comments))
