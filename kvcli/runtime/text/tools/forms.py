"""How families of models write calls of tools, as data. A form is known by texts of the chat template.

What changes from call to call stands in guillemets: «name» of the tool, «arguments», and in some «id» or «number».
White space is as the templates write it; readers take any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcli.runtime.text.tools.syntaxes import JSON, PYTHON, Bare, Syntax, Tagged

_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@dataclass(frozen=True)
class Form:
    """`known`: texts that the family's templates have, all of them. Calls stand between `opens` and `closes`, and have
    `between` between them; `single`: there is one at most."""

    name: str
    known: tuple[str, ...]
    call: str
    arguments: Syntax = JSON
    opens: str = ""
    closes: str = ""
    between: str = ""
    single: bool = False

    @property
    def lead(self) -> str:
        """What stands before the name of the first tool."""
        return self.opens + self.call.partition("«")[0]

    @property
    def first(self) -> bool:
        """Whether calls are only known at the beginning of an answer, since they have no mark."""
        return not _MARK.match(self.lead)

    def marks(self, names: list[str]) -> list[str]:
        """Texts with which the first call begins, and no other text does."""
        if found := _MARK.match(self.lead):
            return [found[0]]
        rest = self.call.split("»", 1)[1][:1]
        return [f"{self.lead}{name}{rest}" for name in names]

    @property
    def pieces(self) -> list[str]:
        """A call as literal texts and fields in guillemets, in order."""
        return [piece for piece in re.split("(«[a-z]+»)", self.call) if piece]


FORMS = (
    Form(  # Qwen 3 Coder, Qwen 3.5 and later, Nemotron 3
        "qwen3-coder",
        known=("<tool_call>", "<function=", "<parameter="),
        call="<tool_call>\n<function=«name»>\n«arguments»",
        arguments=Tagged("<parameter=«key»>\n«value»\n</parameter>\n", "</function>\n</tool_call>"),
        between="\n",
    ),
    Form(
        "seed-oss",
        known=("<seed:tool_call>",),
        call="<seed:tool_call>\n<function=«name»>\n«arguments»",
        arguments=Tagged("<parameter=«key»>«value»</parameter>\n", "</function>\n</seed:tool_call>"),
        between="\n",
    ),
    Form(  # GLM 4.5 and later
        "glm",
        known=("<tool_call>", "<arg_key>"),
        call="<tool_call>«name»\n«arguments»",
        arguments=Tagged("<arg_key>«key»</arg_key>\n<arg_value>«value»</arg_value>\n", "</tool_call>"),
        between="\n",
    ),
    Form(  # M2
        "minimax",
        known=("<minimax:tool_call>",),
        call='<invoke name="«name»">\n«arguments»',
        arguments=Tagged('<parameter name="«key»">«value»</parameter>\n', "</invoke>\n"),
        opens="<minimax:tool_call>\n",
        closes="</minimax:tool_call>",
    ),
    Form(  # V3.2
        "deepseek-dsml",
        known=("｜DSML｜", "invoke name="),
        call='<｜DSML｜invoke name="«name»">\n«arguments»',
        arguments=Tagged(
            '<｜DSML｜parameter name="«key»" string="«text»">«value»</｜DSML｜parameter>\n', "</｜DSML｜invoke>\n"
        ),
        opens="<｜DSML｜function_calls>\n",
        closes="</｜DSML｜function_calls>",
    ),
    Form(  # V2.5, V3 and R1
        "deepseek",
        known=("<｜tool▁sep｜>", "```json"),
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>«name»\n```json\n«arguments»\n```<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
        between="\n",
    ),
    Form(  # V3.1
        "deepseek-bare",
        known=("<｜tool▁sep｜>",),
        call="<｜tool▁call▁begin｜>«name»<｜tool▁sep｜>«arguments»<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
    ),
    Form(  # K2
        "kimi",
        known=("<|tool_call_argument_begin|>",),
        call="<|tool_call_begin|>functions.«name»:«number»<|tool_call_argument_begin|>«arguments»<|tool_call_end|>",
        opens="<|tool_calls_section_begin|>",
        closes="<|tool_calls_section_end|>",
    ),
    Form(
        "gemma4",
        known=("<|tool_call>",),
        call="<|tool_call>call:«name»{«arguments»<tool_call|>",
        arguments=Bare('<|"|>'),
    ),
    Form(  # FunctionGemma
        "gemma",
        known=("<start_function_call>",),
        call="<start_function_call>call:«name»{«arguments»<end_function_call>",
        arguments=Bare("<escape>"),
    ),
    Form(  # Small 3.2
        "mistral-ids",
        known=("[TOOL_CALLS]", "[CALL_ID]"),
        call="[TOOL_CALLS]«name»[CALL_ID]«id»[ARGS]«arguments»",
    ),
    Form("mistral", known=("[TOOL_CALLS]", "[ARGS]"), call="[TOOL_CALLS]«name»[ARGS]«arguments»"),
    Form(  # 7B to Small 3.1
        "mistral-list",
        known=("[TOOL_CALLS]",),
        call='{"name": "«name»", "arguments": «arguments», "id": "«id»"}',
        opens="[TOOL_CALLS][",
        closes="]",
        between=", ",
    ),
    Form(  # Granite 3, Phi 4 mini
        "list",
        known=("<|tool_call|>",),
        call='{"name": "«name»", "arguments": «arguments»}',
        opens="<|tool_call|>[",
        closes="]",
        between=", ",
    ),
    Form(  # Command R7B, Command A
        "command",
        known=("<|START_ACTION|>", "tool_call_id"),
        call='{"tool_call_id": "«number»", "tool_name": "«name»", "parameters": «arguments»}',
        opens="<|START_ACTION|>[\n    ",
        closes="\n]<|END_ACTION|>",
        between=",\n    ",
    ),
    Form(
        "lfm2",
        known=("<|tool_call_start|>",),
        call="«name»(«arguments»",
        arguments=PYTHON,
        opens="<|tool_call_start|>[",
        closes="]<|tool_call_end|>",
        between=", ",
    ),
    Form(  # gpt-oss
        "harmony",
        known=("<|channel|>", "<|call|>", "functions."),
        call="<|channel|>commentary to=functions.«name» <|constrain|>json<|message|>«arguments»",
        single=True,
    ),
    Form(  # Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4
        "hermes",
        known=("<tool_call>",),
        call='<tool_call>\n{"name": "«name»", "arguments": «arguments»}\n</tool_call>',
        between="\n",
    ),
    Form(  # Llama 3.2 and 4, where they are told to
        "pythonic",
        known=("[func_name1(",),
        call="«name»(«arguments»",
        arguments=PYTHON,
        opens="[",
        closes="]",
        between=", ",
    ),
    Form(  # Llama 3.1 to 3.3
        "llama3",
        known=('{"name": ', '"parameters": '),
        call='{"name": "«name»", "parameters": «arguments»}',
        single=True,
    ),
)


def form_of(template: str) -> Form | None:
    """The form that the text of a chat template tells of."""
    return next((form for form in FORMS if all(text in template for text in form.known)), None)
