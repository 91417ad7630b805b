"""The words that stories, questions and the other made-up documents are about: everyday ones, for a small model."""

from __future__ import annotations


def _listed(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.replace("\n", " ").split(",") if entry.strip())


NAMES = _listed("""
Tim, Lily, Tom, Mia, Ben, Anna, Sam, Lucy, Max, Ella, Jack, Emma, Leo, Rosie, Finn, Nora, Oscar, Ruby, Theo, Sara,
Noah, Amy, Luke, Zoe, Adam, Molly, Jake, Sue, Peter, Jane, Dan, Kate, Bob, Daisy, Fred, Lola, Henry, Maya, Alex,
Grace, Billy, Polly, Hugo, Ida, Carl, Nina, Paul, Eva, Mark, Tina, Eric, Clara, Pip, Dora, Felix, Bella, Roy, Hanna,
Otto, Rita
""")

ANIMALS = _listed("""
cat, dog, rabbit, fox, bear, mouse, bird, duck, frog, turtle, hedgehog, squirrel, owl, deer, pig, cow, horse, sheep,
goat, hen, rooster, goose, swan, penguin, seal, whale, dolphin, fish, crab, octopus, lion, tiger, elephant, giraffe,
zebra, monkey, kangaroo, koala, panda, camel, wolf, bee, butterfly, ladybug, ant, spider, snail, worm, bat, parrot,
crow, robin, eagle, otter, beaver, badger, mole, donkey, pony, kitten, puppy, lamb, chick, snake, lizard, shark,
starfish, moose
""")

PEOPLE = _listed("""
girl, boy, farmer, baker, teacher, sailor, gardener, painter, king, queen, princess, pirate, doctor, grandmother,
grandfather, fisherman, knight, robot, giant, wizard, fairy, snowman, dragon, clown, astronaut, shepherd, miller,
tailor
""")

TRAITS = _listed("""
little, happy, shy, brave, sleepy, curious, kind, funny, hungry, lonely, clever, silly, gentle, lazy, busy, proud,
quiet, cheerful, grumpy, careful, friendly, small, young, old, tired, playful, helpful, noisy, polite, clumsy
""")

THINGS = _listed("""
ball, kite, red balloon, book, drum, boat, lamp, hat, blue scarf, box, key, map, bell, cake, apple, basket, umbrella,
toy train, bike, ladder, mirror, teddy bear, shell, feather, stone, candle, flute, guitar, pencil, painting, flower,
seed, blanket, pillow, jar of honey, cookie, carrot, pumpkin, egg, nest, coin, ring, clock, letter, paper plane,
wagon, swing, rope, bucket, shovel, snowball, lantern, whistle, puzzle, doll, glove, boot, sock, spoon, cup, kettle,
pie, loaf of bread, strawberry, pear, acorn, leaf, star, rainbow, sled, raft, tent, camera, button, ribbon, crown,
treasure chest, broom
""")

PLACES = _listed("""
park, forest, garden, beach, farm, school, kitchen, river, lake, hill, village, market, town, castle, cave, meadow,
barn, library, playground, mountain, island, pond, field, old house, attic, zoo, bakery, train station, harbor,
desert, jungle, snowy valley, orchard, bridge, big city, backyard, tree house, shop, lighthouse, museum
""")

EVENTS = _listed("""
gets lost, makes a new friend, finds something, loses something, learns to share, helps a friend,
is afraid of the dark, plants a seed, builds something, has a birthday, goes on a trip, learns to swim,
learns to ride a bike, sees snow for the first time, hears a strange noise, wants to fly, cooks a meal, says sorry,
tells a lie and feels bad, wins a race, loses a game, cleans up a mess, waits for the rain to stop,
takes care of a baby, breaks something, fixes something, looks for treasure, sings a song, paints a picture,
cannot sleep, misses home, gets a gift, gives a gift, tries a new food, climbs too high, meets someone different,
learns to be patient, tells the truth, keeps a promise, goes to bed, asks for help, catches a cold,
plays hide and seek, bakes a cake, saves someone, shares lunch, finds the way home
""")

FEELINGS = _listed("""
happy, sad, angry, scared, proud, excited, lonely, surprised, bored, tired, nervous, calm, jealous, thankful, shy,
hungry, sick, worried, brave, curious, confused, hopeful
""")

FOODS = _listed("""
apple, banana, bread, butter, cheese, milk, egg, rice, soup, salad, pasta, pizza, potato, tomato, carrot, onion,
honey, cake, cookie, chocolate, ice cream, orange, lemon, grape, strawberry, pear, peach, cherry, melon, corn, bean,
pea, nut, fish, chicken, sandwich, pancake, pie, jam, tea, coffee, juice, water, yogurt, salt, sugar, pepper, oat,
mushroom, garlic
""")

NATURE = _listed("""
sun, moon, star, sky, cloud, rain, snow, wind, storm, rainbow, thunder, fog, ice, river, lake, sea, ocean, wave,
mountain, hill, forest, tree, flower, grass, leaf, seed, rock, sand, desert, island, volcano, cave, spring, summer,
autumn, winter, morning, night, day, shadow, fire, planet, earth, air, mud, valley, waterfall, beach
""")

OBJECTS = _listed("""
chair, table, bed, door, window, lamp, clock, mirror, spoon, fork, knife, cup, plate, bottle, pan, oven, fridge,
phone, computer, book, pencil, pen, paper, scissors, bag, box, key, lock, umbrella, shoe, hat, coat, sock, glove, car,
bus, train, plane, boat, bicycle, wheel, bridge, road, house, school, hospital, shop, library, camera, radio, drum,
piano, guitar, violin, ball, kite, doll, puzzle, hammer, nail, saw, rope, ladder, broom, soap, towel, toothbrush,
comb, candle, map, coin, blanket, pillow, basket, garden, kitchen, zoo, farm, museum, letter, stamp, robot, telescope,
calendar, magnet, battery
""")

JOBS = _listed("""
doctor, nurse, teacher, farmer, baker, cook, pilot, driver, sailor, fisherman, painter, singer, dancer, writer,
builder, carpenter, plumber, tailor, gardener, firefighter, police officer, judge, scientist, astronaut, vet, dentist,
librarian, mechanic, postman, shepherd, beekeeper, photographer, actor, waiter, engineer
""")

ACTIONS = _listed("""
bake bread, make tea, cook rice, boil an egg, make a sandwich, make soup, make pancakes, wash my hands,
brush my teeth, clean my room, wash a car, plant a flower, grow tomatoes, water a plant, paint a wall, draw a cat,
fold a paper plane, tie my shoes, ride a bike, learn to swim, make a friend, say sorry, fall asleep, wake up early,
feel better, stay healthy, save money, save water, write a letter, write a poem, read more books, learn a new word,
learn to count, tell a joke, give a gift, plan a party, pack a bag, build a snowman, fly a kite, feed a cat,
walk a dog, take care of a fish, set a table, make lemonade, make a salad, dry wet shoes, stay warm in winter,
stay cool in summer, find my way home, ask for help, be a good friend, be kind, be brave, calm down, stop being angry,
cheer up a friend, study for a test, sharpen a pencil, wrap a present, light a candle safely, cross the street,
clean a window, wash dishes, do the laundry, sew a button, play hide and seek, play chess, sing well, dance,
run faster, jump rope, throw a ball, catch a fish, start a garden
""")

COLOURS = _listed("red, blue, green, yellow, orange, purple, pink, brown, black, white, gray, gold, silver")

CITIES = _listed("""
Paris, London, Rome, Berlin, Madrid, Vienna, Oslo, Lisbon, Dublin, Athens, Prague, Cairo, Tokyo, Delhi, Lima, Boston,
Chicago, Toronto, Sydney, Seoul, Nairobi, Helsinki, Warsaw, Zurich, Milan, Lyon, Porto, Ghent, Bergen, Denver, Austin,
Kyoto
""")
