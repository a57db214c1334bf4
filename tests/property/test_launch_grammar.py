"""`flyball run` parses a command line as torchrun does: compared with torchrun's own parser."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.run import config_from_args, get_args_parser

from flyball.contracts.errors import UsageError
from flyball.launch.launch_flags import ALL_FLAGS
from flyball.launch.launch_grammar import ParsedCommandLine, read_line
from flyball.launch.launcher import parse_run

THEIR_ACTIONS = [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]
THEIR_SPELLINGS = [spelling for action in THEIR_ACTIONS for spelling in action.option_strings]
OUR_SPELLINGS = [spelling for flag in ALL_FLAGS for spelling in flag.spellings]

values = st.one_of(
    st.sampled_from(
        ["1", "2", "1:4", "0.5", "-1", "-0.5", "spawn", "node", "gpu", "3", "0:3,1:2", "a b", "-a b", "", "--"]
    ),
    st.text(max_size=6).filter(lambda text: "\0" not in text),
)


@st.composite
def launcher_words(draw: st.DrawFn) -> list[str]:
    """One of torchrun's flags, whole or abbreviated, with a possible value."""
    spelling = draw(st.sampled_from(THEIR_SPELLINGS))
    action = next(a for a in THEIR_ACTIONS if spelling in a.option_strings)
    if spelling.startswith("--") and draw(st.booleans()):
        spelling = spelling[: draw(st.integers(3, len(spelling)))]
    if action.nargs == 0:
        return [draw(st.sampled_from([spelling, spelling, spelling, spelling + "=1", "-mt3", "-mr", "-m3", "-mm"]))]
    value = draw(st.sampled_from(list(action.choices)) if action.choices and draw(st.booleans()) else values)
    # `--flag=--` is no value: argparse takes the dashes away, and hands on an empty list
    return [f"{spelling}={value}"] if value != "--" and draw(st.booleans()) else [spelling, value]


script_words = st.lists(
    st.one_of(
        st.sampled_from(
            ["--", "-h", "--help", "", "-m", "--no", "--nproc", "--c", "--save", "--lr=3e-4", "-1", "x y", "größe"]
        ),
        st.sampled_from(THEIR_SPELLINGS + OUR_SPELLINGS),
        st.text(max_size=8),
    ),
    max_size=6,
)
scripts = st.one_of(
    st.sampled_from(["train.py", "pkg.train", "-1", "a b.py", "-", "x=1", "--"]),
    st.text(min_size=1, max_size=6).filter(lambda text: not text.startswith("-")),
)


def torchruns(words: Sequence[str]) -> tuple[Namespace | None, str]:
    """torchrun's result for the words, or None if it exits, and its output."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            return get_args_parser().parse_args(list(words)), ""
        except SystemExit:
            return None, output.getvalue()


def ours(words: Sequence[str]) -> ParsedCommandLine | None:
    try:
        line = read_line(words)
    except UsageError as error:
        assert error.hint
        return None
    return None if line.help or not line.script else line


def assert_same(line: ParsedCommandLine, theirs: Namespace) -> None:
    assert line.script == theirs.training_script
    assert list(line.script_arguments) == theirs.training_script_args
    for action in THEIR_ACTIONS:
        value = getattr(theirs, action.dest)
        if action.dest.startswith("duplicate"):
            assert (action.dest in line.given) == (value != [])
        elif action.dest in line.given:
            assert line.given[action.dest] == value
        else:
            assert value == action.default


def is_ambiguity_of_one_flag(output: str) -> bool:
    """Python before 3.13 calls `--nproc` ambiguous: --nproc-per-node or --nproc_per_node. Newer ones accept it."""
    candidates = output.rpartition("could match ")[2].strip().split(", ")
    return len({c.replace("_", "-") for c in candidates}) == 1


@given(st.lists(launcher_words(), max_size=4), st.sampled_from([[], [], ["--"]]), scripts, script_words)
@settings(max_examples=600)
@example([], [], "train.py", ["--ckpt", "x", "--save", "--network", "--host", "--state", "--training", "--c", "1"])
@example([], [], "train.py", ["--no", "--n"])
@example([], [], "train.py", ["--", "a"])
@example([], [], "train.py", ["--", "--", "a"])
@example([], ["--"], "-m", ["--", "a"])
@example([["-mt3"]], [], "pkg.train", [])
@example([["--nproc", "2"]], [], "train.py", [])
@example([["--re", "3"]], [], "train.py", [])
@example([["--local_r", "0"], ["--tee=3"], ["-r3"]], [], "train.py", [])
def test_every_word_goes_where_torchrun_puts_it(
    flags: list[list[str]], dashes: list[str], script: str, arguments: list[str]
) -> None:
    before = [word for flag in flags for word in flag] + dashes
    theirs, output = torchruns([*before, script, *arguments])
    line = ours([*before, script, *arguments])
    if "ambiguous option" in output and (is_ambiguity_of_one_flag(output) or torchruns([*before, script])[0]):
        return  # see below: words that torchrun should have accepted
    if theirs is None:
        assert line is None, output
        return
    assert line is not None or not theirs.training_script
    if line is not None:
        assert_same(line, theirs)


@given(st.lists(launcher_words(), max_size=3), script_words)
@settings(max_examples=300)
def test_no_word_after_the_script_stops_a_run(flags: list[list[str]], arguments: list[str]) -> None:
    """torchrun itself fails with `train.py --no`."""
    before = [word for flag in flags for word in flag]
    theirs, _ = torchruns([*before, "train.py", "first"])
    if theirs is None or theirs.training_script != "train.py":
        return
    line = ours([*before, "train.py", "first", *arguments])
    assert line is not None
    assert line.script_arguments == ("first", *arguments)
    theirs.training_script_args = list(line.script_arguments)
    assert_same(line, theirs)


@given(
    st.dictionaries(st.sampled_from(THEIR_ACTIONS), values, max_size=4),
    st.lists(launcher_words(), max_size=2),
)
@settings(max_examples=300)
def test_variables_stand_in_for_flags_as_with_torchrun(variables: dict[object, str], flags: list[list[str]]) -> None:
    environ = {f"PET_{action.dest.upper()}": value for action, value in variables.items()}  # type: ignore[attr-defined]
    words = [*(word for flag in flags for word in flag), "train.py", "--lr", "1"]
    if any("\0" in value for value in environ.values()):
        return
    with mock.patch.dict(os.environ, environ):
        try:
            theirs, output = torchruns(words)
        except ValueError:
            theirs, output = None, "a switch that is not a number"
        config = None
        if theirs is not None:
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.chdir(folder),  # torchrun creates the folder of --log-dir at once
                contextlib.suppress(ValueError, AssertionError, RuntimeError, KeyError),
                mock.patch("logging.Logger.warning"),
            ):
                config = config_from_args(theirs)[0]
    if "ambiguous option" in output:
        return
    try:
        request = parse_run(words, environ)
    except UsageError:
        return  # Flyball refuses more, but what it accepts is the same
    assert theirs is not None, output
    assert request.argv == (theirs.training_script, *theirs.training_script_args)
    assert request.module == (theirs.module and not theirs.run_path)
    if config is not None:
        most = config.max_nodes if request.rendezvous or request.supervisor else 1  # alone, no other host can join
        assert (request.min_nnodes, request.nnodes) == (config.min_nodes, most)
        assert request.nproc_per_node in (str(config.nproc_per_node), theirs.nproc_per_node.strip())
