"""Word problems and arithmetic with worked steps, drawn from templates of this project.

Each template is a function of a `random.Random` that returns a question and an answer:
one step a line, and last "The answer is N." Numbers are small, so that a model of 3 M
parameters can get the steps right. No template is taken from a benchmark.
"""

import math
import random
from fractions import Fraction


def _split(table: str, mark: str = " ") -> list[str]:
    return table.replace("\n", mark).split(mark)


NAMES = _split("""Anna Ben Carla David Emma Felix Grace Henry Iris Jack Kate Leo Maria
Nora Oscar Paula Quinn Rosa Sam Tina Victor Wendy Yusuf Zoe Amir Bella Chen
Dora Elif Finn""")
THINGS = _split("""apples books pencils marbles stickers coins cards flowers shells
stamps cookies oranges balloons buttons candles eggs toys tickets stones beads""")
GROUPS = (
    ("box", "boxes"),
    ("bag", "bags"),
    ("basket", "baskets"),
    ("shelf", "shelves"),
    ("row", "rows"),
    ("jar", "jars"),
    ("pack", "packs"),
)
GOODS = _split("""pen notebook sandal ticket hat book ball lamp shirt plant cake mug""")
WORKERS = _split("""painter baker gardener tailor farmer potter carpenter student""")


def _end(value) -> str:
    return f"The answer is {value}."


def _worked(*lines) -> str:
    *steps, value = lines
    return "\n".join([*steps, _end(value)])


def plus_minus(r):
    n, t, a, b = r.choice(NAMES), r.choice(THINGS), r.randint(5, 60), r.randint(2, 40)
    gain = r.choice(["buys", "finds", "gets"])
    c = r.randint(1, a + b - 1)
    loss = r.choice(["gives away", "loses", "sells"])
    ask = r.choice([f"How many {t} does {n} have now?", f"How many {t} are left?"])
    q = f"{n} has {a} {t}. {n} {gain} {b} more and then {loss} {c}. {ask}"
    return q, _worked(
        f"{n} starts with {a} {t}.",
        f"With {b} more, {n} has {a} + {b} = {a + b} {t}.",
        f"Then {n} {loss} {c}, so {a + b} - {c} = {a + b - c} {t} are left.",
        a + b - c,
    )


def groups(r):
    n, t, (one, many) = r.choice(NAMES), r.choice(THINGS), r.choice(GROUPS)
    a, b = r.randint(2, 12), r.randint(2, 12)
    if r.random() < 0.5:
        q = f"{n} has {a} {many} with {b} {t} in each {one}. "
        q += f"How many {t} does {n} have?"
        s = f"There are {a} {many} with {b} {t} each."
        return q, _worked(s, f"In total that is {a} * {b} = {a * b} {t}.", a * b)
    c = r.randint(1, 20)
    q = f"{n} has {a} {many} with {b} {t} in each {one} and {c} more {t} on the table. "
    return q + f"How many {t} are there in total?", _worked(
        f"The {many} hold {a} * {b} = {a * b} {t}.",
        f"With the {c} on the table that is {a * b} + {c} = {a * b + c} {t}.",
        a * b + c,
    )


def sharing(r):
    n, t, a, b = r.choice(NAMES), r.choice(THINGS), r.randint(2, 12), r.randint(2, 12)
    left = r.choice([0, 0, r.randint(1, b - 1)])
    total = a * b + left
    q = f"{n} shares {total} {t} equally among {b} friends. "
    if left == 0:
        return q + f"How many {t} does each friend get?", _worked(
            f"There are {total} {t} for {b} friends.",
            f"Each friend gets {total} / {b} = {a} {t}.",
            a,
        )
    return q + f"How many {t} are left over?", _worked(
        f"Each friend gets {a} {t}, because {a} * {b} = {a * b}.",
        f"Then {total} - {a * b} = {left} {t} are left over.",
        left,
    )


def shopping(r):
    n, (g, h) = r.choice(NAMES), r.sample(GOODS, 2)
    a, b, p, s = r.randint(2, 9), r.randint(1, 6), r.randint(2, 12), r.randint(2, 12)
    cost = a * p + b * s
    q = f"A {g} costs {p} dollars and a {h} costs {s} dollars. {n} buys {a} {g}s "
    q += f"and {b} {h}{'s' if b > 1 else ''}. "
    steps = [
        f"The {g}s cost {a} * {p} = {a * p} dollars.",
        f"The {h}{'s cost' if b > 1 else ' costs'} {b} * {s} = {b * s} dollars.",
        f"Together that is {a * p} + {b * s} = {cost} dollars.",
    ]
    if r.random() < 0.5:
        return q + f"How much does {n} pay?", _worked(*steps, cost)
    paid = (cost // 10 + r.randint(1, 3)) * 10
    q += f"{n} pays with {paid} dollars. How much change does {n} get?"
    steps.append(f"The change is {paid} - {cost} = {paid - cost} dollars.")
    return q, _worked(*steps, paid - cost)


def saving(r):
    n, g = r.choice(NAMES), r.choice(["bicycle", "guitar", "camera", "phone", "tent"])
    w, k, a = r.randint(3, 15), r.randint(3, 12), r.randint(5, 40)
    price = a + w * k
    q = f"{n} wants to buy a {g} for {price} dollars. {n} has {a} dollars and saves "
    return q + f"{w} dollars each week. How many weeks does it take?", _worked(
        f"{n} still needs {price} - {a} = {price - a} dollars.",
        f"At {w} dollars a week it takes {price - a} / {w} = {k} weeks.",
        k,
    )


def comparing(r):
    (n, m), t = r.sample(NAMES, 2), r.choice(THINGS)
    a, b, k = r.randint(3, 40), r.randint(2, 20), r.randint(2, 5)
    if r.random() < 0.5:
        q = f"{n} has {a} {t}. {m} has {b} more {t} than {n}. "
        q += "How many do they have together?"
        return q, _worked(
            f"{m} has {a} + {b} = {a + b} {t}.",
            f"Together they have {a} + {a + b} = {2 * a + b} {t}.",
            2 * a + b,
        )
    q = f"{n} has {a} {t}. {m} has {k} times as many. "
    q += f"How many {t} do they have together?"
    return q, _worked(
        f"{m} has {k} * {a} = {k * a} {t}.",
        f"Together they have {a} + {k * a} = {a + k * a} {t}.",
        a + k * a,
    )


def wages(r):
    n, job, h, d = r.choice(NAMES), r.choice(WORKERS), r.randint(3, 9), r.randint(2, 6)
    w = r.randint(6, 20)
    q = f"{n} works as a {job} for {h} hours a day and earns {w} dollars an hour. "
    return q + f"How much does {n} earn in {d} days?", _worked(
        f"In one day {n} earns {h} * {w} = {h * w} dollars.",
        f"In {d} days {n} earns {d} * {h * w} = {d * h * w} dollars.",
        d * h * w,
    )


def travel(r):
    n, v = r.choice(NAMES), r.choice([4, 5, 10, 12, 15, 20, 30, 40, 50, 60, 80])
    h, way = r.randint(2, 9), r.choice(["drives", "rides", "travels"])
    d = v * h
    kind = r.randrange(3)
    if kind == 0:
        q = f"{n} {way} at {v} kilometers per hour for {h} hours. How far does {n} go?"
        s = "Distance is speed times time."
        return q, _worked(s, f"{v} * {h} = {d} kilometers.", d)
    if kind == 1:
        q = f"{n} {way} {d} kilometers at {v} kilometers per hour. "
        q += "How long does it take?"
        s = "Time is distance divided by speed."
        return q, _worked(s, f"{d} / {v} = {h} hours.", h)
    q = f"{n} {way} {d} kilometers in {h} hours. What is the speed?"
    s = "Speed is distance divided by time."
    return q, _worked(s, f"{d} / {h} = {v} kilometers per hour.", v)


def percent(r):
    p, a = r.choice([5, 10, 20, 25, 30, 40, 50, 60, 75, 80]), r.randint(1, 20) * 20
    part, g = p * a // 100, r.choice(GOODS)
    kind = r.randrange(3)
    step = f"{p}% of {a} is {a} * {p} / 100 = {part}."
    if kind == 0:
        return f"What is {p}% of {a}?", _worked(step, part)
    if kind == 1:
        q = f"A {g} costs {a} dollars. It is sold at {p}% off. What is the new price?"
        s = f"The new price is {a} - {part} = {a - part} dollars."
        return q, _worked(step, s, a - part)
    q = f"The price of a {g} was {a} dollars and rises by {p}%. What is the new price?"
    s = f"The new price is {a} + {part} = {a + part} dollars."
    return q, _worked(step, s, a + part)


def average(r):
    k = r.randint(3, 5)
    m = r.randint(4, 30)
    values = [m + r.randint(-4, 4) for _ in range(k - 1)]
    values.append(k * m - sum(values))
    if values[-1] < 0:
        return average(r)
    total, shown = sum(values), ", ".join(map(str, values))
    q = r.choice(["What is the average of {}?", "Find the mean of the numbers {}."])
    return q.format(shown), _worked(
        f"The sum is {' + '.join(map(str, values))} = {total}.",
        f"There are {k} numbers, so the average is {total} / {k} = {m}.",
        m,
    )


def area(r):
    a, b = r.randint(2, 20), r.randint(2, 12)
    thing = r.choice(["garden", "room", "field", "table", "wall", "rectangle", "park"])
    kind = r.randrange(4)
    if kind == 0:
        q = f"A {thing} is {a} meters long and {b} meters wide. What is its area?"
        s = "The area of a rectangle is length times width."
        return q, _worked(s, f"{a} * {b} = {a * b} square meters.", a * b)
    if kind == 1:
        q = f"A {thing} is {a} meters long and {b} meters wide. What is its perimeter?"
        s = "The perimeter of a rectangle is 2 * (length + width)."
        return q, _worked(
            s,
            f"{a} + {b} = {a + b}.",
            f"2 * {a + b} = {2 * (a + b)} meters.",
            2 * (a + b),
        )
    if kind == 2:
        q = f"What is the area of a triangle with base {2 * a} and height {b}?"
        s = "The area of a triangle is base times height divided by 2."
        return q, _worked(
            s, f"{2 * a} * {b} = {2 * a * b}.", f"{2 * a * b} / 2 = {a * b}.", a * b
        )
    q = f"A square has a side of {a} meters. What are its area and its perimeter?"
    return q, _worked(
        f"The area is {a} * {a} = {a * a} square meters.",
        f"The perimeter is 4 * {a} = {4 * a} meters.",
        f"{a * a} and {4 * a}",
    )


def chain(r):
    values = [r.randint(1, 50) for _ in range(r.randint(2, 5))]
    expression, total, steps = str(values[0]), values[0], []
    for v in values[1:]:
        sign = "-" if v <= total and r.random() < 0.45 else "+"
        new = total + v if sign == "+" else total - v
        steps.append(f"{total} {sign} {v} = {new}.")
        expression += f" {sign} {v}"
        total = new
    q = r.choice(["Calculate {}.", "What is {}?", "Work out {}.", "Compute {}."])
    return q.format(expression), _worked(*steps, total)


def product(r):
    a, b = r.randint(11, 99), r.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    q = r.choice(["What is {} * {}?", "Multiply {} by {}.", "Calculate {} * {}."])
    steps = [f"{a} = {tens} + {ones}.", f"{tens} * {b} = {tens * b}."]
    steps += [f"{ones} * {b} = {ones * b}."]
    steps += [f"{tens * b} + {ones * b} = {a * b}."]
    return q.format(a, b), _worked(*steps, a * b)


def brackets(r):
    a, b, c, d = (r.randint(2, 12) for _ in range(4))
    kind = r.randrange(3)
    if kind == 0:
        q, steps, v = f"({a} + {b}) * {c}", [f"{a} + {b} = {a + b}."], (a + b) * c
        steps.append(f"{a + b} * {c} = {v}.")
    elif kind == 1:
        q, v = f"{a} * {b} + {c} * {d}", a * b + c * d
        steps = [f"{a} * {b} = {a * b}.", f"{c} * {d} = {c * d}."]
        steps.append(f"{a * b} + {c * d} = {v}.")
    else:
        q, v = f"{a} + {b} * {c}", a + b * c
        steps = ["Multiply first.", f"{b} * {c} = {b * c}.", f"{a} + {b * c} = {v}."]
    return r.choice(["Calculate {}.", "What is {}?"]).format(q), _worked(*steps, v)


def linear(r):
    x, a, b, v = r.randint(1, 15), r.randint(2, 9), r.randint(1, 30), r.choice("xyzn")
    c = a * x + b
    q = r.choice(["Solve {} for {v}.", "Solve the equation {}.", "Find {v} if {}."])
    if r.random() < 0.5:
        return q.format(f"{a}{v} + {b} = {c}", v=v), _worked(
            f"Subtract {b} from both sides: {a}{v} = {c} - {b} = {c - b}.",
            f"Divide both sides by {a}: {v} = {c - b} / {a} = {x}.",
            f"{v} = {x}",
        )
    c = a * x - b
    return q.format(f"{a}{v} - {b} = {c}", v=v), _worked(
        f"Add {b} to both sides: {a}{v} = {c} + {b} = {c + b}.",
        f"Divide both sides by {a}: {v} = {c + b} / {a} = {x}.",
        f"{v} = {x}",
    )


def evaluate(r):
    a, b, x = r.randint(2, 9), r.randint(1, 20), r.randint(1, 10)
    if r.random() < 0.5:
        return f"If f(x) = {a}x + {b}, what is f({x})?", _worked(
            f"Put x = {x} into the formula: f({x}) = {a} * {x} + {b}.",
            f"{a} * {x} = {a * x}.",
            f"{a * x} + {b} = {a * x + b}.",
            a * x + b,
        )
    v = x * x + b
    return f"What is the value of x^2 + {b} when x = {x}?", _worked(
        f"x^2 = {x} * {x} = {x * x}.", f"{x * x} + {b} = {v}.", v
    )


def divisors(r):
    g = r.randint(2, 12)
    a, b = g * r.randint(1, 8), g * r.randint(1, 8)
    d, m = math.gcd(a, b), math.lcm(a, b)
    if r.random() < 0.5:
        steps, x, y = [], max(a, b), min(a, b)
        while y:
            steps.append(f"{x} divided by {y} leaves {x % y}.")
            x, y = y, x % y
        steps.append(f"The last divisor is {d}.")
        return f"What is the greatest common divisor of {a} and {b}?", _worked(
            *steps, d
        )
    return f"What is the least common multiple of {a} and {b}?", _worked(
        f"The greatest common divisor of {a} and {b} is {d}.",
        f"The least common multiple is {a} * {b} / {d} = {m}.",
        m,
    )


def fractions(r):
    b, c = r.randint(2, 8), r.randint(2, 8)
    a, d = r.randint(1, b), r.randint(1, c)
    total, m = Fraction(a, b) + Fraction(d, c), math.lcm(b, c)
    x, y = a * m // b, d * m // c
    steps = [f"The common denominator of {b} and {c} is {m}."]
    steps += [f"{a}/{b} = {x}/{m} and {d}/{c} = {y}/{m}."]
    steps += [f"{x}/{m} + {y}/{m} = {x + y}/{m}."]
    if Fraction(x + y, m).denominator != m:
        steps.append(f"In lowest terms that is {total}.")
    return f"What is {a}/{b} + {d}/{c}?", _worked(*steps, total)


def part_of(r):
    n, t, b = r.choice(NAMES), r.choice(THINGS), r.randint(2, 8)
    a, k = r.randint(1, b - 1), r.randint(2, 10)
    total = b * k
    q = f"{n} has {total} {t} and gives {a}/{b} of them away. How many {t} are left?"
    return q, _worked(
        f"1/{b} of {total} is {total} / {b} = {k}.",
        f"{a}/{b} of {total} is {a} * {k} = {a * k}.",
        f"{total} - {a * k} = {total - a * k} {t} are left.",
        total - a * k,
    )


def sequence(r):
    a, d, k = r.randint(1, 20), r.randint(2, 9), r.randint(4, 5)
    if r.random() < 0.7:
        terms = [a + d * i for i in range(k)]
        s, v = f"Each number is {d} more than the one before.", terms[-1] + d
        last = f"{terms[-1]} + {d} = {v}."
    else:
        d, a = r.randint(2, 3), r.randint(1, 6)
        terms = [a * d**i for i in range(4)]
        s, v = f"Each number is {d} times the one before.", terms[-1] * d
        last = f"{terms[-1]} * {d} = {v}."
    shown = ", ".join(map(str, terms))
    return f"What is the next number in the sequence {shown}?", _worked(s, last, v)


def ages(r):
    (n, m), a, d = r.sample(NAMES, 2), r.randint(4, 30), r.randint(2, 20)
    k = r.randint(2, 12)
    q = f"{n} is {a} years old. {m} is {d} years older. "
    q += f"How old will {m} be in {k} years?"
    return q, _worked(
        f"{m} is now {a} + {d} = {a + d} years old.",
        f"In {k} years {m} will be {a + d} + {k} = {a + d + k} years old.",
        a + d + k,
    )


def clock(r):
    h, m, d = (
        r.randint(1, 9),
        r.choice([0, 10, 15, 20, 30, 40, 45]),
        r.randint(3, 18) * 5,
    )
    thing = r.choice(
        ["film", "lesson", "concert", "game", "meeting", "train ride", "walk"]
    )
    end = h * 60 + m + d
    q = f"A {thing} starts at {h}:{m:02d} and takes {d} minutes. When does it end?"
    hours, minutes = divmod(m + d, 60)
    steps = [f"{m} + {d} = {m + d} minutes after {h}:00."]
    if hours:
        s = "" if hours == 1 else "s"
        steps.append(f"{m + d} minutes are {hours} hour{s} and {minutes} minutes.")
    return q, _worked(*steps, f"{end // 60}:{end % 60:02d}")


def units(r):
    big, small, f = r.choice(
        [
            ("hours", "minutes", 60),
            ("minutes", "seconds", 60),
            ("days", "hours", 24),
            ("weeks", "days", 7),
            ("meters", "centimeters", 100),
            ("kilometers", "meters", 1000),
            ("kilograms", "grams", 1000),
            ("feet", "inches", 12),
            ("dozens", "pieces", 12),
        ]
    )
    a = r.randint(2, 12)
    if r.random() < 0.5:
        s = f"There are {f} {small} in one of the {big}."
        q = f"How many {small} are {a} {big}?"
        return q, _worked(s, f"{a} * {f} = {a * f} {small}.", a * f)
    s = f"There are {f} {small} in one of the {big}."
    return f"How many {big} are {a * f} {small}?", _worked(
        s, f"{a * f} / {f} = {a} {big}.", a
    )


def chance(r):
    colors = r.sample(["red", "blue", "green", "white", "black", "yellow"], 2)
    a, b = r.randint(1, 9), r.randint(1, 9)
    p = Fraction(a, a + b)
    q = f"A bag holds {a} {colors[0]} and {b} {colors[1]} balls. What is the "
    steps = [f"There are {a} + {b} = {a + b} balls.", f"{a} of them are {colors[0]}."]
    steps.append(f"The probability is {a}/{a + b}.")
    if p.denominator != a + b:
        steps.append(f"In lowest terms that is {p}.")
    return q + f"probability of drawing a {colors[0]} ball?", _worked(*steps, p)


def rate(r):
    n, job = r.choice(NAMES), r.choice(["paints", "bakes", "packs", "reads", "makes"])
    t = {"paints": "signs", "bakes": "cakes", "packs": "boxes", "reads": "pages"}
    t, a, h, k = t.get(job, "toys"), r.randint(2, 15), r.randint(2, 6), r.randint(2, 9)
    q = f"{n} {job} {a * h} {t} in {h} hours. "
    q += f"How many {t} does {n} finish in {k} hours?"
    return q, _worked(
        f"In one hour {n} finishes {a * h} / {h} = {a} {t}.",
        f"In {k} hours that is {k} * {a} = {k * a} {t}.",
        k * a,
    )


def two_days(r):
    n, t = r.choice(NAMES), r.choice(["pages", "kilometers", "problems", "words"])
    verb = {
        "pages": "reads",
        "kilometers": "runs",
        "problems": "solves",
        "words": "learns",
    }
    a, b = r.randint(3, 30), r.randint(2, 12)
    v = verb[t]
    if r.random() < 0.5:
        q = f"On Monday {n} {v} {a} {t}. On Tuesday {n} {v} twice as many, and on "
        q += f"Wednesday {b} more than on Tuesday. How many {t} is that in three days?"
        w = 2 * a + b
        return q, _worked(
            f"On Tuesday {n} {v} 2 * {a} = {2 * a} {t}.",
            f"On Wednesday {n} {v} {2 * a} + {b} = {w} {t}.",
            f"In total that is {a} + {2 * a} + {w} = {3 * a + w} {t}.",
            3 * a + w,
        )
    k = r.randint(3, 9)
    q = f"{n} {v} {a} {t} every day. How many {t} is that in {k} days?"
    return q, _worked(f"{k} days of {a} {t} are {k} * {a} = {k * a} {t}.", k * a)


def even_odd(r):
    a = r.randint(2, 200)
    kind = r.randrange(3)
    if kind == 0:
        word = "even" if a % 2 == 0 else "odd"
        s = f"{a} divided by 2 leaves {a % 2}, so it is {word}."
        return f"Is {a} even or odd?", _worked(s, word)
    if kind == 1:
        d = r.randint(2, 9)
        s = f"{a} = {a // d} * {d} + {a % d}."
        q = f"What is the remainder when {a} is divided by {d}?"
        return q, _worked(s, f"The remainder is {a % d}.", a % d)
    a = r.randint(2, 60)
    small = next((d for d in range(2, a) if a % d == 0), None)
    if small is None:
        s = f"No number from 2 to {math.isqrt(a)} divides {a}, so it is prime."
        s = s if a > 3 else f"{a} has no divisors except 1 and itself."
        return f"Is {a} a prime number?", _worked(s, "yes")
    s = f"{a} = {small} * {a // small}, so it is not prime."
    return f"Is {a} a prime number?", _worked(s, "no")


TEMPLATES = (
    plus_minus,
    groups,
    sharing,
    shopping,
    saving,
    comparing,
    wages,
    travel,
    percent,
    average,
    area,
    chain,
    product,
    brackets,
    linear,
    evaluate,
    divisors,
    fractions,
    part_of,
    sequence,
    ages,
    clock,
    units,
    chance,
    rate,
    two_days,
    even_odd,
)
OPENINGS = (
    "",
    "",
    "",
    "",
    "Let us solve this step by step.\n",
    "We go step by step.\n",
)


def task(rng: random.Random) -> tuple[str, str]:
    """One question with its worked answer."""
    question, answer = rng.choice(TEMPLATES)(rng)
    return question, rng.choice(OPENINGS) + answer
