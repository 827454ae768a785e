"""The Jinja environment of chat templates: sandboxed, transformers' conventions, origins marked.

Every string that stands in a template is replaced, before compilation, by a variable that holds it as trusted
text (see provenance.py); messages are plain strings. So each character of the result says where it came from,
whatever tests and filters the template applied on the way. Import this module lazily: jinja2 takes 0.1 s.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import do_join, do_title
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from kvcli.runtime.text.provenance import Marked, MarkedFormatter, concat, trust

__all__ = ["Refused", "SecurityError", "TemplateSyntaxError", "compile_template"]


class Refused(Exception):
    """The template called raise_exception; str() is its message."""


@functools.lru_cache(maxsize=4)
def compile_template(source: str) -> Template:
    """Ready to render: `.render(variables)` returns a Marked string. Raises TemplateSyntaxError."""
    environment = _Environment()
    tree = environment.parse(source)
    literals = _Literals()
    tree = literals.visit(tree)
    tree.set_environment(environment)
    return environment.from_string(tree, literals.texts)


def variables_of(source: str) -> set[str]:
    """What a template reads that it may be given."""
    return find_undeclared_variables(_Environment().parse(source))


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(concat)  # joins the output of templates, macros and blocks

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters |= {"tojson": _tojson, "join": _join, _CONCAT: _concat_any, "safe": Markup, "title": _title}
        self.filters |= {"escape": _escape, "e": _escape, "forceescape": _escape, "indent": _indent}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` and `str.format_map` without access to attributes that are forbidden, and with marks."""
        if super().wrap_str_format(value) is None:
            return None
        form, formatter = value.__self__, _Formatter(self)
        if value.__name__ == "format_map":
            return lambda named: formatter.vformat(form, (), named)
        return lambda *values, **named: formatter.vformat(form, values, named)


class _Formatter(MarkedFormatter, SandboxedFormatter):
    """MarkedFormatter over what the sandbox allows."""


_CONCAT = "_concat"


class _Literals(NodeTransformer):
    """Strings of a template -> variables; `texts` maps their names to trusted strings."""

    def __init__(self) -> None:
        self.texts: dict[str, Any] = {}

    def _variable(self, text: str, lineno: int) -> nodes.Name:
        name = f"_literal_{len(self.texts)}"
        self.texts[name] = trust(text)
        return nodes.Name(name, "load", lineno=lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._variable(node.data, node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return self._variable(node.value, node.lineno) if isinstance(node.value, str) else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Const):  # a key is not text: message['content'] stays as it is
            node.node = self.visit(node.node)
            return node
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        items = nodes.Tuple([self.visit(item) for item in node.nodes], "load", lineno=node.lineno)
        return nodes.Filter(items, _CONCAT, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what is trained on; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares a mutable set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _concat_any(items: tuple[Any, ...]) -> Marked:
    """The ~ operator."""
    return concat(map(str, items))


@pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    return do_join(context, value, Marked(d), attribute)


def _title(text: Any) -> Marked:
    """Jinja's `title`, which begins words elsewhere than `str.title` does."""
    return Marked(str(text)).with_letters(do_title)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent`: `width` letters, or that text, before each line, the first one and blank ones if asked."""
    margin = width if isinstance(width, str) else " " * width
    lines = (Marked(text) + "\n").splitlines()
    moved = [first if number == 0 else blank or line != "" for number, line in enumerate(lines)]
    return Marked("\n").join(concat([margin, line]) if move else line for line, move in zip(lines, moved, strict=True))


_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"}


def _escape(text: Any) -> str:
    """HTML's special characters as entities; unlike Jinja's, a string like any other."""
    escaped: str = Marked(str(text))
    for letter, entity in _ENTITIES.items():  # & first: entities begin with it
        escaped = escaped.replace(letter, entity)
    return escaped


class Markup(Marked):
    """What `safe` makes of a text, as Jinja's own: a text that is put before or behind it with + is escaped."""

    __slots__ = ()

    def __new__(cls, text: Any = "") -> Markup:
        marked = Marked(str(text))
        made = str.__new__(cls, marked)
        made._parts = marked._parts
        return made

    def __add__(self, other: str) -> Marked:
        return Markup(super().__add__(_as_markup(other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Marked:
        return Markup(super().__radd__(_as_markup(other))) if isinstance(other, str) else NotImplemented


def _as_markup(text: str) -> str:
    return text if isinstance(text, Markup) else _escape(text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
