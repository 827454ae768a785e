"""Plain values are what Typer makes of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from conftest import PACKAGE_ROOT

from kvcli.cli import plainvalues
from kvcli.cli.app import walk
from kvcli.cli.main import _tree

VALUES = (None, "", "hi", "5", "-3", "007", " 5", "5 ", "+5", "1_000", "1.5", "-0.25", "1e3", ".5", "nan", "9" * 19)
VALUES += (0, 7, 2.5, True, False, [], ["a"], ("a", "b"), (), ["a", 1])


def test_plain_values_are_what_typer_makes_of_them() -> None:
    seen, plainly = set(), 0
    for _, command in walk(_tree()):
        context = command.context_class(command, info_name="kv")
        for param in command.params:
            if not hasattr(param, "type_descriptor"):
                pytest.skip("this Typer converts values itself")
            kind = str(param.type_descriptor.annotation), param.multiple, param.nargs, param.required
            if kind in seen:
                continue
            seen.add(kind)
            for value in VALUES:
                plain = plainvalues._plain(param, value)
                if plain is NotImplemented:
                    continue
                plainly += 1
                theirs: Any = param.get_runtime_param().coerce(value, param=param, ctx=context)
                assert (type(plain), plain) == (type(theirs), theirs), (kind, value)
    assert len(seen) >= 5 and plainly > 20


def test_a_command_line_needs_no_pydantic() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "sys.argv = ['kv', 'run', '-m', 'no-such-file.gguf', '-n', '1', '--temp', '0.5', '-f', 'no-such-file', 'hi']\n"
        "from kvcli.cli.main import run_command\n"
        "print(run_command(sys.argv[1:]), 'pydantic' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.split()[-1] == "False" and result.stdout.split()[0] != "0", result
