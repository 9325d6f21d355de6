import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenv.plotting.characters import Character, characters, escape

SAMPLE = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=30).map(lambda s: s.encode("utf-8")),
    st.lists(st.sampled_from(["é", "😀", "a", "\n"]), max_size=9).map(
        lambda s: "".join(s).encode()[1:-1]
    ),
)


def plain(data: bytes) -> list[Character]:
    return characters(data, [0.5] * len(data), [False] * len(data))


@given(SAMPLE)
def test_byte_ranges_follow_one_another_and_cover_the_data(data):
    chars = plain(data)
    assert [c.start for c in chars] == [0, *(c.end for c in chars)][: len(chars)]
    assert b"".join(data[c.start : c.end] for c in chars) == data


@given(SAMPLE)
def test_characters_are_those_of_pythons_own_decoder(data):
    # surrogateescape keeps every byte it cannot decode, one by one, as one lone surrogate.
    decoded = data.decode("utf-8", errors="surrogateescape")
    expected = [
        f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else escape(c) for c in decoded
    ]
    assert [c.text for c in plain(data)] == expected


@given(st.data(), SAMPLE)
def test_last_byte_gives_the_probability_and_any_byte_the_boundary(draw, data):
    n = len(data)
    probability = draw.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    boundary = draw.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    for c in characters(data, probability, boundary):
        assert c.probability == probability[c.end - 1]
        assert c.boundary == any(boundary[c.start : c.end])


def test_a_character_has_the_probability_of_its_last_byte_and_any_boundary_in_it():
    data = "ü€😀".encode()
    boundary = [True, False, False, False, False, False, False, True, False]
    assert characters(data, [i / 10 for i in range(1, 10)], boundary) == [
        Character("ü", 0.2, True, 0, 2),
        Character("€", 0.5, False, 2, 5),
        Character("😀", 0.9, True, 5, 9),
    ]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"", []),
        (b"a\xe2\x82", ["a", "\\xe2", "\\x82"]),  # cut off
        (b"\xe2\x82a", ["\\xe2", "\\x82", "a"]),
        (b"\xc0\xaf", ["\\xc0", "\\xaf"]),  # overlong
        (b"\xed\xa0\x80", ["\\xed", "\\xa0", "\\x80"]),  # surrogate
        (b"\xf4\x90\x80\x80", ["\\xf4", "\\x90", "\\x80", "\\x80"]),  # beyond U+10FFFF
        (b"\n\t\x0b\x00\x1b\x7f\r", ["\n", "\t", "\\x0b", "\\x00", "\\x1b", "\\x7f", "\\x0d"]),
        ("\x9b\u202e\u2028\U000e0001".encode(), ["\\u009b", "\\u202e", "\\u2028", "\\U000e0001"]),
    ],
)
def test_what_has_no_visible_form_is_escaped(data, texts):
    assert [c.text for c in plain(data)] == texts


@given(st.text(st.characters(exclude_categories=())))
def test_escaped_text_cannot_control_a_terminal(text):
    shown = escape(text)
    assert escape(shown) == shown
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    shown.encode("utf-8")


@pytest.mark.parametrize(("pi", "drawn"), [([0.5], [True, False]), ([0.5, 0.5], [True]), ([], [])])
def test_lengths_must_agree(pi, drawn):
    with pytest.raises(
        ValueError, match=f"2 bytes, {len(pi)} probabilities and {len(drawn)} decisions"
    ):
        characters(b"ab", pi, drawn)


@pytest.mark.parametrize("bad", [-0.01, 1.01, math.nan, math.inf])
def test_probabilities_must_be_probabilities_in_every_byte(bad):
    with pytest.raises(ValueError, match=r"at byte 0 is .*not in"):
        characters("ü".encode(), [bad, 0.5], [False, False])
