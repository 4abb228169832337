"""Tool calls in every format, valid and invalid, with their expected meaning."""

from typing import Any

OSLO = ("get_weather", {"city": "Oslo", "days": 3})
NOW: tuple[str, dict[str, Any]] = ("now", {})
OSLO_JSON = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
NOW_JSON = '{"name": "now", "arguments": {}}'
B, E, S = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
BB, EE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
D = "\uff5cDSML\uff5c"
CODER = (
    "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>"
)

NS = "]<]minimax[>["
"""The token before each tag of MiniMax M3."""
Q = '<|"|>'
HY = "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3"
STEP = (
    '<steptml:invoke name="get_weather"><steptml:parameter name="city">Oslo</steptml:parameter>\n'
    '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke>'
)
SB, SE = (
    "<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>",
    "<\uff5ctool_call_end\uff5c>",
)

WHOLE: list[tuple[str, str, str, list[Any]]] = [
    (
        "gemma4",
        f"So:<|tool_call>call:get_weather{{city:{Q}Oslo{Q},days:3}}<tool_call|>",
        "So:",
        [OSLO],
    ),
    (
        "gemma4",
        f"<|tool_call>call:a.b-c{{x:{{y:[1,{Q}}}]{Q},true],{Q}k{Q}:null}},z:-1.5}}<tool_call|>"
        "<|tool_call>call:now{}<tool_call|><|tool_response>",
        "",
        [("a.b-c", {"x": {"y": [1, "}]", True], "k": None}, "z": -1.5}), NOW],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{"a": "b\\n", c: d e}<tool_call|>',
        "",
        [("f", {"a": "b\n", "c": "d e"})],
    ),
    (
        "gemma4",
        "<|tool_call>call:get_weather{city:7,days:7}",
        "",
        [("get_weather", {"city": "7", "days": 7})],
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call><start_function_response>",
        "",
        [OSLO, NOW],
    ),
    (
        "hunyuan",
        f"Hm.<tool_calls>\n<tool_call>get_weather<tool_sep>\n{HY}</arg_value>\n</tool_call>\n"
        "<tool_call>now<tool_sep></tool_call>\n</tool_calls>",
        "Hm.",
        [OSLO, NOW],
    ),
    (
        "hy_v3",
        "Hm."
        + f"<tool_calls>\n<tool_call>get_weather<tool_sep>\n{HY}</arg_value>\n</tool_call>\n"
        "<tool_call>now<tool_sep></tool_call>\n</tool_calls>".replace(">", ":opensource>"),
        "Hm.",
        [OSLO, NOW],
    ),
    (
        "hy_v3",
        f"<tool_call>get_weather<tool_sep>\n{HY}</arg_value>\n</tool_call>",
        "",
        [OSLO],
    ),
    (
        "step3",
        f'Hm.<\uff5ctool_calls_begin\uff5c>\n{SB}{STEP}{SE}\n{SB}<steptml:invoke name="now">'
        f"</steptml:invoke>{SE}\n<\uff5ctool_calls_end\uff5c>",
        "Hm.",
        [OSLO, NOW],
    ),
    (
        "openai",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 3}<|call|>',
        "",
        [OSLO],
    ),
    ("openai", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [NOW]),
    (
        "apertus",
        'So:<|tools_prefix|>[{"get_weather": {"city": "Oslo", "days": 3}}, {"now": {}}]'
        "<|tools_suffix|>",
        "So:",
        [OSLO, NOW],
    ),
    (
        "cohere_command3",
        "<|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo", '
        '"days": 3}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n'
        "]<|END_ACTION|>",
        "",
        [OSLO, NOW],
    ),
    (
        "dots",
        'So:<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name=now>\n'
        "</invoke>\n</dots_function_call>",
        "So:",
        [OSLO, NOW],
    ),
    (
        "solar_open2",
        "Hm.<|tool_call:start|>get_weather\n"
        "<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n"
        "<|tool_call:end|>\n<|tool_call:start|>now\n<|tool_call:end|>",
        "Hm.",
        [OSLO, NOW],
    ),
    ("dots", f"<dots_function_call>\n{OSLO_JSON}\n</dots_function_call>", "", [OSLO]),
    ("gigachat3", f"So:<|message_sep|>\n\nfunction call<|role_sep|>\n{OSLO_JSON}", "So:", [OSLO]),
    ("gigachat3", f"<|function_call|>{NOW_JSON}", "", [NOW]),
    (
        "inkling",
        "<|content_invoke_tool_json|>"
        '{"name": "get_weather", "args": {"city": "Oslo", "days": 3}}<|end_message|>'
        '<|message_model|><|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>',
        "",
        [OSLO, NOW],
    ),
    (
        "kimi_k3",
        'So:<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        "So:",
        [OSLO, NOW],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|>'
        '<|open|>argument key="a&amp;&quot;b" type="object"<|sep|>{"c": "&amp;"}'
        "<|close|>argument<|sep|><|close|>call<|sep|>"
        "<|close|>tools<|sep|>",
        "",
        [("now", {'a&"b': {"c": "&amp;"}})],
    ),
    ("longcat", f"<longcat_tool_call>\n{OSLO_JSON}\n</longcat_tool_call>", "", [OSLO]),
    (
        "minicpm5",
        'So: <function name="get_weather"><param name="city">Oslo</param>'
        '<param name="days">3</param></function>\n<function name="now"></function>',
        "So:",
        [OSLO, NOW],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[</param> & <b>\n]]></param>'
        "</function>",
        "",
        [("get_weather", {"city": "</param> & <b>\n"})],
    ),
    (
        "muse_glimmer",
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Oslo</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        "",
        [OSLO],
    ),
    (
        "muse_glimmer",
        '<atem:invoke name="now.now"></atem:invoke>',
        "",
        [NOW],
    ),
    (
        "olmo3",
        "<function_calls>\nget_weather(city='Oslo', days=3)\nnow()\n</function_calls>",
        "",
        [OSLO, NOW],
    ),
    ("hermes", f"<tool_call>\n{OSLO_JSON}\n</tool_call>", "", [OSLO]),
    ("hermes", f"Let me see.\n<tool_call>{OSLO_JSON}</tool_call>\n", "Let me see.", [OSLO]),
    (
        "hermes",
        f"<tool_call>\n{OSLO_JSON}\n</tool_call>\n<tool_call>\n{NOW_JSON}\n</tool_call>",
        "",
        [OSLO, NOW],
    ),
    ("hermes", f"a <tool_call>{NOW_JSON}</tool_call> b", "a  b", [NOW]),
    ("hermes", f"<tool_call>{NOW_JSON}", "", [NOW]),
    ("hermes", f"<tool_call>{NOW_JSON}}}\n</tool_call>", "", [NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>',
        "",
        [("f", {"a": [1]})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}", "id": 7}</tool_call>',
        "",
        [("f", {"a": "é"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("f", {"a": "x\ny"})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("llama3_json", OSLO_JSON.replace("arguments", "parameters"), "", [OSLO]),
    ("llama3_json", f"<|python_tag|>{OSLO_JSON}; {NOW_JSON}", "", [OSLO, NOW]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
    ("pythonic", '[get_weather(city="Oslo", days=3), now()]', "", [OSLO, NOW]),
    (
        "pythonic",
        "[get_weather(city='a\\'b\\n\\x41', tags=('x', \"y\",), where=None, "
        "exact=True, n=-1_0.5e1)]",
        "",
        [
            (
                "get_weather",
                {"city": "a'b\nA", "tags": ["x", "y"], "where": None, "exact": True, "n": -105.0},
            )
        ],
    ),
    ("pythonic", "[now(a={'k': [1, {}]})]", "", [("now", {"a": {"k": [1, {}]}})]),
    (
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="Oslo", days=3)]<|python_end|>',
        "",
        [OSLO],
    ),
    ("mistral", f"[TOOL_CALLS] [{OSLO_JSON}, {NOW_JSON}]", "", [OSLO, NOW]),
    (
        "mistral",
        'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]now{}',
        "Hm.",
        [OSLO, NOW],
    ),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "", [NOW]),
    ("granite", f"<|tool_call|>[{OSLO_JSON}, {NOW_JSON}]", "", [OSLO, NOW]),
    ("granite", f"<tool_call>[{OSLO_JSON}]", "", [OSLO]),
    ("granite-20b-fc", f"<function_call> {OSLO_JSON}\n<function_call> {NOW_JSON}", "", [OSLO, NOW]),
    ("granite4", f"<tool_call>\n{OSLO_JSON}\n</tool_call>", "", [OSLO]),
    (
        "deepseek_v3",
        f'{BB}{B}function{S}get_weather\n```json\n{{"city": "Oslo", "days": 3}}\n```{E}\n'
        f"{B}function{S}now\n```json\n{{}}\n```{E}{EE}",
        "",
        [OSLO, NOW],
    ),
    (
        "deepseek_v31",
        f'Hm.{BB}{B}get_weather{S}{{"city":"Oslo","days":3}}{E}{B}now{S}{{}}{E}{EE}',
        "Hm.",
        [OSLO, NOW],
    ),
    (
        "deepseek_v32",
        f'<{D}function_calls>\n<{D}invoke name="get_weather">\n'
        f'<{D}parameter name="city" string="true">Oslo</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">3</{D}parameter>\n'
        f"</{D}invoke>\n"
        f'<{D}invoke name="now">\n</{D}invoke>\n</{D}function_calls>',
        "",
        [OSLO, NOW],
    ),
    ("qwen3_coder", f"Hm.\n<tool_call>\n{CODER}\n</tool_call>", "Hm.", [OSLO]),
    (
        "qwen3_coder",
        f"<tool_call>\n{CODER}\n<function=now>\n</function>\n</tool_call>",
        "",
        [OSLO, NOW],
    ),
    ("qwen3_coder", CODER, "", [OSLO]),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\na\n\n<b>\n\n</parameter>"
        "<parameter=tags>['x']</parameter><parameter=where>null</parameter>"
        "<parameter=exact>True</parameter></function></tool_call>",
        "",
        [("get_weather", {"city": "a\n\n<b>\n", "tags": ["x"], "where": None, "exact": True})],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        [OSLO, NOW],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [OSLO],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [OSLO, NOW],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
        'Oslo</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [OSLO],
    ),
    (
        "minimax_m3",
        f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Oslo{NS}</city>'
        f'{NS}<days>3{NS}</days>{NS}</invoke>\n{NS}<invoke name="now">{NS}</invoke>\n'
        f"{NS}</tool_call>",
        "",
        [OSLO, NOW],
    ),
    ("seed_oss", f"<seed:tool_call>\n{CODER}\n</seed:tool_call>", "", [OSLO]),
    ("jamba", f"<tool_calls>[\n{OSLO_JSON}\n]</tool_calls>", "", [OSLO]),
    ("internlm", f"<|action_start|> <|plugin|>\n{OSLO_JSON}<|action_end|>", "", [OSLO]),
    ("phi4_mini_json", f"functools[{OSLO_JSON}]", "", [OSLO]),
    ("xlam", f"[{OSLO_JSON}, {NOW_JSON}]", "", [OSLO, NOW]),
    ("xlam", f"Here:\n```json\n[{OSLO_JSON}]\n```", "Here:", [OSLO]),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Oslo", days=3)]<|tool_call_end|>', "", [OSLO]),
]

TEXT = [
    ("hermes", "Just text, 1 < 2, <tool, <tool_calls>"),
    ("hermes", " \n text with blanks \n"),
    ("hermes", "<tool_call>\nnot json\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>"),
    ("llama3_json", '{"name": "John", "age": 3}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", "[1, 2]"),
    ("llama3_json", ""),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[a link](http://x.y)"),
    ("pythonic", "[unknown(a=1)]"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]now[ARGS]5"),
    ("mistral", '[TOOL_CALLS] I call {"a": 1}'),
    ("mistral", '[TOOL_CALLS] So [{"name": "now", "arguments": {}}]'),
    ("phi4_mini_json", "import functools\nfunctools.reduce"),
    ("deepseek_v3", f"{B}function"),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
    ("kimi_k2", "<|tool_call_begin|>f"),
    ("xlam", "```json\n{}\n```"),
    ("gemma4", "<|tool_call>now{}<tool_call|>"),
    ("functiongemma", "<start_function_call>call:now"),
    ("minimax_m3", f"{NS}<tool_call>{{}}{NS}</tool_call>"),
    ("minimax_m3", f'{NS}<tool_call>\n{NS}<invoke name="now">'),
    ("hunyuan", "<tool_call>now</tool_call>"),
    ("step3", "<steptml:invoke name=>"),
    ("hy_v3", "<tool_call:opensource>now</tool_call:opensource>"),
    ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'),
    ("kimi_k3", "<|open|>tools<|sep|>"),
    ("minicpm5", '<function name="unknown"><param name="x">1</param></function>'),
    ("olmo3", "<function_calls>now</function_calls>"),
    ("openai", "<|channel|>commentary to=now<|message|>5"),
    # Text that begins like a call, up to its first value.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call> after'),
    ("pythonic", "[now(a=b)]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=1e999)]"),
    ("mistral", "[TOOL_CALLS]now[ARGS]{,}"),
    ("openai", '<|channel|>commentary to=now<|message|>{"a": oops}'),
    ("qwen3_coder", "<tool_call><function=f>"),
]

BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"', "", '{"a": "x"'),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 70 + "</tool_call>",
        "",
        '{"a": ' + "[" * 70,
    ),
    (
        "hermes",
        'So <tool_call>{"name": "f", "arguments": {"a": "b, "c": 1}}</tool_call> or so',
        "So  or so",
        '{"a": "b, "c": 1}}',
    ),
    ("pythonic", "[now(a='b', c)]", "", '{"a": "b\', c)]'),
    ("gemma4", "<|tool_call>call:now{a:" + "[" * 70, "", '{"a": ' + "[" * 70),
    (
        "functiongemma",
        "<start_function_call>call:now{a:<escape>b}<end_function_call> or so",
        "or so",
        '{"a": "b}',
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x", "", '{"a": "x'),
    (
        "minimax_m3",
        f'{NS}<invoke name="get_weather">{NS}<city>x',
        "",
        '{"city": "x',
    ),
]
"""(parser, text, content, arguments) of calls whose arguments cannot be parsed."""
