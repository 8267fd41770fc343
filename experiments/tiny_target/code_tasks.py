"""Small Python tasks with correct solutions, composed from parts by templates.

Each template is a function of a `random.Random` that returns a task (what the function
does), its code, and one sentence on how it works. `task` dresses it as a request and an
answer. `data.py` compiles every answer; no template is taken from a benchmark.
"""

import ast
import pathlib
import random

# name, "the ... numbers", condition on {x}
NUMBER_TESTS = (
    ("even", "even", "{x} % 2 == 0"),
    ("odd", "odd", "{x} % 2 == 1"),
    ("positive", "positive", "{x} > 0"),
    ("negative", "negative", "{x} < 0"),
    ("nonzero", "non-zero", "{x} != 0"),
    ("small", "less than {k}", "{x} < {k}"),
    ("large", "greater than {k}", "{x} > {k}"),
    ("multiples_of_{k}", "divisible by {k}", "{x} % {k} == 0"),
    ("not_multiples_of_{k}", "not divisible by {k}", "{x} % {k} != 0"),
    ("single_digit", "between 0 and 9", "0 <= {x} <= 9"),
    ("in_range", "between low and high", "low <= {x} <= high"),
    ("above_limit", "greater than limit", "{x} > limit"),
    ("below_limit", "less than limit", "{x} < limit"),
    ("divisible", "divisible by n", "{x} % n == 0"),
    ("equal", "equal to value", "{x} == value"),
)
WORD_TESTS = (
    ("long", "longer than {k} characters", "len({x}) > {k}"),
    ("short", "shorter than {k} characters", "len({x}) < {k}"),
    ("upper", "in upper case", "{x}.isupper()"),
    ("lower", "in lower case", "{x}.islower()"),
    ("numeric", "made of digits", "{x}.isdigit()"),
    ("alphabetic", "made of letters", "{x}.isalpha()"),
    ("starting_with", "that start with prefix", "{x}.startswith(prefix)"),
    ("ending_with", "that end with suffix", "{x}.endswith(suffix)"),
    ("containing", "that contain part", "part in {x}"),
    ("palindrome", "that are palindromes", "{x} == {x}[::-1]"),
    ("non_empty", "that are not empty", "{x} != ''"),
)
CHAR_TESTS = (
    ("vowels", "vowels", "{x} in 'aeiou'"),
    ("consonants", "consonants", "{x}.isalpha() and {x} not in 'aeiou'"),
    ("digits", "digits", "{x}.isdigit()"),
    ("letters", "letters", "{x}.isalpha()"),
    ("spaces", "spaces", "{x} == ' '"),
    ("uppercase_letters", "upper case letters", "{x}.isupper()"),
    ("lowercase_letters", "lower case letters", "{x}.islower()"),
    ("punctuation", "punctuation marks", "{x} in '.,;:!?'"),
)
EXTRA = ("low", "high", "limit", "n", "value", "prefix", "suffix", "part")
NUMBER_MAPS = (
    ("double", "doubled", "{x} * 2"),
    ("triple", "tripled", "{x} * 3"),
    ("square", "squared", "{x} ** 2"),
    ("cube", "cubed", "{x} ** 3"),
    ("halve", "halved", "{x} / 2"),
    ("negate", "negated", "-{x}"),
    ("increment", "increased by one", "{x} + 1"),
    ("decrement", "decreased by one", "{x} - 1"),
    ("add_{k}", "increased by {k}", "{x} + {k}"),
    ("multiply_by_{k}", "multiplied by {k}", "{x} * {k}"),
    ("absolute", "made positive", "abs({x})"),
    ("to_string", "turned into a string", "str({x})"),
    ("to_float", "turned into a float", "float({x})"),
    ("last_digit", "reduced to its last digit", "{x} % 10"),
)
WORD_MAPS = (
    ("uppercase", "in upper case", "{x}.upper()"),
    ("lowercase", "in lower case", "{x}.lower()"),
    ("capitalize", "with a capital first letter", "{x}.capitalize()"),
    ("reverse", "reversed", "{x}[::-1]"),
    ("strip", "without spaces at both ends", "{x}.strip()"),
    ("length", "replaced by its length", "len({x})"),
    ("first_letter", "reduced to its first letter", "{x}[0]"),
    ("last_letter", "reduced to its last letter", "{x}[-1]"),
    ("repeat", "repeated twice", "{x} * 2"),
    ("to_int", "turned into an integer", "int({x})"),
)
NUMBER_LISTS = ("numbers", "values", "items", "nums", "data")
WORD_LISTS = ("words", "names", "strings", "items", "lines")


def _fill(part, k):
    return [text.replace("{k}", str(k)) for text in part]


def _signature(name, first, condition):
    tokens = condition.replace("(", " ").replace(")", " ").replace("{x}", " ").split()
    return f"{name}({', '.join([first, *[e for e in EXTRA if e in tokens]])})"


def _pick(r):
    """A list name, an item name and a test, for numbers or for words."""
    k = r.randint(2, 12)
    if r.random() < 0.6:
        items, x = r.choice(NUMBER_LISTS), r.choice("xn")
        x = "x" if items != "nums" else "num"
        kind, (name, words, test) = "numbers", _fill(r.choice(NUMBER_TESTS), k)
    else:
        items = r.choice(WORD_LISTS)
        x = {"items": "item"}.get(items, items[:-1])
        kind, (name, words, test) = "strings", _fill(r.choice(WORD_TESTS), k)
    return kind, items, x, name, words, test.replace("{x}", x), test


def filter_list(r):
    kind, items, x, name, words, test, raw = _pick(r)
    verb = r.choice(["filter", "select", "keep", "get"])
    head = _signature(f"{verb}_{name}", items, raw)
    task = f"returns the {kind} in a list that are {words}"
    task = task.replace("that are that", "that")
    if r.random() < 0.5:
        code = f"def {head}:\n    return [{x} for {x} in {items} if {test}]"
        return task, code, "It uses a list comprehension with a condition."
    code = f"""def {head}:
    result = []
    for {x} in {items}:
        if {test}:
            result.append({x})
    return result"""
    return task, code, f"It loops over the {items} and keeps those that pass the test."


def remove_list(r):
    kind, items, x, name, words, test, raw = _pick(r)
    head = _signature(f"{r.choice(['remove', 'drop', 'exclude'])}_{name}", items, raw)
    task = f"removes the {kind} that are {words} from a list"
    task = task.replace("that are that", "that")
    code = f"def {head}:\n    return [{x} for {x} in {items} if not ({test})]"
    return task, code, "It keeps every item for which the condition is false."


def count_list(r):
    kind, items, x, name, words, test, raw = _pick(r)
    head = _signature(f"count_{name}", items, raw)
    task = f"counts how many {kind} in a list are {words}".replace("are that", "")
    task = task.replace("  ", " ")
    if r.random() < 0.5:
        code = f"def {head}:\n    return sum(1 for {x} in {items} if {test})"
        return task, code, "It adds one for every item that passes the test."
    code = f"""def {head}:
    count = 0
    for {x} in {items}:
        if {test}:
            count += 1
    return count"""
    return task, code, "It starts at zero and adds one for every match."


def any_all(r):
    kind, items, x, name, words, test, raw = _pick(r)
    word = r.choice(["any", "all"])
    head = _signature(f"{r.choice(['has', 'check'])}_{word}_{name}", items, raw)
    task = f"checks whether {word} of the {kind} in a list are {words}"
    task = task.replace("are that are", "are").replace("are that ", "")
    if r.random() < 0.6:
        code = f"def {head}:\n    return {word}({test} for {x} in {items})"
        return task, code, f"It uses the built-in function {word}."
    yes, no, test = (
        ("True", "False", test) if word == "any" else ("False", "True", f"not ({test})")
    )
    code = f"""def {head}:
    for {x} in {items}:
        if {test}:
            return {yes}
    return {no}"""
    return task, code, "It stops as soon as the result is known."


def first_index(r):
    kind, items, x, name, words, test, raw = _pick(r)
    if r.random() < 0.5:
        head = _signature(f"{r.choice(['first', 'find_first'])}_{name}", items, raw)
        task = f"returns the first of the {kind} in a list that is {words}, or None"
        code = f"""def {head}:
    for {x} in {items}:
        if {test}:
            return {x}
    return None"""
        why = "It returns at the first match and gives None when there is none."
    else:
        head = _signature(f"index_of_{name}", items, raw)
        task = f"returns the index of the first of the {kind} that is {words}, or -1"
        code = f"""def {head}:
    for i, {x} in enumerate({items}):
        if {test}:
            return i
    return -1"""
        why = "It uses enumerate to get each index together with its item."
    return task.replace("is that are", "is").replace("is that ", ""), code, why


def sum_if(r):
    items, k = r.choice(NUMBER_LISTS), r.randint(2, 12)
    name, words, raw = _fill(r.choice(NUMBER_TESTS), k)
    test = raw.replace("{x}", "x")
    op = r.choice(["sum", "product", "max", "min", "average"])
    head = _signature(f"{op}_{name}", items, raw)
    noun = {"max": "largest", "min": "smallest"}.get(op, op)
    join = "" if op in ("max", "min") else " of"
    task = f"returns the {noun}{join} the numbers in a list that are {words}"
    task = task.replace(f"{noun} the numbers", f"{noun} of the numbers")
    if op == "sum" and r.random() < 0.5:
        body = f"    return sum(x for x in {items} if {test})"
        why = "It adds up the numbers that pass the test."
    elif op in ("sum", "product"):
        start, sign = ("0", "+") if op == "sum" else ("1", "*")
        body = f"    result = {start}\n    for x in {items}:\n        if {test}:\n"
        body += f"            result {sign}= x\n    return result"
        why = f"It starts with {start} and updates the result for every match."
    else:
        value = {"average": "sum(found) / len(found)"}.get(op, f"{op}(found)")
        body = f"    found = [x for x in {items} if {test}]\n    if not found:\n"
        body += f"        return None\n    return {value}"
        why = "It returns None when no number passes the test."
    return task, f"def {head}:\n{body}", why


def map_list(r):
    k, loop = r.randint(2, 12), r.random() < 0.4
    if r.random() < 0.5:
        items, x = r.choice(NUMBER_LISTS), "x"
        kind, (name, words, change) = "number", _fill(r.choice(NUMBER_MAPS), k)
        tail = r.choice(["numbers", "list", "all", "values"])
    else:
        items = r.choice(WORD_LISTS)
        x = items[:-1]
        kind, (name, words, change) = "string", _fill(r.choice(WORD_MAPS), k)
        tail = r.choice(["words", "list", "all", "strings"])
    change = change.replace("{x}", x)
    head = f"{name}_{tail}({items})"
    task = f"returns a new list with every {kind} of a list {words}"
    if not loop:
        code = f"def {head}:\n    return [{change} for {x} in {items}]"
        return task, code, "It builds the new list with a list comprehension."
    code = f"""def {head}:
    result = []
    for {x} in {items}:
        result.append({change})
    return result"""
    return task, code, "It loops over the list and appends each new value."


def map_filter(r):
    k = r.randint(2, 12)
    items = r.choice(NUMBER_LISTS)
    name, words, raw = _fill(r.choice(NUMBER_TESTS), k)
    verb, done, change = _fill(r.choice(NUMBER_MAPS), r.randint(2, 12))
    test, change = raw.replace("{x}", "x"), change.replace("{x}", "x")
    head = _signature(f"{verb}_{name}", items, raw)
    task = f"takes the numbers in a list that are {words} and returns them {done}"
    task = task.replace("made positive", "as positive numbers")
    task = task.replace("reduced to its last digit", "reduced to their last digits")
    task = task.replace("a string", "strings").replace("a float", "floats")
    code = f"def {head}:\n    return [{change} for x in {items} if {test}]"
    return (
        task,
        code,
        "The condition selects the numbers and the expression changes them.",
    )


def chars(r):
    name, words, raw = r.choice(CHAR_TESTS)
    c, s = r.choice(
        [("c", "text"), ("char", "s"), ("ch", "string"), ("letter", "word")]
    )
    test = raw.replace("{x}", c)
    op = r.choice(["count", "remove", "extract", "has", "replace"])
    if op == "count":
        task = f"counts the {words} in a string"
        if r.random() < 0.5:
            body = f"    return sum(1 for {c} in {s} if {test})"
            why = "It checks every character and counts the matches."
        else:
            body = f"    count = 0\n    for {c} in {s}:\n        if {test}:\n"
            body += "            count += 1\n    return count"
            why = "It loops over the characters and counts the matches."
        return task, f"def count_{name}({s}):\n{body}", why
    if op == "remove":
        code = f"def remove_{name}({s}):\n"
        code += f"    return ''.join({c} for {c} in {s} if not ({test}))"
        return (
            f"removes the {words} from a string",
            code,
            "It joins the characters that are left.",
        )
    if op == "extract":
        code = f"def extract_{name}({s}):\n    return [{c} for {c} in {s} if {test}]"
        return (
            f"returns a list of the {words} in a string",
            code,
            "Every character is tested once.",
        )
    if op == "has":
        code = f"def has_{name}({s}):\n    return any({test} for {c} in {s})"
        return (
            f"checks whether a string has {words}",
            code,
            "It stops at the first match.",
        )
    code = f"""def replace_{name}({s}, new):
    result = ''
    for {c} in {s}:
        if {test}:
            result += new
        else:
            result += {c}
    return result"""
    return (
        f"replaces the {words} in a string by new",
        code,
        "Other characters are kept.",
    )


KEYS = (
    ("length", "by length", "len({x})"),
    ("first_letter", "by first letter", "{x}[0]"),
    ("last_letter", "by last letter", "{x}[-1]"),
    ("lower_case", "by lower case form", "{x}.lower()"),
    ("vowel_count", "by number of vowels", "sum(c in 'aeiou' for c in {x})"),
)


def keyed(r):
    items = r.choice(WORD_LISTS)
    x = items[:-1]
    name, words, raw = r.choice(KEYS)
    key = raw.replace("{x}", x)
    op = r.choice(["group", "sort", "count", "max"])
    if op == "sort":
        down = r.random() < 0.4
        task = f"sorts a list of {items} {words}" + (
            " in descending order" if down else ""
        )
        code = f"def sort_by_{name}({items}):\n"
        code += f"    return sorted({items}, key=lambda {x}: {key}"
        code += ", reverse=True)" if down else ")"
        return task, code, "The key function gives the value to sort by."
    if op == "max":
        task = f"returns the largest of a list of {items} {words}"
        code = f"def largest_by_{name}({items}):\n"
        code += f"    return max({items}, key=lambda {x}: {key})"
        return task, code, "The function max takes a key to compare the items."
    if op == "group":
        task = f"groups a list of {items} {words} in a dictionary"
        line = f"        groups.setdefault({key}, []).append({x})"
        start, end, why = (
            "groups",
            "groups",
            "It uses setdefault to start each new group.",
        )
    else:
        task = f"counts a list of {items} {words} in a dictionary"
        line = f"        key = {key}\n        counts[key] = counts.get(key, 0) + 1"
        start, end, why = "counts", "counts", "A missing key counts as zero."
    code = (
        f"def {op}_by_{name}({items}):\n    {start} = {{}}\n    for {x} in {items}:\n"
    )
    return task, code + f"{line}\n    return {end}", why


CONVERSIONS = (
    ("celsius", "fahrenheit", "celsius * 9 / 5 + 32"),
    ("fahrenheit", "celsius", "(fahrenheit - 32) * 5 / 9"),
    ("celsius", "kelvin", "celsius + 273.15"),
    ("kelvin", "celsius", "kelvin - 273.15"),
    ("miles", "kilometers", "miles * 1.609"),
    ("kilometers", "miles", "kilometers / 1.609"),
    ("meters", "feet", "meters * 3.281"),
    ("feet", "meters", "feet / 3.281"),
    ("inches", "centimeters", "inches * 2.54"),
    ("centimeters", "inches", "centimeters / 2.54"),
    ("pounds", "kilograms", "pounds * 0.4536"),
    ("kilograms", "pounds", "kilograms / 0.4536"),
    ("hours", "minutes", "hours * 60"),
    ("minutes", "hours", "minutes / 60"),
    ("minutes", "seconds", "minutes * 60"),
    ("seconds", "minutes", "seconds / 60"),
    ("days", "hours", "days * 24"),
    ("weeks", "days", "weeks * 7"),
    ("grams", "kilograms", "grams / 1000"),
    ("kilograms", "grams", "kilograms * 1000"),
    ("liters", "milliliters", "liters * 1000"),
    ("degrees", "radians", "degrees * 3.14159 / 180"),
    ("radians", "degrees", "radians * 180 / 3.14159"),
)


def convert(r):
    a, b, formula = r.choice(CONVERSIONS)
    name = r.choice([f"{a}_to_{b}", f"convert_{a}_to_{b}", f"to_{b}"])
    if r.random() < 0.3:
        code = f"def {name}({a}):\n    return round({formula}, 2)"
        return (
            f"converts {a} to {b} and rounds to two digits",
            code,
            "It rounds the result.",
        )
    code = f"def {name}({a}):\n    return {formula}"
    return f"converts {a} to {b}", code, "It applies the formula for the two units."


SHAPES = (
    ("rectangle", "area", "width, height", "width * height"),
    ("rectangle", "perimeter", "width, height", "2 * (width + height)"),
    ("square", "area", "side", "side ** 2"),
    ("square", "perimeter", "side", "4 * side"),
    ("circle", "area", "radius", "3.14159 * radius ** 2"),
    ("circle", "circumference", "radius", "2 * 3.14159 * radius"),
    ("triangle", "area", "base, height", "base * height / 2"),
    ("cube", "volume", "side", "side ** 3"),
    ("box", "volume", "length, width, height", "length * width * height"),
    ("cylinder", "volume", "radius, height", "3.14159 * radius ** 2 * height"),
    ("sphere", "volume", "radius", "4 / 3 * 3.14159 * radius ** 3"),
    ("cone", "volume", "radius, height", "3.14159 * radius ** 2 * height / 3"),
)


def shape(r):
    thing, what, arguments, formula = r.choice(SHAPES)
    name = r.choice(
        [f"{thing}_{what}", f"{what}_of_{thing}", f"compute_{thing}_{what}"]
    )
    task = f"computes the {what} of a {thing}"
    if r.random() < 0.3:
        first = arguments.split(",")[0]
        code = f"""def {name}({arguments}):
    if {first} < 0:
        raise ValueError('{first} must not be negative')
    return {formula}"""
        return (
            task + f" and raises an error for a negative {first}",
            code,
            "It checks its input.",
        )
    return (
        task,
        f"def {name}({arguments}):\n    return {formula}",
        "It uses the usual formula.",
    )


ATTRIBUTES = {
    "car": ("brand", "year", "speed", "color"),
    "book": ("title", "author", "pages", "price"),
    "student": ("name", "age", "grade", "school"),
    "dog": ("name", "breed", "age", "weight"),
    "employee": ("name", "salary", "role", "team"),
    "product": ("name", "price", "stock", "code"),
    "house": ("address", "rooms", "price", "owner"),
    "movie": ("title", "director", "year", "rating"),
    "city": ("name", "country", "population", "area"),
    "player": ("name", "score", "level", "lives"),
    "song": ("title", "artist", "length", "album"),
    "customer": ("name", "email", "balance", "city"),
    "planet": ("name", "mass", "radius", "moons"),
    "ship": ("name", "length", "speed", "captain"),
}


def simple_class(r):
    noun = r.choice(list(ATTRIBUTES))
    a, b = r.sample(ATTRIBUTES[noun], 2)
    kind = r.randrange(3)
    head = f"class {noun.capitalize()}:\n    def __init__(self, {a}, {b}):\n"
    head += f"        self.{a} = {a}\n        self.{b} = {b}\n\n"
    base = f"`{noun.capitalize()}` with the attributes `{a}` and `{b}`"
    if kind == 0:
        tail = f"    def describe(self):\n        return f'{{self.{a}}}, {{self.{b}}}'"
        return (
            f"class {base} and a method `describe`",
            head + tail,
            "The method returns a string.",
        )
    if kind == 1:
        tail = "    def __repr__(self):\n"
        tail += f"        return f'{noun.capitalize()}({{self.{a}}}, {{self.{b}}})'"
        return (
            f"class {base} and a readable representation",
            head + tail,
            "It defines __repr__.",
        )
    tail = f"    def set_{b}(self, value):\n        self.{b} = value\n\n"
    tail += f"    def get_{b}(self):\n        return self.{b}"
    task = f"class {base} and methods to get and set `{b}`"
    return task, head + tail, f"The methods read and change the attribute {b}."


def loop_print(r):
    a, b, k = r.randint(0, 10), r.randint(11, 60), r.randint(2, 9)
    kind = r.randrange(6)
    if kind == 0:
        code = f"for i in range({a}, {b + 1}):\n    print(i)"
        return (
            f"loop that prints the numbers from {a} to {b}",
            code,
            "The end of range is excluded.",
        )
    if kind == 1:
        code = f"for i in range({b}, {a - 1}, -1):\n    print(i)"
        return (
            f"loop that counts down from {b} to {a}",
            code,
            "The step of the range is -1.",
        )
    if kind == 2:
        code = f"for i in range(1, 11):\n    print(i * {k})"
        return (
            f"loop that prints the first ten multiples of {k}",
            code,
            "Each turn prints one.",
        )
    if kind == 3:
        code = f"total = 0\nfor i in range({a}, {b + 1}):\n    total += i\nprint(total)"
        return (
            f"loop that adds the numbers from {a} to {b}",
            code,
            "It prints the total at the end.",
        )
    if kind == 4:
        code = f"i = {a}\nwhile i < {b}:\n    print(i)\n    i += {k}"
        task = f"while loop that starts at {a} and prints every number below {b} "
        task += f"in steps of {k}"
        return task, code, "The variable grows by the step in each turn."
    code = f"for i in range({a}, {b + 1}):\n    if i % {k} == 0:\n        print(i)"
    return (
        f"loop that prints the multiples of {k} from {a} to {b}",
        code,
        "It tests each number.",
    )


def dictionary(r):
    d = r.choice(["data", "scores", "prices", "ages", "table", "counts", "d"])
    k = r.randint(2, 50)
    options = (
        (
            "returns the keys of a dictionary in sorted order",
            "sorted_keys",
            "",
            f"sorted({d})",
        ),
        (
            "swaps the keys and values of a dictionary",
            "invert",
            "",
            f"{{v: k for k, v in {d}.items()}}",
        ),
        (
            "returns the sum of the values of a dictionary",
            "sum_values",
            "",
            f"sum({d}.values())",
        ),
        (
            "returns the key with the largest value",
            "max_key",
            "",
            f"max({d}, key={d}.get)",
        ),
        (
            "returns the key with the smallest value",
            "min_key",
            "",
            f"min({d}, key={d}.get)",
        ),
        (
            "sorts a dictionary by its values",
            "sort_by_value",
            "",
            f"dict(sorted({d}.items(), key=lambda item: item[1]))",
        ),
        (
            "returns the value of a key or a default",
            "get_or_default",
            ", key, default",
            f"{d}.get(key, default)",
        ),
        ("merges two dictionaries", "merge", ", other", f"{{**{d}, **other}}"),
        (
            f"keeps the entries of a dictionary with a value greater than {k}",
            f"keep_above_{k}",
            "",
            f"{{k: v for k, v in {d}.items() if v > {k}}}",
        ),
        (
            f"keeps the entries of a dictionary with a value less than {k}",
            f"keep_below_{k}",
            "",
            f"{{k: v for k, v in {d}.items() if v < {k}}}",
        ),
        (
            f"adds {k} to every value of a dictionary",
            f"add_{k}",
            "",
            f"{{k: v + {k} for k, v in {d}.items()}}",
        ),
        (
            f"multiplies every value of a dictionary by {k}",
            f"scale_by_{k}",
            "",
            f"{{k: v * {k} for k, v in {d}.items()}}",
        ),
        ("checks whether a dictionary has a key", "has_key", ", key", f"key in {d}"),
        (
            "returns the average of the values of a dictionary",
            "average_value",
            "",
            f"sum({d}.values()) / len({d})",
        ),
        ("counts the entries of a dictionary", "count_entries", "", f"len({d})"),
    )
    task, name, more, value = r.choice(options)
    name = (
        name if r.random() < 0.5 else f"{name}_{r.choice(['dict', 'entries', 'items'])}"
    )
    return (
        task,
        f"def {name}({d}{more}):\n    return {value}",
        "It works on the whole dictionary at once.",
    )


def _classics() -> list[tuple[str, str, str]]:
    """(task, code, why) of each function of `classics.py`."""
    source = pathlib.Path(__file__).with_name("classics.py").read_text()
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = (ast.get_source_segment(source, node) or "").split("\n")
        task, why = (ast.get_docstring(node) or "").split("\n\n")
        first = (node.body[0].end_lineno or 0) - node.lineno + 1
        found.append((task, "\n".join([lines[0], *lines[first:]]), why))
    return found


CLASSICS = _classics()
CLASS_CLASSICS = (
    (
        "class `Stack` with the methods push, pop and is_empty",
        """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0""",
        "The last item that was pushed is the first to leave.",
    ),
    (
        "class `Queue` with the methods enqueue, dequeue and size",
        """class Queue:
    def __init__(self):
        self.items = []

    def enqueue(self, item):
        self.items.append(item)

    def dequeue(self):
        return self.items.pop(0)

    def size(self):
        return len(self.items)""",
        "The first item that entered is the first to leave.",
    ),
    (
        "class `Counter` that can count up and reset",
        """class Counter:
    def __init__(self):
        self.count = 0

    def increment(self):
        self.count += 1

    def reset(self):
        self.count = 0""",
        "The state is one number.",
    ),
    (
        "class `BankAccount` with the methods deposit and withdraw",
        """class BankAccount:
    def __init__(self, balance=0):
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError('not enough money')
        self.balance -= amount""",
        "It refuses to go below zero.",
    ),
    (
        "class `Point` that can be added to another point",
        """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)""",
        "The method __add__ makes the plus sign work.",
    ),
    (
        "class `Rectangle` with the methods area and perimeter",
        """class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)""",
        "Both methods use the stored sides.",
    ),
    (
        "class `Node` for a linked list and a function to print the list",
        """class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next


def print_list(node):
    while node is not None:
        print(node.value)
        node = node.next""",
        "It follows the links until the end.",
    ),
    (
        "class `Timer` that measures seconds",
        """import time


class Timer:
    def start(self):
        self.begin = time.time()

    def stop(self):
        return time.time() - self.begin""",
        "It stores the time at the start.",
    ),
)


def classic(r):
    if r.random() < 0.12:
        return r.choice(CLASS_CLASSICS)
    return r.choice(CLASSICS)


TEMPLATES = (
    (filter_list, 3),
    (remove_list, 1),
    (count_list, 2),
    (any_all, 2),
    (first_index, 2),
    (sum_if, 2),
    (map_list, 2),
    (map_filter, 2),
    (chars, 2),
    (keyed, 2),
    (convert, 1),
    (shape, 1),
    (simple_class, 2),
    (loop_print, 1),
    (dictionary, 2),
    (classic, 6),
)
ASK = (
    "Write a Python function {name} that {task}.",
    "Write a Python function that {task}.",
    "Write a function {name} in Python that {task}.",
    "Implement {name}, a function that {task}.",
    "I need a Python function that {task}. Call it {name}.",
    "How do I write a Python function that {task}?",
)
ASK_OTHER = (
    "Write a Python {task}.",
    "Write a {task} in Python.",
    "Show me a Python {task}.",
)
OPEN = (
    "",
    "",
    "Here is the {what}:\n\n",
    "Here is a {what} that does this:\n\n",
    "Sure.\n\n",
)


def _documented(code: str, task: str) -> tuple[str, str]:
    """The signature with a docstring, and the code with it."""
    head, body = code.split("\n", 1)
    doc = f'    """{task[0].upper()}{task[1:]}."""'
    return f"{head}\n{doc}", f"{head}\n{doc}\n{body}"


def task(rng: random.Random) -> tuple[str, str]:
    """One request with its answer: a fenced solution and, mostly, how it works."""
    templates, weights = zip(*TEMPLATES, strict=True)
    what, code, why = rng.choices(templates, weights)[0](rng)
    close = rng.choice(["", f"\n\n{why}", f"\n\n{why}"])
    if not code.startswith("def "):
        kind = "class" if "class " in what else "code"
        ask = rng.choice(ASK_OTHER).format(task=what)
    else:
        kind, name = "function", code[4 : code.index("(")]
        stub, documented = _documented(code, what)
        if rng.random() < 0.2:
            ask = f"Complete this Python function:\n\n```python\n{stub}\n```"
            return ask, f"```python\n{documented}\n```{close}"
        form = rng.choice(ASK)
        ask = form.format(name=f"`{name}`", task=what)
        code = documented if rng.random() < 0.3 else code
    opening = rng.choice(OPEN).format(what=kind)
    return ask, f"{opening}```python\n{code}\n```{close}"
