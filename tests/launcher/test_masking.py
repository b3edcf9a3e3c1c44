"""Secrets are hidden by name, by shape and by value; what only sounds like one is shown."""

from __future__ import annotations

import pytest

from dsrun.launcher.commands import run
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.masking import Masker, is_secret_name, mask_plan, masked, masked_text, masked_words
from dsrun.launcher.plan.launch_plan import Program, make_plan

HF = "hf_" + "aB3" * 8


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HFTOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "db_password",
        "PGPASSWORD",
        "apiKey",
        "--api-key",
        "MY_APIKEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "client.secret",
        "GITHUB_PAT",
        "DB_PWD",
        "DSRUN_NONCE",
        "ssh_passphrase",
    ],
)
def test_names_that_speak_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "MONKEY",
        "KEYBOARD",
        "TOKENIZERS_PARALLELISM",
        "tokenizer",
        "OMP_NUM_THREADS",
        "DSRUN_CONFIG",
        "PWD",
        "OLDPWD",
        "PATH",
        "COMPASS",
        "--pad-token",
        "TURKEY_BATCH",
        "bypass_cache",
        "",
    ],
)
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "anything", "***"),
        ("HF_TOKEN", "", ""),
        ("MAX_TOKENS", "4096", "4096"),
        ("num_key_value_heads", "8", "8"),
        ("train_tokens", "1.5B", "1.5B"),
        ("API_KEY", "12345678", "***"),
        ("MODEL", "gpt2", "gpt2"),
        ("MODEL", HF, "***"),
        ("DATABASE_URL", "postgres://me:s3cret@db:5432/x", "postgres://me:***@db:5432/x"),
        ("http_proxy", "http://proxy:3128", "http://proxy:3128"),
    ],
)
def test_values_are_masked_by_their_name_or_their_own_look(name: str, value: str, shown: str) -> None:
    assert masked(name, value) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"loading with {HF}, please wait", "loading with ***, please wait"),
        ("key sk-" + "x1" * 12, "key ***"),
        ("git clone https://me:pw@host/x.git failed", "git clone https://me:***@host/x.git failed"),
        ("GET https://h/x?a=1&sig=2&token=abcdef#f", "GET https://h/x?a=1&sig=2&token=***#f"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ('{"comet": {"api_key": "x1"}, "tokens": "12"}', '{"comet": {"api_key": "***"}, "tokens": "12"}'),
        (r"{'api_key': 'it\'s', 'lr': '1e-3'}", "{'api_key': '***', 'lr': '1e-3'}"),
        ("sk-learn and hf_hub are libraries", "sk-learn and hf_hub are libraries"),
        ("rank 1 on w0 exited with code 3", "rank 1 on w0 exited with code 3"),
    ],
)
def test_keys_are_found_inside_a_text_by_their_shape(text: str, shown: str) -> None:
    assert masked_text(text) == shown


def test_words_of_a_command_lose_what_follows_a_secret_option() -> None:
    words = ["--api-key=abc", "--token", "xyz", "--lr", "3e-4", "password=p", "--num-key-value-heads", "8", HF]
    assert masked_words(words) == [
        "--api-key=***",
        "--token",
        "***",
        "--lr",
        "3e-4",
        "password=***",
        "--num-key-value-heads",
        "8",
        "***",
    ]


def test_an_option_after_a_secret_option_is_no_value() -> None:
    assert masked_words(["--use-auth-token", "--lr", "3", "--data", "a=b=c"]) == [
        "--use-auth-token",
        "--lr",
        "3",
        "--data",
        "a=b=c",
    ]


@pytest.mark.parametrize(
    "option",
    ["--api-key", "--password", "--wandb-key", "--hf_token", "--apiKey", "-token", "--aws-access-key-id", "--key-2"],
)
def test_a_secret_option_loses_its_value_in_both_forms(option: str) -> None:
    assert masked_words([option, "abc", "train.py"]) == [option, "***", "train.py"]
    assert masked_words([f"{option}=abc", "train.py"]) == [f"{option}=***", "train.py"]


@pytest.mark.parametrize(
    "option",
    ["--key-projection", "--token-mixing", "--api-key-file", "--password-path", "--no-token", "--keyboard", "--lr"],
)
def test_an_option_that_is_no_secret_keeps_the_word_behind_it(option: str) -> None:
    words = [option, "linear", f"{option}=linear"]
    assert masked_words(words) == words


def test_a_variable_is_masked_however_it_is_given() -> None:
    words = ["--env=HF_TOKEN=abc", "--env", "HF_TOKEN=abc", "--env=A=1", "--env=HF_TOKEN"]
    assert masked_words(words) == ["--env=HF_TOKEN=***", "--env", "HF_TOKEN=***", "--env=A=1", "--env=HF_TOKEN"]


def test_settings_of_hydra_are_masked_with_their_signs() -> None:
    words = ["++model.api_key=abc", "+hf_token=abc", "+optim.lr=3"]
    assert masked_words(words) == ["++model.api_key=***", "+hf_token=***", "+optim.lr=3"]


def options_of_run() -> list[str]:
    return [option for param in run.command.params for option in (*param.opts, *param.secondary_opts) if "-" in option]


def test_no_option_of_our_own_hides_its_neighbour() -> None:
    options = options_of_run()
    assert "--accept-new-host-keys" in options
    words = [word for option in options for word in (option, "train.py")]
    assert masked_words(words, own_options=options) == words


def test_options_of_a_script_are_masked_behind_our_own() -> None:
    words = ["--accept-new-host-keys", "train.py", "--api-key", "abc"]
    shown = masked_words(words, own_options=options_of_run())
    assert shown == ["--accept-new-host-keys", "train.py", "--api-key", "***"]


def test_a_plan_is_masked_everywhere_and_the_original_stays() -> None:
    plan = make_plan(
        Allocation(hosts=(HostSpec(name="here", slots=1, source="test", env={"WANDB_API_KEY": "h", "B": "2"}),)),
        Program(kind="script", target="t.py", args=("--token", "abc"), python="python"),
        job_id="j",
        start="fork",
        cwd="/",
        env={"HF_TOKEN": "abc", "A": "1"},
        run_dir="/r",
        grace_s=1,
        nonce="word",
        worker_env={"here": {"X_KEY": "k", "CUDA_VISIBLE_DEVICES": "0"}},
    )
    before = plan.to_json()
    shown = mask_plan(before)
    assert (shown["env"], shown["nonce"]) == ({"HF_TOKEN": "***", "A": "1"}, "***")
    assert shown["program"]["args"] == ["--token", "***"]
    assert shown["nodes"][0]["host"] == before["nodes"][0]["host"] | {"env": {"WANDB_API_KEY": "***", "B": "2"}}
    assert shown["nodes"][0]["workers"][0]["env"] == {"X_KEY": "***", "CUDA_VISIBLE_DEVICES": "0"}
    assert before == plan.to_json()


def test_values_known_from_the_environment_are_hidden_wherever_they_appear() -> None:
    masker = Masker([{"DB_PASSWORD": "hunter2-long", "X_KEY": "hunter2-long-er", "HOME": "/home/somebody"}])
    assert masker.text("ssh: hunter2-long-er, hunter2-long in /home/somebody") == "ssh: ***, *** in /home/somebody"
    assert masker.value({"lines": ["hunter2-long"], "rank": 3, "token": "abc"}) == {
        "lines": ["***"],
        "rank": 3,
        "token": "***",
    }


@pytest.mark.parametrize("value", ["short", "12345678", ""])
def test_short_or_plain_values_are_not_looked_for(value: str) -> None:
    assert Masker([{"X_TOKEN": value}]).text(f"a {value} b") == f"a {value} b"
