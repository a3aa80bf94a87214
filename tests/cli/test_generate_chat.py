"""`tokenmill generate` and `tokenmill chat`, piped and on a terminal, with a model that writes known text."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from tests.support.checkpoints import IM_END_ID, rigged_gguf, token_list
from tests.support.gguf_writer import edit_gguf
from tokenmill.backends.check import LIMITS
from tokenmill.cli.main import main

IDS = {text: i for i, text in enumerate(token_list())}
HELLO = [IDS["hello"], IDS["Ġ"], IDS["Ġwor"], IDS["l"], IDS["d"]]
OPTIONS = ["--num-threads", "1", "--kv-cache-bytes", "4000000", "--temperature", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(rigged_gguf(tmp_path_factory.mktemp("rigged") / "rigged.gguf", HELLO))


def generate(model, *arguments, **kwargs):
    return CliRunner().invoke(main, ["generate", "--model", model, *OPTIONS, *arguments], **kwargs)


def test_a_prompt_streams_its_completion(model):
    done = generate(model, "in a")
    assert (done.exit_code, done.stdout) == (0, "hello  world\n")


def test_a_prompt_from_stdin(model):
    for arguments in ([], ["-"]):
        assert generate(model, *arguments, input="in a").stdout == "hello  world\n"


def test_logprobs_have_a_place_in_json_only(model):
    done = generate(model, "in", "--logprobs", "2")
    assert done.exit_code == 2 and "need --json" in done.stderr


def test_sampling_options_reach_the_sampler(model):
    assert generate(model, "in", "--max-tokens", "1").stdout == "hello\n"
    assert generate(model, "in", "--stop", "wor").stdout == "hello  \n"
    assert generate(model, "in", "--stop", "wor", "--include-stop-str-in-output").stdout == "hello  wor\n"
    assert generate(model, "in", "--n", "2").stdout == "--- 0\nhello  world\n--- 1\nhello  world\n"


def test_json_holds_everything(model):
    done = generate(model, "in", "--json", "--logprobs", "1", "--prompt-logprobs", "0", "--chat", "--system", "a")
    answer = json.loads(done.stdout)
    (choice,) = answer["outputs"]
    assert choice["text"] == "hello  world" and choice["token_ids"] == [*HELLO, IM_END_ID]
    assert choice["finish_reason"] == "stop" and set(choice["logprobs"][0]) >= {str(HELLO[0])}
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"])
    assert IDS["<|im_start|>"] in answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["in", "--temperature", "-3"], "temperature"),
        (["in", "--max-model-len", "99999999"], "max_model_len is 99999999"),
        (["in", "--isa", "abacus"], "isa is 'abacus'"),
        ([""], "the prompt is empty"),
    ],
)
def test_what_is_wrong_is_one_line(model, arguments, says):
    done = generate(model, *arguments)
    assert done.exit_code == 1 and done.stderr.startswith("Error: ") and says in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_check_runs_the_prompt_against_the_reference(model, monkeypatch):
    done = generate(model, "in a", "--check")
    assert (done.exit_code, done.stdout) == (0, "hello  world\n")
    assert "agree with the reference" in done.stderr and "attention" in done.stderr
    monkeypatch.setitem(LIMITS, "attention", -1.0)
    done = generate(model, "in a", "--check")
    assert done.exit_code == 1 and done.stdout == ""
    assert "attention (layer 0, llama.py:" in done.stderr.replace("layer 1", "layer 0") and "differs by" in done.stderr


def test_system_needs_chat(model):
    assert generate(model, "in", "--system", "x").exit_code == 2


# ---- chat


def test_lines_piped_in_are_turns(model):
    done = CliRunner().invoke(main, ["chat", model, *OPTIONS], input="in\n\na\n")
    assert (done.exit_code, done.stdout) == (0, "hello  world\nhello  world\n")


def test_a_model_without_a_chat_template_is_told_at_the_start(model, tmp_path):
    path = edit_gguf(model, tmp_path / "base.gguf", remove=("tokenizer.chat_template",))
    done = CliRunner().invoke(main, ["chat", str(path), *OPTIONS], input="in\n")
    assert done.exit_code == 1 and done.stdout == ""
    assert "base.gguf has no chat template" in done.stderr and "tokenmill generate" in done.stderr


class Terminal:
    """`tokenmill chat` on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill.cli.main", "chat", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
        )
        os.close(child)
        self.seen = ""

    def wait_for(self, text, seconds=60):
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; seen:\n{self.seen}"
            self.seen += os.read(self.fd, 65536).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, line):
        os.write(self.fd, (line + "\n").encode())

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(tmp_path):
    """A chat whose replies last for many seconds, however fast the machine."""
    model = rigged_gguf(tmp_path / "long.gguf", HELLO, context_length=200_000)
    terminal = Terminal(str(model), *OPTIONS, "--kv-cache-bytes", "200000000", "--ignore-eos")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_reply_and_not_the_program(terminal):
    terminal.wait_for("Ctrl-C stops a reply")
    terminal.wait_for("you")
    terminal.type("in")  # without an end token the reply goes on to the context's edge
    terminal.wait_for("hello")
    terminal.interrupt()
    terminal.wait_for("stopped")
    terminal.wait_for("you")
    time.sleep(0.5)  # readline notices a signal only once it waits for a key, a moment after its prompt
    terminal.interrupt()
    terminal.wait_for("Ctrl-D or /exit leaves")
    terminal.type("/reset")
    terminal.wait_for("a new conversation")
    terminal.type("/what")
    terminal.wait_for("/system TEXT")
    terminal.type("/exit")
    assert terminal.process.wait(20) == 0
