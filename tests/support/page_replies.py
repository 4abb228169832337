"""Model answers for the page."""

THINKS = """<think>
The user wants a function. I will write it with a test and a table.
</think>
"""
MARKDOWN = '''\
Here is a function that **reverses** a string, with a test:

```python
def reverse(text: str) -> str:
    """The characters of `text` in reverse order."""
    return text[::-1]


def test_reverse() -> None:
    assert reverse("Hello") == "olleH"  # 5 characters
```

1. `text[::-1]` is a *slice* with step -1.
2. See [the docs](https://docs.python.org/3/).

| Case | Input | Result |
| :-- | --: | --- |
| short | `"ab"` | `"ba"` |
| empty | `""` | `""` |

> Combining characters would need more care.
'''
TOOL_CALL = """\
<think>
</think>
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
</tool_call>"""
TOOLS = (
    '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'
)
LONG = " ".join(f"This is sentence number {index}." for index in range(400))
WIDE = "\n\n".join(
    (
        "x" * 200,
        "```\n" + "y" * 200 + "\n```",
        "| a | b |\n| - | - |\n| " + "cell" * 20 + " | " + "cell" * 20 + " |",
        "`" + "z" * 100 + "`",
        "https://example.com/" + "p" * 100,
    )
)
"""Words and blocks that are wider than a phone's screen."""
