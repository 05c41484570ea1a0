"""The grammar of `--kernel`: which texts are choices, what of, and that all of these can be built."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.kernels import BUILT_IN
from ffncli.kernels.choice import KernelChoice, choices, parse

ACCEPTED = {
    "eager": KernelChoice("eager", "eager"),
    "conv": KernelChoice("conv1x1", "conv1x1"),
    "mine.py": KernelChoice("", "mine.py"),
    "mine.py:f": KernelChoice("mine.py:f", "mine.py", "f"),
    "~/some dir/mine.py:f_2": KernelChoice("mine.py:f_2", "~/some dir/mine.py", "f_2"),
    "main:x/mine.py:f": KernelChoice("main:mine.py:f", "x/mine.py", "f", None, "main"),
    "old=origin/a-b~2:mine.py": KernelChoice("old", "mine.py", None, None, "origin/a-b~2"),
    "v1:mine.py": KernelChoice("", "mine.py", None, None, "v1"),
    "slowed:2:HEAD^:mine.py:f": KernelChoice("slowed:2:HEAD^:mine.py:f", "mine.py", "f", "2", "HEAD^"),
    "a.py.py:f": KernelChoice("a.py.py:f", "a.py.py", "f"),
    "slowed.py:f": KernelChoice("slowed.py:f", "slowed.py", "f"),
    "a=mine.py": KernelChoice("a", "mine.py"),
    "a=../mine.py:f": KernelChoice("a", "../mine.py", "f"),
    "a b=mine.py:f": KernelChoice("a b", "mine.py", "f"),
    "./a=b/mine.py:f": KernelChoice("mine.py:f", "./a=b/mine.py", "f"),
    "slowed:1:eager": KernelChoice("slowed:1:eager", "eager", None, "1"),
    "slowed:1.50:conv": KernelChoice("slowed:1.50:conv1x1", "conv1x1", None, "1.50"),
    "a=slowed:1.05:eager": KernelChoice("a", "eager", None, "1.05"),
    "slowed:2:mine.py:f": KernelChoice("slowed:2:mine.py:f", "mine.py", "f", "2"),
    "slowed:2:x/mine.py:f": KernelChoice("slowed:2:mine.py:f", "x/mine.py", "f", "2"),
    "a=slowed:2:mine.py": KernelChoice("a", "mine.py", None, "2"),
    "slowed:2:mine.py": KernelChoice("", "mine.py", None, "2"),
}
REFUSED = {
    "": "--kernel: unknown kernel ''",
    "eagr": "--kernel: unknown kernel 'eagr'; did you mean 'eager'",
    "a=eager": "--kernel: unknown kernel 'a=eager'; did you mean 'eager'",
    "eager:f": "--kernel: unknown kernel 'eager:f'; did you mean 'eager'",
    "mine": "--kernel: unknown kernel 'mine'; known: eager, ",
    "-x:mine.py:f": "is not a kernel; write it as file.py:name",
    ":mine.py:f": "is not a kernel; write it as file.py:name",
    "a:b:mine.py:f": "is not a kernel; write it as file.py:name",
    "mine.py:": "--kernel: 'mine.py:' is not a kernel; write it as file.py:name or label=file.py:name",
    "mine.py:f:g": "is not a kernel; write it as file.py:name",
    "mine.pyc": "is not a kernel; write it as file.py:name",
    ".py": "is not a kernel; write it as file.py:name",
    "a\nb.py:f": "is not a kernel; write it as file.py:name",
    "eager=mine.py:f": "--kernel: 'eager' is one of ffn's own kernels; give another label",
    "eager=slowed:2:eager": "--kernel: 'eager' is one of ffn's own kernels; give another label",
    "slowed:2": "--kernel: unknown kernel 'slowed:2'",
    "slowed:2:eagr": "--kernel: unknown kernel 'eagr'; did you mean 'eager'",
    "slowed:2:slowed:2:eager": "--kernel: unknown kernel 'slowed:2:eager'",
    **{
        f"slowed:{factor}:eager": f"--kernel: '{factor}' is not a factor, in 'slowed:{factor}:eager'; write it as"
        for factor in ("1..2", "", "x", "-2", "0", "0.5", "1.", ".5", "1e3", "1000", "inf", "٣", "1 ")
    },
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_text_means_one_choice(text):
    assert parse(text) == ACCEPTED[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_kernel_is_refused_in_one_line(text):
    with pytest.raises(FFNError) as caught:
        parse(text)
    assert REFUSED[text] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.code == 2


NAMES = st.from_regex(r"[^\W\d]\w{0,5}", fullmatch=True)
LABELS = st.none() | st.from_regex(r"[A-Za-z ().-]{1,6}", fullmatch=True).filter(lambda text: text not in BUILT_IN)
FACTORS = st.none() | st.decimals(1, 999, allow_nan=False, places=3).map(str)
FILES = st.from_regex(r"(?:[a-z.~=: -]{1,4}/){0,2}[a-z]{1,4}\.py", fullmatch=True)


@given(LABELS, FACTORS, FILES | st.sampled_from(list(BUILT_IN)), st.none() | NAMES)
def test_what_is_stored_of_a_choice_is_read_back_as_that_choice(label, factor, kernel, name):
    """The label comes back too, but where only the file can say what its kernel is called."""
    text = kernel if not (name and kernel.endswith(".py")) else f"{kernel}:{name}"
    text = text if factor is None else f"slowed:{factor}:{text}"
    try:
        choice = parse(text if label is None else f"{label}={text}")
    except FFNError:
        assert label is not None or not kernel.endswith(".py") or ":" in kernel  # of our own; or `slowed:` in a path
        return
    assert parse(choice.text) == choice
    assert choice.factor == factor
    assert pickle.loads(pickle.dumps(choice)) == choice


def test_the_name_in_a_file_is_its_label_unless_one_was_given():
    assert parse("x/mine.py").with_attribute("f") == parse("x/mine.py:f")
    assert parse("slowed:2:mine.py").with_attribute("f") == parse("slowed:2:mine.py:f")
    assert parse("a=mine.py").with_attribute("f") == parse("a=mine.py:f")


def test_a_file_is_found_from_where_it_was_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse("x/mine.py:f").file == Path.cwd() / "x" / "mine.py"
    assert parse("a=slowed:2:~/mine.py:f").file == tmp_path / "home" / "mine.py"
    assert parse("eager").file is None


def test_lists():
    def labels(*texts: str) -> list[str]:
        return [choice.label for choice in choices(texts)]

    assert labels() == []
    assert labels("all") == list(BUILT_IN)
    assert labels("packed, a=mine.py:f", "eager") == ["packed", "a", "eager"]
    assert labels("conv,eager,conv1x1", "eager,all")[:2] == ["conv1x1", "eager"]
    assert labels("mine.py:f,mine.py:f") == ["mine.py:f"]
    for texts in (["a/mine.py:f,b/mine.py:f"], ["a=mine.py:f", "a=mine.py:g"], ["a=slowed:2:eager,a=slowed:3:eager"]):
        with pytest.raises(FFNError, match=r"two kernels are called '.*'; give labels: --kernel a=file\.py:name"):
            choices(texts)
