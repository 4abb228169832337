"""Tags of the families that write a tag for each argument."""

from typing import Any

from server.parsers.kinds import ParserKind, by_name
from server.parsers.tool.xml import Attributes, Tags


def _in_section(section: str, **more: Any) -> Tags:
    """Tags of Qwen3-Coder, with calls in a `section`."""
    return Tags(
        **{
            "markers": (f"<{section}>",),
            "opening": "<function=",
            "name_end": (">",),
            "key": "<parameter=",
            "key_end": ">",
            "value_end": "</parameter>",
            "call_end": "</function>",
            "section_end": f"</{section}>",
            **more,
        }
    )


def _invoke(prefix: str, quote: str = "", **more: Any) -> Tags:
    """Tags such as `<invoke name=...><parameter name=...>`, with `prefix` in all tags."""
    return Tags(
        **{
            "opening": f"<{prefix}invoke name={quote}",
            "name_end": (f"{quote}>",),
            "key": f"<{prefix}parameter name={quote}",
            "key_end": quote or ">",
            "value_end": f"</{prefix}parameter>",
            "call_end": f"</{prefix}invoke>",
            **more,
        }
    )


def _key_and_value(**more: Any) -> Tags:
    """Tags that enclose each key and each value separately."""
    return Tags(
        markers=("<tool_call>",),
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
        is_framed=False,
        **more,
    )


QWEN3_CODER = _in_section("tool_call", markers=("<tool_call>", "<function="))
SEED = _in_section("seed:tool_call", markers=("<seed:tool_call>", "<function="))
MINIMAX = _invoke(
    "",
    markers=("<minimax:tool_call>", "<invoke name="),
    section_end="</minimax:tool_call>",
    is_framed=False,
)
DSML = _invoke(
    "\uff5cDSML\uff5c",
    '"',
    markers=(
        "<\uff5cDSML\uff5cfunction_calls>",
        "<\uff5cDSML\uff5ctool_calls>",
        '<\uff5cDSML\uff5cinvoke name="',
    ),
    ignored_markers=("</\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5ctool_calls>"),
    attributes=Attributes(end=">", text=' string="true"', other=' string="false"'),
    is_framed=False,
)
DOTS = _invoke(
    "",
    markers=("<dots_function_call>",),
    section_end="</dots_function_call>",
    is_framed=False,
)
MUSE_GLIMMER = _invoke(
    "atem:",
    markers=("<atem:function_calls>", "<atem:invoke name="),
    section_end="</atem:function_calls>",
    is_framed=False,
)
MINICPM5 = Tags(
    markers=("<function name=",),
    opening="<function name=",
    name_end=(">",),
    key="<param name=",
    key_end=">",
    value_end="</param>",
    call_end="</function>",
    is_framed=False,
    cdata=("<![CDATA[", "]]>"),
    must_be_known=True,
)
KIMI_K3 = Tags(
    markers=("<|open|>tools<|sep|>", '<|open|>call tool="'),
    ignored_markers=(
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    ),
    opening='<|open|>call tool="',
    name_end=('"',),
    key='<|open|>argument key="',
    key_end='"',
    value_end="<|close|>argument<|sep|>",
    call_end="<|close|>call<|sep|>",
    section_end="<|close|>tools<|sep|>",
    attributes=Attributes(
        end="<|sep|>",
        text=' type="string"',
        other=' type="(number|boolean|null|object|array)"',
        call=' index="[0-9]{1,3}"',
        is_escaped=True,
    ),
    is_framed=False,
)
GLM = _key_and_value(name_end=("\n", "{", "<arg_key>", "</tool_call>"), leaves_name_end=True)
HUNYUAN = _key_and_value(
    name_end=("<tool_sep>",),
    ignored_markers=("<tool_calls>", "</tool_calls>"),
    section=("<tool_calls>", "</tool_calls>"),
    ends=("</tool_call>",),
)
STEP3 = _invoke(
    "steptml:",
    markers=("<steptml:invoke name=",),
    ignored_markers=(
        "<\uff5ctool_calls_begin\uff5c>",
        "<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>",
        "<\uff5ctool_call_end\uff5c>",
        "<\uff5ctool_calls_end\uff5c>",
    ),
    section=("<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_calls_end\uff5c>"),
    ends=("<\uff5ctool_call_end\uff5c>",),
    is_framed=False,
)
SOLAR_OPEN2 = Tags(
    markers=("<|tool_call:start|>",),
    name_end=("\n", "<|tool_arg:start|>", "<|tool_call:end|>"),
    leaves_name_end=True,
    key="<|tool_arg:start|>",
    key_end="<|tool_arg:value|>",
    value_end="<|tool_arg:end|>",
    call_end="<|tool_call:end|>",
    is_framed=False,
)

TOOL_PARSERS = by_name(
    ParserKind(
        ("qwen3_coder", "qwen3_xml", "mimo", "step3p5"),
        QWEN3_CODER,
        "`<tool_call><function=f><parameter=a>x</parameter></function></tool_call>`",
        marks=("<function=",),
        rank=3,
    ),
    ParserKind(
        ("seed_oss",),
        SEED,
        "`<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>`",
        marks=("<seed:tool_call>",),
    ),
    ParserKind(
        ("deepseek_v32", "deepseek_v4"),
        DSML,
        '`<\uff5cDSML\uff5cinvoke name="f"><\uff5cDSML\uff5cparameter name="a" '
        'string="true">x</\uff5cDSML\uff5cparameter></\uff5cDSML\uff5cinvoke>`',
        marks=("<\uff5cDSML\uff5c",),
    ),
    ParserKind(
        ("minimax_m2",),
        MINIMAX,
        '`<minimax:tool_call><invoke name="f"><parameter '
        'name="a">x</parameter></invoke></minimax:tool_call>`',
        marks=("<minimax:tool_call>",),
        rank=1,
    ),
    ParserKind(
        ("dots",),
        DOTS,
        '`<dots_function_call><invoke name="f"><parameter '
        'name="a">x</parameter></invoke></dots_function_call>`',
        marks=("<dots_function_call>",),
    ),
    ParserKind(
        ("muse_glimmer",),
        MUSE_GLIMMER,
        '`<atem:invoke name="f"><atem:parameter name="a">x</atem:parameter></atem:invoke>`',
        marks=("<atem:",),
    ),
    ParserKind(
        ("minicpm5",),
        MINICPM5,
        '`<function name="f"><param name="a">x</param></function>`',
        marks=("<function name=",),
    ),
    ParserKind(
        ("kimi_k3",),
        KIMI_K3,
        "`call` and `argument` tags of `<|open|>`, `<|close|>` and `<|sep|>`",
        marks=("<|open|>",),
    ),
    ParserKind(
        ("glm45", "glm47", "ling3", "poolside_v1"),
        GLM,
        "`<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>`",
        marks=("<arg_key>",),
        rank=2,
    ),
    ParserKind(
        ("hunyuan",),
        HUNYUAN,
        "`<tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>x</arg_value></tool_call>`",
        marks=("<tool_sep>",),
        rank=1,
    ),
    ParserKind(
        ("step3",),
        STEP3,
        '`<steptml:invoke name="f"><steptml:parameter '
        'name="a">x</steptml:parameter></steptml:invoke>`',
        marks=("<steptml:",),
    ),
    ParserKind(
        ("solar_open2",),
        SOLAR_OPEN2,
        "`<|tool_call:start|>f<|tool_arg:start|>a<|tool_arg:value|>x"
        "<|tool_arg:end|><|tool_call:end|>`",
        marks=("<|tool_call:start|>",),
    ),
)
