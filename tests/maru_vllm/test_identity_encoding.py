from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_vllm.encoding import UnencodableError, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value: object) -> object:
    """Like the value, but unequal wherever the type is (1, True and 1.0 are equal in Python)."""
    match value:
        case tuple():
            return ("tuple", *map(typed, value))
        case dict():
            return ("dict", frozenset((key, typed(entry)) for key, entry in value.items()))
        case float():
            return ("float", struct.pack("<d", value))
    return (type(value).__name__, value)


@given(values, values)
def test_values_have_equal_encodings_exactly_when_they_and_their_types_are_equal(
    one: object, other: object
) -> None:
    assert (encode(one) == encode(other)) == (typed(one) == typed(other))


@given(values, values)
def test_no_encoding_is_the_beginning_of_another(one: object, other: object) -> None:
    if encode(one) != encode(other):
        assert not encode(one).startswith(encode(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, None),
        (1, 1.0),
        ("a", b"a"),
        (("a", "b"), ("ab",)),
        ((("a",), "b"), (("a", "b"),)),
        ("", ()),
        (-1, 255),
        (128, -128),
        ({"a": 1}, (("a", 1),)),
    ],
)
def test_values_that_are_easily_taken_for_each_other_differ(one: object, other: object) -> None:
    assert encode(one) != encode(other)


def test_the_order_of_a_mapping_does_not_count() -> None:
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})


def test_a_text_with_a_lone_surrogate_has_an_encoding_of_its_own() -> None:
    assert len({encode("\ud800"), encode("\udfff"), encode("?"), encode("\ufffd")}) == 4


@pytest.mark.parametrize("value", [object(), {1}, ("a", [object()]), {"a": {1: 2}}, 1j])
def test_a_value_of_unknown_type_is_refused_wherever_it_stands(value: object) -> None:
    with pytest.raises(UnencodableError):
        encode(value)
