"""Well-known small functions, as the answers of `code_tasks.py`.

Of each docstring the first line is the task and the second says how it works; the code
below it is the answer. Read as text, never imported.
"""

# ruff: noqa
# pyright: reportRedeclaration=false
# fmt: off


def factorial(n):
    """returns the factorial of n

    It multiplies the numbers from 2 to n.
    """
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def factorial(n):
    """returns the factorial of n by recursion

    The recursion stops at 1.
    """
    if n <= 1:
        return 1
    return n * factorial(n - 1)


def fibonacci(n):
    """returns the n-th Fibonacci number

    Each turn moves one step along the sequence.
    """
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def fibonacci_list(n):
    """returns a list of the first n Fibonacci numbers

    It appends each number before moving on.
    """
    result = []
    a, b = 0, 1
    for _ in range(n):
        result.append(a)
        a, b = b, a + b
    return result


def is_prime(n):
    """checks whether a number is prime

    It tries divisors up to the square root of n.
    """
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True


def primes_up_to(n):
    """returns all prime numbers up to n

    A number is prime if no smaller prime divides it.
    """
    primes = []
    for i in range(2, n + 1):
        if all(i % p != 0 for p in primes):
            primes.append(i)
    return primes


def gcd(a, b):
    """returns the greatest common divisor of two numbers

    This is the algorithm of Euclid.
    """
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """returns the least common multiple of two numbers

    It divides the product by the greatest common divisor.
    """
    x, y = a, b
    while y:
        x, y = y, x % y
    return a * b // x


def digit_sum(n):
    """returns the sum of the digits of a number

    It takes off the last digit in each turn.
    """
    total = 0
    while n > 0:
        total += n % 10
        n //= 10
    return total


def count_digits(n):
    """returns the number of digits of a number

    It turns the number into a string first.
    """
    return len(str(abs(n)))


def reverse_number(n):
    """reverses the digits of a number

    It reverses the number as a string.
    """
    return int(str(n)[::-1])


def divisors(n):
    """returns all divisors of a number

    It tests every number from 1 to n.
    """
    return [i for i in range(1, n + 1) if n % i == 0]


def is_palindrome(text):
    """checks whether a string is a palindrome

    It compares the string with its reverse.
    """
    return text == text[::-1]


def reverse_string(text):
    """reverses a string

    The slice with step -1 reads the string backwards.
    """
    return text[::-1]


def reverse_words(sentence):
    """reverses the order of the words in a sentence

    It splits, reverses and joins the words.
    """
    return ' '.join(reversed(sentence.split()))


def count_words(sentence):
    """counts the words in a sentence

    Splitting on spaces gives the words.
    """
    return len(sentence.split())


def longest_word(sentence):
    """returns the longest word in a sentence

    The key compares the words by length.
    """
    return max(sentence.split(), key=len)


def capitalize_words(sentence):
    """capitalizes every word in a sentence

    Each word is changed and joined again.
    """
    return ' '.join(word.capitalize() for word in sentence.split())


def char_counts(text):
    """counts how often each character appears in a string

    A missing character counts as zero.
    """
    counts = {}
    for c in text:
        counts[c] = counts.get(c, 0) + 1
    return counts


def word_counts(text):
    """counts how often each word appears in a text

    A missing word counts as zero.
    """
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def are_anagrams(a, b):
    """checks whether two strings are anagrams

    Anagrams have the same letters in another order.
    """
    return sorted(a.lower()) == sorted(b.lower())


def remove_duplicates(items):
    """removes duplicates from a list and keeps the order

    A set remembers what was seen.
    """
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def find_largest(numbers):
    """returns the largest number in a list without using max

    It keeps the largest number seen so far.
    """
    largest = numbers[0]
    for x in numbers:
        if x > largest:
            largest = x
    return largest


def find_smallest(numbers):
    """returns the smallest number in a list without using min

    It keeps the smallest number seen so far.
    """
    smallest = numbers[0]
    for x in numbers:
        if x < smallest:
            smallest = x
    return smallest


def second_largest(numbers):
    """returns the second largest number in a list

    The set removes equal numbers before sorting.
    """
    return sorted(set(numbers))[-2]


def average(numbers):
    """returns the average of a list of numbers

    An empty list gives zero.
    """
    if not numbers:
        return 0
    return sum(numbers) / len(numbers)


def median(numbers):
    """returns the median of a list of numbers

    An even length needs the mean of two numbers.
    """
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def most_common(items):
    """returns the most common item in a list

    It compares the items by their count.
    """
    return max(set(items), key=items.count)


def is_sorted(numbers):
    """checks whether a list is sorted

    It compares each number with the next one.
    """
    for i in range(len(numbers) - 1):
        if numbers[i] > numbers[i + 1]:
            return False
    return True


def bubble_sort(numbers):
    """sorts a list with bubble sort

    Large numbers move to the end like bubbles.
    """
    n = len(numbers)
    for i in range(n):
        for j in range(n - i - 1):
            if numbers[j] > numbers[j + 1]:
                numbers[j], numbers[j + 1] = numbers[j + 1], numbers[j]
    return numbers


def insertion_sort(numbers):
    """sorts a list with insertion sort

    Each number is moved left to its place.
    """
    for i in range(1, len(numbers)):
        key = numbers[i]
        j = i - 1
        while j >= 0 and numbers[j] > key:
            numbers[j + 1] = numbers[j]
            j -= 1
        numbers[j + 1] = key
    return numbers


def selection_sort(numbers):
    """sorts a list with selection sort

    Each turn puts the smallest number in front.
    """
    for i in range(len(numbers)):
        smallest = i
        for j in range(i + 1, len(numbers)):
            if numbers[j] < numbers[smallest]:
                smallest = j
        numbers[i], numbers[smallest] = numbers[smallest], numbers[i]
    return numbers


def quick_sort(numbers):
    """sorts a list with quick sort

    It splits the list around a pivot.
    """
    if len(numbers) <= 1:
        return numbers
    pivot = numbers[0]
    smaller = [x for x in numbers[1:] if x < pivot]
    larger = [x for x in numbers[1:] if x >= pivot]
    return quick_sort(smaller) + [pivot] + quick_sort(larger)


def merge_sort(numbers):
    """sorts a list with merge sort

    It sorts both halves and merges them.
    """
    if len(numbers) <= 1:
        return numbers
    middle = len(numbers) // 2
    left = merge_sort(numbers[:middle])
    right = merge_sort(numbers[middle:])
    result = []
    while left and right:
        if left[0] <= right[0]:
            result.append(left.pop(0))
        else:
            result.append(right.pop(0))
    return result + left + right


def binary_search(numbers, target):
    """finds a value in a sorted list with binary search

    Each turn halves the part that is searched.
    """
    low, high = 0, len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == target:
            return middle
        if numbers[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def linear_search(items, target):
    """finds the index of a value in a list

    It returns -1 if the value is not there.
    """
    for i, item in enumerate(items):
        if item == target:
            return i
    return -1


def flatten(lists):
    """flattens a list of lists

    The two loops visit every inner item.
    """
    return [item for inner in lists for item in inner]


def transpose(matrix):
    """returns the transpose of a matrix

    The function zip turns rows into columns.
    """
    return [list(row) for row in zip(*matrix)]


def matrix_sum(matrix):
    """returns the sum of all numbers in a matrix

    It adds the sums of the rows.
    """
    return sum(sum(row) for row in matrix)


def matrix_multiply(a, b):
    """multiplies two matrices

    Each entry is the product of a row and a column.
    """
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def chunk(items, n):
    """splits a list into chunks of size n

    The range moves in steps of n.
    """
    return [items[i:i + n] for i in range(0, len(items), n)]


def rotate_left(items, k):
    """rotates a list to the left by k places

    It joins the two parts in the other order.
    """
    if not items:
        return items
    k = k % len(items)
    return items[k:] + items[:k]


def common_items(a, b):
    """returns the common items of two lists

    It keeps the items that are in both lists.
    """
    return [item for item in a if item in b]


def difference(a, b):
    """returns the items of the first list that are not in the second

    It keeps what the second list lacks.
    """
    return [item for item in a if item not in b]


def add_lists(a, b):
    """adds two lists item by item

    The function zip pairs the items.
    """
    return [x + y for x, y in zip(a, b)]


def dot_product(a, b):
    """returns the dot product of two lists

    It adds the products of the pairs.
    """
    return sum(x * y for x, y in zip(a, b))


def interleave(a, b):
    """merges two lists by taking items in turn

    Each turn takes one item from both lists.
    """
    result = []
    for x, y in zip(a, b):
        result.append(x)
        result.append(y)
    return result


def merge_sorted(a, b):
    """merges two sorted lists

    It always takes the smaller front item.
    """
    result = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            result.append(a[i])
            i += 1
        else:
            result.append(b[j])
            j += 1
    return result + a[i:] + b[j:]


def running_total(numbers):
    """returns the running total of a list

    The total grows with every number.
    """
    total = 0
    result = []
    for x in numbers:
        total += x
        result.append(total)
    return result


def swap_ends(items):
    """swaps the first and last items of a list

    Both are assigned in one statement.
    """
    items[0], items[-1] = items[-1], items[0]
    return items


def clamp(value, low, high):
    """limits a value to the range from low to high

    It takes the nearest end when the value is outside.
    """
    return max(low, min(value, high))


def distance(x1, y1, x2, y2):
    """returns the distance between two points

    This is the theorem of Pythagoras.
    """
    return ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5


def is_leap_year(year):
    """checks whether a year is a leap year

    Full centuries must be divisible by 400.
    """
    if year % 400 == 0:
        return True
    if year % 100 == 0:
        return False
    return year % 4 == 0


def fizzbuzz(n):
    """returns Fizz, Buzz, FizzBuzz or the number

    The test for 15 must come first.
    """
    if n % 15 == 0:
        return 'FizzBuzz'
    if n % 3 == 0:
        return 'Fizz'
    if n % 5 == 0:
        return 'Buzz'
    return str(n)


def power(base, exponent):
    """raises a number to a power without using **

    It multiplies by the base again and again.
    """
    result = 1
    for _ in range(exponent):
        result *= base
    return result


def to_binary(n):
    """returns the binary form of a number as a string

    It collects the remainders of division by 2.
    """
    if n == 0:
        return '0'
    digits = ''
    while n > 0:
        digits = str(n % 2) + digits
        n //= 2
    return digits


def from_binary(text):
    """turns a binary string into a number

    Each digit doubles the result so far.
    """
    result = 0
    for c in text:
        result = result * 2 + int(c)
    return result


def is_balanced(text):
    """checks whether brackets in a string are balanced

    The depth must end at zero.
    """
    depth = 0
    for c in text:
        if c == '(':
            depth += 1
        elif c == ')':
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def caesar(text, n):
    """shifts the letters of a text by n places

    Other characters are kept as they are.
    """
    result = ''
    for c in text:
        if c.isalpha():
            start = ord('A') if c.isupper() else ord('a')
            result += chr((ord(c) - start + n) % 26 + start)
        else:
            result += c
    return result


def read_lines(path):
    """reads a file and returns its lines

    The with statement closes the file.
    """
    with open(path) as f:
        return [line.strip() for line in f]


def write_lines(path, lines):
    """writes a list of lines to a file

    Each line ends with a newline.
    """
    with open(path, 'w') as f:
        for line in lines:
            f.write(line + '\n')


def count_lines(path):
    """counts the lines in a file

    It adds one for every line.
    """
    with open(path) as f:
        return sum(1 for _ in f)


def read_json(path):
    """reads a JSON file

    The module json does the work.
    """
    import json
    with open(path) as f:
        return json.load(f)


def write_json(path, data):
    """writes data to a JSON file

    The indent makes the file easy to read.
    """
    import json
    with open(path, 'w') as f:
        json.dump(data, f, indent=2)


def safe_divide(a, b):
    """divides two numbers and returns None for a zero divisor

    It tests the divisor first.
    """
    if b == 0:
        return None
    return a / b


def to_number(text, default):
    """turns a string into a number or returns a default

    The error is caught and the default is returned.
    """
    try:
        return float(text)
    except ValueError:
        return default


def letter_grade(score):
    """returns the letter grade of a score

    The tests go from high to low.
    """
    if score >= 90:
        return 'A'
    if score >= 80:
        return 'B'
    if score >= 70:
        return 'C'
    if score >= 60:
        return 'D'
    return 'F'


def discounted(price, percent):
    """returns the price after a discount in percent

    The discount is taken off the full price.
    """
    return price * (1 - percent / 100)


def simple_interest(amount, rate, years):
    """returns the simple interest of a loan

    The rate is in percent for each year.
    """
    return amount * rate * years / 100
