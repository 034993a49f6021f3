"""Runs of a Wan beside diffusers: sampling with its pipeline, and adapters as it loads them.

pip install -e '.[parity]'
python tests/parity/check_wan.py        # 1 minute; ends with status 1 if something differs
"""

# ruff: noqa: E402

import dataclasses
import functools
import itertools
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from peft import PeftModel

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import startrail_jax as st
from programs import make_program, make_wan_config
from trainer.checkpoints.checkpoint import Checkpoints, save_frozen
from trainer.config import LoraConfig
from trainer.dit.batches import padded_text
from trainer.dit.drawing import Below, Drawing
from trainer.dit.flow_steps import euler, unipc
from trainer.dit.wan.config_json import read_config
from trainer.dit.wan.export import export_wan
from trainer.dit.wan.objective import Asked
from trainer.dit.wan.pretrained import open_wan
from trainer.parallel.state import TrainState
from trainer.run.settings import save_config

REFERENCES = Path(__file__).parent / "wan"
SIZE, STEPS, GUIDANCE, SHIFT = (3, 4, 6), 20, 5.0, 3.0
BOUNDARY, GUIDANCE_BELOW = 0.875, 1.0


def main():
    worst = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, found in (*samples(), *adapters(Path(folder))):
            worst[name] = found
            print(f"{name:<40} {found:.1e}")
    bad = [name for name, x in worst.items() if not x < (1e-5 if "adapters" in name else 1e-4)]
    print(f"different: {', '.join(bad)}" if bad else "all equal")
    sys.exit(bool(bad))


def make_run(name, run_dir, **changes):
    model = dataclasses.replace(read_config(REFERENCES / name), dtype="float32", text_tokens=8)
    config = dataclasses.replace(
        make_wan_config(size=SIZE, batch_size=2),
        model=model,
        init_from=REFERENCES / name,
        run_dir=run_dir,
        **changes,
    )
    program = make_program(config, st.Degrees(), jax.devices()[:1])
    with open_wan(config, program.state_shapes.base) as initial:
        state = program.begin_with(initial.read(program.state_shapes.base))
    return config, program, state


def samples():
    """Latents from noise, with guidance, beside `WanPipeline` with a VAE that is not used.

    With one model, and with two, of which the second has other weights and no guidance.
    """
    vae = AutoencoderKLWan(base_dim=4, z_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                           latents_mean=[0.0] * 3, latents_std=[1.0] * 3)  # fmt: skip
    rng = np.random.default_rng(0)
    texts = [rng.normal(size=(2, 8, 5)).astype("f4") for _ in range(2)]
    config, program, state = make_run("t2v", Path("unused"))
    transformer, second = (
        WanTransformer3DModel.from_pretrained(REFERENCES / "t2v") for _ in range(2)
    )
    second.load_state_dict({name: 0.9 * x for name, x in second.state_dict().items()})
    pair = state.model, jax.tree.map(lambda x: 0.9 * x, state.model)
    kinds = (
        ("unipc", unipc, UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)),
        ("euler", euler, FlowMatchEulerDiscreteScheduler(shift=SHIFT)),
    )  # fmt: skip
    for (name, ours, theirs), two in itertools.product(kinds, (False, True)):
        more = dict(transformer_2=second, boundary_ratio=BOUNDARY) if two else {}
        pipeline = WanPipeline(None, None, vae, theirs, transformer, **more)
        pipeline.set_progress_bar_config(disable=True)
        below = Below(program, GUIDANCE_BELOW, BOUNDARY) if two else None

        def sample(predict, noise, ours=ours):
            return ours(predict, noise, steps=STEPS, shift=SHIFT)

        filled = functools.partial(padded_text, length=8, setting="model.text_tokens")
        asked = [Asked(np.stack([filled(x).astype("f4") for x in text])) for text in texts]
        noise = []

        def spy(predict, x, sample=sample, noise=noise):
            jax.debug.callback(lambda x: noise.append(np.asarray(x)), x)
            return sample(predict, x)

        drawing = Drawing(program, sample=spy, guidance=GUIDANCE, below=below)
        weights = pair if two else state.model
        found = np.stack([*drawing.draw(weights, given=asked[0], without=asked[1], seed=1)])
        from trainer.dit.patches import unpatchify

        latents = unpatchify(noise[0], SIZE, config.model.patch)
        # Texts are rounded to 16 bits in a run.
        text, without = (torch.tensor(np.asarray(x.text, np.float32)) for x in asked)
        with torch.no_grad():
            wanted = pipeline(
                prompt_embeds=text,
                negative_prompt_embeds=without,
                latents=torch.tensor(np.moveaxis(latents, -1, 1)),
                height=SIZE[1] * 8,
                width=SIZE[2] * 8,
                num_frames=4 * (SIZE[0] - 1) + 1,
                num_inference_steps=STEPS,
                guidance_scale=GUIDANCE,
                guidance_scale_2=GUIDANCE_BELOW if two else None,
                output_type="latent",
            ).frames
        wanted = np.moveaxis(np.asarray(wanted), 1, -1)
        yield (
            f"sample {name}{' of two models' * two}",
            np.abs(found - wanted).max() / np.abs(wanted).max(),
        )


def adapters(folder):
    """Outputs of a model with adapters as diffusers loads them, beside those of the merged one."""
    everything = ("query", "key", "value", "out", "up", "down")
    for number, targets in enumerate((("query", "value"), everything)):
        place = folder / str(number)
        place.mkdir()
        lora = LoraConfig(rank=3, alpha=4.5, targets=targets)
        config, program, state = make_run("i2v_2_1", place / "run", lora=lora)
        config.run_dir.mkdir()
        rng = np.random.default_rng(0)
        weights = jax.tree.map(
            lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3).astype("f4")),  # noqa: B023
            state.weights,
        )
        shapes = program.state_shapes.frozen
        save_frozen(config.run_dir / "frozen", shapes, state.frozen, note=print)
        with Checkpoints(config.run_dir / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(1, TrainState(weights, ()), {})
        save_config(config, config.run_dir / "config.json")
        export_wan(config.run_dir, config, place / "alone")
        export_wan(config.run_dir, config, place / "merged", merge=True)
        one, other = (
            WanTransformer3DModel.from_pretrained(x)
            for x in (REFERENCES / "i2v_2_1", place / "merged")
        )
        base, adapted = (
            WanTransformer3DModel.from_pretrained(REFERENCES / "i2v_2_1") for _ in range(2)
        )
        adapted = PeftModel.from_pretrained(adapted, place / "alone")
        one.load_lora_adapter(str(place / "alone"), weight_name="pytorch_lora_weights.safetensors")
        inputs = dict(
            hidden_states=torch.tensor(rng.normal(size=(2, 10, *SIZE)).astype("f4")),
            timestep=torch.tensor([300.0, 800.0]),
            encoder_hidden_states=torch.tensor(rng.normal(size=(2, 512, 5)).astype("f4")),
            encoder_hidden_states_image=torch.tensor(rng.normal(size=(2, 9, 6)).astype("f4")),
        )
        with torch.no_grad():
            found, of_peft, wanted, without = (
                model(**inputs).sample for model in (one, adapted, other, base)
            )
        largest = wanted.abs().max()
        assert (wanted - without).abs().max() > 0.1 * largest, "the adapters do something"
        for name, x in (("diffusers", found), ("PEFT", of_peft)):
            difference = float((x - wanted).abs().max() / largest)
            yield f"adapters {' '.join(targets)}, {name}", difference


if __name__ == "__main__":
    main()
