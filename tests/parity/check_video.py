"""From files of videos to files of videos: every command, with tiny random models of diffusers.

pip install -e '.[video]'
python tests/parity/check_video.py      # 6 minutes; ends with an error if something differs
"""

import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import ml_dtypes  # noqa: F401  For safetensors.
import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from safetensors.numpy import load_file
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from trainer.dit.wan.clips import read_lines  # noqa: E402
from trainer.dit.wan.videos import Shape, read_video, write_video  # noqa: E402

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220), "dark": (20, 20, 20)}
CODECS = {".mkv": "libx264", ".mp4": "libx264", ".avi": "mpeg4", ".webm": "libvpx"}
TINY = "--model.dtype float32 --steps 2 --batch-size 2 --validation-sequences 2 --log-every 1 "
TINY += "--no-tensorboard --devices 4 --size 2 4 4"


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_videos(folder / "videos")
        check_reading(folder / "videos")
        check_times(folder)
        for kind in ("text", "image", "image 2.1"):
            check(folder / kind.replace(" ", "_"), folder / "videos", kind)
    print("all equal")


def make_videos(folder):
    """Five videos of three sizes and lengths, two of them in a subfolder."""
    (folder / "sub").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, (colour, rgb) in enumerate([*COLOURS.items(), *list(COLOURS.items())[:2]]):
        height, width = ((32, 48), (48, 32))[number % 2]
        frames = np.full((8 + 4 * number, height, width, 3), rgb, np.uint8)
        frames[:, 8:16, 8:16] = rng.integers(256, size=(len(frames), 1, 1, 3))
        path = folder / ("sub" if number > 2 else "") / f"{number}.mp4"
        write_video(path, frames, rate=16)
        path.with_suffix(".txt").write_text(f"a {colour} video\n")


def check_reading(folder):
    """Frames are those that are shown at the wanted times, whole and in their order."""
    shape = Shape((5, 9), ((32, 48),), 16.0)
    whole = read_video(folder / "2.mp4", shape)
    assert whole.shape == (9, 32, 48, 3), whole.shape
    assert np.abs(whole[0, 0, 0].astype(int) - COLOURS["dark"]).max() < 12, whole[0, 0, 0]
    half = read_video(folder / "2.mp4", shape._replace(rate=8.0))
    np.testing.assert_array_equal(half[:5], whole[::2])
    twice = read_video(folder / "2.mp4", shape._replace(rate=32.0))
    np.testing.assert_array_equal(twice[0:9:2], whole[:5])
    assert len(read_video(folder / "0.mp4", shape)) == 5


def check_times(folder):
    """In each format, frames have the same times, whenever the first is shown."""
    for suffix, codec in CODECS.items():
        for first in (0, 5, 16):
            path = folder / f"times{suffix}"
            with av.open(str(path), "w") as container:
                stream = container.add_stream(codec, rate=16)
                stream.height, stream.width, stream.pix_fmt = 64, 64, "yuv420p"
                stream.bit_rate = 500_000
                for number in range(20):
                    grey = np.full((64, 64, 3), 20 + 10 * number, np.uint8)
                    frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
                    frame.pts, frame.time_base = first + number, Fraction(1, 16)
                    container.mux(stream.encode(frame))
                container.mux(stream.encode())
            for rate, taken in ((16, range(17)), (8, range(0, 17, 2)), (32, np.arange(17) // 2)):
                found = read_video(path, Shape((9, 17), ((64, 64),), float(rate)))
                numbers = [round((picture.mean() - 20) / 10) for picture in found]
                assert numbers == list(taken)[: len(numbers)], (path.name, first, rate, numbers)


def make_pipeline(folder, kind):
    """A random pipeline of Wan, tiny, with a VAE of 3 channels whose statistics matter."""
    torch.manual_seed(0)
    words = ["<pad>", "</s>", "<unk>", "▁a", "▁red", "▁blue", "▁dark", "▁video", "▁", *"abdeiklouv"]
    vocab = [(word, 0.0 if "<" in word else -len(word)) for word in words]
    tokenizer = T5TokenizerFast(vocab=vocab, extra_ids=0)
    config = UMT5Config(vocab_size=32, d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3], latents_std=[0.5, 1.5, 2.0],
    )  # fmt: skip
    sizes = dict(
        num_attention_heads=2, attention_head_dim=12, in_channels=3, out_channels=3, text_dim=12,
        freq_dim=8, ffn_dim=12, num_layers=1, qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    own, encoder = {}, {}
    if kind != "text":
        sizes["in_channels"] = 10
        encoder = dict(image_encoder=None, image_processor=None)
    if kind == "image 2.1":
        vision = CLIPVisionConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
            image_size=32, patch_size=2,
        )  # fmt: skip
        own = dict(image_dim=8, added_kv_proj_dim=24)
        size = {"height": 32, "width": 32}
        processor = CLIPImageProcessor(size=size, crop_size=size)
        encoder = dict(image_encoder=CLIPVisionModel(vision), image_processor=processor)
    pipeline = (WanPipeline if kind == "text" else WanImageToVideoPipeline)(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(config).eval(),
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=WanTransformer3DModel(**sizes | own),
        **encoder,
    )
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(*arguments, fails=""):
    command = [sys.executable, *(str(x) for x in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert bool(done.returncode) == bool(fails), text[-3000:]
    assert fails in " ".join(text.split()), text[-3000:]
    return text


def check(folder, videos, kind):
    pipeline = make_pipeline(folder / "Tiny-Diffusers", kind)
    encode = ["-m", "trainer.dit.encode", videos, folder / "encoded"]
    encode += ["--model", folder / "Tiny-Diffusers", "--sizes", "32x32", "--frames", "5"]
    if kind == "text":
        refusals(folder, videos, encode)
    # Two processes, the second of which is repeated.
    run(*encode, "--process", 0, 2)
    run(*encode, "--process", 1, 2)
    assert "encodes 0" in run(*encode, "--process", 1, 2)
    if kind == "text":  # A caption and a video that change, and come back.
        other = (videos / "1.mp4").read_bytes()
        for path, changed in ((videos / "0.txt", b"a dark video"), (videos / "2.mp4", other)):
            for content in (changed, path.read_bytes()):
                path.write_bytes(content)
                assert f"has changed: '{path.stem}.mp4'" in run(*encode)
    check_encoded(folder / "encoded", videos, pipeline, kind)
    start = ["train.py", "--init-from", folder / "Tiny-Diffusers", "--data.path"]
    text = run(*start, folder / "encoded", *TINY.split(), "--run-dir", folder / "run")
    assert "4 videos to train on, 1 held out" in text, text
    # Files of captions and first frames; captions alone; an image.
    sample = ["sample.py", folder / "run", "--steps", 3, "--decode", folder / "Tiny-Diffusers"]
    files = sorted((folder / "encoded" / "clips").iterdir())[:2]
    run(*sample, "--prompt-embeddings", *files, "--out", folder / "of_files")
    image = []
    if kind != "text":
        Image.fromarray(np.full((40, 64, 3), 90, np.uint8)).save(folder / "first.png")
        image = ["--image", folder / "first.png"]
        run(*sample, "--prompt", "a red video", fails="--image")
    run(*sample, "--prompt", "a red video", *image, "--samples", 2, "--out", folder / "of_text")
    run(*sample)
    # The model as it is, without encoded videos, in a size of the moment.
    imported = folder / "imported"
    flags = ["--size", 2, 4, 4, "--devices", 2, "--run-dir", imported]
    run("-m", "trainer.pretrained", folder / "Tiny-Diffusers", *flags)
    sample[1] = imported
    run(*sample[:-2], fails="no --decode FOLDER")
    if kind == "text":
        run(*sample, fails="got no --prompt")
    run(*sample, "--prompt", "a dark video", *image, "--size", "3x4x8")
    shape = Shape((9,), ((32, 64),), 16.0)
    assert read_video(imported / "samples" / "0.mp4", shape).shape == (9, 32, 64, 3)
    for name, count in (("of_files", 2), ("of_text", 2), ("run/samples", 1)):
        found = sorted(x.name for x in (folder / name).iterdir())
        assert found == [*(f"{i}.mp4" for i in range(count)), "sheet.png"], found
    shape = Shape((5,), ((32, 32),), 16.0)
    assert read_video(folder / "of_text" / "0.mp4", shape).shape == (5, 32, 32, 3)
    run("-m", "trainer.dit.export", folder / "run", folder / "exported")
    WanTransformer3DModel.from_pretrained(folder / "exported")
    print(f"{kind}: encoded, trained, drawn and decoded")


def check_encoded(folder, videos, pipeline, kind):
    """Latents, texts and first frames are those that the pipeline makes."""
    lines = read_lines(folder)
    assert sorted(x.caption for x in lines) == [
        *(["a blue video"] * 2), "a dark video", *(["a red video"] * 2)
    ]  # fmt: skip
    config = pipeline.vae.config
    mean, deviation = (torch.tensor(x).view(1, 3, 1, 1, 1) for x in (
        config.latents_mean, config.latents_std
    ))  # fmt: skip

    def latent_of(pixels):
        with torch.no_grad():
            latent = pipeline.vae.encode(pixels).latent_dist.mode()
        return np.moveaxis(((latent - mean) / deviation).numpy()[0], 0, -1)

    for line in lines:
        number = line.file[0]
        place = videos / ("sub" if int(number) > 2 else "") / f"{number}.mp4"
        frames = read_video(place, Shape((5,), ((32, 32),), 16.0))
        pixels = pipeline.video_processor.preprocess_video([Image.fromarray(x) for x in frames])
        found = load_file(folder / "clips" / line.file)
        with torch.no_grad():
            text, _ = pipeline.encode_prompt(line.caption, False, max_sequence_length=512)
        wanted = {"latent": latent_of(pixels), "text": text[0, : line.tokens].numpy()}
        assert not text[0, line.tokens :].any()
        if kind != "text":
            args = (pixels[:, :, 0], 1, 3, 32, 32, 5, torch.float32, "cpu")
            with torch.no_grad():
                _, condition = pipeline.prepare_latents(*args)
            wanted["given"] = np.moveaxis(condition[0, 4:].numpy(), 0, -1)
            mask = condition[0, :4]
            assert mask[:, 0].all()
            assert not mask[:, 1:].any()
        if kind == "image 2.1":
            with torch.no_grad():
                wanted["image"] = pipeline.encode_image(Image.fromarray(frames[0]), "cpu")[
                    0
                ].numpy()
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            # Files have 8 bits of a number.
            error = np.abs(found[name].astype("f4") - x).max()
            assert error <= 2**-8 * np.abs(x).max(), (name, error)


def refusals(folder, videos, encode):
    """Mistakes of a newcomer, each of which is an error that says what to do."""
    rest = encode[2:]
    run(*encode[:2], folder, *rest[1:], fails="FOLDER must hold images")
    run(*encode[:2], folder / "gone", *rest[1:], fails="gone' must exist")
    run(*encode, "--frames", "6", fails="Use 5")
    run(*encode, "--sizes", "30x32", fails="multiples of 16")
    run(*encode, "--model", videos, fails="model_index.json")
    run(*encode, "--process", "2", "2", fails="--process 0 4")
    lost = videos / "1.txt"
    caption = lost.read_text()
    lost.unlink()
    run(*encode, fails="1 of 5 without, such as '1.mp4'")
    lost.write_text(caption)
    # A damaged video, and one that is too short, are named and left out.
    (videos / "broken.mp4").write_bytes((videos / "0.mp4").read_bytes()[:200])
    (videos / "broken.txt").write_text("a red video")
    write_video(videos / "short.mp4", np.zeros((2, 32, 32, 3), np.uint8), rate=16)
    (videos / "short.txt").write_text("a red video")
    text = run(*encode, fails="2 videos were left out")
    assert "broken.mp4' must be a whole video" in " ".join(text.split()), text
    assert "at least 5 frames at 16 a second; got 2" in " ".join(text.split()), text
    assert "next:" not in text, text
    for name in ("broken", "short"):
        (videos / f"{name}.mp4").unlink()
        (videos / f"{name}.txt").unlink()
    run(*encode, "--rate", "8", fails="rate=16.0 and 8.0 now")
    for path in sorted((folder / "encoded").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


if __name__ == "__main__":
    main()
