import pytest
from jinja2 import TemplateError

from server.text.sandbox import MAX_DEPTH, MAX_SEARCH_STEPS, Sandbox, TooMuchText

MANY = 10**6
# Each value holds 2**19 items or 2**19 characters, but takes only milliseconds without a check.
NESTED = (
    "{% set ns = namespace(t=(1,), u=(1,), l=[1], long='ab') %}{% for _ in range(19) %}"
    "{% set ns.t = (ns.t, ns.t) %}{% set ns.u = (ns.u, ns.u) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% if loop.index < 17 %}{% set ns.long = ns.long ~ ns.long %}{% endif %}{% endfor %}"
)


def render(template: str) -> str:
    return Sandbox(200_000).from_string(template).render(MANY=MANY)


@pytest.mark.parametrize(
    "expression",
    [
        r"'\t'.expandtabs(tabsize=MANY)",
        "('x' * 1000).replace('x', 'y' * 1000, 900)",
        "'%99d' | format(1) | center(width=MANY)",
        "'x' | indent(first=true, width=MANY)",
        r"('x\n' * 1000) | indent(width=1000, first=0 - MANY)",
        "('x ' * 1000) | wordwrap(1, 0 - MANY, 'y' * 1000)",
        "['x'] | batch(linecount=MANY, fill_with='y') | list",
        "range(1000) | list | tojson(separators=('x' * 1000, ':'))",
        "{'a': 1} | tojson(separators=(',', 'x' * 1000))",
        "'{:{w}}'.format('x', w=MANY)",
        "('{0:9999}' * 30).format(1)",
        "'{}{}{}'.format(ns.long, ns.long, ns.long)",
        "(('{0:9999}' * 30) | safe).format(1)",
        "('%(a)9999d' * 30) % {'a': 1}",
        "('%(a)9999d' * 30) | format(a=1)",
        "['%99999d'] | format(1)",
        "'%99999d' is odd",
        "'%99999d' is even",
        "'%99999d' is divisibleby(5)",
        "'x' | round(6, 'ceil')",
        "1 | round(MANY, 'ceil')",
        "5 | round(0 - MANY)",
        "('f' * 100000) | int(base=16)",
        "[ns.long, ns.long] | join(ns.long)",
        "([range(1000) | list] * 1000) | sum(start=[])",
        "strftime_now('%c' * 10000)",
        "'x'.encode()",
        "(5).to_bytes(MANY, 'big')",
        "(5).from_bytes([5] * 100000)",
        "('x' | safe).striptags()",
        "('x' | safe).escape(ns.l)",
        # Conversions of nested values to text.
        "'x' | replace(ns.l, '')",
        "'x' | replace('x', ns.l)",
        "[1, 2] | join(ns.l)",
        "'{}'.format(ns.l)",
        "'{!r}'.format(ns.l)",
        "'{x}'.format_map({'x': ns.l})",
        "raise_exception(ns.l)",
        "ns.l | string",
        "ns ~ ''",
        "{'a': ns.l}.values() ~ ''",
        "{'a': ns.l}.items() ~ ''",
        "{'a': ns.l}.values().mapping ~ ''",
        *(
            f"ns.l | {name}"
            for name in (
                *("capitalize", "e", "escape", "forceescape", "lower", "safe", "title", "trim"),
                *("truncate", "upper", "wordcount"),
            )
        ),
        "ns.l is lower",
        "([ns.long] * 1000) is upper",
        # Comparisons and hashes.
        "dict([(ns.t, 1)])",
        "dict([[1, ns.t] | reverse])",
        "dict({1: 1}, x=1).get(ns.t)",
        "dict.fromkeys([ns.t])",
        "dict.fromkeys([[ns.t]] | map('first'))",
        "{}.fromkeys([ns.t])",
        "namespace([(ns.t, 1)])",
        "{}.keys() - [ns.t]",
        "[ns.t] - {}.keys()",
        "{}.keys().isdisjoint([ns.t])",
        "[[ns.t]] | map('first') | unique | list",
        "[[ns.t], [ns.u]] | map('first') | sort",
        "[[ns.t], [ns.u]] | map('first') | min",
        "[namespace(t=ns.t), namespace(t=ns.u)] | sort(attribute='t')",
        "[namespace(t=ns.t), namespace(t=ns.u)] | max(attribute='t')",
        "[namespace(t=ns.t), namespace(t=ns.u)] | groupby('t')",
        "{'a': ns.t}.values() == {'a': ns.u}.values()",
        "{'a': ns.t}.items() == {'a': ns.u}.items()",
        "1 in {'a': ns.t}.values()",
        "([ns.long] * 1000) | sort",
        "ns.long.startswith((ns.long ~ 'x',) * 1000)",
    ],
)
def test_an_operation_beyond_the_limits_is_refused_before_it_runs(expression: str) -> None:
    with pytest.raises(TemplateError):
        render(NESTED + "{% set _ = " + expression + " %}")


def test_loop_changed_compares_no_large_values() -> None:
    loop = "{% for x in [ns.t, ns.u] %}{{ loop.changed(x) }}{% endfor %}"

    with pytest.raises(TooMuchText):
        render(NESTED + loop)


def test_deep_values_are_not_hashed() -> None:
    # Python overflows the stack.
    deep = "{% set ns = namespace(t=()) %}{% for _ in range(DEPTH) %}{% set ns.t = (ns.t,) %}"

    with pytest.raises(TemplateError, match=f"nested more than {MAX_DEPTH} levels deep"):
        render(deep.replace("DEPTH", str(MAX_DEPTH + 1)) + "{% endfor %}{{ {ns.t: 1} }}")


@pytest.mark.parametrize(
    "search", ["rfind(n)", "rindex(n)", "rsplit(n)", "rsplit(sep=n)", "rpartition(n)", "strip(n)"]
)
def test_searches_of_quadratic_time_are_bounded(search: str) -> None:
    texts = "{% set t = 'a' * 20000 %}{% set n = 'b' * 10000 %}"

    assert MAX_SEARCH_STEPS < 20_000 * 10_000
    with pytest.raises(TemplateError, match=f"more than {MAX_SEARCH_STEPS} steps"):
        render(texts + "{{ t." + search + " }}")


def test_the_filter_trim_has_the_bound_of_the_method() -> None:
    with pytest.raises(TemplateError, match="steps"):
        render("{{ ('a' * 20000) | trim('b' * 10000) }}")


def test_the_division_of_large_integers_is_refused() -> None:
    for operator in ("//", "%"):
        with pytest.raises(TemplateError, match="bits are too large"):
            render("{{ ('f' * 9000) | int(base=16) " + operator + " 7 }}")


def test_a_method_in_a_loop_takes_keywords() -> None:
    loop = "{% for x in ['a-b'] %}{% set y = x.split(sep='-') %}{{ y }}{{ x.replace('a', 'c') }}"

    assert render(loop + "{% endfor %}") == "['a', 'b']c-b"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'{:>{}} {a[b]!r}'.format('x', 3, a={'b': 'c'})", "  x 'c'"),
        ("('<{}>' | safe).format('&')", "<&amp;>"),
        ("'a-b-c'.rsplit('-', maxsplit=1)", "['a-b', 'c']"),
        (r"'a\tb'.expandtabs(tabsize=2)", "a b"),
        ("'a-b'.rpartition('-')", "('a', '-', 'b')"),
        ("' xyx '.strip(' x')", "y"),
        ("' y ' | trim", "y"),
        ("dict([('a', 1)], b=2)", "{'a': 1, 'b': 2}"),
        ("dict({'a': 1}, self=2)", "{'a': 1, 'self': 2}"),
        ("dict(self=2)", "{'self': 2}"),
        ("dict.fromkeys('ab', 1)", "{'a': 1, 'b': 1}"),
        ("namespace([('a', 1)], self=2).self", "2"),
        ("[[1], [2]] | sum(start=[])", "[1, 2]"),
        ("[{'a': 1}, {'a': 2}] | sum(attribute='a')", "3"),
        (
            "[{'a': 2, 'b': 1}, {'a': 1, 'b': 2}] | sort(attribute='a,b')",
            "[{'a': 1, 'b': 2}, {'a': 2, 'b': 1}]",
        ),
        ("[{'a': 1}, {}] | groupby('a', default=3) | map(attribute='grouper') | list", "[1, 3]"),
        ("['b', 'B', 'a'] | unique | list", "['b', 'a']"),
        ("[3, 1] | map('abs') | max", "3"),
        ("2.567 | round(2)", "2.57"),
        ("25 | round(0 - 1)", "20"),
        ("7 is odd", "True"),
        ("10 is divisibleby(5)", "True"),
        ("'f' | int(base=16)", "15"),
        ("{'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=true)", '{"a":[2],"b":1}'),
        ("{'a': ['é', {}]} | tojson(indent=2)", '{\n  "a": [\n    "é",\n    {}\n  ]\n}'),
        ("'<' | e", "&lt;"),
        ("5 | upper", "5"),
        ("{'a': 1}.items()", "dict_items([('a', 1)])"),
        ("7 - 2", "5"),
    ],
)
def test_operations_within_the_limits_give_the_results_of_jinja(expression: str, text: str) -> None:
    assert render("{{ " + expression + " }}") == text
