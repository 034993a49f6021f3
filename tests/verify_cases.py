"""Runs that are drawn at random, for `--verify`: all kinds of models, meshes and settings."""

import dataclasses

import numpy as np

import startrail_jax as st
from models.parts.experts import ExpertsConfig
from models.parts.gated_delta import LinearConfig
from models.parts.ssd import SSDConfig
from programs import SMALL, make_config, make_dit_config, make_text_config, make_wan_config
from startrail_jax.errors import UserError
from trainer.config import AttentionConfig, LoraConfig, OptimizerConfig
from trainer.gpt.config import DataConfig
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.objectives.preference import Preference
from trainer.parallel.abstract_step import AbstractStep
from trainer.tasks import TASKS

DEGREES = (
    st.Degrees(ring=8),
    st.Degrees.startrail(8, c=2),
    st.Degrees(head=2, ring=4),
    st.Degrees(group=8),
    st.Degrees(data=2, ring=2, head=2),
    st.Degrees(data=2, group=2, team=2),
    st.Degrees(data=4, ring=2),
    st.Degrees(tensor=2, ring=2, head=2),
    st.Degrees(tensor=2, group=2, team=2),
)
KINDS = (
    "plain",
    "windows",
    "hybrid",
    "mamba",
    "experts",
    "wan",
    "dit",
    "dit_of_texts",
    "objective",
    "documents",
)


def drawn(seed):
    """A config and degrees on eight devices, which fit each other."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        try:
            config, degrees = _draw(rng, KINDS[seed % len(KINDS)])
            objective = TASKS[config.kind].make_objective(config)
            AbstractStep.of_degrees(config, objective, degrees)
            return config, degrees
        except UserError:
            continue
    raise AssertionError(f"no settings fit for seed {seed}")


def _draw(rng, kind):
    def one_of(*values):
        return values[rng.integers(len(values))]

    degrees = one_of(*DEGREES)
    zero = one_of(0, 0, 1, 2, 3)
    parts = one_of(1, 1, 2)
    common = dict(
        zero=zero,
        gradient_accumulation=parts,
        batch_size=4 * parts,
        remat=one_of("auto", "none", "full", "attention_saved", "products_saved"),
        tile=one_of(None, None, 16),
        attention=AttentionConfig(
            inner=one_of(1, 1, 2),
            keep_gathered=one_of(False, False, True),
            gradient_dtype="float32",
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, kind=one_of("adamw", "adamw", "lion", "muon")
        ),
        ema_decay=one_of(None, None, 0.99),
        seed=int(rng.integers(100)),
    )
    lora = LoraConfig(rank=4) if rng.random() < 0.25 else LoraConfig()
    if kind == "dit_of_texts":
        return make_text_config(size=one_of((2, 8, 8), (3, 6, 10)), **common), degrees
    if kind == "dit":
        return make_dit_config(size=one_of((2, 8, 8), (3, 6, 10)), **common), degrees
    if kind == "wan":
        model = dict(first_frame=one_of("none", "time", "channels"))
        size = one_of((2, 8, 8), (4, 8, 12))
        block = one_of(None, None, 1)
        return make_wan_config(model, size=size, block_frames=block, lora=lora, **common), degrees
    model, others = dict(SMALL, qk_norm=one_of(True, False), tied_head=one_of(True, False)), {}
    if kind == "windows":
        model |= dict(windows=one_of((12,), (9, "none")), sinks=one_of(True, False))
        model |= dict(softcap=one_of(None, 20.0))
    elif kind == "hybrid":
        model |= dict(mixers=("linear", "attention"), linear=LinearConfig(key_heads=2))
    elif kind == "mamba":
        model |= dict(mixers=("ssd", "attention"), ssd=SSDConfig(groups=2, state_dim=8))
    elif kind == "experts":
        experts = ExpertsConfig(count=8, width=16, balance_rate=one_of(0.0, 0.001))
        model |= dict(feed_forwards=("experts", "mlp"), experts=experts)
        others |= dict(experts=one_of("auto", "dispatch") if zero == 3 else "auto")
        lora = LoraConfig()
    elif kind == "objective":
        loss = dict(
            policy=Policy(mean=one_of("batch", "sequence"), ratio=one_of("token", "sequence")),
            preference=Preference(loss=one_of("sigmoid", "ipo", "simpo")),
        )
        name = one_of(*loss)
        others |= {"objective": name, name: loss[name]}
        if one_of(True, False):
            model |= dict(mixers=("linear", "attention"), linear=LinearConfig(key_heads=2))
    elif kind == "documents":
        others |= dict(data=DataConfig(batches="documents"))
        common |= dict(gradient_accumulation=1)
        common["attention"] = dataclasses.replace(common["attention"], inner=1)
    length = int(one_of(64, 96, 100))
    return make_config(model, seq_len=length, lora=lora, **others, **common), degrees
