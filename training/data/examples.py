"""Conversations that the small writer is shown before each request, so that it answers as simply as they do."""

from __future__ import annotations

from dataclasses import dataclass

STORY_SYSTEM = "You write very short stories for small children with short and easy words."
ANSWER_SYSTEM = "You answer small children in one to three short and simple sentences."


@dataclass(frozen=True, slots=True)
class Examples:
    """`kind` is that of the prompts that may follow; `turns` are what a user said and what was answered."""

    kind: str
    system: str
    turns: tuple[tuple[str, str], ...]


EXAMPLES = (
    Examples(
        "story",
        STORY_SYSTEM,
        (
            (
                "Write a very short story about a shy duck named Pia who wants a hat.",
                "Pia was a shy duck. She lived at the pond and she wanted a hat. One day, she saw a red hat in the grass. "
                '"Is this your hat?" she asked the frog. "No," said the frog. "You can have it." Pia put the hat on her '
                'head and looked into the water. She looked very nice. "Thank you!" she said. Now Pia had a hat and a new '
                "friend.",
            ),
        ),
    ),
    Examples(
        "answer",
        ANSWER_SYSTEM,
        (
            ("What is a chair?", "A chair is a thing to sit on. It has four legs and a back."),
            ("Why do we sleep?", "We sleep so that our body can rest. After a good night, we feel fresh and strong."),
            (
                "How do I make tea?",
                "First, boil some water. Then put a tea bag in a cup and pour the hot water over it. Wait three minutes, "
                "and your tea is ready.",
            ),
            ("I feel happy today.", "That is wonderful! I am glad that you feel happy. What made your day so good?"),
        ),
    ),
    Examples(
        "story",
        STORY_SYSTEM,
        (
            (
                "Write a very short story about a tired farmer named Gus who loses his boots.",
                "Gus was a tired farmer. In the morning, he could not find his boots. He looked under the bed and behind "
                "the door, but there were no boots. Then he heard a funny noise in the barn. His dog was asleep on the "
                'boots! Gus had to laugh. "You like my boots too," he said. He gave the dog an old blanket and put on his '
                "boots. Then they went to the field together.",
            ),
        ),
    ),
    Examples(
        "answer",
        ANSWER_SYSTEM,
        (
            ("What does a cow eat?", "A cow eats grass and hay. It chews its food for a long time."),
            ("What color is the sea?", "The sea is often blue or green. When the sky is gray, the sea looks gray too."),
            (
                "My friend is sick. What can I do?",
                "You can visit your friend and bring some soup. A kind word helps too.",
            ),
            ("What can I do with a rope?", "You can jump over it or tie a knot. You can also play a pulling game."),
        ),
    ),
    Examples("story", STORY_SYSTEM, ()),
    Examples(
        "story",
        STORY_SYSTEM,
        (
            (
                "Write a very short story about a girl named Ula who is afraid of the storm.",
                "It was dark and the wind was loud. Ula hid under her blanket. She was afraid of the storm. Her "
                'grandmother came in with a candle. "The storm is only the sky that sings," she said. They sat at the '
                "window and counted the flashes of light. One, two, three! Soon the storm was far away. Ula was not afraid "
                "any more, and she fell asleep.",
            ),
        ),
    ),
    Examples(
        "answer",
        ANSWER_SYSTEM,
        (
            ("Hello!", "Hello! It is nice to meet you. What would you like to talk about?"),
            ("What does a pilot do?", "A pilot flies a plane. The pilot brings people safely to other cities."),
            ("Where does a whale live?", "A whale lives in the sea. It comes up to the air to breathe."),
            (
                "How can I learn to draw?",
                "Start with simple shapes like circles and lines. Draw a little bit every day.",
            ),
        ),
    ),
)
