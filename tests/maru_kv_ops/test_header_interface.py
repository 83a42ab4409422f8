"""What a refresh says about entry points: read from headers without a compiler."""

from __future__ import annotations

import pytest

from maru_kv_ops.header_interface import ChangeKind, changes, interface

HEADER = r"""
#pragma once
#define NOT_A_FUNCTION(x) \
    int hidden(int x);
/* int commented_out(); */
namespace maru { namespace detail {
extern "C" {
__global__ void __launch_bounds__(128, (2)) kernel(const __grid_constant__ Copy copy);
}
inline int64_t million() { return 1'000'000; }  // int also_commented_out();
template <class T>
T pick(T value = {1, 2}, char end = ';') { if (value) { return '}'; } return value; }
constexpr int64_t kWide = wide(3);
inline constexpr const char* kText = "a;{ // no comment";
inline constexpr Row kRows[2] = {{1, "one"}, {2, "two"}};
bool operator==(Copy a, Copy b);
struct alignas(16) Copy {
    int64_t rows = 0;  // how many
    int64_t end() const { return rows; }
};
enum class Direction : int { H2D = 0 };
struct Later;
using Short = Copy;
static_assert(sizeof(Copy) == 16);
}}
"""


def test_every_declaration_is_found_under_its_name() -> None:
    found = interface({"header.h": HEADER})
    assert found == {
        "Copy": (
            "struct alignas(16) Copy { int64_t rows = 0; int64_t end() const { return rows; } }",
        ),
        "Direction": ("enum class Direction : int { H2D = 0 }",),
        "Later": ("struct Later",),
        "kRows": ('inline constexpr Row kRows[2] = {{1, "one"}, {2, "two"}}',),
        "kText": ('inline constexpr const char* kText = "a;{ // no comment"',),
        "kWide": ("constexpr int64_t kWide = wide(3)",),
        "kernel": (
            "__global__ void __launch_bounds__(128, (2)) kernel(const __grid_constant__ Copy copy)",
        ),
        "million": ("inline int64_t million()",),
        "operator==": ("bool operator==(Copy a, Copy b)",),
        "pick": ("template <class T> T pick(T value = {1, 2}, char end = ';')",),
    }


def test_comments_white_space_and_bodies_change_nothing() -> None:
    before = {"a.h": "int move(int a, int b) { return a; }"}
    after = {"b.h": "int move(int a,  // source\n  int b)\n{ return b + 1; }"}
    assert changes(before, after) == []


@pytest.mark.parametrize(
    ("before", "after", "kind", "name"),
    [
        ("", "int move(int a);", ChangeKind.ADDED, "move"),
        ("int move(int a);", "", ChangeKind.REMOVED, "move"),
        ("int move(int a);", "int move(int64_t a);", ChangeKind.CHANGED, "move"),
        ("int move(int a);", "int move(int a); int move(long a);", ChangeKind.CHANGED, "move"),
        ("struct S { int a; };", "struct S { int a; int b; };", ChangeKind.CHANGED, "S"),
        ("enum E { kA = 0 };", "enum E { kA = 1 };", ChangeKind.CHANGED, "E"),
        ("constexpr int kMax = 4;", "constexpr int kMax = 8;", ChangeKind.CHANGED, "kMax"),
    ],
)
def test_a_change_of_a_declaration_is_seen(
    before: str, after: str, kind: ChangeKind, name: str
) -> None:
    (change,) = changes({"x.h": f"namespace m {{ {before} }}"}, {"x.h": after})
    assert (change.kind, change.name) == (kind, name)
    assert (change.before == (), change.after == ()) == (
        kind is ChangeKind.ADDED,
        kind is ChangeKind.REMOVED,
    )
