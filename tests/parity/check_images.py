"""From a folder of images to drawn images: every command, with a tiny random VAE of diffusers, and
with tiny random text encoders of transformers.

pip install -e '.[video,images]'
python tests/parity/check_images.py     # 12 minutes; ends with an error if something differs
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageOps

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from trainer.dit.encoded_images import ImageLine, read_images  # noqa: E402
from trainer.dit.texts import TextEncoder  # noqa: E402

COLOURS = {"ant": (220, 30, 30), "bee": (30, 30, 220), "cat": (20, 20, 20), "é 10": (90, 200, 90)}
SIZES = ((48, 48), (40, 64), (72, 48))
"""Heights and widths of files."""
STATISTICS = {
    "scale": dict(scaling_factor=0.4),
    "shift": dict(scaling_factor=0.4, shift_factor=0.15),
    "mean": dict(scaling_factor=0.5, latents_mean=[0.1, -0.2, 0.3, 0.0],
                 latents_std=[0.5, 1.5, 2.0, 1.0]),
}  # fmt: skip
TINY = "--model.width 16 --model.layers 2 --model.heads 2 --model.mlp-width 32 --batch-size 4 "
TINY += "--model.dtype float32 --steps 30 --validation-sequences 4 --log-every 10 --zero 0 "
TINY += "--no-tensorboard --checkpoint.every 1000 --devices 4 --mesh.data 2"
WORDS = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "blue": 5, "dark": 6, "green": 7}
CAPTIONS = {"ant": "red", "bee": "a blue", "cat": "a dark dark dark", "é 10": "a green"}


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images")
        for kind, statistics in STATISTICS.items():
            check(folder / kind, folder / "images", statistics)
        check_pixels(folder)
        check_encoders(folder)
        check_captions(folder)
    print("all equal")


def make_images(folder):
    """Forty images of three sizes in four classes."""
    rng = np.random.default_rng(0)
    for number in range(40):
        name, rgb = list(COLOURS.items())[number % 4]
        height, width = SIZES[number % 3]
        pixels = np.full((height, width, 3), rgb, np.uint8)
        pixels[8:24, 8:24] = rng.integers(256, size=3)
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name / f"{number}.png")


def make_vae(folder, statistics):
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        norm_num_groups=4,
        **statistics,
    )
    vae.save_pretrained(folder)
    return vae.eval()


def expected(vae, path, height, width):
    """The latent of an image, as pipelines of diffusers prepare it."""
    image = ImageOps.fit(Image.open(path).convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    with torch.no_grad():
        found = vae.encode(VaeImageProcessor().preprocess(image)).latent_dist.mode()
    config = vae.config
    if config.latents_mean is not None:
        mean, std = (
            torch.tensor(x).view(1, -1, 1, 1) for x in (config.latents_mean, config.latents_std)
        )
        found = (found - mean) * config.scaling_factor / std
    else:
        found = (found - (config.shift_factor or 0)) * config.scaling_factor
    return found[0].permute(1, 2, 0).numpy()


def check(folder, images, statistics):
    vae = make_vae(folder / "vae", statistics)
    out = folder / "encoded"
    encode = ["-m", "trainer.dit.encode", images, out, "--vae", folder / "vae", "--size", "48"]
    run(*encode, "--max-ratio", "2")
    lines = read_images(out)
    assert len(lines) == 40, len(lines)
    sizes = {line.size for line in lines.values()}
    assert sizes == {(1, 12, 12), (1, 10, 14), (1, 14, 10)}, sizes
    assert "40 images are as they were" in run(*encode, "--max-ratio", "2")
    worst = max(difference(vae, out, images, line) for line in lines.values())
    print(f"{folder.name}: latents differ from diffusers' by {worst:.2e} at most")
    assert worst < 1e-5, worst
    shown = run(
        "train.py", "dit_1b", "--data.path", out, "--run-dir", folder / "run", *TINY.split()
    )
    for size in ("1x12x12", "1x10x14", "1x14x10"):
        assert f"of {size}" in shown, shown
    print("\n".join(x for x in shown.splitlines() if "loss" in x and "step" in x))
    draw = ["sample.py", folder / "run", "--samples", "2", "--steps", "3"]
    shown = run(*draw, "--decode", folder / "vae", "--classes", "é 10", "0")
    assert "row: class 3, 'é 10'" in shown, shown
    drawn = np.asarray(Image.open(folder / "run" / "samples.png"))
    scale = 2  # To at least 64 pixels.
    assert drawn.shape == (2 * 49 * scale + scale, 2 * 49 * scale + scale, 3), drawn.shape
    run(*draw, "--size", "1x10x14", "--classes", "3", "0")
    with np.load(folder / "run" / "samples.npz") as file:
        assert file["latents"].shape == (4, 1, 10, 14, 4), file["latents"].shape
    # What is drawn is decoded as diffusers' pipelines do.
    run(*draw, "--classes", "3", "0")
    with np.load(folder / "run" / "samples-2.npz") as file:
        check_decoded(vae, file["latents"][0, 0], drawn[::scale, ::scale][1:49, 1:49])


def difference(vae, out, images, line: ImageLine):
    from safetensors.numpy import load_file

    found = load_file(out / "images" / line.file)["images"][line.row]
    wanted = expected(vae, images / line.image, *(4 * n for n in line.size[1:]))
    return float(np.abs(found - wanted).max())


def check_decoded(vae, latent, pixels):
    config, x = vae.config, torch.tensor(latent).permute(2, 0, 1)[None]
    if config.latents_mean is not None:
        mean, std = (
            torch.tensor(x).view(1, -1, 1, 1) for x in (config.latents_mean, config.latents_std)
        )
        x = x * std / config.scaling_factor + mean
    else:
        x = x / config.scaling_factor + (config.shift_factor or 0)
    with torch.no_grad():
        decoded = vae.decode(x, return_dict=False)[0]
    (image,) = VaeImageProcessor().postprocess(decoded, output_type="pil")
    apart = np.abs(np.asarray(image).astype(int) - pixels).max()
    assert apart <= 1, apart


def check_pixels(folder):
    out = folder / "pixels"
    run("-m", "trainer.dit.encode", folder / "images", out, "--pixels", "--size", "16")
    run("train.py", "dit_1b", "--data.path", out, "--run-dir", folder / "of_pixels", *TINY.split())
    run("sample.py", folder / "of_pixels", "--samples", "2", "--steps", "3")
    drawn = np.asarray(Image.open(folder / "of_pixels" / "samples.png"))
    assert drawn.shape == (4 * (4 * 17 + 1), 4 * (2 * 17 + 1), 3), drawn.shape


PARTS = {"t5": "encoder", "clip": "text_model", "gemma2": "model"}
"""The part of a model that encodes texts, where it has others."""


def make_encoders(folder):
    """Text encoders of several kinds: in a folder of their own, in a whole CLIP, in a pipeline."""
    torch.manual_seed(0)
    heads = dict(num_attention_heads=2, num_hidden_layers=2, intermediate_size=20)
    common = dict(vocab_size=len(WORDS), bos_token_id=1, eos_token_id=1, pad_token_id=0)
    clip = dict(hidden_size=12, **heads, **common, max_position_embeddings=9)
    t5 = dict(d_model=14, d_kv=6, d_ff=20, num_layers=2, num_heads=2, vocab_size=len(WORDS))
    gemma = dict(hidden_size=16, head_dim=8, num_key_value_heads=1, **heads, **common)
    bert = dict(hidden_size=10, **heads, vocab_size=len(WORDS), max_position_embeddings=9)
    t = transformers
    models = {
        "t5": t.T5ForConditionalGeneration(t.T5Config(**t5, feed_forward_proj="gated-gelu")),
        "umt5/text_encoder": t.UMT5EncoderModel(t.UMT5Config(**t5)),
        "clip": t.CLIPModel(
            t.CLIPConfig(
                text_config=clip, vision_config=dict(hidden_size=8, image_size=32, **heads)
            )
        ),
        "clip_text/text_encoder": t.CLIPTextModel(t.CLIPTextConfig(**clip)),
        "bert": t.BertModel(t.BertConfig(**bert)),
        "gemma2": t.Gemma2ForCausalLM(t.Gemma2Config(**gemma)),
    }
    for name, model in models.items():
        with torch.no_grad():
            for x in model.parameters():
                x.normal_(0, 0.3)
        model.eval().save_pretrained(folder / name)
        at = Path(name)
        write_tokenizer(folder / (at.parent / "tokenizer" if at.parts[1:] else at))
    return {Path(name).parts[0]: model for name, model in models.items()}


def write_tokenizer(folder):
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = {"single": "$A </s>", "special_tokens": [("</s>", 1)]}
    built.post_processor = tokenizers.processors.TemplateProcessing(**ends)
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, model_max_length=9, **special
    ).save_pretrained(folder)


def check_encoders(folder):
    """Beside the models themselves, padded in one batch."""
    texts = [*CAPTIONS.values(), "a dark blue green green red a"]
    for name, model in make_encoders(folder / "encoders").items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "encoders" / "t5")
        encoder = TextEncoder(folder / "encoders" / name)
        found = encoder.encode(texts)
        rows = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        inner = getattr(model, PARTS[name]) if name in PARTS else model
        ids, mask = rows["input_ids"], rows["attention_mask"]
        with torch.no_grad():
            wanted = inner(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
        counts = mask.sum(1).tolist()
        assert [len(x) for x in found] == counts, name
        pairs = zip(found, wanted, counts, strict=True)
        worst = max(float(np.abs(x - y[:count]).max()) for x, y, count in pairs)
        print(f"{name}: {encoder.sizes}, texts differ from transformers' by {worst:.2e} at most")
        assert worst < 1e-5, worst
        assert max(np.abs(x).max() for x in found) > 0.5, name
        # In one batch, as on a GPU.
        encoder._device = torch.device("cpu")
        pairs = zip(found, encoder.encode(texts), strict=True)
        assert max(float(np.abs(x - y).max()) for x, y in pairs) < 1e-5, name


def check_captions(folder):
    """A model that learns what colour a caption names, on 8 devices as on one."""
    images, out = folder / "captions", folder / "of_captions"
    lines = []
    for number in range(40):
        name, rgb = list(COLOURS.items())[number % 4]
        images.mkdir(exist_ok=True)
        pixels = np.full((*SIZES[number % 3], 3), rgb, np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": CAPTIONS[name]}) + "\n")
    (images / "metadata.jsonl").write_text("".join(lines))
    encoder = folder / "encoders" / "t5"
    encode = ["-m", "trainer.dit.encode", images, out, "--pixels", "--size", "8"]
    encode += ["--max-ratio", "2", "--text-encoder", encoder]
    run(*encode)
    assert "40 images are as they were" in run(*encode)
    train = ["train.py", "dit_1b", "--data.path", out, *TINY.split(), "--sample.every", "30"]
    train += ["--model.heads", "4"]
    losses = []
    for number, mesh in enumerate(MESHES):
        place = folder / f"mesh{number}"
        run(*train, "--run-dir", place, "--log-every", "1", *mesh.split())
        records = (place / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in records]
        losses.append([x["train_loss"] for x in records if "train_loss" in x])
        assert (place / "samples" / "step-30.png").is_file()
    apart = [max(np.abs(np.array(x) / losses[0] - 1)) for x in losses[1:]]
    print("30 steps on 8 devices and on one:", " ".join(f"{x:.1e}" for x in apart))
    assert len(losses[0]) == 30, losses
    assert max(apart) < 1e-5, apart
    learnt = folder / "learnt"
    run(*train, "--run-dir", learnt, *LEARNT.split())
    prompts = [*CAPTIONS.values(), ""]
    draw = ["sample.py", learnt, "--samples", "4", "--text-encoder", encoder, "--scale", "1"]
    shown = run(*draw, "--prompt", *prompts, "--guidance", "1")
    assert "row: 'a dark dark dark'" in shown, shown
    assert "warning" not in shown, shown
    drawn = np.asarray(Image.open(learnt / "samples.png")).astype(float)
    height, width = drawn.shape[0] // 5, drawn.shape[1] // 4
    for row, (name, rgb) in enumerate(COLOURS.items()):
        cells = drawn[1 + row * height : (row + 1) * height]
        found = [
            cells[: height - 1, 1 + x * width : (x + 1) * width].mean((0, 1)) for x in range(4)
        ]
        apart = {other: np.abs(np.mean(found, 0) - y).max() for other, y in COLOURS.items()}
        print(f"{CAPTIONS[name]!r} draws {np.mean(found, 0).round()}, for {rgb}")
        assert min(apart, key=apart.get) == name, apart
        assert apart[name] < 30, apart


MESHES = (
    "--devices 1 --mesh.data 1",
    "--devices 8 --mesh.data 1 --mesh.c 2",
    "--devices 8 --mesh.data 2 --mesh.head 2 --mesh.tensor 2 --zero 2",
    "--devices 8 --mesh.data 2 --mesh.ring 4 --zero 3",
)
LEARNT = "--steps 600 --devices 1 --mesh.data 1 --batch-size 16 --model.width 64 "
LEARNT += "--model.mlp-width 128 --optimizer.learning-rate 3e-3 --ema-decay None"


def run(*arguments):
    command = [sys.executable, *(str(x) for x in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shown = done.stdout + done.stderr
    assert not done.returncode, f"{' '.join(command)}\n{shown}"
    return shown


if __name__ == "__main__":
    main()
