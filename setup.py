"""Native extensions. Everything else about the project stands in pyproject.toml.

An extension that cannot be built is left out and the install goes on: the package says at run
time what is missing where it matters, and why it was not built stands in the build output
(``pip install -v`` shows it). One line for each extension says how it went.

    MARU_CXL_FLUSH   unset: build it if that works; 1: fail if it does not; 0: do not build it
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CXL_FLUSH_WISH = os.environ.get("MARU_CXL_FLUSH", "")


class BuildWhatWorks(build_ext):
    """``build_ext`` that says in one line what became of each extension."""

    def build_extension(self, ext: Extension) -> None:
        """Build, and report either way."""
        try:
            super().build_extension(ext)
        except Exception as error:
            print(
                f"maru build: {ext.name} OFF: {error}. A C compiler and the headers of Python "
                f"would be needed",
                file=sys.stderr,
            )
            raise  # setuptools goes on without an extension that is optional.
        print(f"maru build: {ext.name} ON", file=sys.stderr)


def extensions() -> list[Extension]:
    """What this build tries."""
    if CXL_FLUSH_WISH == "0":
        print("maru build: maru_shm._cxl_flush OFF: MARU_CXL_FLUSH=0", file=sys.stderr)
        return []
    return [
        Extension(
            "maru_shm._cxl_flush",
            sources=["maru_shm/_cxl_flush.c"],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=CXL_FLUSH_WISH != "1",
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildWhatWorks})
