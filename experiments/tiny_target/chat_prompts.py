"""Chat prompts of the tiny target: forms times subjects, all written for this project.

`prompts(seed)` lists every (form, subject) pair once, in a seeded order. SmolLM2-135M
answers the first few thousand of them (`data.py`); the forms are few and the subjects
plain, so that a model of 3 M parameters can learn the way in which they are answered.
"""

import itertools
import random

CONCEPTS = """gravity|photosynthesis|the water cycle|electricity|magnets|evolution
DNA|a black hole|the solar system|the moon|a volcano|an earthquake|a rainbow
the ocean|climate|weather|the wind|a thunderstorm|snow|the seasons|a desert
a rainforest|a glacier|a river|energy|heat|light|sound|time|a battery|a computer
the internet|a computer program|a robot|artificial intelligence|machine learning
a database|a search engine|a website|an algorithm|a password|a smartphone|a camera
a telescope|a microscope|an engine|a bicycle|a train|an airplane|a rocket|a satellite
a bridge|a map|a compass|a clock|a calendar|money|a bank|inflation|taxes|a budget
a loan|trade|a market|advertising|a contract|a law|a court|democracy|a president
a constitution|voting|a city|a village|a school|a library|a museum|a hospital
a vaccine|a virus|bacteria|the heart|the brain|the lungs|the skin|sleep|a dream
exercise|nutrition|vitamins|sugar|salt|bread|cheese|chocolate|coffee|tea|music|a song
rhythm|painting|sculpture|poetry|a novel|theatre|dance|film|photography|architecture
a language|grammar|an alphabet|translation|history|archaeology|a fossil|a dinosaur
a mammal|an insect|a bird|a fish|a reptile|a plant|a tree|a flower|a seed|soil
farming|recycling|pollution|solar power|wind power|nuclear energy|a fraction
a triangle|a circle|probability|an average|geometry|algebra|a prime number|friendship
trust|courage|patience|kindness|honesty|teamwork|leadership|creativity|curiosity
stress|happiness|culture|peace"""

HOW_TO = """bake bread|cook rice|make a cup of tea|make coffee|boil an egg
make pancakes|make a salad|make soup|wash dishes|clean a kitchen|do the laundry
iron a shirt|fold clothes|tie a tie|tie shoelaces|pack a suitcase|plan a trip
read a map|ride a bicycle|fix a flat tire|change a light bulb|paint a wall
plant a tree|grow tomatoes|water house plants|make compost|train a dog
take care of a cat|take care of a fish|build a bird house|build a campfire
put up a tent|catch a fish|swim|run faster|start exercising|stretch
lose weight safely|sleep better|wake up early|drink more water|eat healthy food
meditate|deal with stress|make new friends|say sorry|give a compliment|listen well
speak in public|write a letter|write a poem|write a story|write a resume
prepare for an interview|ask for a raise|find a job|save money|make a budget
pay off a debt|buy a house|rent an apartment|sell a car|learn a language
learn to draw|learn to play the guitar|learn to code|study for an exam
take good notes|remember names|read more books|write an essay|solve a puzzle
play chess|organize a desk|manage time|set goals|break a bad habit|start a new hobby
throw a party|wrap a gift|choose a gift|take good photos|edit a video|start a blog
build a website|protect a password|back up files|clean a computer|save energy at home
recycle at home|treat a small cut|treat a cold|stop a nosebleed|wash your hands
brush your teeth|stay warm in winter|stay cool in summer|prepare for a storm
cross a street safely|teach a child to read|help a friend who is sad
be a good neighbor|run a meeting|work in a team"""

PLAIN_JOBS = """teacher|doctor|nurse|farmer|baker|chef|pilot|sailor|soldier
police officer|firefighter|lawyer|judge|engineer|architect|carpenter|plumber
electrician|mechanic|painter|writer|journalist|photographer|musician|actor|dancer
scientist|astronomer|biologist|chemist|programmer|designer|manager|accountant|banker
cashier|waiter|librarian|gardener|dentist|veterinarian|mayor|coach|translator
truck driver|postal worker|tailor|fisherman|miner"""

ANIMALS = """dog|cat|horse|cow|sheep|goat|pig|chicken|duck|rabbit|mouse|squirrel|fox
wolf|bear|lion|tiger|elephant|giraffe|zebra|monkey|gorilla|kangaroo|koala|panda
penguin|owl|eagle|parrot|swan|frog|snake|turtle|crocodile|shark|whale|dolphin|octopus
crab|bee|ant|butterfly|spider|snail|bat|hedgehog|camel|deer|otter|seal"""

PLACES = """France|Spain|Italy|Germany|Japan|China|India|Brazil|Mexico|Canada|Egypt
Kenya|Australia|Greece|Norway|Russia|Turkey|Peru|Argentina|Thailand|London|Paris|Rome
New York|Tokyo|Berlin|Madrid|Cairo|Sydney|Toronto|Chicago|Amsterdam|Vienna|Istanbul
Moscow|Delhi"""

PAIRS = """cats|dogs;tea|coffee;books|films;trains|planes;summer|winter
the city|the country;bicycles|cars;apples|oranges;the sun|the moon;rivers|lakes
frogs|toads;bees|wasps;butter|oil;rice|pasta;pens|pencils;radio|television
letters|emails;gold|silver;wood|stone;walking|running;hills|mountains
fruit|vegetables;cheese|yogurt;guitars|pianos;poems|songs;chess|checkers
soccer|basketball;a list|a dictionary;hardware|software;a laptop|a tablet
bacteria|viruses;weather|climate;stars|planets;an island|a continent;a loan|a gift
school|university;a doctor|a nurse;a novel|a short story;bread|cake;ice|steam"""

CHOICES = """working from home|living in a big city|living in a small town
owning a car|owning a pet|learning a second language|studying online
going to university|watching television|playing video games|using social media
eating meat|eating fast food|cooking at home|traveling alone|traveling by train
traveling by plane|camping|running every day|going to the gym|getting up early
working at night|starting a business|working in a team|having a large family
renting a home|buying a home|using credit cards|paying with cash|solar power
nuclear power|electric cars|public transport|school uniforms|homework|zoos
mobile phones at school|reading paper books|reading on a screen|keeping a diary
growing your own food|shopping online|robots in factories|a four-day work week"""

PROBLEMS = """I cannot sleep at night|I feel tired all day|I feel lonely
I am nervous about my exam|I argued with my best friend|I forgot my mother's birthday
I am always late|I hate my job|I lost my keys|I want to move to another city
I spend too much money|I cannot focus on my work|my neighbor is too loud
my dog does not listen to me|my plants keep dying|my computer is slow
my phone battery dies quickly|I want to eat better|I want to get fit
I am afraid of flying|I am afraid of speaking in public
I do not know what to cook tonight|I am bored|I have too much homework
my boss does not listen to me|my son does not like to read|my room is always messy
I want to learn to cook|I want to read more|I miss my family
I have a job interview tomorrow|I am moving to a new school|I have a cold
my back hurts|I drink too much coffee|I watch too much television
I cannot decide what to study"""

LETTERS = """thanking a teacher for her help|asking my boss for a day off
inviting a friend to dinner|inviting my neighbors to a party
saying sorry for being late|asking a customer to pay a bill|asking for a refund
complaining about a broken phone|applying for a job at a bakery
applying for a job as a programmer|thanking my grandmother for a gift
asking about an apartment|telling my team about a meeting|moving a meeting to Friday
welcoming a new colleague|saying goodbye to my colleagues
asking a professor for advice|congratulating a friend on a new job
congratulating a couple on their wedding|reminding my team about a deadline
asking a library about a lost book|booking a table at a restaurant
booking a hotel room|canceling an appointment|wishing a friend a happy birthday
asking a friend for help with moving|thanking a customer for an order
telling parents about a school trip|asking for feedback on a report"""

HEROES = """a young girl|an old fisherman|a brave knight|a small dragon|a lost puppy
a clever fox|a shy boy|a lonely robot|a kind baker|a tired king|two sisters
a curious cat|a wise owl|a little mouse|a farmer|a sailor|a painter|a friendly giant
a young wizard|an astronaut"""

THINGS = """a magic key|a hidden door|a broken clock|an old map|a golden bird
a strange letter|a silver coin|a talking tree|a red balloon|a small boat
a secret garden|a lost treasure|a shooting star|a wooden box|a music box|a deep cave
a big storm|a snowy mountain|a quiet village|a warm loaf of bread"""

WHY = """is the sky blue|do leaves change color|do we sleep|do we dream|do birds sing
do cats purr|do dogs bark|is the sea salty|does ice float|does it rain
do stars twinkle|do we have seasons|do people laugh|do people cry
is exercise good for us|is sleep important|is water important|are bees important
are trees important|are friends important|is reading important|is history important
do we need laws|do we pay taxes|do we go to school|do plants need light
do fish live in water|do planes fly|do ships float|do magnets stick to iron
does bread rise|does metal rust|do we have two eyes|does the moon change its shape
do bears sleep in winter|do birds fly south|do people travel|do people make music
do people tell stories|do prices rise"""

FORMS = (
    (CONCEPTS, "What is {}?"),
    (CONCEPTS, "Explain {} in simple words."),
    (CONCEPTS, "Tell me about {}."),
    (CONCEPTS, "Why is it useful to know about {}?"),
    (HOW_TO, "How do I {}?"),
    (HOW_TO, "Give me three tips on how to {}."),
    (HOW_TO, "I want to {}. Where should I start?"),
    (HOW_TO, "Explain to a beginner how to {}."),
    (PLAIN_JOBS, "What does a {} do?"),
    (PLAIN_JOBS, "Describe a day in the life of a {}."),
    (PLAIN_JOBS, "What skills does a good {} need?"),
    (ANIMALS, "What does a {} eat?"),
    (ANIMALS, "Where does a {} live?"),
    (ANIMALS, "Tell me an interesting fact about the {}."),
    (ANIMALS, "Write a short story about a {}."),
    (PLACES, "What is {} famous for?"),
    (PLACES, "What should I see when I visit {}?"),
    (PLACES, "Describe {} in a few sentences."),
    (CHOICES, "What are the pros and cons of {}?"),
    (CHOICES, "Is {} a good idea?"),
    (CHOICES, "What do you think about {}?"),
    (PROBLEMS, "{}. What should I do?"),
    (PROBLEMS, "{}. Can you help me?"),
    (LETTERS, "Write a short email {}."),
    (LETTERS, "Write a polite letter {}."),
    (WHY, "Why {}?"),
    (WHY, "A child asks: why {}?"),
)
PAIR_FORMS = (
    "What is the difference between {} and {}?",
    "Compare {} and {}.",
    "Which is better, {} or {}?",
)
STORY_FORMS = (
    "Write a short story about {} and {}.",
    "Tell me a story in which {} finds {}.",
    "Write the first lines of a tale about {} and {}.",
)


def _subjects(table: str) -> list[str]:
    return [s.strip() for s in table.replace("\n", "|").split("|")]


def prompts(seed: int) -> list[str]:
    """Every prompt once; of the stories, which are the most, every third."""
    rng = random.Random(seed)
    plain = [form.format(s) for table, form in FORMS for s in _subjects(table)]
    plain = [p[0].upper() + p[1:] for p in plain]
    pairs = [p.split("|") for p in PAIRS.replace("\n", ";").split(";")]
    plain += [form.format(*pair) for form in PAIR_FORMS for pair in pairs]
    stories = [
        form.format(hero, thing)
        for form, hero, thing in itertools.product(
            STORY_FORMS, _subjects(HEROES), _subjects(THINGS)
        )
    ]
    plain += rng.sample(stories, len(stories) // 3)
    rng.shuffle(plain)
    return plain
