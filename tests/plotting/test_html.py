import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page

from tokenv.plotting.characters import Character, characters
from tokenv.plotting.html import coloured, segment_page


def page(data: bytes, boundary: bool = False, **options) -> str:
    chars = characters(data, [0.43] * len(data), [boundary] * len(data))
    return segment_page({"p": chars}, title="t", facts={}, **options)


@given(st.one_of(st.binary(max_size=40), st.text("<>&\"'\n a/{}%", max_size=40).map(str.encode)))
def test_visible_characters_are_the_text(data):
    chars = characters(data, [0.5] * len(data), [True] * len(data))
    parsed = Page(page(data))
    assert parsed.texts == ["".join(c.text for c in chars)]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab\n"), st.sampled_from([0.0, 0.001, 0.5]), st.booleans()),
        max_size=30,
    )
)
def test_stretches_of_one_colour_are_one_span_each(drawn):
    chars = [Character(text, p, boundary, i, i + 1) for i, (text, p, boundary) in enumerate(drawn)]
    spans = coloured(chars, (0.0, 1.0))
    assert "".join(text for _, _, text in spans) == "".join(c.text for c in chars)
    alone = [text == "\n" or "b" in classes.split() for classes, _, text in spans]
    assert all(len(text) == 1 for lone, (_, _, text) in zip(alone, spans, strict=True) if lone)
    assert sum("boundary" in tip for _, tip, _ in spans) == sum(c.boundary for c in chars)
    for i in range(1, len(spans)):
        assert alone[i] or alone[i - 1] or spans[i][0] != spans[i - 1][0]


@pytest.mark.parametrize(
    "markup", ["<script>alert(1)</script>", "\"'><b>", "a & b &lt;", "{{ 7*7 }}</style>"]
)
def test_everything_is_escaped(markup):
    chars = characters(markup.encode(), [0.5] * len(markup), [False] * len(markup))
    parsed = Page(segment_page({markup: chars}, title=markup, facts={markup: markup}))
    assert parsed.texts == [markup]
    assert parsed.cells == [markup, markup]
    assert parsed.headings == [markup, markup, markup]
    assert not parsed.tags & {"script", "b"}


def test_page_loads_nothing():
    source = page(b"abc")
    assert not any(
        word in source for word in ("http://", "https://", "url(", "@import", "src=", "<script")
    )
    assert 'name="viewport"' in source
    assert "prefers-color-scheme: dark" in source
    source.encode("utf-8")


def test_spans_carry_level_boundary_and_tip():
    chars = characters(
        "a€\n".encode(), [0.0, 0.1, 0.2, 0.43, 1.0], [False, False, True, False, True]
    )
    spans = Page(segment_page({"p": chars}, title="t", facts={})).spans
    tips = ["π = 0.43 · bytes 1–3 · boundary", "π = 1.0000 · byte 4 · boundary"]
    assert spans == [
        {"class": "p0", "title": "π = 0.0000 · byte 0"},
        {"class": "p14 b", "title": tips[0], "tabindex": "0"},
        {"class": "p32 b n", "title": tips[1], "tabindex": "0"},
    ]


def test_newline_breaks_after_its_span():
    assert '</span>\n<span class="p14" title="π = 0.43 · byte 2">b</span></div>' in page(b"a\nb")


def test_scripts_run_in_their_own_direction_and_lines_come_after_their_characters():
    source = page("אב".encode())
    assert "unicode-bidi: plaintext" in source
    assert "bidi-override" not in source
    boundary = segment_page({"p": [Character("א", 0.5, True, 0, 2)]}, title="t", facts={})
    assert 'tabindex="0">א<i></i></span>' in boundary


def test_legend_shows_the_true_range():
    assert "<span>0</span><span>0.25</span><span>0.5</span><span>0.75</span><span>1</span>" in page(
        b"a"
    )
    stretched = page(b"a", scale=(0.1, 0.5))
    assert "<span>≤ 0.1</span><span>0.2</span>" in stretched
    assert "<span>≥ 0.5</span>" in stretched
    assert 'class="p26"' in stretched


def test_invalid_scale_is_rejected_without_text():
    with pytest.raises(ValueError, match="increasing pair"):
        segment_page({}, title="t", facts={}, scale=(0.4, 0.2))


def test_tables_follow_the_text_and_are_escaped():
    markup = "<b>&"
    parsed = Page(
        segment_page({"p": []}, title="t", facts={}, tables={markup: [["a", "b"], [markup, "1"]]})
    )
    assert parsed.headings[-1] == markup
    assert parsed.cells == ["a", "b", markup, "1"]
    assert "b" not in parsed.tags
