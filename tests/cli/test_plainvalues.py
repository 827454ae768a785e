"""Plain values are what Typer makes of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from conftest import PACKAGE_ROOT

from kvcli.cli import main, plainvalues
from kvcli.cli.app import walk
from kvcli.cli.invocation import Invocation
from kvcli.cli.main import _tree
from kvcli.cli.settings import Settings

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


WORDS: list[list[str]] = [
    [],
    ["-n", "3", "--temp", "0.5", "hi"],
    ["-f", "a", "-f", "b", "-qv", "--no-stats", "--spec", "off"],
    ["--color=never", "-c", "4k", "-ct", "int8"],
]


def test_what_nobody_gave_is_found_once_and_is_the_same() -> None:
    """Whatever was given, or set, to another call in between."""
    main.prepare(["run"])
    ready, lasting = main.prepared.pop("run"), 0
    for words in (*WORDS, *WORDS[::-1]):
        for environment in ({}, {"KV_TEMP": "0.25", "KV_NO_THINK_BUDGET": "1", "KV_FILE": "x"}):
            assert read(ready, words, environment) == read(main.command_of("run"), words, environment), words
    for param in ready.commands["run"].params:
        lasting += param.handle_parse_result._known is not None
    assert lasting > 0.9 * len(ready.commands["run"].params)


def read(command: Any, words: list[str], environment: dict[str, str]) -> tuple[Any, ...]:
    """Every value that a line of words for `kv run` comes to, what each is from, and what is noted of the call."""
    invocation = Invocation(settings=Settings(main.COMMANDS, set, environment))
    with command.make_context("kv", ["run", *words], obj=invocation) as context:
        below = command.commands["run"].make_context("run", list(words), context)
    sources = {name: str(below.get_parameter_source(name)) for name in below.params}
    noted = invocation.verbose, invocation.quiet, invocation.color, invocation.json, invocation.called
    return below.params, sources, below.args, noted, invocation.told


def test_help_of_a_command_that_was_read_is_whole() -> None:
    main.prepare(["run"])
    ready = main.prepared.pop("run")
    pages = []
    for command in (ready, main.command_of("run")):
        with command.make_context("kv", ["run"], obj=Invocation()) as context:
            below = command.commands["run"].make_context("run", [], context)
            pages.append(below.get_help())
    assert pages[0] == pages[1] and "--help" in pages[0]


def test_a_command_line_needs_no_pydantic() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "sys.argv = ['kv', 'run', '-m', 'no-such-file.gguf', '-n', '1', '--temp', '0.5', '-f', 'no-such-file', 'hi']\n"
        "from kvcli.cli.main import run_command\n"
        "print(run_command(sys.argv[1:]), 'pydantic' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.split()[-1] == "False" and result.stdout.split()[0] != "0", result
