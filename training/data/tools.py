"""Made-up conversations with tools: which one to call, with what, and what to say when its result is there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .documents import Document, assistant, chat, system, user
from .talk import SYSTEMS, polite_turn
from .words import CITIES, FEELINGS, FOODS, NAMES, OBJECTS, THINGS

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """`asks` name the values in braces; `result` and `says` are what comes back and what is said then."""

    name: str
    description: str
    properties: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...]
    draw: Callable[[random.Random], Values]
    asks: tuple[str, ...]
    result: Callable[[random.Random, Values], Values]
    says: tuple[str, ...]

    def declaration(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": dict(self.properties), "required": list(self.required)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_WHOLE, _NUMBER, _YES_NO = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
_SKIES = ("sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "stormy", "clear")
_ROOMS = ("kitchen", "bedroom", "bathroom", "living room", "garden", "hall")
_MESSAGES = (
    "I will be late", "dinner is ready", "happy birthday", "see you soon", "please call me", "I miss you", "good luck",
    "the train is late", "I am at home", "thank you for the gift", "we won the game", "bring some milk", "I am on my way",
    "let us meet tomorrow", "the cat is fine", "I found your key", "do not wait for me", "have a nice day",
)  # fmt: skip
_SONGS = (
    "jazz",
    "rock",
    "piano music",
    "pop",
    "folk songs",
    "opera",
    "lullabies",
    "guitar music",
    "dance music",
    "old songs",
)
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek", "Danish")
_UNITS = (
    ("km", "miles", 0.62),
    ("miles", "km", 1.61),
    ("kg", "pounds", 2.2),
    ("pounds", "kg", 0.45),
    ("cm", "inches", 0.39),
)
_TITLES = ("The {} and the {}", "My little {} and the {}", "The lost {} of the {}", "A {} for the {}")
_TASKS = (
    "feed the {}", "buy a {}", "clean the {}", "bring the {}", "fix the {}", "find the {}", "paint the {}", "return the {}",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _title(draw: random.Random) -> str:
    return draw.choice(_TITLES).format(draw.choice(OBJECTS), draw.choice(OBJECTS))


def _task(draw: random.Random) -> str:
    return draw.choice(_TASKS).format(draw.choice(THINGS))


def _conversion(draw: random.Random) -> Values:
    one, two, _ = draw.choice(_UNITS)
    return {"amount": draw.randint(1, 300), "from_unit": one, "to_unit": two}


def _converted(_: random.Random, values: Values) -> Values:
    factor = next(f for one, two, f in _UNITS if (one, two) == (values["from_unit"], values["to_unit"]))
    return {"result": round(values["amount"] * factor, 1)}


def _sum(draw: random.Random) -> Values:
    return {"expression": f"{draw.randint(2, 999)} {draw.choice('+-*')} {draw.randint(2, 99)}"}


def _computed(_: random.Random, values: Values) -> Values:
    one, sign, two = values["expression"].split()
    return {"result": {"+": int(one) + int(two), "-": int(one) - int(two), "*": int(one) * int(two)}[sign]}


def _done(*_: object) -> Values:
    return {"status": "ok"}


TOOLS = (
    Tool(
        "get_weather", "Get the weather of a city.", {"city": _text("Name of the city")}, ("city",),
        lambda d: {"city": d.choice(CITIES)},
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Will I need an umbrella in {city}?",
         "Is it warm in {city}?", "Tell me the weather in {city}.", "I am going to {city}. What is the weather like?"),
        lambda d, _: {"sky": d.choice(_SKIES), "degrees": d.randint(-10, 38)},
        ("It is {sky} in {city} with {degrees} degrees.", "In {city} it is {sky} and {degrees} degrees."),
    ),
    Tool(
        "get_forecast", "Get the weather of the next days.",
        {"city": _text("Name of the city"), "days": _WHOLE}, ("city", "days"),
        lambda d: {"city": d.choice(CITIES), "days": d.randint(2, 10)},
        ("What will the weather be in {city} in the next {days} days?", "Give me a forecast of {days} days for {city}.",
         "How will the weather in {city} be for the next {days} days?"),
        lambda d, _: {"sky": d.choice(_SKIES), "degrees": d.randint(-10, 38)},
        ("The next {days} days in {city} will be {sky} with about {degrees} degrees.",),
    ),
    Tool(
        "calculate", "Compute a sum.", {"expression": _text("What to compute")}, ("expression",), _sum,
        ("What is {expression}?", "Compute {expression}.", "How much is {expression}?", "Please calculate {expression}."),
        _computed, ("{expression} = {result}.", "The result is {result}."),
    ),
    Tool(
        "set_timer", "Start a timer.", {"minutes": _WHOLE, "label": _text("What the timer is for")}, ("minutes",),
        lambda d: {"minutes": d.randint(1, 90), "label": d.choice(FOODS)},
        ("Set a timer of {minutes} minutes for the {label}.", "Please start a {minutes} minute timer for the {label}.",
         "The {label} needs {minutes} minutes. Set a timer."),
        _done, ("The timer for the {label} is set to {minutes} minutes.", "Done! I will tell you about the {label} in {minutes} minutes."),
    ),
    Tool(
        "send_message", "Send a message to somebody.", {"to": _text("Who gets it"), "text": _text("What it says")}, ("to", "text"),
        lambda d: {"to": d.choice(NAMES), "text": d.choice(_MESSAGES)},
        ("Send {to} a message: {text}.", "Tell {to}: {text}.", "Write to {to}: {text}.", "Please send \"{text}\" to {to}."),
        _done, ("I sent your message to {to}.", "Done! {to} will read: {text}."),
    ),
    Tool(
        "play_music", "Play music.", {"music": _text("What to play"), "volume": _WHOLE}, ("music", "volume"),
        lambda d: {"music": d.choice(_SONGS), "volume": d.randint(1, 10)},
        ("Play {music} at volume {volume}.", "I want to hear {music}. Volume {volume}, please.", "Put on some {music}, volume {volume}."),
        _done, ("I am playing {music} at volume {volume}.", "Here is some {music}. Enjoy!"),
    ),
    Tool(
        "switch_light", "Turn a light on or off.", {"room": _one_of(*_ROOMS), "on": _YES_NO}, ("room", "on"),
        lambda d: {"room": d.choice(_ROOMS), "on": d.random() < 0.5},
        ("Turn {on} the light in the {room}.", "Switch the {room} light {on}.", "Please turn the light in the {room} {on}."),
        _done, ("The light in the {room} is {on} now.", "Done! The {room} light is {on}."),
    ),
    Tool(
        "add_to_list", "Put something on the shopping list.", {"item": _text("What to buy"), "count": _WHOLE}, ("item", "count"),
        lambda d: {"item": d.choice(FOODS + OBJECTS), "count": d.randint(1, 24)},
        ("Add {count} {item} to my shopping list.", "Put {item} on the list, {count} of it.", "I need {item}, {count} pieces. Add it to my list."),
        lambda d, _: {"items": d.randint(1, 20)}, ("I put {item} on your list. There are {items} things on it now.",),
    ),
    Tool(
        "get_time", "Get the time in a city.", {"city": _text("Name of the city")}, ("city",),
        lambda d: {"city": d.choice(CITIES)},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city} now?"),
        lambda d, _: {"time": f"{d.randint(0, 23):02}:{d.randint(0, 59):02}"}, ("It is {time} in {city}.", "In {city} it is {time} now."),
    ),
    Tool(
        "convert_units", "Convert an amount to another unit.",
        {"amount": _NUMBER, "from_unit": _text("Unit of the amount"), "to_unit": _text("Wanted unit")}, ("amount", "from_unit", "to_unit"),
        _conversion, ("How many {to_unit} are {amount} {from_unit}?", "Convert {amount} {from_unit} to {to_unit}.",
         "What is {amount} {from_unit} in {to_unit}?"),
        _converted, ("{amount} {from_unit} are {result} {to_unit}.",),
    ),
    Tool(
        "find_recipe", "Find a recipe.", {"ingredient": _text("What must be in it"), "vegetarian": _YES_NO}, ("ingredient",),
        lambda d: {"ingredient": d.choice(FOODS), "vegetarian": True} if d.random() < 0.4 else {"ingredient": d.choice(FOODS)},
        ("Find a recipe with {ingredient}{vegetarian}.", "What can I cook with {ingredient}{vegetarian}?", "I want a recipe with {ingredient}{vegetarian}."),
        lambda d, v: {"recipe": f"{v['ingredient']} {d.choice(('soup', 'salad', 'pie', 'stew', 'cake'))}", "minutes": d.randint(10, 90)},
        ("You can make {recipe}. It takes {minutes} minutes.", "How about {recipe}? You need {minutes} minutes."),
    ),
    Tool(
        "set_reminder", "Remind the user of something.", {"task": _text("What to do"), "day": _one_of(*_DAYS)}, ("task", "day"),
        lambda d: {"task": _task(d), "day": d.choice(_DAYS)},
        ("Remind me to {task} on {day}.", "On {day} I have to {task}. Please remind me.", "Set a reminder for {day}: {task}."),
        _done, ("I will remind you to {task} on {day}.", "Done! On {day} I will tell you to {task}."),
    ),
    Tool(
        "translate", "Translate a word.", {"word": _text("An English word"), "language": _one_of(*_LANGUAGES)}, ("word", "language"),
        lambda d: {"word": d.choice(OBJECTS + FOODS + FEELINGS), "language": d.choice(_LANGUAGES)},
        ("What is {word} in {language}?", "Translate {word} to {language}.", "How do you say {word} in {language}?"),
        lambda d, _: {"translation": "".join(d.choice(("la", "mo", "ti", "re", "so", "ka", "ne")) for _ in range(d.randint(2, 3)))},
        ("In {language}, {word} is {translation}.", "The {language} word for {word} is {translation}."),
    ),
    Tool(
        "get_price", "Get the price of something.", {"item": _text("What to look up"), "currency": _one_of("EUR", "USD", "GBP")}, ("item", "currency"),
        lambda d: {"item": d.choice(OBJECTS + THINGS), "currency": d.choice(("EUR", "USD", "GBP"))},
        ("How much is a {item} in {currency}?", "What does a {item} cost in {currency}?", "Tell me the price of a {item} in {currency}."),
        lambda d, _: {"price": round(d.uniform(1, 300), 2)}, ("A {item} costs {price} {currency}.",),
    ),
    Tool(
        "search_books", "Look for a book in the library.", {"title": _text("Title of the book")}, ("title",),
        lambda d: {"title": _title(d)},
        ("Do you have the book \"{title}\"?", "Look for the book \"{title}\".", "I want to read \"{title}\". Is it there?"),
        lambda d, _: {"found": True, "shelf": d.randint(1, 60)}, ("Yes, \"{title}\" is on shelf {shelf}.", "You find it on shelf {shelf}."),
    ),
    Tool(
        "book_table", "Book a table in a restaurant.", {"name": _text("Name of the guest"), "people": _WHOLE, "day": _one_of(*_DAYS)}, ("name", "people", "day"),
        lambda d: {"name": d.choice(NAMES), "people": d.randint(2, 12), "day": d.choice(_DAYS)},
        ("Book a table for {people} people on {day}. My name is {name}.", "I am {name}. We are {people} people and want a table on {day}."),
        lambda d, _: {"table": d.randint(1, 40)}, ("Table {table} is booked for {people} people on {day}.", "Done, {name}! You have table {table} on {day}."),
    ),
)  # fmt: skip


def tool_document(draw: random.Random) -> Document:
    """One to three declared tools and one or two turns; now and then a turn that needs no tool."""
    declared = draw.sample(TOOLS, draw.choice((1, 1, 2, 2, 3)))
    thinks = draw.random() < 0.3
    messages: list[dict[str, Any]] = [system(draw.choice(SYSTEMS))] if draw.random() < 0.2 else []
    group, answer, reasoning = "", "", ""
    turns = draw.choice((1, 1, 2, 2, 3))
    for turn in range(turns):
        if answer:
            messages.append({**assistant(answer), **({"reasoning_content": reasoning} if thinks else {})})
        if draw.random() < 0.15:
            asked, answer, reasoning = polite_turn(draw, thanks=turn > 0)
            messages.append(user(asked))
            continue
        tool = draw.choice(declared)
        asked, call, result, answer, reasoning = _called(draw, tool, thinks, number=turn)
        messages += [user(asked), call, result]
        group = asked
    kind_fields = {"tools": [tool.declaration() for tool in declared]}
    return chat("tool", f"tool|{group}", messages, answer, reasoning=reasoning if thinks else None, **kind_fields)


def _called(draw: random.Random, tool: Tool, thinks: bool, *, number: int) -> tuple[str, Values, Values, str, str]:
    """What is asked, the call and its result as messages, what is said then and thought before that."""
    values = tool.draw(draw)
    asked = draw.choice(tool.asks).format(**_spoken(values))
    result = tool.result(draw, values)
    call: Values = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": tool.name, "arguments": json.dumps(values)},
            }
        ],
    }
    if thinks:
        call["reasoning_content"] = f"I need the tool {tool.name} for this."
    said = draw.choice(tool.says).format(**_spoken({**values, **result}))
    message = {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps(result)}
    return asked, call, message, said, f"The tool {tool.name} has answered. I tell the user."


def _spoken(values: Values) -> Values:
    """As a person says it: a switch is on or off; what is not wanted is not named."""
    spoken = {"vegetarian": "", **values}
    if isinstance(spoken.get("on"), bool):
        spoken["on"] = "on" if spoken["on"] else "off"
    if spoken["vegetarian"] is True:
        spoken["vegetarian"] = " but without meat"
    return spoken
