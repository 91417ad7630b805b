"""Simple facts about everyday things, each asked in several ways. Where these answer a question, SmolLM's guess is not taken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from .documents import Document
from .prompts import with_article
from .talk import conversation, polite_turn

_ANIMALS = """
cat|meows|kitten|fish and meat|in a house with people;dog|barks|puppy|meat and bones|in a house with people
cow|moos|calf|grass and hay|on a farm;pig|oinks|piglet|corn and vegetables|on a farm;horse|neighs|foal|grass and oats|on a farm
sheep|bleats|lamb|grass|on a farm;goat|bleats|kid|grass and leaves|on a farm;hen|clucks|chick|seeds and worms|on a farm
duck|quacks|duckling|plants and snails|at a pond;goose|honks|gosling|grass|at a lake;frog|croaks|tadpole|flies and bugs|at a pond
lion|roars|cub|meat|in the grassland of Africa;tiger|roars|cub|meat|in the jungle;bear|growls|cub|berries, honey and fish|in the forest
wolf|howls|pup|meat|in the forest;fox|barks|kit|mice and berries|in the forest;owl|hoots|owlet|mice|in a hollow tree
mouse|squeaks|pup|seeds and cheese|in a small hole;monkey|screeches|infant|fruit and leaves|in the jungle
elephant|trumpets|calf|grass and leaves|in Africa and Asia;snake|hisses|snakelet|mice and eggs|in the grass
bee|buzzes|larva|nectar|in a hive;bird|sings|chick|seeds and worms|in a nest;rooster|crows|chick|seeds and corn|on a farm
donkey|brays|foal|grass and hay|on a farm;whale|sings|calf|small fish|in the sea;seal|barks|pup|fish|at the sea
dolphin|clicks|calf|fish|in the sea;parrot|talks|chick|seeds and nuts|in the jungle;crow|caws|chick|seeds and worms|in the trees
rabbit||bunny|grass and carrots|in a hole in the ground;deer||fawn|grass and leaves|in the forest;fish||fry|water plants|in the water
squirrel||kit|nuts and acorns|in the trees;hedgehog||hoglet|bugs and snails|in the garden;turtle||hatchling|plants|near the water
penguin||chick|fish|in the cold south;giraffe||calf|leaves from tall trees|in Africa;zebra||foal|grass|in Africa
kangaroo||joey|grass|in Australia;koala||joey|leaves|in the trees of Australia;panda||cub|bamboo|in China;camel||calf|dry plants|in the desert
butterfly||caterpillar|nectar|in the garden;spider||spiderling|flies|in its web;snail||snail|leaves|in the garden
ant||larva|sugar and seeds|in an anthill;octopus||larva|crabs|in the sea;crab||larva|small sea animals|at the beach;shark||pup|fish|in the sea
otter||pup|fish|at the river;beaver||kit|bark and leaves|at the river;mole||pup|worms|under the ground;bat||pup|bugs|in a cave
eagle||eaglet|fish and mice|in the mountains;swan||cygnet|water plants|at the lake;moose||calf|leaves and water plants|in the north
"""
_FOODS = """
apple|red or green|sweet;banana|yellow|sweet;bread|brown|mild;butter|yellow|rich;cheese|yellow|salty;milk|white|mild
egg|white or brown|mild;rice|white|mild;tomato|red|fresh;potato|brown|mild;carrot|orange|sweet;onion|white|sharp;honey|golden|very sweet
chocolate|brown|sweet;orange|orange|sweet and fresh;lemon|yellow|sour;grape|green or purple|sweet;strawberry|red|sweet
pear|green or yellow|sweet;peach|orange and pink|sweet;cherry|red|sweet;melon|green outside|sweet;corn|yellow|sweet;pea|green|mild
nut|brown|rich;jam|red|sweet;coffee|black or brown|bitter;water|clear|of nothing at all;yogurt|white|a little sour;salt|white|salty
sugar|white|sweet;pepper|black|hot;mushroom|white or brown|mild;garlic|white|strong;salad|green|fresh;juice|often orange|sweet
"""
_USES = """
chair|sit on;table|eat or work at;bed|sleep in;door|go in and out;window|look outside;lamp|make light;clock|see what time it is
mirror|see ourselves;spoon|eat soup;fork|eat with;knife|cut things;cup|drink from;plate|put food on;bottle|keep water in;pan|fry food
oven|bake bread and cakes;fridge|keep food cold;phone|talk to people far away;computer|work, write and play;book|read stories
pencil|write and draw;pen|write;scissors|cut paper;bag|carry things;box|keep things in;key|open a lock;lock|keep a door closed
umbrella|stay dry in the rain;shoe|keep our feet safe;hat|keep our head warm;coat|stay warm;sock|keep our feet warm;glove|keep our hands warm
car|drive from place to place;bus|ride with many people;train|travel far on rails;plane|fly to other countries;boat|go over the water
bicycle|ride with our own legs;bridge|cross a river;road|drive on;house|live in;school|learn in;hospital|get well again;shop|buy things
library|borrow books;camera|take pictures;radio|hear music and news;drum|make loud beats;piano|play music;guitar|play music;ball|throw, kick and play
kite|fly in the wind;hammer|hit nails;saw|cut wood;rope|tie things;ladder|climb up high;broom|sweep the floor;soap|wash our hands
towel|dry ourselves;toothbrush|clean our teeth;comb|comb our hair;candle|make a small light;map|find the way;coin|pay for things
blanket|keep warm at night;pillow|rest our head;basket|carry fruit and bread;telescope|look at the stars;calendar|see which day it is
battery|give power to small things;bell|make a sound;bucket|carry water;shovel|dig a hole;whistle|make a loud sound;kettle|boil water
"""
_JOBS = """
doctor|helps sick people|hospital;nurse|takes care of sick people|hospital;teacher|teaches children|school;farmer|grows food and keeps animals|farm
baker|bakes bread and cakes|bakery;cook|makes food|kitchen;pilot|flies planes|plane;driver|drives a car or a bus|road;sailor|works on a ship|sea
fisherman|catches fish|sea;painter|paints pictures and walls|workshop;singer|sings songs|stage;dancer|dances for people|stage
writer|writes books|desk;builder|builds houses|building site;carpenter|makes things from wood|workshop;tailor|makes clothes|workshop
gardener|takes care of plants|garden;firefighter|puts out fires|fire station;judge|decides what is right by law|court
vet|helps sick animals|animal clinic;dentist|takes care of teeth|clinic;librarian|takes care of books|library;mechanic|fixes cars|garage
postman|brings letters|street;shepherd|takes care of sheep|meadow;beekeeper|takes care of bees|garden;photographer|takes pictures|studio
actor|plays in films and plays|theater;waiter|brings food to guests|restaurant;astronaut|flies into space|space station
"""
_OTHER = """
How many days are in a week?|A week has seven days.;How many months are in a year?|A year has twelve months.
What are the seasons of the year?|The seasons are spring, summer, autumn and winter.;How many legs does a dog have?|A dog has four legs.
How many legs does a spider have?|A spider has eight legs.;How many legs does a bird have?|A bird has two legs.
What color is the sky?|On a clear day, the sky is blue.;What color is snow?|Snow is white.;What color is grass?|Grass is green.
What color is the sun?|The sun looks yellow.;What color is the sea?|The sea is often blue or green.;What is the capital of France?|The capital of France is Paris.
What is the capital of Italy?|The capital of Italy is Rome.;What is the capital of Germany?|The capital of Germany is Berlin.
What is the capital of Spain?|The capital of Spain is Madrid.;What is the capital of England?|The capital of England is London.
What is the capital of Japan?|The capital of Japan is Tokyo.;What is the capital of Norway?|The capital of Norway is Oslo.
What is rain?|Rain is water that falls from the clouds.;What is snow?|Snow is frozen water that falls from the clouds in winter.
What is the sun?|The sun is a big, hot star. It gives us light and makes the day warm.;What is the moon?|The moon goes around the earth. We see it at night.
What is ice?|Ice is frozen water. It is hard and cold.;What is a tree?|A tree is a tall plant with a trunk, branches and leaves.
What is a river?|A river is water that flows through the land to the sea.;What is the sea?|The sea is a very big body of salty water.
What is a cloud?|A cloud is made of many tiny drops of water in the sky.;What is fire?|Fire is hot and bright. It can cook our food, but it can burn us too.
What is a mountain?|A mountain is very high land. It is often cold at the top.;What is a flower?|A flower is the colorful part of a plant.
"""
Fact = tuple[tuple[str, ...], str]
"""Ways to ask, and the answer."""


def _entries(table: str) -> Iterator[list[str]]:
    for line in table.strip().split("\n"):
        for entry in line.split(";"):
            yield entry.split("|")


@cache
def simple_facts() -> tuple[Fact, ...]:
    """Every fact, in a fixed order."""
    others = (((asked,), said) for asked, said in _entries(_OTHER))
    return (*_animal_facts(), *_food_facts(), *_use_facts(), *_job_facts(), *others)


@cache
def answered_questions() -> frozenset[str]:
    return frozenset(asked for ways, _ in simple_facts() for asked in ways)


def fact_document(draw: random.Random) -> Document:
    """One to three facts. Always for training: they are to be known, not guessed."""
    turns = [_turn(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    if draw.random() < 0.1:
        turns.append(polite_turn(draw, thanks=True))
    return conversation(draw, "", turns)


def _turn(draw: random.Random) -> tuple[str, str, str]:
    ways, said = draw.choice(simple_facts())
    return draw.choice(ways), said, "I know this. The answer is simple."


def _animal_facts() -> Iterator[Fact]:
    for noun, sound, baby, eats, lives in _entries(_ANIMALS):
        a = with_article(noun)
        capital = a.capitalize()
        if sound:
            yield (
                (f"What sound does {a} make?", f"What does {a} say?", f"Which sound does the {noun} make?"),
                f"{capital} {sound}.",
            )
        yield (
            (f"What is a baby {noun} called?", f"What do you call a baby {noun}?"),
            f"A baby {noun} is called {with_article(baby)}.",
        )
        yield (f"What does {a} eat?", f"What do I feed {a}?", f"What food does {a} like?"), f"{capital} eats {eats}."
        yield (
            (f"Where does {a} live?", f"Where can I find {a}?", f"Where is the home of {a}?"),
            f"{capital} lives {lives}.",
        )


def _food_facts() -> Iterator[Fact]:
    for noun, colour, taste in _entries(_FOODS):
        capital = noun.capitalize()
        yield (
            (f"What color is {noun}?", f"What color is {with_article(noun)}?", f"Which color does {noun} have?"),
            f"{capital} is {colour}.",
        )
        yield (f"What does {noun} taste like?", f"How does {noun} taste?"), f"{capital} tastes {taste}."


def _use_facts() -> Iterator[Fact]:
    for noun, use in _entries(_USES):
        a = with_article(noun)
        yield (
            (
                f"What is {a} for?",
                f"What do people use {a} for?",
                f"Why do people need {a}?",
                f"What can I do with {a}?",
                f"What is {a}?",
            ),
            (
                f"{a.capitalize()} is a thing to {use}."
                if use.endswith(("on", "in", "at", "from", "with"))
                else f"We use {a} to {use}."
            ),
        )


def _job_facts() -> Iterator[Fact]:
    for noun, does, place in _entries(_JOBS):
        a = with_article(noun)
        yield (
            (f"What does {a} do?", f"What is the work of {a}?", f"Tell me about the work of {a}."),
            f"{a.capitalize()} {does}.",
        )
        preposition = (
            "on"
            if place in ("farm", "stage", "road", "sea", "street", "building site", "plane", "meadow", "space station")
            else "in"
        )
        preposition = "at" if place in ("desk", "fire station", "court") else preposition
        yield (
            (f"Where does {a} work?",),
            f"{a.capitalize()} works {preposition} {'the' if place in ('sea', 'road', 'street') else with_article(place).split()[0]} {place}.",
        )
