from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import UsageError
from dsrun.launcher.plan.script_args import misplaced_options, split_script_words


@pytest.mark.parametrize(
    ("words", "args", "config", "deepspeed_config"),
    [
        ([], [], None, None),
        (["--lr", "3"], ["--lr", "3"], None, None),
        (["--config", "a.json", "--lr", "3"], ["--lr", "3"], "a.json", None),
        (["--lr", "3", "--config=a.json"], ["--lr", "3"], "a.json", None),
        (["--config=a=b.json"], [], "a=b.json", None),
        (["--", "--config", "mine.yaml"], ["--", "--config", "mine.yaml"], None, None),
        (["--config", "a.json", "--", "--config", "mine.yaml"], ["--", "--config", "mine.yaml"], "a.json", None),
        (["--"], ["--"], None, None),
        (["--", "a"], ["--", "a"], None, None),
        (["a", "--", "b", "--", "c"], ["a", "--", "b", "--", "c"], None, None),
        (
            ["--config-file", "x", "--configs=y", "-config", "z"],
            ["--config-file", "x", "--configs=y", "-config", "z"],
            None,
            None,
        ),
        (["--deepspeed_config", "d.json", "--x"], ["--deepspeed_config", "d.json", "--x"], None, "d.json"),
        (["--deepspeed_config=d.json"], ["--deepspeed_config=d.json"], None, "d.json"),
        (["--", "--deepspeed_config", "d.json"], ["--", "--deepspeed_config", "d.json"], None, None),
        (["--config", "a", "--deepspeed_config", "b"], ["--deepspeed_config", "b"], "a", "b"),
        (["--config", "a", "--config", "a"], [], "a", None),
        (["", " ", "\n", "$HOME", "\udcff"], ["", " ", "\n", "$HOME", "\udcff"], None, None),
    ],
)
def test_only_the_config_is_taken_out(
    words: list[str], args: list[str], config: str | None, deepspeed_config: str | None
) -> None:
    found = split_script_words(words)
    assert (list(found.args), found.config, found.deepspeed_config) == (args, config, deepspeed_config)


@pytest.mark.parametrize("words", [["--config"], ["--config="], ["--config", ""], ["--config", "--", "x"]])
def test_config_without_a_file_is_an_error(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        split_script_words(words)
    assert caught.value.render() == (
        "error: `--config` after the script names no file\n"
        "hint: write `--config FILE`; if it is meant for the script alone, put `--` before the script"
    )


def test_two_different_configs_are_an_error() -> None:
    with pytest.raises(UsageError, match="`--config` names 2 files: a, b"):
        split_script_words(["--config", "a", "--config=b"])


plain_words = st.lists(
    st.text(max_size=6).filter(lambda word: word.partition("=")[0] not in ("--config", "--deepspeed_config", "--"))
)


@given(plain_words, plain_words)
def test_every_other_word_arrives_as_it_was_and_in_order(before: list[str], after: list[str]) -> None:
    assert list(split_script_words([*before, "--config", "c", *after]).args) == before + after
    assert list(split_script_words([*before, "--", *after]).args) == [*before, "--", *after]


@given(st.lists(st.sampled_from(["--", "a", "--config", "--config=c", "--deepspeed_config"])))
def test_with_a_double_dash_before_the_script_every_word_is_the_scripts(words: list[str]) -> None:
    found = split_script_words(words, all_are_scripts=True)
    assert (list(found.args), found.config, found.deepspeed_config) == (words, None, None)


REFUSED = ["usage: train.py [-h] [--env ENV]", "               [--lr LR]", ""]


@pytest.mark.parametrize(
    ("words", "last_line", "found"),
    [
        (["--log-dir", "x"], "train.py: error: unrecognized arguments: --log-dir x", ["--log-dir"]),
        (["--log-dir=x", "-n", "4"], "train.py: error: unrecognized arguments: --log-dir=x -n 4", ["--log-dir", "-n"]),
        (["--log-dir"], "Error: No such option: --log-dir", ["--log-dir"]),
        (["--log-dirs"], "train.py: error: unrecognized arguments: --log-dirs", []),
        (["--other"], "train.py: error: unrecognized arguments: --other", []),
        (["--env"], "train.py: error: argument --env: expected one argument", []),
        (["--", "--log-dir", "x"], "train.py: error: unrecognized arguments: --log-dir x", []),
        ([], "train.py: error: unrecognized arguments: --log-dir", []),
    ],
)
def test_an_option_of_dsrun_that_the_script_refused_is_found(
    words: list[str], last_line: str, found: list[str]
) -> None:
    assert misplaced_options(words, [*REFUSED, last_line], options={"--log-dir", "-n", "--env"}) == found


def test_without_a_word_of_the_script_no_option_is_blamed() -> None:
    assert misplaced_options(["--log-dir", "x"], [], options={"--log-dir"}) == []
