"""What C++ headers declare, and how it changed between two sets of them.

Not a compiler: a scanner that knows comments, strings, preprocessor lines and braces, which is
enough for headers in the style of ``csrc``. A declaration is a function, a type with its fields,
or a constant at namespace level; two declarations are equal when they differ in nothing but white
space and comments. The bodies of functions are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

_LITERAL = r"""("(?:\\.|[^"\\])*"|(?<!\w)'(?:\\.|[^'\\])*')"""  # in 1'000 the ' begins none
_NOISE = re.compile(
    rf"""
      //[^\n]* | /\*.*?\*/            # comments
    | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*  # preprocessor lines, continued ones too
    | {_LITERAL}                      # kept, and so is what looks like a comment in it
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(rf"{_LITERAL}|[{{}}();]")
_TRANSPARENT = re.compile(r"^(?:inline\s+)?namespace\b|^extern\s+\"C\"$")
_TYPE = re.compile(r"^(?:template\s*<[^{]*>\s*)?(?:struct|class|union|enum(?:\s+class)?)\s+(\w+)")
_FUNCTION = re.compile(r"^[^=(]*?(\w+|operator\s*[^\s\w(]+)\s*\(")
_CONSTANT = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=|$)")
_ATTRIBUTE = re.compile(r"\b(?:alignas|__\w+__)\s*\((?:[^()]|\([^()]*\))*\)")
_NOT_AN_INTERFACE = re.compile(r"^(?:static_assert|using|typedef|friend)\b")


class ChangeKind(Enum):
    """What became of a declaration."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Change:
    """One name whose declarations differ. ``before`` and ``after`` hold one text per overload."""

    kind: ChangeKind
    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def interface(headers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Declarations of these headers (path -> text) by name, overloads sorted."""
    found: dict[str, set[str]] = {}
    for text in headers.values():
        for name, declaration in _declarations(text):
            found.setdefault(name, set()).add(declaration)
    return {name: tuple(sorted(declarations)) for name, declarations in sorted(found.items())}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """What the headers ``after`` declare otherwise than the headers ``before``, by name."""
    old, new = interface(before), interface(after)
    result = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name, ()), new.get(name, ())
        if was == now:
            continue
        kind = ChangeKind.CHANGED
        if not was:
            kind = ChangeKind.ADDED
        elif not now:
            kind = ChangeKind.REMOVED
        result.append(Change(kind, name, was, now))
    return result


def _declarations(text: str) -> Iterator[tuple[str, str]]:
    text = _NOISE.sub(lambda match: match.group(1) or " ", text)
    for statement in _statements(text):
        if not statement or _NOT_AN_INTERFACE.search(statement):
            continue
        bare = " ".join(_ATTRIBUTE.sub("", statement).split())
        for pattern in (_TYPE, _FUNCTION, _CONSTANT):
            match = pattern.search(bare)
            if match is not None:
                yield match.group(1), statement
                break


def _statements(text: str) -> Iterator[str]:
    """Statements at namespace level, on one line each. A function's body is dropped, the braces of
    types and initialisers are kept."""
    start = braces = parentheses = body_from = 0
    for mark in _MARK.finditer(text):
        character, position = mark.group(), mark.start()
        if character in "()":
            parentheses += 1 if character == "(" else -1
        elif parentheses or mark.group(1):
            continue
        elif character == "{":
            if braces == 0:
                if _TRANSPARENT.search(_one_line(text[start:position])):
                    start = position + 1
                    continue
                body_from = position
            braces += 1
        elif character == "}" and braces == 0:  # closes a namespace
            start = position + 1
        elif character == "}":
            braces -= 1
            head = _one_line(text[start:body_from])
            if braces == 0 and _has_body(head):
                yield head
                start = position + 1
        elif braces == 0:
            yield _one_line(text[start:position])
            start = position + 1


def _has_body(head: str) -> bool:
    """Whether what follows this text in braces is a function's body."""
    bare = _ATTRIBUTE.sub("", head)
    return _TYPE.search(bare) is None and _FUNCTION.search(bare) is not None


def _one_line(text: str) -> str:
    return " ".join(text.split())
