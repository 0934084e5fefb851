"""What is seen where a progress bar, its rank's lines, another rank's and the runner's come one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.ui.shared_lines import SharedLines


def screen(data: bytes) -> list[str]:
    """Return the lines of a terminal to which this was written."""
    lines, column = [""], 0
    text = data.decode()
    while text:
        if text.startswith("\x1b[K"):
            lines[-1], text = lines[-1][:column], text[3:]
            continue
        letter, text = text[0], text[1:]
        if letter == "\n":
            lines, column = [*lines, ""], 0
        elif letter == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + letter + lines[-1][column + 1 :]
            column += 1
    return lines


class Shared:
    def __init__(self, *, is_terminal: bool) -> None:
        self.written = b""
        self.lines = SharedLines(self.write, is_terminal=is_terminal)

    def write(self, data: bytes) -> None:
        self.written += data


def test_a_bar_on_a_terminal_stays_below_what_others_say() -> None:
    shared = Shared(is_terminal=True)
    shared.lines.put("rank 0", b"\r 10%|# |")
    shared.lines.put("runner", b"committed 5\n")
    shared.lines.put("rank 1", b"a line\n")
    assert screen(shared.written) == ["committed 5", "a line", " 10%|# |"]
    shared.lines.put("rank 0", b"\r 20%|## |")
    assert screen(shared.written)[-1] == " 20%|## |"
    shared.lines.put("rank 0", b"\n")
    shared.lines.put("runner", b"finished\n")
    assert screen(shared.written)[-3:] == [" 20%|## |", "finished", ""]


def test_in_a_file_a_line_of_another_source_begins_a_line() -> None:
    shared = Shared(is_terminal=False)
    shared.lines.put("rank 0", b"\r 10%|# |")
    shared.lines.put("runner", b"committed 5\n")
    shared.lines.put("rank 0", b"\r 20%|##|\n")
    shared.lines.put("runner", b"finished\n")
    assert shared.written == b"\r 10%|# |\ncommitted 5\n\r 20%|##|\nfinished\n"


def test_two_unfinished_lines_are_two_lines() -> None:
    shared = Shared(is_terminal=True)
    shared.lines.put("rank 0", b"a bar")
    shared.lines.put("rank 1", b"another")
    shared.lines.put("runner", b"text\n")
    assert screen(shared.written) == ["a bar", "text", "another"]


def test_what_is_too_long_is_not_drawn_again() -> None:
    shared = Shared(is_terminal=True)
    shared.lines.put("rank 0", b"x" * 5000)
    shared.lines.put("runner", b"text\n")
    assert shared.written == b"x" * 5000 + b"\ntext\n"


def test_a_bar_that_ends_with_a_carriage_return_is_drawn_over() -> None:
    shared = Shared(is_terminal=True)
    for bar in (b" 10%\r", b" 20%\r"):
        shared.lines.put("rank 0", bar)
    shared.lines.put("runner", b"text\n")
    assert shared.written.endswith(b"text\n 20%\r")
    shared.lines.put("rank 0", b" 30%\r")
    assert screen(shared.written) == ["text", " 30%"]


@pytest.mark.parametrize("piece", [b"." * 1000, b"\r" * 1000], ids=["text", "returns"])
def test_output_without_line_ends_is_passed_on_and_not_kept(piece: bytes) -> None:
    """All of it was kept, and copied again with each piece, while all other output waited."""
    shared = Shared(is_terminal=True)
    for _ in range(100):
        shared.lines.put("rank 0", piece)
    assert shared.written == piece * 100 and len(shared.lines._unfinished) <= 4096
    shared.lines.put("runner", b"text\n")
    assert shared.written.endswith((b".\ntext\n", b"text\n" + shared.lines._unfinished))


def test_a_bar_after_much_output_without_line_ends_is_drawn_again() -> None:
    shared = Shared(is_terminal=True)
    shared.lines.put("rank 0", b"x" * 9000)
    shared.lines.put("rank 0", b"\r 10%")
    shared.lines.put("runner", b"text\n")
    assert shared.written.endswith(b"text\n 10%")


@pytest.mark.parametrize("is_terminal", [True, False])
@given(
    st.lists(
        st.tuples(st.sampled_from(["one", "two"]), st.sampled_from([b"a\n", b"b", b"\rc", b"d\ne", b"e\r", b"\n"]))
    )
)
def test_one_sources_bytes_stay_and_no_line_has_two_sources(is_terminal: bool, said: list[tuple[str, bytes]]) -> None:
    alone, shared = Shared(is_terminal=is_terminal), Shared(is_terminal=is_terminal)
    for source, data in said:
        alone.lines.put("one", data)
        # Letters tell who wrote them.
        shared.lines.put(source, data.upper() if source == "two" else data)
    assert alone.written == b"".join(data for _, data in said)
    for line in screen(shared.written):
        assert not (line.isupper() and line.islower()) and line in (line.upper(), line.lower())
