"""The grammar of tool calls, from how a model family spells them and the schemas of the tools.

required   begin call (separator call)* end
else       (text begin call ... end)* text      where text ends with the first beginning
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from tokenspeed.constraint import ARGUMENTS, NAME, NUMBER, ToolCalls


def tool_call_grammar(
    asked: ToolCalls, special: Mapping[str, int], arguments: Callable[[str, str], str]
) -> str:
    """Lark. `special` are the texts of special tokens with their ids; `arguments(name, schema)` is
    the grammar of one tool's arguments.
    """
    spelling = asked.format
    literals = _Literals(special)
    begin = spelling.begin or spelling.call[0]
    trigger, *rest = literals.parts(begin)
    rules = [r"TEXT: /(.|\n)*/", r"NUMBER: /0|[1-9][0-9]{0,3}/"]
    for index, (name, schema) in enumerate(asked.tools):
        fields = {NAME: json.dumps(name), NUMBER: "NUMBER", ARGUMENTS: f"arguments_{index}"}
        parts = [fields[part] if part in fields else literals.text(part) for part in spelling.call]
        # A call that itself begins the list goes on behind its beginning.
        tail = parts if spelling.begin else parts[1:]
        rules += [
            f"arguments_{index}: {arguments(name, schema)}",
            f"call_{index}: {' '.join(parts)}",
            f"first_{index}: {' '.join([*rest, *tail])}",
        ]
    for rule in ("call", "first"):
        numbered = [f"{rule}_{index}" for index in range(len(asked.tools))]
        rules.append(f"{rule}: {' | '.join(numbered)}")
    more = f"({literals.text(spelling.separator)} call)*" if asked.parallel else ""
    rules.append(f"calls: first {more} {literals.text(spelling.end)}")
    if asked.required:
        rules.append(f"start: {trigger} calls")
    elif trigger.startswith("<["):
        rules.append(f"start: (TEXT {trigger} calls)* TEXT")
    else:
        rules.append(f"begun[lazy]: TEXT {trigger}")
        rules.append("start: (begun calls)* TEXT")
    return "\n".join(rules)


class _Literals:
    """Text as Lark: strings, and special tokens by their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def parts(self, text: str) -> list[str]:
        found, at = [], 0
        for match in self._pattern.finditer(text):
            found += [json.dumps(text[at : match.start()])] * (match.start() > at)
            found.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        return found + [json.dumps(text[at:])] * (len(text) > at)

    def text(self, text: str) -> str:
        return " ".join(self.parts(text))
