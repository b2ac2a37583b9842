"""YAML from people: plain data is read, and what is none is refused in one sentence that names the file, at
once.
"""
import os

import pytest

from stepscope import StepscopeError
from stepscope.yaml_files import load_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi"))


@pytest.fixture
def yaml_file(tmp_path):
    def write(content: str | bytes):
        path = tmp_path / "some.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
    return write


@pytest.mark.parametrize(("content", "expected"), [
    ("", None),
    ("- {a: 1, b: [x, 'y', 2.5, null]}\n", [{"a": 1, "b": ["x", "y", 2.5, None]}]),
    ("\ufeffa: µ\n", {"a": "µ"}),
    ("a: &unused 1\n", {"a": 1}),
    ("1: a\n'1': b\n", {1: "a", "1": "b"}),
    ("outer: {a: 1}\ninner: {a: 2}\n", {"outer": {"a": 1}, "inner": {"a": 2}}),
])
def test_plain_data_is_read(yaml_file, content, expected):
    assert load_yaml(yaml_file(content)) == expected


@pytest.mark.parametrize(("content", "problem"), [
    ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' is there twice"),
    ("x: {y: [{0x10: 1, 16: 2}]}\n", "the key 16 is there twice"),
    (BOMB, "line 2, column 8: the alias *a"),
    ("a: &a {b: *a}\n", "alias"),
    ("[" * 5_000, "levels"),
    ("[" * 5_000 + "]" * 5_000, "levels"),
    ("".join("  " * n + "a:\n" for n in range(400)), "levels"),
    ("{a: [1, 2\n", "line"),
    ("a: 1\n---\nb: 2\n", "document"),
    ("!!python/object/apply:os.system [true]\n", "python/object"),
    ("a: " + "9" * 6_000 + "\n", "digits"),
    ("a: " + "1:" * 200_000 + "1\n", "characters"),
    ("a: !!timestamp x\n", "expected plain YAML"),
    ("a: !!bool x\n", "expected plain YAML"),
    ("a: 2001-99-99\n", "month"),
    ("{[1]: 2}\n", "unhashable"),
    ("a: \0\n", "expected plain YAML"),
    (b"a: \xff\n", "byte 3 is not UTF-8"),
    ("# " + "x" * 2**20, "larger than 1,048,576 bytes"),
])
def test_what_is_no_plain_yaml_is_refused_in_one_sentence(yaml_file, content, problem):
    path = yaml_file(content)
    with pytest.raises(StepscopeError) as raised:
        load_yaml(path)
    sentence = str(raised.value)
    assert sentence.startswith(f"{path}: ") and problem in sentence and "\n" not in sentence and len(sentence) < 600


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, problem in (("pipe.yaml", "no regular file"), (".", "no regular file"),
                          ("absent.yaml", "No such file")):
        with pytest.raises(StepscopeError, match=problem):
            load_yaml(tmp_path / name)


def test_a_caller_may_ask_for_less(yaml_file):
    with pytest.raises(StepscopeError, match="larger than 4 bytes"):
        load_yaml(yaml_file("a: 123"), limit=4)
