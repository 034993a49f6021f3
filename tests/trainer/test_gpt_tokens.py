"""Text becomes tokens: in slices that change none, once for all processes, in whole files only."""

import dataclasses
import errno
import os
import random
import threading
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax import Layout
from startrail_jax.errors import InputError
from trainer import durable
from trainer.data import cache, documents, progress_bar
from trainer.data.documents import Document
from trainer.data.slices import Slicer
from trainer.errors import StorageError
from trainer.gpt import encoding
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.corpus import open_corpora
from trainer.gpt.task import GPTTask
from trainer.gpt.tokenize import main
from trainer.gpt.tokenizer import FileTokenizer
from trainer.sums import SUMS_FILE

pytestmark = pytest.mark.quick

WORDS = [
    *("the", "them", "theory", "there's", "don't", "naïve", "été", "漢字", "x1", "3.14159", "2024"),
    *("def", "return", "foo(bar)", "a_b", "<eos>", "\u00a0", "—", "...", "Straße", "🎉🎉"),
]
SPACES = [" ", " ", " ", " ", "\n", "\n", "\n\n", "  ", "\t", "\r\n", "\n    ", "。", ""]


def random_text(seed, count=400):
    choice = random.Random(seed).choice
    return "".join(choice(WORDS) + choice(SPACES) for _ in range(count))


def gpt2():
    """As GPT-2's: a regular expression, then bytes."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return built, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama3():
    """As Llama 3's: signs and the new lines after them are one word, digits come in threes."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    built = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return built, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama2():
    """As Llama 2's: a space before the text, and no division into words."""
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # For training alone: merges must not cross words.
    built.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return built, trainers.BpeTrainer(special_tokens=["<unk>"])


def t5():
    """As T5's: likeliest parts of words, each with the space before it."""
    built = tokenizers.Tokenizer(models.Unigram())
    built.normalizer = normalizers.NFKC()
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    return built, trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>")


def bert():
    """As BERT's: lower case, words without spaces."""
    built = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return built, trainers.WordPieceTrainer(special_tokens=["<unk>"])


def train_tokenizer(make, path):
    built, trainer = make()
    trainer.vocab_size, trainer.show_progress = 300, False
    built.train_from_iterator([random_text(99)], trainer)
    if make is llama2:
        built.pre_tokenizer = None
    built.add_special_tokens(["<eos>"])
    built.save(str(path))
    return path


def watch_encode(monkeypatch, see):
    """Has a function see the texts that are tokenised."""
    encode = FileTokenizer.encode

    def watched(self, texts):
        see(texts)
        return encode(self, texts)

    monkeypatch.setattr(FileTokenizer, "encode", watched)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(gpt2, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def sliced(text, encode, *, part=97, length=64, window=48):
    """The slices of a text that is read in parts."""
    slicer = Slicer(encode, length=length, window=window)
    parts = [text[start : start + part] for start in range(0, len(text), part)] or [""]
    return [
        piece
        for index, x in enumerate(parts)
        for piece in slicer.add(
            Document(key="a", place="a", text=x, is_last=index == len(parts) - 1)
        )
    ]


# Slices.


@pytest.mark.parametrize("make", [gpt2, llama3, llama2, t5, bert])
def test_tokens_of_slices_are_those_of_the_whole(make, tmp_path):
    path = train_tokenizer(make, tmp_path / "t.json")
    one = FileTokenizer(path, end_of_document=None, vocab_size=400)
    for seed in range(5):
        text = random_text(seed)
        pieces = sliced(text, one.ids)
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert np.concatenate(one.encode(pieces)).tolist() == [*one.ids(text), one.end_of_document]
        # Most slices are about as long as they should be.
        assert len(pieces) > len(text) / 64 / 2
        for piece in pieces:
            assert text.encode()[piece.offset :].startswith(piece.text.encode())


def test_text_without_a_place_for_a_cut_stays_whole(tokenizer):
    one = FileTokenizer(tokenizer, end_of_document=None, vocab_size=400)
    text = "the" * 300
    (piece,) = sliced(text, one.ids)
    assert (piece.text, piece.is_last) == (text, True)
    # The next document begins anew.
    assert [x.text for x in sliced("", one.ids)] == [""]


def test_memory_does_not_grow_with_the_text(tokenizer, tmp_path, monkeypatch):
    """The longest text that is tokenised at once, and all memory that Python takes."""
    monkeypatch.setattr(documents, "BLOCK", 1 << 12)
    monkeypatch.setattr(encoding, "CHUNK", 1 << 13)
    monkeypatch.setattr(encoding, "Slicer", lambda ids: Slicer(ids, length=1 << 10, window=64))
    lengths, peaks = [], []
    watch_encode(monkeypatch, lambda texts: lengths.append([len(x.text) for x in texts]))
    for repeats in (2, 8):
        folder = tmp_path / str(repeats)
        folder.mkdir()
        (folder / "a.txt").write_text(random_text(0, 3000) * repeats)
        tracemalloc.start()
        opened = open_text_corpus(folder / "a.txt", tokenizer, folder / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(opened.train[0]) > 5000 * repeats
    assert max(map(max, lengths)) < 3 << 10
    assert max(map(sum, lengths)) < 3 << 13
    # All text is four times as long, 100 kB and more.
    assert peaks[1] < 1.3 * peaks[0]


# Cache.


def open_text_corpus(path, tokenizer, folder, *, vocab_size=400, **options):
    config = DataConfig(path=(path,), tokenizer=tokenizer, **{"validation_fraction": 0.2} | options)
    (opened,) = open_corpora(config, vocab_size=vocab_size, cache=folder)
    return opened


def tokens_of(opened):
    return [stream.read(0, len(stream)).tolist() for stream in (*opened.train, *opened.held_out)]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(30):
        (tmp_path / f"texts/{index}.txt").write_text(random_text(index, 10))
    return tmp_path / "texts"


@pytest.fixture
def encoded(monkeypatch):
    """The documents that were tokenised."""
    found = []
    watch_encode(monkeypatch, lambda texts: found.extend(text.place for text in texts))
    return found


def test_second_start_tokenises_nothing(text, tokenizer, tmp_path, encoded, capfd):
    in_memory = open_text_corpus(text, tokenizer, None)
    encoded.clear()
    first = open_text_corpus(text, tokenizer, tmp_path / "cache")
    assert len(encoded) == 30
    second = open_text_corpus(text, tokenizer, tmp_path / "cache")
    assert len(encoded) == 30
    assert capfd.readouterr().err == ""
    assert tokens_of(first) == tokens_of(second) == tokens_of(in_memory)
    assert isinstance(second.train[0].tokens, np.memmap)
    assert first.description == second.description == in_memory.description
    assert first.digest == second.digest == in_memory.digest
    assert second.end_of_document == first.end_of_document


def test_log_shows_the_progress(monkeypatch, capfd):
    times = iter([0.0, 1.0, 3.0, 20.0, 40.0, 50.0])
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(times))
    with progress_bar.shown_progress("tokenising [a] {b}", 8_000_000) as advance:
        for _ in range(4):
            advance(2_000_000)
    assert capfd.readouterr().err.splitlines() == [
        "tokenising [a] {b}: 4.0 of 8.0 MB",
        "tokenising [a] {b}: 8.0 of 8.0 MB",
        "tokenising [a] {b}: 8.0 MB in 50.0 s",
    ]


def test_whatever_changes_tokens_makes_new_ones(text, tokenizer, tmp_path, encoded):
    def again(**options):
        encoded.clear()
        open_text_corpus(text, tokenizer, tmp_path / "cache", **options)
        return len(encoded)

    assert again() == 30
    assert again(validation_fraction=0.3) == 30
    assert again(end_of_document=7) == 30
    before = (text / "3.txt").read_bytes()
    (text / "3.txt").write_bytes(before.replace(b"e", b"o", 1))
    assert again() == 30
    os.utime(text / "4.txt")
    assert again() == 0
    (text / "3.txt").write_bytes(before)
    assert again() == 0
    other = tmp_path / "other.json"
    built = tokenizers.Tokenizer.from_file(str(tokenizer))
    built.add_tokens(["theory"])
    built.save(str(other))
    encoded.clear()
    open_text_corpus(text, other, tmp_path / "cache")
    assert len(encoded) == 30


def test_processes_tokenise_once_and_the_others_wait(text, tokenizer, tmp_path, encoded, capfd):
    """A lock belongs to an open file, so that threads stand for processes."""
    found = []

    def start():
        found.append(open_text_corpus(text, tokenizer, tmp_path / "cache"))

    began, may_end = threading.Event(), threading.Event()
    write = encoding.encode_to_folder
    said = []

    def say(line):
        said.append(line)
        if len(said) == 2:
            may_end.set()

    def slow(*arguments, **options):
        began.set()
        assert may_end.wait(300)
        write(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "encode_to_folder", slow)
        patch.setattr(cache, "say", say)
        threads = [threading.Thread(target=start) for _ in range(3)]
        threads[0].start()
        assert began.wait(300)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(encoded) == 30
    assert len(said) == 2
    assert all(line.startswith("waiting for another process, which writes") for line in said)
    assert tokens_of(found[0]) == tokens_of(found[1]) == tokens_of(found[2])


def test_killed_write_is_never_taken_for_whole(text, tokenizer, tmp_path, monkeypatch, encoded):
    rename = cache.durable.rename

    def killed(part, target):
        if part.is_dir():
            raise KeyboardInterrupt
        rename(part, target)

    with monkeypatch.context() as patch:
        # As late as can be, and with nothing cleaned up.
        patch.setattr(cache.durable, "rename", killed)
        patch.setattr(cache.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            open_text_corpus(text, tokenizer, tmp_path / "cache")
    (left,) = (tmp_path / "cache").glob(".*.part-*")
    assert {x.name for x in left.iterdir()} == {"train.npy", "val.npy", ".about.json", SUMS_FILE}
    assert len(encoded) == 30
    opened = open_text_corpus(text, tokenizer, tmp_path / "cache")
    assert len(encoded) == 60
    assert not left.exists()
    assert opened.train[0].tokens[-1] == opened.end_of_document


def test_failed_write_leaves_nothing(text, tokenizer, tmp_path, encoded):
    cache = tmp_path / "cache"
    (text / "bad.txt").write_bytes(b"caf\xe9")
    with refused(InputError, "UTF-8"):
        open_text_corpus(text, tokenizer, cache)
    (text / "bad.txt").unlink()
    with refused(InputError, "model.vocab_size"):
        open_text_corpus(text, tokenizer, cache, vocab_size=100)
    assert not [x for x in cache.iterdir() if not x.name.endswith(".lock")]
    # Tokens that are cached may be beyond another vocabulary.
    open_text_corpus(text, tokenizer, cache)
    encoded.clear()
    with refused(InputError, "below model.vocab_size; got id", "texts' with vocab_size=99. Use"):
        open_text_corpus(text, tokenizer, cache, vocab_size=99)
    assert not encoded


def test_cache_that_cannot_be_written_raises(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(InputError, "data.cache must"):
        open_text_corpus(text, tokenizer, Path("s3://x"))
    assert not Path("s3:").exists()
    (tmp_path / "cache").write_text("a file")
    with refused(StorageError, "Files must be written"):
        open_text_corpus(text, tokenizer, tmp_path / "cache")
    with refused(StorageError, "Files must be written"):
        main([str(text), str(tmp_path / "cache" / "out"), "--validation-fraction", "0.2"])
    np.save(tmp_path / "a.npy", np.arange(100))
    with refused(InputError, "data.cache must"):
        open_corpora(DataConfig(path=(tmp_path / "a.npy",), cache=tmp_path), vocab_size=100)


def test_file_system_without_locks_warns(text, tokenizer, tmp_path, monkeypatch):
    refuse = mock.Mock(side_effect=OSError(durable.NO_LOCKS[0], "no locks"))
    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"has no locks: each process writes"):
        opened = open_text_corpus(text, tokenizer, tmp_path / "cache")
    assert tokens_of(opened) == tokens_of(open_text_corpus(text, tokenizer, None))


def test_run_caches_tokens_beside_its_folder(text, tokenizer, tmp_path):
    recipe = gpt_tiny()
    config = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, vocab_size=400),
        data=DataConfig(path=(text,), tokenizer=tokenizer, validation_fraction=0.2),
        seq_len=8,
        sample=TextSampleConfig(),
        run_dir=tmp_path / "runs" / "mine",
    )
    data = GPTTask().open_data(config, Layout("contiguous", 1))
    (folder,) = (tmp_path / "runs" / "tokens").glob("*/train.npy")
    assert len(np.load(folder)) == len(data.corpus.train[0])
    assert data.digest == data.corpus.digest
    # The folder of the run is not made before its lock is held.
    assert not config.run_dir.exists()


def test_bytes_are_cached_on_request_only(text, tmp_path):
    opened = open_text_corpus(text, None, tmp_path / "cache", vocab_size=256)
    assert not (tmp_path / "cache").exists()
    asked = DataConfig(path=(text,), validation_fraction=0.2, cache=tmp_path / "cache")
    for _ in range(2):
        assert tokens_of(open_corpora(asked, vocab_size=256)[0]) == tokens_of(opened)
    (folder,) = (tmp_path / "cache").glob("*/train.npy")
    assert np.load(folder).dtype == np.uint8


# Content.


def test_digest_tells_other_text_and_other_tokens(text, tokenizer, tmp_path):
    before = open_text_corpus(text, tokenizer, None).digest
    assert open_text_corpus(text, None, None).digest != before
    content = (text / "7.txt").read_bytes()
    (text / "7.txt").write_bytes(b"another text of any length")
    assert open_text_corpus(text, tokenizer, None).digest != before
    (text / "7.txt").write_bytes(content)
    assert open_text_corpus(text.rename(tmp_path / "moved"), tokenizer, None).digest == before


# The command.


def test_command_writes_what_training_reads(text, tokenizer, tmp_path, capsys):
    out = tmp_path / "tokens" / "texts"
    main([str(text), str(out), "--tokenizer", str(tokenizer), "--validation-fraction", "0.2"])
    printed = capsys.readouterr()
    command = printed.out.removeprefix("next: python train.py ").split()
    assert "documents to train on" in printed.err
    flags = dict(zip(command[::2], command[1::2], strict=True))
    assert flags.keys() == {"--data.path", "--data.end-of-document", "--model.vocab-size"}
    whole = open_text_corpus(text, tokenizer, None)
    config = DataConfig(path=(out,), end_of_document=int(flags["--data.end-of-document"]))
    (opened,) = open_corpora(config, vocab_size=int(flags["--model.vocab-size"]))
    assert tokens_of(opened) == tokens_of(whole)
    assert opened.end_of_document == whole.end_of_document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("texts texts", r"OUT must be a folder that does not exist yet; got '.*texts'"),
        ("texts gs://bucket/out", r"OUT must be a folder of a file system; got 'gs://bucket/out'"),
        ("text out", r"data.path must exist; got"),
        ("a.npy out", r"IN must be text; got npy files in '.*a.npy'. They hold tokens already"),
        ("texts out --tokenizer none", r"must be a Hugging Face tokenizer.json; got 'none'"),
        ("texts out --text-key body", r"data.text_key must be left out where it has no effect"),
        (
            "one out --validation-fraction 0.0001",
            r"got 1 and 0 tokens.*Give more data, or --validation-path",
        ),
    ],
)
def test_wrong_command_raises(text, tmp_path, monkeypatch, arguments, message):
    np.save(tmp_path / "a.npy", np.arange(100))
    monkeypatch.chdir(tmp_path)
    Path("one").write_text("a")
    with pytest.raises(SystemExit, match=message):
        main(arguments.split())
    assert not (tmp_path / "out").exists()


def flip(path, random):
    """Another value for one bit of a file, chosen at random."""
    content = bytearray(path.read_bytes())
    bit = int(random.integers(8 * len(content)))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_flipped_bit_of_cached_tokens_is_noticed(text, tokenizer, tmp_path):
    opened = open_text_corpus(text, tokenizer, tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    files = sorted(folder.iterdir())
    assert {path.name for path in files} == {"train.npy", "val.npy", ".about.json", SUMS_FILE}
    random, train, held_out = np.random.default_rng(0), folder / "train.npy", folder / "val.npy"
    for damage, paths in (
        (lambda path: flip(path, random), [*files * 4, *[train] * 14, *[held_out] * 10]),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), [train]),
        (lambda path: path.unlink(), [held_out]),
    ):
        for path in paths:
            before = path.read_bytes()
            damage(path)
            with refused(InputError, "Files with checksums must"):
                open_text_corpus(text, tokenizer, tmp_path / "cache")
            path.write_bytes(before)
    assert open_text_corpus(text, tokenizer, tmp_path / "cache").tokens == opened.tokens


def test_tokens_that_others_have_written_are_checked_without_a_write(
    text, tokenizer, tmp_path, encoded, monkeypatch
):
    own = open_text_corpus(text, tokenizer, tmp_path / "cache")
    (sums,) = (tmp_path / "cache").glob(f"*/{SUMS_FILE}")
    encoded.clear()
    refuse = mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    # For the superuser, no folder is read-only.
    monkeypatch.setattr(cache, "write_sums", refuse)
    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    assert open_text_corpus(text, tokenizer, tmp_path / "cache").tokens == own.tokens
    flip(sums.with_name("train.npy"), np.random.default_rng(0))
    with refused(InputError, "Files with checksums must"):
        open_text_corpus(text, tokenizer, tmp_path / "cache")
    assert encoded == []


def test_tokens_are_among_what_a_run_compares(text, tokenizer, tmp_path, monkeypatch):
    """Another version of the package of a tokenizer may make others of the same text."""
    cached = open_text_corpus(text, tokenizer, tmp_path / "cache")
    in_memory = open_text_corpus(text, tokenizer, None)
    assert cached.tokens == in_memory.tokens
    assert len(cached.tokens) == 64
    encode = FileTokenizer.encode
    monkeypatch.setattr(FileTokenizer, "encode", lambda *x: [y[::-1] for y in encode(*x)])
    other = open_text_corpus(text, tokenizer, tmp_path / "other")
    assert other.digest == cached.digest
    assert other.tokens != cached.tokens
