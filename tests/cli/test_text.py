"""What was recorded is shown, and does nothing to the terminal or the table."""

from __future__ import annotations

import pytest

from marft_agents.cli._text import printable, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07\x9b31m\r", "\\x1b[2J\\x07\\x9b31m\\r"),
        ("txt\u202eexe", "txt\\u202eexe"),
        ("half \ud83d", "half \\ud83d"),
        ("日本語 é 👩‍💻\n\tnext", "日本語 é 👩‍💻\n\tnext"),
    ],
)
def test_only_what_moves_or_hides_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown == printable(shown)


def test_a_name_of_several_lines_is_one_cell() -> None:
    lines = table(("agent", "turns"), [("a\nskipped lines  0", "1"), ("b\x1b", "2")])
    assert [" ".join(line.split()) for line in lines] == [
        "agent turns",
        "a\\nskipped lines 0 1",
        "b\\x1b 2",
    ]
    assert lines[1].index("1") == lines[2].index("2"), "the widths are those of what is shown"
