import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.colors import to_hex
from rich.console import Console

from tokenv.plotting.characters import Character, characters
from tokenv.plotting.console import coloured_text, console, summary_table
from tokenv.plotting.theme import PALETTE, ink, level


def show(data: bytes, boundary: bool = False) -> str:
    out = io.StringIO()
    chars = characters(data, [0.5] * len(data), [boundary] * len(data))
    Console(file=out, width=10_000, color_system=None).print(coloured_text(chars), end="")
    return out.getvalue()


def test_palette_is_cividis():
    steps = len(PALETTE) - 1
    assert [to_hex(colormaps["cividis"](i / steps)) for i in range(steps + 1)] == list(PALETTE)


def test_ink_is_the_more_readable_of_black_and_white():
    assert [ink(c) for c in ("#000000", PALETTE[0], PALETTE[-1], "#ffffff")] == [
        "#ffffff",
        "#ffffff",
        "#000000",
        "#000000",
    ]


def test_level_spans_the_scale_and_clips_beyond_it():
    assert [level(p, (0.0, 1.0)) for p in (0.0, 0.5, 1.0)] == [0, 16, 32]
    assert [level(p, (0.1, 0.3)) for p in (0.0, 0.1, 0.2, 0.3, 0.9)] == [0, 0, 16, 32, 32]


@pytest.mark.parametrize(
    "scale", [(0.5, 0.5), (0.6, 0.4), (-0.1, 1.0), (0.0, 1.1), (0.0, float("nan"))]
)
def test_scale_must_be_an_increasing_pair(scale):
    with pytest.raises(ValueError, match="increasing pair"):
        level(0.5, scale)


@given(st.binary(max_size=60))
def test_no_control_character_reaches_the_terminal(data):
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in show(data))


def test_escape_sequences_and_markup_are_shown_literally():
    assert show(b"[bold]x[/] :smile: \x1b[31m") == "[bold]x[/] :smile: \\x1b[31m"
    assert "\x1b" not in coloured_text([Character("\x1b[2J", 0.5, False, 0, 1)]).plain


def test_boundaries_show_without_colour_and_newlines_break_after_theirs():
    assert show(b"ab", boundary=True) == "a│b│"
    assert show(b"a\nb", boundary=True) == "a│↵│\nb│"


def test_background_goes_from_blue_to_yellow():
    spans = coloured_text(characters(b"ab", [0.0, 1.0], [False, False])).spans
    assert [span.style.bgcolor.name for span in spans] == [PALETTE[0], PALETTE[-1]]
    assert [span.style.color.name for span in spans] == ["#ffffff", "#000000"]


def test_summary_table_shows_names_and_values_literally():
    out = io.StringIO()
    console(out).print(
        summary_table({"[red]run": "a\x1b[0m", "bits per byte": "1.23"}, "[b]Result")
    )
    text = out.getvalue()
    assert "[b]Result" in text
    assert "[red]run" in text
    assert "a\\x1b[0m" in text
    assert "1.23" in text
    assert "\x1b" not in text


def test_console_prints_strings_literally():
    out = io.StringIO()
    console(out).print("[bold]runs[/bold] :smile: 3.14")
    assert out.getvalue() == "[bold]runs[/bold] :smile: 3.14\n"
