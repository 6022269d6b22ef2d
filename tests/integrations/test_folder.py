"""What a user does with a folder of a model: the daemon's configuration from it, and answers on the daemon's pages."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglcache import config
from sglcache.errors import ConfigError
from sglcache.integrations.transformers import load_config, load_model, load_tokenizer, pool_settings, settings
from sglcache.integrations.transformers.__main__ import main
from sglcache.testing.daemon import Daemon

TEXT = "The cat sat on the mat, and the rat sat on the cat; the mat was flat, and that was that. " * 4
VOCAB = 300  # every byte, the end of a text, and what was learnt
END = "<end>"
NUM_NEW = 6
PAGE = Path(__file__).parents[2] / "docs" / "integrate.md"
Run = Callable[..., "Done"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer of its own, as anybody would save it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **{**tiny.SIZES, "vocab_size": VOCAB}))
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(4.0)
    model.generation_config.eos_token_id = tokenizer.token_to_id(END)
    model.save_pretrained(folder)
    return folder


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def answers(self) -> list[dict[str, Any]]:
        """Of --json."""
        assert (self.code, self.err) == (0, "")
        return [json.loads(line) for line in self.out.splitlines()]


def in_a_process(*words: object) -> Done:
    command = [sys.executable, "-m", "sglcache.integrations.transformers", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line, in this process."""

    def run(*words: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        return Done(main(list(map(str, words))), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Configured with what the command line printed for the folder."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["--model", str(folder), "--print-config", "--num-tokens", "1024"]) == 0
    sections = tomllib.loads(out.getvalue())
    config.parse(sections)  # it is a configuration
    with Daemon(tmp_path_factory.mktemp("daemon"), events={"enabled": False}, **sections) as daemon:
        yield daemon


@pytest.fixture
def say(folder: Path, daemon: Daemon, run: Run) -> Run:
    """An empty cache, and the command line on it."""
    daemon.settle()
    with daemon.admin() as admin:
        admin.clear()
    return partial(run, "--model", folder, "--socket", daemon.socket, "--max-new-tokens", NUM_NEW)


def own_words(folder: Path, tokens: list[int]) -> list[int]:
    """What the model says by itself."""
    return tiny.greedy(load_model(folder), tokens, NUM_NEW)


def test_the_printed_configuration_is_the_folder_s(folder: Path, run: Run) -> None:
    done = run("--model", folder, "--print-config", "--page-size", 4, "--num-shards", 2, "--dtype", "bfloat16")
    want = pool_settings(load_config(folder), page_size=4, dtype="bfloat16", num_shards=2)
    assert (done.code, tomllib.loads(done.out)) == (0, {"pool": want})
    assert pool_settings(load_config(folder))["dtype"] == "float32", "as the weights are saved"


def test_what_is_printed_for_a_model_of_windows_and_states_is_what_serves_it(run: Run, tmp_path: Path) -> None:
    tiny.build("lara_mini").save_pretrained(tmp_path / "model")
    done = run("--model", tmp_path / "model", "--print-config", "--num-tokens", 1024)
    sections = tomllib.loads(done.out)
    assert (done.code, sections) == (0, settings(load_config(tmp_path / "model"), num_tokens=1024))
    with Daemon(tmp_path / "daemon", events={"enabled": False}, **sections) as daemon:
        on_it = ("--model", tmp_path / "model", "--socket", daemon.socket, "--max-new-tokens", NUM_NEW)
        prompt = tiny.prompt(60)
        said = [json.loads(run(*on_it, "--json", "--ids", ",".join(map(str, prompt))).out) for _ in range(2)]
    assert [each["matched_tokens"] for each in said] == [0, 48]
    words = own_words(tmp_path / "model", prompt)
    assert [each["output"] for each in said] == [words, words]


def test_a_configuration_that_can_not_be_served_is_not_printed(folder: Path, run: Run) -> None:
    for option, value, words in (
        ("--num-shards", 3, "pool.num_shards = 3 does not divide pool.num_kv_heads"),
        ("--num-tokens", 15, "pool.num_tokens = 15"),
    ):
        done = run("--model", folder, "--print-config", option, value)
        assert (done.code, done.out) == (2, "")
        assert words in done.err


def test_each_call_is_a_process_and_finds_what_the_last_one_left(folder: Path, daemon: Daemon, say: Run) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokens = tokenizer(TEXT)["input_ids"]
    assert 64 < len(tokens) < len(TEXT), "it learnt words"
    words = ("--json", "--prompt", TEXT)
    (cold,) = in_a_process("--model", folder, "--socket", daemon.socket, "--max-new-tokens", NUM_NEW, *words).answers
    (warm,) = say(*words).answers
    assert (cold["prompt_tokens"], cold["matched_tokens"]) == (len(tokens), 0)
    assert (warm["matched_tokens"], warm["host_tokens"]) == ((len(tokens) - 1) // 16 * 16, 0)
    assert cold["output"] == warm["output"] == own_words(folder, tokens)
    assert warm["text"] == tokenizer.decode(warm["output"])


def test_people_read_text_and_pipes_write_lines(folder: Path, say: Run) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    done = say("--prompt", "The cat")
    assert done.code == 0
    assert done.out.removesuffix("\n") == tokenizer.decode(own_words(folder, tokenizer("The cat")["input_ids"]))
    assert done.err.startswith("-- 0 of")
    lines = say("--json", stdin=f"{TEXT}\n{TEXT}\n").answers
    assert [line["matched_tokens"] > 0 for line in lines] == [False, True], "each is answered before the next is read"
    assert lines[0]["output"] == lines[1]["output"]


def test_an_answer_stops_where_the_model_ends_it(folder: Path, say: Run, tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8]
    words = own_words(folder, prompt)
    model = load_model(folder)
    model.generation_config.eos_token_id = [words[2]]
    model.save_pretrained(tmp_path)
    (short,) = say("--json", "--ids", "5,6 7,8", "--model", tmp_path).answers
    assert short["output"] == words[: words.index(words[2]) + 1]
    assert short["text"] is None, "there is no tokenizer"


def test_sampling_is_the_seed_s(say: Run) -> None:
    words = ("--json", "--temperature", 2.0, "--prompt", TEXT)
    (cold,), (warm,) = say(*words, "--seed", 1).answers, say(*words, "--seed", 1).answers
    assert (cold["matched_tokens"], warm["matched_tokens"] > 0) == (0, True)
    assert cold["output"] == warm["output"]
    assert say(*words, "--seed", 2).answers[0]["output"] != cold["output"]


def test_the_example_of_the_documentation_runs(
    folder: Path, daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads the model, and says how much was cached: most of it, the second time."""
    monkeypatch.setenv("SGLCACHE_SOCKET", str(daemon.socket))
    *_, source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    said = []
    for _ in range(2):
        exec(source.replace("FOLDER", str(folder)), {})
        output, _, cached = capsys.readouterr().out.rpartition("]")
        said.append((output, int(cached)))
    assert said == [(said[0][0], 0), (said[0][0], 48)]
    words = tiny.greedy(load_model(folder), list(range(1, 50)), NUM_NEW)
    assert said[0][0].startswith(str(words).removesuffix("]"))


def test_what_is_wrong_is_said_in_a_line(folder: Path, daemon: Daemon, run: Run, tmp_path: Path) -> None:
    on_it = ("--socket", daemon.socket, "--ids", "1")
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("--model", tmp_path, *on_it), 2, r"error\[config\]: .* has no config\.json"),
        (("--model", folder, "--socket", tmp_path / "nobody", "--ids", "1"), 69, r"error\[unavailable\]: "),
        (("--model", folder, *on_it, "--dtype", "bfloat16"), 2, r"pool\.dtype = float32 and the model needs bfloat16"),
        (("--model", folder, "--socket", daemon.socket, "--ids", "one"), 2, "1,2,3"),
        (("--model", folder, "--socket", daemon.socket, "--ids", " ".join("1" * 1100)), 1, r"error\[no_space\]: "),
        (on_it, 2, "--model"),
    ]
    for words, code, said in cases:
        done = run(*words)
        assert (done.code, done.out) == (code, ""), done.err
        assert re.search(said, done.err), done.err
    model = load_model(folder)
    model.save_pretrained(tmp_path)
    done = run("--model", tmp_path, "--socket", daemon.socket, "--prompt", "The cat")
    assert (done.code, "no tokenizer" in done.err) == (2, True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(tmp_path)


@pytest.mark.timeout(240)  # three processes import torch
def test_with_two_shards_it_is_two_processes(folder: Path, run: Run, tmp_path: Path) -> None:
    pool = pool_settings(load_config(folder), num_tokens=1024, num_shards=2)
    with Daemon(tmp_path, pool=pool, events={"enabled": False}) as daemon:
        done = run(
            "--model", folder, "--socket", daemon.socket, "--max-new-tokens", NUM_NEW, "--json", "--ids", "9,8,7"
        )
    assert done.answers[0]["output"] == own_words(folder, [9, 8, 7])


def test_a_prompt_that_can_t_be_answered_takes_no_other_along(folder: Path, say: Run) -> None:
    """One that is too long for the pool, one with a token that the model lacks, and an empty line of standard input."""
    too_long = ",".join(map(str, range(100))) + ",1" * 2000
    done = say("--json", "--ids", "1,2,3", "--ids", too_long, "--ids", "1,999999")
    assert done.code == 1
    (answer,) = (json.loads(line) for line in done.out.splitlines())
    assert answer["output"] == own_words(folder, [1, 2, 3])
    assert "error[no_space]: a prompt of 2100 tokens" in done.err
    assert "error[bad_request]: a prompt of 2 tokens: token 999999" in done.err
    done = say("--json", stdin="\nthe sea\n")
    assert done.code == 1
    assert len(done.out.splitlines()) == 1
