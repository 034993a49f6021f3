"""sample.py: text from the folder of a run, and what it says where it cannot give any."""

import dataclasses
import functools
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from test_gpt_tokens import gpt2, train_tokenizer

import sample
import startrail_jax as st
from configs.gpt import gpt_tiny
from models.config import GPTConfig
from models.gpt import GPT
from programs import REPOSITORY, run_python, save_run, session_of_one, shapes_of
from refusals import message_of_sample as message_of
from refusals import refused, usage_error
from startrail_jax.errors import InputError
from trainer.checkpoints import checkpoint
from trainer.checkpoints.reading import restore_weights
from trainer.config import MeshConfig
from trainer.data import files
from trainer.gpt import sample as text_samples
from trainer.gpt.config import DataConfig, TextOptions, TextSampleConfig
from trainer.gpt.corpus import Corpus, Stream
from trainer.gpt.sample import Continuation, prompt_tokens, stops_of_run
from trainer.gpt.text import IdTokenizer, TextStream, encode_prompt, open_tokenizer
from trainer.gpt.tokenizer import ByteTokenizer, FileTokenizer
from trainer.run.folder import open_run
from trainer.run.settings import save_config

MODEL = GPTConfig(width=16, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=16)
QUICK = "--tokens 4 --temperature 2"


@functools.cache
def first_weights():
    def make():
        model = GPT(MODEL, attention_fn=jax.nn.dot_product_attention, rngs=nnx.Rngs(0))
        return nnx.state(model)

    return jax.jit(make)()


def make_weights(step=0):
    """Others for every step."""
    return jax.tree.map(lambda x: x + step / 8, first_weights())


def make_config(run_dir, **changes):
    sizes = {"model": MODEL, "seq_len": 16, "sample": TextSampleConfig(length=8), "devices": 2}
    return dataclasses.replace(gpt_tiny(), run_dir=run_dir, **sizes | changes)


def make_run(run_dir, steps=(2,), *, average=None, **changes):
    saved = {} if average is None else {"average": average}
    states = {
        step: {"weights": make_weights(step), "optimizer": {"count": jnp.int32(step)}} | saved
        for step in steps
    }
    return save_run(make_config(run_dir, **changes), states)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def run(capsys, run_dir, *flags):
    """What the program writes to standard output, and to standard error."""
    capsys.readouterr()
    sample.sample([str(run_dir), *QUICK.split(), *flags])
    return capsys.readouterr()


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_program_continues_standard_input_while_the_run_goes_on(run_dir):
    """Without touching a file of a folder that another program has locked."""
    before = contents(run_dir)
    flags = [*QUICK.split(), "--top-k", "1", "--samples", "2"]
    with open_run(make_config(run_dir)):
        before |= contents(run_dir)
        command = ["-W", "error", "sample.py", str(run_dir), *flags]
        result = run_python(*command, input="def f(x):\n" * 3)
        assert contents(run_dir) == before
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.removeprefix("--- sample 1\n").split("\n--- sample 2\n")
    # One choice, and so the same text.
    assert first == second.removesuffix("\n") != ""
    lines = result.stderr.splitlines()
    # On whichever line: a plugin for GPUs that finds none says so first.
    assert "mesh: data 1, group 1, ring 2, team 1, head 1, tensor 1" in result.stderr
    assert f"model: {run_dir} after step 2" in lines
    assert "prompt: 30 bytes" in lines
    assert "prompt and sample make 34 tokens: the model was trained on sequences of 16" in lines


@pytest.fixture(scope="module")
def endless_run(tmp_path_factory):
    """Of a model that cannot draw the end of a document."""
    run_dir = tmp_path_factory.mktemp("runs") / "endless"
    return make_run(run_dir, data=DataConfig(end_of_document=256))


PAGE = 4096  # The smallest pipe.


@contextmanager
def streaming(run_dir, errors, **environment):
    """The program, which draws more than its pipe holds, its output and the first piece of it."""
    flags = ("--prompt", "a", "--tokens", "20000", "--temperature", "2")
    with errors.open("w") as file, subprocess.Popen(
        [sys.executable, "sample.py", str(run_dir), *flags],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=file, env=os.environ | environment,
        pipesize=PAGE,
    ) as process:  # fmt: skip
        try:
            output = process.stdout
            assert output is not None
            piece = os.read(output.fileno(), 100_000)
            assert piece, errors.read_text()
            yield process, output, piece
            process.wait(300)
        finally:
            process.kill()


def test_each_piece_is_shown_before_the_next_token_is_drawn(monkeypatch):
    raw = io.BytesIO()
    shown = io.TextIOWrapper(io.BufferedWriter(raw))  # As a pipe, with a buffer.
    session = session_of_one()
    tokenizer = ByteTokenizer(end_of_document=None, vocab_size=256)
    stream = TextStream(tokenizer, np.array([97], np.int32))

    def draw():
        for index, letter in enumerate(b"some text"):
            assert raw.getvalue() == b"some text"[:index]
            yield [letter]

    monkeypatch.setattr("sys.stdout", shown)
    text_samples._print_streams([stream], draw(), session)
    assert raw.getvalue() == b"some text\n"


@pytest.mark.slow
def test_program_streams_until_ctrl_c(endless_run, tmp_path):
    """To a terminal that knows ASCII alone."""
    errors = tmp_path / "errors"
    with streaming(endless_run, errors, PYTHONIOENCODING="ascii") as (process, output, text):
        while len(text) < 50:
            piece = os.read(output.fileno(), 100_000)
            assert piece, errors.read_text()
            text += piece
        assert b"?" in text  # Half of all bytes are not ASCII.
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert "Traceback" not in errors.read_text()


@pytest.mark.slow
def test_program_ends_with_its_reader(endless_run, tmp_path):
    errors = tmp_path / "errors"
    with streaming(endless_run, errors) as (process, output, _):
        output.close()
    assert process.returncode == 0
    assert "BrokenPipe" not in errors.read_text()


@pytest.mark.slow
def test_text_does_not_depend_on_the_mesh(run_dir, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("import os")
    flags = ("--top-k", "200", "--top-p", "0.99", "--seed", "1")
    first = run(capsys, run_dir, "--prompt", "import os", *flags)
    other = ("--devices", "4", "--mesh.c", "1", "--mesh.head", "2", "--zero", "3")
    from_file = ("--prompt-file", str(tmp_path / "prompt.txt"))
    again = run(capsys, run_dir, *from_file, *other, *flags)
    assert again.out == first.out
    assert "head 2" in again.err
    assert first.out.endswith("\n")


@pytest.mark.slow
def test_more_devices_than_there_are_and_degrees_that_do_not_fit(tmp_path, capsys):
    """Those of the run give way; those of the command line do not."""
    make_run(tmp_path, devices=3, mesh=MeshConfig(head=2))
    few = jax.devices()[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.devices", lambda: few)
        found = run(capsys, tmp_path, "--prompt", "12345678")
    assert "the run had 3 devices: all of these are used instead" in found.err
    assert "at most the number of devices; got devices=65" in message_of(
        tmp_path, "--prompt", "a", "--devices", "65"
    )
    assert "mesh degrees must divide the number of devices; got head=2 * tensor=5" in (
        message_of(tmp_path, "--prompt", "a", "--mesh.tensor", "5")
    )


@pytest.mark.slow
def test_token_ids_are_continued_by_token_ids(tmp_path, capsys):
    np.arange(99, dtype=np.uint16).tofile(tmp_path / "data.bin")
    make_run(tmp_path, data=DataConfig(path=(tmp_path / "data.bin",)))
    ids = run(capsys, tmp_path, "--prompt", "17 4\n 99 0 0 0 255 1").out.split()
    assert len(ids) == 4
    assert all(0 <= int(x) < 256 for x in ids)
    assert "below model.vocab_size; got id 256 with vocab_size=256" in message_of(
        tmp_path, "--prompt", "3 256"
    )
    assert "must be token ids with spaces between" in message_of(tmp_path, "--prompt", "3 x")


@pytest.mark.slow
def test_average_is_preferred_and_the_newest_checkpoint_is_read(tmp_path):
    average = jax.tree.map(lambda x: x + 1, make_weights(0))
    folder = make_run(tmp_path, steps=(2, 4), average=average) / "checkpoints"
    (folder / "5.orbax-checkpoint-tmp").mkdir()
    found, step = restore_weights(folder, shapes_of(make_weights()))
    assert step == 4
    chex.assert_trees_all_equal(found, average)
    plain = make_run(tmp_path / "plain", steps=(2, 4)) / "checkpoints"
    chex.assert_trees_all_equal(
        restore_weights(plain, shapes_of(make_weights()))[0], make_weights(4)
    )


@pytest.mark.slow
def test_checkpoint_that_goes_while_it_is_read_gives_way_to_the_next(tmp_path, monkeypatch):
    folder, load = make_run(tmp_path) / "checkpoints", checkpoint.ocp.load

    def load_late(path, *arguments):
        if path.endswith("/2"):
            make_run(tmp_path, steps=(7,))
            raise FileNotFoundError(path)
        return load(path, *arguments)

    monkeypatch.setattr(checkpoint.ocp, "load", load_late)
    assert restore_weights(folder, shapes_of(make_weights()))[1] == 7


# Text ------------------------------------------------------------------------------------------


def test_bytes_are_shown_when_a_character_is_whole():
    tokenizer = ByteTokenizer(end_of_document=256, vocab_size=257)
    stream = TextStream(tokenizer, np.array([65]))
    shown = [stream.add(byte) for byte in "aé✓".encode()]
    assert shown == ["a", "", "é", "", "", "✓"]
    assert [stream.add(0xE2), stream.add(65), stream.add(0xC3)] == ["", "\ufffdA", ""]
    assert stream.end() == "\ufffd"
    assert stream.add(256) == "\ufffd"


@pytest.fixture
def byte_level(tmp_path):
    """A tokenizer as GPT-2's: its tokens are pieces of UTF-8."""
    return train_tokenizer(gpt2, tmp_path / "tokenizer.json")


def test_text_of_a_tokenizer_is_shown_when_it_is_certain(byte_level):
    tokenizer = FileTokenizer(byte_level, end_of_document=None, vocab_size=300)
    prompt, new = (encode_prompt(tokenizer, x) for x in ("then é", " the ✓then"))
    stream = TextStream(tokenizer, prompt)
    shown = [stream.add(int(token)) for token in new]
    assert "".join(shown) == " the ✓then"
    assert stream.end() == ""
    at = shown.index("✓")
    assert shown[at - 2 : at] == ["", ""]
    # A character that never ends.
    first = encode_prompt(tokenizer, "✓")[:1]
    assert stream.add(int(first[0])) == ""
    assert stream.end() == "\ufffd"


def test_words_keep_the_space_that_joins_them_to_the_prompt(tmp_path):
    """A decoder as Llama 2's drops the space at the start of a text."""
    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"</s>": 0, "▁one": 1, "▁two": 2}, unk_token="</s>")
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    built.decoder = tokenizers.decoders.Metaspace()
    built.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer": tmp_path / "tokenizer.json"}
    tokenizer = open_tokenizer(DataConfig(**options), vocab_size=3)
    stream = TextStream(tokenizer, encode_prompt(tokenizer, "one"))
    assert [stream.add(2), stream.add(1)] == [" two", " one"]


def test_tokenizer_of_a_run_whose_data_are_gone(tmp_path):
    kinds = {None: ByteTokenizer, "gone.txt": ByteTokenizer, "gone.npy": IdTokenizer}
    for name, kind in kinds.items():
        config = DataConfig(path=(tmp_path / name,) if name else ())
        assert isinstance(open_tokenizer(config, vocab_size=256), kind)
    elsewhere = DataConfig(path=(Path("data/tokens"),))
    with refused(InputError, "data.path must exist", "'data/tokens'"):
        open_tokenizer(elsewhere, vocab_size=256)


def test_sample_reads_no_more_of_the_data_than_tells_their_kind(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("all files are looked for")

    monkeypatch.setattr(files, "find_files", refuse)
    kinds = {"book.txt": ByteTokenizer, "shard_0.npy": IdTokenizer, "deep/er/b.bin": IdTokenizer}
    for name, kind in kinds.items():
        folder = tmp_path / name.replace("/", "_")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
        # A search of the whole folder refuses this.
        ((folder / name).parent / "again").symlink_to(folder)
        assert isinstance(open_tokenizer(DataConfig(path=(folder,)), vocab_size=256), kind)
    (tmp_path / "book.txt" / "train.bin").touch()
    (tmp_path / "book.txt" / "val.bin").touch()
    found = open_tokenizer(DataConfig(path=(tmp_path / "book.txt",)), vocab_size=256)
    assert isinstance(found, IdTokenizer)


def final_sample(window=None, interrupted=lambda: False):
    """What train.py shows at its end, of a run whose rows need no longer window than this."""
    tokens = np.array([7, 7, 1, 2, 3, 7, 4, 7, 9, 9], np.uint8)
    stream = Stream(name="held out", tokens=tokens, vocab_size=256)
    corpus = Corpus(
        train=(), held_out=(stream,), end_of_document=7, unit="token", decode=None,
        description="", digest="",
    )  # fmt: skip
    mesh = st.make_mesh(st.Degrees(data=2), "auto", jax.devices()[:2])
    config = make_config(Path("unused"))
    program = SimpleNamespace(
        config=config, attention=st.Attention(mesh, causal=True, window=window)
    )
    lines = Continuation(program, corpus)(make_weights(), 1, interrupted)
    names, texts = zip(*(line.split("\n") for line in lines), strict=True)
    assert names == ("--- held-out text", "--- continued by the model")
    return texts


@pytest.mark.slow
def test_run_stops_where_its_pretrained_model_does(capsys, tmp_path):
    model, path = tmp_path / "model", tmp_path / "run"
    make_run(path, init_from=model)
    whole = run(capsys, path, "--prompt", "a").out
    kept = path / "pretrained"
    kept.mkdir()
    (kept / "config.json").write_text('{"eos_token_id": 1}')
    config = make_config(path, init_from=model)
    assert stops_of_run(path, config, None) == (1,)
    # A character of one byte, which is one token.
    at = next(index for index, x in enumerate(whole) if x.isascii())
    assert at < len(whole) - 1
    ids = f"[7, {ord(whole[at])}]"
    (kept / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    assert run(capsys, path, "--prompt", "a").out == f"{whole[:at]}\n"
    # Ids of the model's tokenizer, wherever it lies, and of no other.
    (kept / "tokenizer.json").write_text("one")
    for folder, content, count in (("copy", "one", 2), ("other", "two", 0), ("model", "two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(content)
        assert len(stops_of_run(path, config, tmp_path / folder / "tokenizer.json")) == count
    assert stops_of_run(path, make_config(path), None) == ()


@pytest.mark.slow
def test_continuation_stays_in_one_document_and_stops_when_it_is_asked_to():
    prompt, text = final_sample()
    assert prompt == "1 2 3"
    assert len(text.split()) == 8
    assert final_sample(window=1) == (prompt, text)
    answers = iter([False, False, False, True])
    assert final_sample(interrupted=lambda: next(answers))[1].split() == text.split()[:3]
    assert final_sample(interrupted=lambda: True) == ("1 2 3", "")


# Errors ----------------------------------------------------------------------------------------


def test_folders_that_are_no_run(tmp_path, run_dir):
    missing = message_of(tmp_path / "no", "--prompt", "a")
    assert "must be the folder of a run, with its config.json; got" in missing
    assert "no such folder. Use the --run-dir of train.py" in missing
    near = message_of(f"{run_dir}s", "--prompt", "a")
    assert f"no such folder. Did you mean '{run_dir}'?" in near
    assert "a folder without one" in message_of(tmp_path, "--prompt", "a")
    save_config(make_config(tmp_path), tmp_path / "config.json")
    assert "There must be a checkpoint to read; got none" in message_of(tmp_path, "--prompt", "a")
    other = json.loads((run_dir / "config.json").read_text())
    other["model"]["width"] = 18
    (tmp_path / "config.json").write_text(json.dumps(other))
    (tmp_path / "checkpoints").symlink_to(run_dir / "checkpoints")
    differs = message_of(tmp_path, "--prompt", "a")
    assert "must be of the model that config.json beside it says; got" in differs
    assert "kernel/value: float32[1, 16, 1, 4] in the checkpoint, float32[1, 18, 1, 4] now" in (
        differs
    )
    (tmp_path / "config.json").write_text("{}")
    assert "must hold the config of a run" in message_of(tmp_path, "--prompt", "a")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "must have at least one byte; got ''"),
        (["--prompt", "a\0b"], "Text must not hold the byte 0"),
        (["--prompt", "a\udcffb"], "must be text that can be written in UTF-8; got bytes that are"),
        (["--prompt-file", "missing.txt"], "that can be read; got 'missing.txt': No such file"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be at least 0"),
        (["--prompt", "a", "--tokenizer", "no.json"], "must be a Hugging Face tokenizer.json"),
    ],
)
def test_flags_that_cannot_be_served(run_dir, flags, message):
    assert message in message_of(run_dir, *flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("RUN --prompt a --prompt-file b", "must be given once; got --prompt and"),
        ("RUN --tokens 0", "tokens must be at least 1; got tokens=0"),
        ("RUN --samples 0", "samples must be at least 1; got samples=0"),
        ("RUN --top-q 1", "--top-q"),
        ("", "The first word must be the folder of a run; got"),
        ("--tokens 3", "The first word must be the folder of a run; got"),
    ],
)
def test_flags_that_cannot_be_read(run_dir, capsys, arguments, message):
    arguments = [str(run_dir) if x == "RUN" else x for x in arguments.split()]
    assert message in usage_error(capsys, sample.sample, arguments)


def test_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "prompt").write_text("abc", encoding="utf-8-sig")
    options = TextOptions(prompt_file=tmp_path / "prompt")
    assert text_samples._read_prompt(options) == "abc"


def test_prompt_that_is_not_utf8(run_dir, tmp_path, monkeypatch):
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    message = message_of(run_dir, "--prompt-file", tmp_path / "prompt")
    assert "The prompt must be UTF-8; got the byte 0xff at offset 3 of" in message
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xc3")))
    assert "got the byte 0xc3 at offset 0 of standard input" in message_of(run_dir)
    monkeypatch.setattr("sys.stdin", None)
    assert "There must be a prompt; got none, and a standard input that is" in message_of(run_dir)


class TypedInput(io.StringIO):
    """The standard input of a program that was started on a terminal, where nothing is typed."""

    def isatty(self):
        return True

    def read(self, *_):
        raise AssertionError("waits for a text that nobody knows of")


@pytest.mark.slow
def test_without_a_prompt_a_terminal_gets_a_sample_at_once(run_dir, capsys, monkeypatch):
    same = run(capsys, run_dir, "--prompt", "\n").out
    monkeypatch.setattr("sys.stdin", TypedInput())
    shown = run(capsys, run_dir)
    assert shown.out == same
    assert "no prompt is given: the sample begins at a new line; --prompt TEXT" in shown.err
    words = shlex.split(shown.err.splitlines()[-1])
    assert words[0] == "next:"
    assert words[-5:] == [str(run_dir), "--samples", "3", "--temperature", "0.5"]
    assert sample.read_command_line(words[-5:])[2].settings.samples == 3


def test_sample_without_a_prompt_begins_with_a_token_that_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", TypedInput())
    session = session_of_one()
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    for tokenizer, first in (
        (ByteTokenizer(end_of_document=None, vocab_size=256), 10),
        (FileTokenizer(tmp_path / "tokenizer.json", end_of_document=None, vocab_size=2), 1),
        (IdTokenizer(end_of_document=7), 7),
        (IdTokenizer(end_of_document=None), 0),
    ):
        assert prompt_tokens(tokenizer, TextOptions(), session).tolist() == [first]


def test_token_of_a_prompt_beyond_the_vocabulary(run_dir, byte_level):
    # The last id of the file is that of the token which ends documents.
    message = message_of(run_dir, "--tokenizer", byte_level, "--prompt", "<eos>")
    assert "Token ids must be below model.vocab_size; got id 300" in message
    assert "in 'the prompt' with vocab_size=256" in message


def test_help_is_fast_and_gives_the_values_of_the_run(run_dir, capsys):
    with pytest.raises(SystemExit):
        sample.sample([str(run_dir), "--help"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "takes the likeliest token. (default: 0.8)" in out
    assert "if there are fewer. (default: 2)" in out
    script = "import sys, sample; sample.sample(['--help'])"
    result = run_python("-X", "importtime", "-c", script)
    assert result.returncode == 0
    for flag in ("--prompt", "--prompt-file", "--top-p", "--mesh.team", "--devices"):
        assert flag in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "tyro" in imported
    assert not imported & {"jax", "flax", "orbax", "numpy"}
