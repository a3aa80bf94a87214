"""The command's frame: help, version, errors as one line, options that are the configs' fields."""

import dataclasses
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tokenmill import __version__
from tokenmill.cli import main as cli
from tokenmill.cli.options import HELP, config_from, options_of, sampling_from
from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.core import SamplingParams
from tokenmill.errors import ConfigError, SetupError


def run(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


def test_version():
    assert run("--version").output == f"tokenmill {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there_and_helps(name):
    done = run(name, "--help")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Usage: ")


def test_the_list_of_commands_says_what_each_is_for():
    output = run("--help").output
    for name, (_, _, text) in cli.COMMANDS.items():
        assert f"{name} " in output and text in output


def test_an_unknown_command_is_a_usage_error():
    done = run("sreve")
    assert done.exit_code == 2 and "No such command 'sreve'" in done.output


@pytest.mark.parametrize(
    ("word", "meant"), [("serv", "serve"), ("model", "models"), ("run", "chat"), ("list", "models")]
)
def test_a_mistyped_command_and_other_engines_words_are_answered_by_ours(word, meant):
    done = run(word)
    assert done.exit_code == 2 and f"No such command '{word}'. Did you mean '{meant}'?" in done.output


def test_python_m_tokenmill_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tokenmill", "--version"], capture_output=True, text=True)
    assert done.stdout == f"tokenmill {__version__}\n"


def test_an_error_of_ours_is_one_line_and_exit_1(monkeypatch):
    @click.command()
    def broken():
        raise SetupError("no model at /nowhere;\n  check the path")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: broken)
    done = run("broken")
    assert done.exit_code == 1
    assert done.stderr == "Error: no model at /nowhere; check the path\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    @click.command()
    def buggy():
        raise ZeroDivisionError

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: buggy)
    assert isinstance(run("buggy").exception, ZeroDivisionError)


@pytest.mark.parametrize("command", ["plan", "generate x --model", "chat"])
def test_a_missing_model_is_one_line(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.main", *command.split(), str(tmp_path / "none.gguf")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1 and "none.gguf" in done.stderr


# ---- options


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig, SamplingParams])
def test_every_field_has_a_line_of_help(cls):
    assert {f.name for f in dataclasses.fields(cls)} == set(HELP[cls])


def parse(cls, *arguments):
    seen = {}

    @click.command()
    @options_of(cls)
    def command(**values):
        seen.update(values)

    command.main(list(arguments), standalone_mode=False)
    return seen


def test_an_option_for_every_kind_of_field():
    values = parse(
        SamplingParams,
        *("--temperature", "0.5", "--max-tokens", "3", "--ignore-eos", "--no-skip-special-tokens"),
        *("--stop", "a", "--stop", "b", "--stop-token-ids", "7", "--logit-bias", '{"5": -1.5}'),
    )
    assert sampling_from(values) == SamplingParams(
        temperature=0.5,
        max_tokens=3,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[7],
        logit_bias={5: -1.5},
        skip_special_tokens=False,
    )


def test_what_is_not_given_is_the_default_of_the_command_then_of_the_class():
    assert sampling_from(parse(SamplingParams), max_tokens=256) == SamplingParams(max_tokens=256)
    assert sampling_from(parse(SamplingParams, "--max-tokens", "9"), max_tokens=256) == SamplingParams(max_tokens=9)


def test_help_shows_the_commands_own_defaults():
    assert "Most tokens to write. [default: 256]" in " ".join(run("generate", "--help").output.split())
    assert "0 is greedy. [default: 0.7]" in " ".join(run("chat", "--help").output.split())


def test_the_command_line_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("TOKENMILL_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "77")
    monkeypatch.setenv("TOKENMILL_ENABLE_PREFIX_CACHING", "true")
    config = config_from(EngineConfig, parse(EngineConfig, "--max-num-seqs", "5", "--no-enable-prefix-caching"))
    assert (config.max_num_seqs, config.max_model_len, config.enable_prefix_caching) == (5, 77, False)
    assert config_from(ServerConfig, parse(ServerConfig, "--api-key", "a", "--api-key", "b")).api_key == ("a", "b")


def test_a_bad_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("TOKENMILL_PORT", "eighty")
    with pytest.raises(ConfigError, match="TOKENMILL_PORT is 'eighty'"):
        config_from(ServerConfig, {})


def test_an_environment_variable_that_is_no_setting_is_refused(monkeypatch):
    monkeypatch.setenv("TOKENMILL_HOME", "/tmp")
    config_from(EngineConfig, {})
    monkeypatch.setenv("TOKENMILL_MAX_MODELLEN", "12")
    for cls in (EngineConfig, ServerConfig):
        with pytest.raises(ConfigError, match=r"MODELLEN is not understood; did you mean TOKENMILL_MAX_MODEL_LEN\?"):
            config_from(cls, {})
    monkeypatch.delenv("TOKENMILL_MAX_MODELLEN")
    monkeypatch.setenv("TOKENMILL_TEMPERATURE", "0")
    with pytest.raises(ConfigError, match="TOKENMILL_TEMPERATURE is not understood"):
        config_from(EngineConfig, {})


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}', '{"1": "x"}', '{"1": null}'])
def test_logit_bias_must_be_an_object_of_numbers(text):
    with pytest.raises(click.BadParameter):
        parse(SamplingParams, "--logit-bias", text)
