"""Conversations for chat templates: plain ones, and all that people and executor put into them."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city: <sun> & 'rain'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Köln, 東京 …"},
                    "days": {"type": "integer", "enum": [1, 2, 3]},
                    "units": {"type": ["string", "null"], "default": None},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "object",
                "properties": {
                    "numbers": {"type": "array", "items": {"type": "number"}},
                    "exact": {"type": "boolean"},
                },
            },
        },
    },
]


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    told = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": told}


def _turns(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": each} for i, each in enumerate(contents)]


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": _turns("Hello!")},
    "turns": {
        "messages": [
            {"role": "system", "content": " You are brief.\n"},
            *_turns("What is 2 + 2?", "4", "  And <b>3</b> + 3?\n", "6", "Thanks ☕"),
        ]
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            *_turns("How is it in Köln?"),
            {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Köln"})]},
            {"role": "tool", "name": "weather", "tool_call_id": "call00000", "content": "sun"},
            {"role": "assistant", "content": "Sunny."},
            *_turns("And 1.5 + 2?"),
            {
                "role": "assistant",
                "content": "I add.",
                "tool_calls": [call("add", {"numbers": [1.5, 2], "exact": True}, 1)],
            },
            {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3.5"},
        ],
        "tools": TOOLS,
    },
    "several calls at once": {
        "messages": [
            *_turns("Köln and 東京?"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    call("weather", {"city": "Köln", "days": 2}),
                    call("weather", {"city": "東京", "units": None}, 1),
                ],
            },
            {"role": "tool", "name": "weather", "tool_call_id": "call00000", "content": '{"t": 1}'},
            {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": ["a"]},
        ],
        "tools": TOOLS,
    },
    "arguments as text": {
        "messages": [
            *_turns("Köln?"),
            {"role": "assistant", "tool_calls": [call("weather", '{"city": "Köln"}')]},
            {"role": "tool", "content": "sun"},
        ],
        "tools": TOOLS,
    },
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Parts."}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        ]
    },
    "unusual": {
        "messages": _turns("", "\u200b🎉\n\t\\n{{ x }}{% if %}", "\x00'\"</s><s>", None, "x")
    },
    "nothing said": {"messages": _turns(None)},
    "thoughts": {
        "messages": [
            *_turns("Why?"),
            {"role": "assistant", "content": "So.", "reasoning_content": "Hm. </think>"},
            *_turns("And?"),
            {"role": "assistant", "content": "<think>\nwell\n</think>\n\nThus.", "thinking": "No"},
            *_turns("Then?"),
        ]
    },
    "wrong order": {
        "messages": [
            *_turns("a", "b"),
            {"role": "assistant", "content": "c"},
            {"role": "system", "content": "late"},
            {"role": "critic", "content": "who?"},
            {"role": "user", "content": "d"},
        ]
    },
    "documents": {
        "messages": _turns("Where is it?"),
        "documents": [{"title": "Rivers", "text": "The Rhine", "doc_id": 1}],
    },
    "options": {
        "messages": [{"role": "developer", "content": "Short."}, *_turns("Hi")],
        "enable_thinking": False,
        "thinking": True,
        "reasoning_effort": "high",
        "custom_tools": None,
    },
}
