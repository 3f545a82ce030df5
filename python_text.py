"""The quick start's text: Python's standard library, which is already on your disk, and conversations about it."""
import ast
import glob
import hashlib
import re
import sysconfig
from pathlib import Path


def python_files():
    """
    Yields {"text": ...} for each file of Python's standard library, in an order that mixes its packages (by the hash
    of the name). Skips tests, and modules that are really tables of data.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    names = glob.glob("**/*.py", root_dir=root, recursive=True)
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if not skip & set(name.split("/")):
            yield {"text": (root / name).read_text(encoding="utf-8", errors="replace")}


def python_conversations():
    """
    Yields {"messages": [{"role", "content"}, ...]}: a question about each function of the standard library, answered
    by the first paragraph of its docstring. Questions have up to 90 characters and answers 10 to 160. No question
    comes twice.
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
                    yield {"messages": [{"role": "user", "content": question},
                                        {"role": "assistant", "content": answer}]}
