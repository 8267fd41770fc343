"""Chat exchanges from small grammars: stories, letters, recipes, facts and word tasks.

SmolLM2's answers (`answers.py`) give variety, these give fluency: every sentence was
written for this project and is drawn with its slots filled. Some tasks copy from the
prompt, as summaries and rewrites do, which is what lookup drafters live on.
"""

import random


def _split(table: str, mark: str = " ") -> list[str]:
    return table.replace("\n", mark).split(mark)


NAMES = _split("""Lily Tom Mia Max Lucy Ben Sara Leo Amy Jack Nina Sam Ella Finn
Ruby Oscar Zara Hugo Ivy Noah Clara Theo Maya Omar""")
PEOPLE = ("girl", "boy", "child", "baker", "farmer", "sailor", "painter", "teacher")
ANIMALS = _split("""dog cat rabbit fox bear mouse owl duck pony frog squirrel hedgehog
turtle lamb kitten puppy""")
MOODS = _split("kind brave clever shy curious cheerful quiet patient gentle lonely")
PLACES = _split(
    """the forest|the garden|the old house|the park|the beach|the market|the village
the mountains|the river|the school|the barn|the library""",
    "|",
)
OBJECTS = _split(
    """a shiny key|an old map|a red ball|a small box|a blue feather|a golden coin
a broken clock|a silver bell|a lost letter|a smooth stone|a music box|a big book
a little boat|a warm hat|a glass jar|a wooden flute""",
    "|",
)
FEELINGS = _split("happy proud calm grateful excited")


def story(r):
    name, friend = r.sample(NAMES, 2)
    mood, who, place, thing = map(r.choice, (MOODS, PEOPLE, PLACES, OBJECTS))
    animal, feeling = r.choice(ANIMALS), r.choice(FEELINGS)
    the = "the " + thing.split(" ", 1)[1]
    if r.random() < 0.4:
        who = animal
    ask = r.choice(
        [
            f"Write a story about a {mood} {who} named {name} and {thing}.",
            f"Tell me a short story about {name}, a {mood} {who}.",
            f"Write a short story that takes place near {place}.",
            f"Write a story for children about {thing}.",
            f"Tell me a story about {name} and {friend}.",
        ]
    )
    start = r.choice(
        [
            f"Once upon a time, there was a {mood} {who} named {name}.",
            f"There once was a {mood} {who} called {name}.",
            f"Long ago, a {mood} {who} named {name} lived near {place}.",
            f"{name} was a {mood} {who} who lived close to {place}.",
        ]
    )
    walk = r.choice(
        [
            f"One day, {name} went for a walk near {place}.",
            f"One sunny morning, {name} walked to {place}.",
            f"Every day, {name} went to {place} to play.",
            f"One evening, {name} was on the way home from {place}.",
        ]
    )
    find = r.choice(
        [
            f"On the ground, {name} saw {thing}.",
            f"Suddenly, {name} found {thing} under a tree.",
            f"There, behind a big rock, was {thing}.",
            f"Something was hidden in the grass. It was {thing}.",
        ]
    )
    wonder = r.choice(
        [
            f'"Who could have lost this?" asked {name}.',
            f"{name} had never seen anything like it.",
            f'"How beautiful!" said {name}.',
            f"{name} wanted to know where it came from.",
        ]
    )
    meet = r.choice(
        [
            f"Then {name} met {friend}, who looked very sad.",
            f"Just then, {friend} came along the path.",
            f"Soon {name} heard someone cry. It was {friend}.",
            f"{name} ran to show it to a friend named {friend}.",
        ]
    )
    talk = r.choice(
        [
            f'"I lost {thing}," said {friend}. "I looked for it all day."',
            f'"{the[0].upper()}{the[1:]} belongs to my grandmother," said {friend}.',
            f'"Can you help me?" asked {friend}. "I cannot find {the}."',
            f'"Let us look after {the} together," said {friend}.',
        ]
    )
    give = r.choice(
        [
            f"{name} smiled and gave {the} to {friend}.",
            f'"Here it is," said {name}, and gave it to {friend}.',
            f"{name} thought for a moment and then shared {the} with {friend}.",
        ]
    )
    end = r.choice(
        [
            f"They were both very {feeling}, and they became good friends.",
            f"From that day on, {name} and {friend} were the best of friends.",
            f"{friend} was so {feeling} that they danced all the way home.",
            f"{name} went home and felt {feeling}.",
        ]
    )
    moral = r.choice(
        ["", "", " It is good to help others.", " A small gift can be a big joy."]
    )
    if r.random() < 0.5:
        text = f"{start} {walk} {find} {wonder}\n\n{meet} {talk} {give}\n\n{end}{moral}"
    else:
        text = f"{start} {walk} {find} {wonder} {meet} {talk} {give} {end}{moral}"
    return ask, text


DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
EVENTS = _split(
    """a birthday party|a dinner|a team meeting|a picnic|a concert|a film night
a garden party|a workshop|a school play|a lunch""",
    "|",
)
FAVORS = _split(
    """to help me move|to look at my report|to lend me a book|to water my plants
to check my homework|to join our team|to send me the notes|to feed my cat
to give me a ride""",
    "|",
)


def letter(r):
    name, me = r.sample(NAMES, 2)
    day, event, favor = r.choice(DAYS), r.choice(EVENTS), r.choice(FAVORS)
    hour = r.randint(1, 8)
    hello = r.choice([f"Dear {name},", f"Hi {name},", f"Hello {name},"])
    hope = r.choice(
        ["I hope you are well. ", "How are you? ", "", "I hope this finds you well. "]
    )
    bye = r.choice(["Best wishes,", "Kind regards,", "Yours,", "Thank you,"])
    kind = r.randrange(5)
    if kind == 0:
        ask = f"Write a short email that invites {name} to {event} on {day}. "
        ask += f"My name is {me}."
        body = r.choice(
            [
                f"I would like to invite you to {event} on {day} at {hour} o'clock.",
                f"On {day} we are having {event}, and I would love to see you there.",
            ]
        )
        more = r.choice(
            [
                "Please let me know if you can come.",
                "There will be good food and music.",
                "You can bring a friend if you like.",
            ]
        )
    elif kind == 1:
        ask = f"Write an email to ask {name} {favor} on {day}. Sign it as {me}."
        body = r.choice(
            [
                f"I am writing to ask you {favor} on {day}.",
                f"Would you have time {favor} on {day}?",
            ]
        )
        more = r.choice(
            [
                "It would be a great help to me.",
                "I would be very grateful.",
                "Please tell me if another day is better for you.",
            ]
        )
    elif kind == 2:
        ask = f"Write a note to thank {name} for {event}. I am {me}."
        body = f"Thank you so much for {event} on {day}."
        more = r.choice(
            [
                "I had a wonderful time and enjoyed every minute.",
                "It was very kind of you to think of me.",
                "I will remember it for a long time.",
            ]
        )
    elif kind == 3:
        ask = f"Write an email to tell {name} that I cannot come to {event}. "
        ask += f"My name is {me}."
        body = f"I am sorry, but I cannot come to {event} on {day}."
        more = r.choice(
            [
                "I have to work that day.",
                "I am not feeling well and need to rest.",
                "I hope we can meet another time.",
            ]
        )
    else:
        ask = f"Write an email to {name} to move {event} to {day}. Sign it as {me}."
        body = f"I would like to move {event} to {day} at {hour} o'clock."
        more = r.choice(
            [
                "Please let me know if that works for you.",
                "I am sorry for the change.",
                "If you have other plans, we can find another day.",
            ]
        )
    return ask, f"{hello}\n\n{hope}{body} {more}\n\n{bye}\n{me}"


DISHES = {
    "tomato soup": ("tomatoes", "onion", "salt", "cream"),
    "vegetable soup": ("carrots", "potatoes", "onion", "salt"),
    "a cheese omelette": ("eggs", "cheese", "butter", "salt"),
    "pancakes": ("flour", "milk", "eggs", "sugar"),
    "a fruit salad": ("apples", "bananas", "oranges", "lemon juice"),
    "a green salad": ("lettuce", "cucumber", "olive oil", "vinegar"),
    "fried rice": ("rice", "eggs", "peas", "soy sauce"),
    "pasta with tomato sauce": ("pasta", "tomatoes", "garlic", "olive oil"),
    "mashed potatoes": ("potatoes", "milk", "butter", "salt"),
    "banana bread": ("bananas", "flour", "sugar", "eggs"),
    "a sandwich": ("bread", "cheese", "lettuce", "butter"),
    "oatmeal": ("oats", "milk", "honey", "berries"),
    "a smoothie": ("berries", "banana", "yogurt", "honey"),
    "roast chicken": ("chicken", "lemon", "garlic", "salt"),
    "bean stew": ("beans", "tomatoes", "onion", "pepper"),
    "apple pie": ("apples", "flour", "butter", "sugar"),
}


def recipe(r):
    dish = r.choice(list(DISHES))
    a, b, c, d = DISHES[dish]
    minutes, people = r.choice([5, 10, 15, 20, 30]), r.randint(2, 6)
    ask = r.choice(
        [
            f"How do I make {dish} for {people} people?",
            f"Give me a simple recipe for {dish}.",
            f"I have {a} and {b}. How can I make {dish}?",
            f"What do I need to make {dish}?",
        ]
    )
    needs = f"To make {dish}, you need {a}, {b}, {c} and {d}."
    if ask.startswith("What do I need"):
        return ask, needs + r.choice(
            ["", " You can buy them in any shop.", " That is all."]
        )
    steps = [
        r.choice(
            [f"Wash and cut the {a}.", f"Prepare the {a}.", f"Put the {a} in a bowl."]
        ),
        r.choice([f"Add the {b} and mix well.", f"Stir in the {b}.", f"Add the {b}."]),
        r.choice(
            [
                f"Add the {c} and wait for {minutes} minutes.",
                f"Add the {c} and let it rest for {minutes} minutes.",
                f"Add the {c} and cook everything for {minutes} minutes.",
            ]
        ),
        r.choice(
            [f"Finish with the {d} and serve.", f"Add the {d} at the end. Enjoy!"]
        ),
    ]
    listed = "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))
    return ask, f"{needs}\n\n{listed}"


# country: capital, continent, language, known for
COUNTRIES = {
    "France": ("Paris", "Europe", "French", "its food and its art"),
    "Spain": ("Madrid", "Europe", "Spanish", "its beaches and its music"),
    "Italy": ("Rome", "Europe", "Italian", "its pasta and its old cities"),
    "Germany": ("Berlin", "Europe", "German", "its cars and its forests"),
    "Greece": ("Athens", "Europe", "Greek", "its islands and its temples"),
    "Portugal": ("Lisbon", "Europe", "Portuguese", "its coast and its fish"),
    "Poland": ("Warsaw", "Europe", "Polish", "its castles and its lakes"),
    "Sweden": ("Stockholm", "Europe", "Swedish", "its forests and its long winters"),
    "Norway": ("Oslo", "Europe", "Norwegian", "its fjords and its mountains"),
    "Finland": ("Helsinki", "Europe", "Finnish", "its lakes and its saunas"),
    "Ireland": ("Dublin", "Europe", "English", "its green hills and its music"),
    "Austria": ("Vienna", "Europe", "German", "its mountains and its music"),
    "Hungary": ("Budapest", "Europe", "Hungarian", "its hot springs"),
    "Japan": ("Tokyo", "Asia", "Japanese", "its trains and its gardens"),
    "China": ("Beijing", "Asia", "Chinese", "its long wall and its tea"),
    "India": ("New Delhi", "Asia", "Hindi", "its spices and its temples"),
    "Thailand": ("Bangkok", "Asia", "Thai", "its food and its beaches"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese", "its rice and its bays"),
    "Turkey": ("Ankara", "Asia", "Turkish", "its markets and its coast"),
    "Egypt": ("Cairo", "Africa", "Arabic", "its pyramids and its river"),
    "Kenya": ("Nairobi", "Africa", "Swahili", "its wild animals"),
    "Morocco": ("Rabat", "Africa", "Arabic", "its markets and its desert"),
    "Ghana": ("Accra", "Africa", "English", "its gold and its cocoa"),
    "Canada": ("Ottawa", "North America", "English", "its forests and its snow"),
    "Mexico": ("Mexico City", "North America", "Spanish", "its food and its pyramids"),
    "Cuba": ("Havana", "North America", "Spanish", "its music and its old cars"),
    "Brazil": (
        "Brasilia",
        "South America",
        "Portuguese",
        "its rainforest and its football",
    ),
    "Argentina": (
        "Buenos Aires",
        "South America",
        "Spanish",
        "its dance and its plains",
    ),
    "Peru": ("Lima", "South America", "Spanish", "its mountains and its old ruins"),
    "Chile": ("Santiago", "South America", "Spanish", "its long coast and its deserts"),
    "Australia": ("Canberra", "Oceania", "English", "its reefs and its kangaroos"),
    "New Zealand": ("Wellington", "Oceania", "English", "its hills and its sheep"),
}


def country(r):
    a, b = r.sample(list(COUNTRIES), 2)
    capital, continent, language, known = COUNTRIES[a]
    kind = r.randrange(6)
    if kind == 0:
        ask = r.choice(
            ["What is the capital of {}?", "Tell me the capital of {}."]
        ).format(a)
        return ask, f"The capital of {a} is {capital}."
    if kind == 1:
        return (
            f"Where is {a}?",
            f"{a} is a country in {continent}. Its capital is {capital}.",
        )
    if kind == 2:
        ask = f"Which language do people speak in {a}?"
        return ask, f"Most people in {a} speak {language}."
    if kind == 3:
        ask = r.choice(
            [f"Describe {a} in two sentences.", f"Give me some facts about {a}."]
        )
        text = f"{a} is a country in {continent} and is known for {known}. "
        return (
            ask,
            text + f"Its capital is {capital}, and most people there speak {language}.",
        )
    if kind == 4:
        other = COUNTRIES[b]
        text = f"{a} is in {continent}, and {b} is in {other[1]}. In {a} people speak "
        text += f"{language}, and in {b} they speak {other[2]}."
        if continent == other[1]:
            text = text.replace(
                f"in {continent}, and {b} is in {other[1]}", f"in {continent}, like {b}"
            )
        return f"Compare {a} and {b} in a few words.", text + (
            f" {a} is known for {known}, while {b} is known for {other[3]}."
        )
    return f"I am going to {a}. What should I know?", (
        f"{a} is known for {known}. The capital is {capital}, and it helps to know "
        f"a few words of {language}. Have a good trip!"
    )


OPPOSITES = _split(
    """hot cold;big small;fast slow;old new;light dark;early late;hard soft;wet dry
rich poor;loud quiet;happy sad;full empty;high low;near far;open closed;strong weak
deep shallow;long short;clean dirty;heavy light;brave afraid;cheap expensive;sweet sour
thick thin;young old;wide narrow;warm cool;right wrong""",
    ";",
)
KINDS = {
    "fruit": _split("apple banana pear cherry grape lemon peach plum"),
    "animal": _split("dog cat horse lion sheep rabbit whale eagle"),
    "color": _split("red blue green yellow orange purple brown pink"),
    "tool": _split("hammer saw drill wrench shovel rake axe pliers"),
    "piece of furniture": _split("chair table bed desk sofa shelf bench stool"),
    "musical instrument": _split("piano violin guitar flute drum trumpet harp cello"),
    "vehicle": _split("car bus train bicycle truck boat plane tram"),
    "vegetable": _split("carrot onion potato cabbage spinach pea leek bean"),
    "part of the body": _split("hand foot arm knee ear nose neck elbow"),
    "sport": _split("tennis football swimming hockey rowing golf boxing skiing"),
}
VERBS = _split(
    """walk walked;play played;cook cooked;write wrote;read read;sing sang;run ran
eat ate;drink drank;see saw;find found;buy bought;make made;take took;give gave
open opened;clean cleaned;build built;draw drew;paint painted""",
    ";",
)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def words(r):
    kind = r.randrange(8)
    if kind == 0:
        a, b = r.sample(r.choice(OPPOSITES).split(), 2)
        ask = r.choice(
            ["What is the opposite of {}?", "Give me the opposite of the word {}."]
        )
        return ask.format(a), f"The opposite of {a} is {b}."
    if kind == 1:
        k, n = r.choice(list(KINDS)), r.randint(3, 5)
        found = r.sample(KINDS[k], n)
        ask = f"Name {n} examples of {_a(k)}."
        return ask, f"{', '.join(found[:-1]).capitalize()} and {found[-1]}."
    if kind == 2:
        k, other = r.sample(list(KINDS), 2)
        odd, rest = r.choice(KINDS[other]), r.sample(KINDS[k], 3)
        shown = [*rest, odd]
        r.shuffle(shown)
        ask = f"Which word does not belong: {', '.join(shown)}?"
        return ask, f"The word {odd} does not belong. Each of the others is {_a(k)}."
    if kind == 3:
        pool = [w for ws in KINDS.values() for w in ws]
        found = r.sample(pool, r.randint(3, 6))
        ask = f"Sort these words by the alphabet: {', '.join(found)}."
        return ask, ", ".join(sorted(found))
    if kind == 4:
        w = r.choice([w for ws in KINDS.values() for w in ws])
        k = next(k for k, ws in KINDS.items() if w in ws)
        return f"What kind of thing is {_a(w)}?", f"{_a(w).capitalize()} is {_a(k)}."
    if kind == 5:
        w, v = r.choice([w for ws in KINDS.values() for w in ws]), r.choice(NAMES)
        ask = r.choice(
            [f"Write a sentence with the word {w}.", f"Use the word {w} in a sentence."]
        )
        k = next(k for k, ws in KINDS.items() if w in ws)
        text = {
            "fruit": f"{v} ate a ripe {w} after lunch.",
            "animal": f"{v} saw {_a(w)} on the way to school.",
            "color": f"{v} painted the old door {w}.",
            "tool": f"{v} used {_a(w)} to repair the fence.",
            "piece of furniture": f"{v} put the {w} next to the window.",
            "musical instrument": f"{v} plays the {w} every evening.",
            "vehicle": f"{v} took the {w} to the city.",
            "vegetable": f"{v} cut the {w} for the soup.",
            "part of the body": f"{v} hurt the left {w} while playing.",
            "sport": f"{v} likes {w} more than any other sport.",
        }[k]
        return ask, text
    if kind == 6:
        a, b = r.choice(VERBS).split()
        return f"What is the past tense of {a}?", f"The past tense of {a} is {b}."
    pool = [w for ws in KINDS.values() for w in ws]
    found = r.sample(pool, r.randint(3, 5))
    ask = f"Turn these words into a numbered list: {', '.join(found)}."
    return ask, "\n".join(f"{i}. {w}" for i, w in enumerate(found, 1))


def reading(r):
    """A short text and a question whose answer is copied from it."""
    (a, b), thing, place = r.sample(NAMES, 2), r.choice(OBJECTS), r.choice(PLACES)
    day, animal, mood = r.choice(DAYS), r.choice(ANIMALS), r.choice(MOODS)
    the = "the " + thing.split(" ", 1)[1]
    text = r.choice(
        [
            f"On {day}, {a} went to {place} with a {mood} {animal}. There they "
            f"found {thing}. {a} gave {the} to {b}.",
            f"{b} lives near {place}. On {day}, {a} came to visit and brought {thing}. "
            f"They played with a {mood} {animal} until it was dark.",
            f"{a} and {b} met near {place} on {day}. {a} had {thing}, and {b} "
            f"had a {mood} {animal}. They talked for an hour.",
        ]
    )
    kind = r.randrange(5)
    if kind == 0:
        ask, answer = "When did this happen?", f"It happened on {day}."
    elif kind == 1:
        ask, answer = (
            "Which animal is in the text?",
            f"The text speaks of a {mood} {animal}.",
        )
    elif kind == 2:
        ask, answer = "Who is in the text?", f"The text is about {a} and {b}."
    elif kind == 3:
        ask, answer = "Which object is in the text?", f"The text speaks of {thing}."
    else:
        ask, answer = "Repeat the text.", text
    if r.random() < 0.2:
        short = f"{a} and {b} spent {day} near {place} with {thing} and a {animal}."
        return f"Summarize this text in one sentence: {text}", short
    return f"{r.choice(['Read this text.', 'Here is a text.'])} {text}\n\n{ask}", answer


GREETINGS = (
    "Hello",
    "Hi",
    "Hi there",
    "Good morning",
    "Good evening",
    "Hey",
    "Good day",
)
TALK = (
    ("How are you?", "I am well, thank you. How can I help you today?"),
    (
        "Who are you?",
        "I am a small language model. I can write short texts, code and sums.",
    ),
    ("What is your name?", "My name is Tiny. I am a small language model."),
    (
        "What can you do?",
        "I can answer questions, tell stories, solve sums and write Python.",
    ),
    ("Are you a person?", "No, I am a computer program. I am a small language model."),
    ("Thank you.", "You are welcome! Is there anything else that I can do for you?"),
    ("Thanks for your help!", "You are welcome! I am glad that I could help."),
    ("Goodbye.", "Goodbye! Have a nice day."),
    ("Good night.", "Good night! Sleep well."),
    ("I am happy today.", "That is good to hear! What made you happy?"),
    ("I am sad today.", "I am sorry to hear that. Would you like to talk about it?"),
    ("I am tired.", "Then you should rest for a while. A short walk can help, too."),
    ("I am hungry.", "What would you like to eat? A sandwich is quick to make."),
    ("Can you help me?", "Of course. What do you need help with?"),
    ("Tell me a joke.", "Why did the book go to the doctor? It had lost its spine."),
    ("Do you like music?", "I cannot hear music, but I can tell you about it."),
)


def small_talk(r):
    ask, answer = r.choice(TALK)
    greeting, name = r.choice(GREETINGS), r.choice(NAMES)
    kind = r.randrange(3)
    if kind == 0:
        return ask, answer
    if kind == 1:
        return f"{greeting}! {ask}", f"{greeting}! {answer}"
    return f"{greeting}, my name is {name}. {ask}", f"{greeting}, {name}! {answer}"


TRIPS = {
    "the beach": ("a towel", "sunscreen", "a hat", "a swimsuit", "water", "a book"),
    "the mountains": ("warm clothes", "good boots", "a map", "water", "food", "a rope"),
    "a big city": ("comfortable shoes", "a map", "an umbrella", "a camera", "money"),
    "the forest": ("boots", "a flashlight", "food", "water", "a raincoat", "a compass"),
    "a friend's house": ("a toothbrush", "pajamas", "a gift", "a change of clothes"),
    "a cold country": ("a coat", "gloves", "a scarf", "warm socks", "a thermos"),
    "a lake": ("a tent", "a fishing rod", "a swimsuit", "food", "a blanket"),
}
MORNING = ("take a walk", "have a good breakfast", "read for an hour", "go swimming")
NOON = (
    "cook lunch",
    "meet a friend",
    "visit a museum",
    "work in the garden",
    "ride a bicycle",
)
NIGHT = (
    "watch a film",
    "write a letter",
    "listen to music",
    "play a game",
    "go to bed early",
)


def plan(r):
    if r.random() < 0.5:
        trip, n = r.choice(list(TRIPS)), r.choice([3, 4])
        ask = r.choice(
            [
                f"What should I pack for a trip to {trip}?",
                f"Make a list of {n} things to take to {trip}.",
            ]
        )
        things = r.sample(TRIPS[trip], n)
        listed = "\n".join(f"- {t}" for t in things)
        return ask, f"For a trip to {trip} you should take:\n\n{listed}"
    day, name = r.choice(DAYS), r.choice(NAMES)
    ask = r.choice([f"Plan a nice {day} for {name}.", f"What can {name} do on {day}?"])
    a, b, c = r.choice(MORNING), r.choice(NOON), r.choice(NIGHT)
    return ask, (
        f"In the morning, {name} can {a}. In the afternoon, {name} can {b}. "
        f"In the evening, it is nice to {c}."
    )


TEMPLATES = (
    (story, 5),
    (letter, 3),
    (recipe, 2),
    (country, 2),
    (words, 2),
    (reading, 3),
    (small_talk, 1),
    (plan, 1),
)


def task(rng: random.Random) -> tuple[str, str]:
    """One request with its answer."""
    templates, weights = zip(*TEMPLATES, strict=True)
    return rng.choices(templates, weights)[0](rng)
