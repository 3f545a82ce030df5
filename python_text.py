"""
The quick start's text: Python's standard library, which is already on your disk, and conversations about it, about
sums and about letters.
"""
import ast
import glob
import hashlib
import re
import sysconfig
from itertools import count, product
from pathlib import Path
from random import Random
from string import ascii_lowercase


def python_files():
    """
    Yields {"text": ...} for each file of Python's standard library, in an order that mixes its packages (by the hash
    of the name). Skips tests, and modules that are really tables of data.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    paths = map(Path, glob.glob("**/*.py", root_dir=root, recursive=True))  # without hidden folders, unlike rglob
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        if skip.isdisjoint(path.parts):
            yield {"text": (root / path).read_text(encoding="utf-8", errors="replace")}


def conversation(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def python_conversations():
    """
    Yields {"messages": [{"role", "content"}, ...]}: a question about each function of the standard library, answered
    by the first paragraph of its docstring. Questions have up to 90 characters and answers 10 to 160. No question
    appears twice.
    """
    asked = set()
    for file in python_files():
        for node in ast.walk(ast.parse(file["text"])):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = re.sub(r"^(self|cls)(, /)?(, |$)", "", ast.unparse(node.args))
                question = f"What does {node.name}({arguments}) do?"
                answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if question not in asked and len(question) <= 90 and 10 <= len(answer) <= 160 and answer.isascii():
                    asked.add(question)
                    yield conversation(question, answer)


# -----------------------------------------------------------------------------
# questions whose answers can be checked: each answer spells out its working and ends with a number

def sum_questions():
    """Yields each sum of two two-digit numbers, as {"question", "answer"}. Answers add the ones, then the tens."""
    for a, b in product(range(10, 100), repeat=2):
        ones = a % 10 + b % 10
        carry = "+1" if ones > 9 else ""
        working = f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carry}={(a + b) // 10}"
        yield {"question": f"What is {a} + {b}?", "answer": f"{working}, so {a + b}"}


def letter_questions():
    """
    Yields {"question", "answer"} for each word of four to ten letters in the standard library: how often it has one of
    its commonest letters or, for a quarter of the words, any letter. Answers repeat the word and count along.
    """
    words = {word for file in python_files() for word in re.findall(r"\b[a-z]{4,10}\b", file["text"])}
    for word in sorted(words):
        random = Random(word)
        commonest = max(random.sample(word, len(word)), key=word.count)
        letter = random.choice([commonest] * 3 + [random.choice(ascii_lowercase)])
        numbers = count(1)
        counted = re.sub(letter, lambda _: f"{letter}{next(numbers)}", word)
        yield {"question": f"How many {letter}'s are in {word}?", "answer": f"{counted}, so {word.count(letter)}"}


def hold_out(rows):
    """Splits rows into 200 for a test and the rest, by the hash of the question."""
    rows = sorted(rows, key=lambda row: hashlib.sha256(row["question"].encode()).digest())
    return rows[:200], rows[200:]
