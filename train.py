"""Trains a byte-level GPT with sequence-parallel attention.

    python train.py                      # StarTrail with C = 2
    python train.py --mesh.team 1        # Ring Attention
    python train.py --devices 1          # one device, for comparison
    python train.py --help

Runs on all real devices, or on 8 simulated ones where there is only a CPU. Prints the loss on text
that was held out, and a continuation of it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import tyro

from configs.gpt import gpt_tiny
from startrail_jax.training.config import TrainConfig


class Losses(NamedTuple):
    """What a run came to, in nats per byte."""

    train: list[float]
    """Of every step, before its update."""
    validation: float
    """After the last step."""


def train(config: TrainConfig) -> Losses:
    """Trains, evaluates and samples as `config` says.

    Raises:
        ValueError: if mesh, data or model do not fit each other.
    """
    # Not at the top of the file: `--help` and a mistyped flag need none of this.
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding

    import startrail_jax as st
    from models.gpt import GPT
    from startrail_jax.training import data
    from startrail_jax.training.devices import select_devices
    from startrail_jax.training.metrics import Reporter
    from startrail_jax.training.sampling import continue_tokens
    from startrail_jax.training.sharding import choose_degrees, describe_degrees, state_shardings
    from startrail_jax.validation import check_heads

    report = Reporter(steps=config.steps, tokens_per_step=config.batch_size * config.seq_len)

    # Devices and mesh. Auto axes: the compiler derives the sharding of every activation from the
    # tokens and the weights, so that the model need not know the mesh. On Explicit axes each
    # embedding lookup and each projection that sums over `tensor` would have to name its output's.
    devices = select_devices(config.devices)
    degrees = choose_degrees(config.mesh, len(devices))
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    attention = st.Attention(mesh, causal=True)
    report.line(f"devices: {len(devices)} x {devices[0].device_kind}")
    report.line(f"mesh: {describe_degrees(config.mesh, degrees)}")
    # What the attention cannot serve is refused now, not when the first step is compiled.
    check_heads(degrees, config.model.heads, config.model.kv_heads)
    attention.layout.check_length(config.seq_len)

    # Data. The layout puts tokens in order on the host; everything after that is elementwise in
    # tokens, but for attention.
    corpus = data.standard_library()
    report.line(
        f"data: {corpus.num_files} files, {len(corpus.train) / 1e6:.1f} MB to train on, "
        f"{len(corpus.held_out) / 1e6:.1f} MB held out"
    )

    def place(windows: np.ndarray) -> data.Batch:
        batch = data.next_token_batch(windows, attention.layout)
        return jax.device_put(batch, NamedSharding(mesh, attention.sequence_spec))

    length = config.seq_len + 1
    num_batches = -(-config.validation_windows // config.batch_size)
    held_out = data.spaced_windows(
        corpus.held_out, length=length, count=num_batches * config.batch_size
    )
    validation_batches = [place(windows) for windows in np.split(held_out, num_batches)]

    # Model and optimizer, initialised where they are to lie.
    def make_model() -> GPT:
        return GPT(**vars(config.model), attention_fn=attention, rngs=nnx.Rngs(config.seed))

    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.optimizer.learning_rate,
        warmup_steps=round(config.optimizer.warmup_fraction * config.steps),
        decay_steps=config.steps,
        end_value=config.optimizer.final_learning_rate,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm),
        optax.adamw(
            schedule,
            b1=config.optimizer.beta1,
            b2=config.optimizer.beta2,
            weight_decay=config.optimizer.weight_decay,
            mask=partial(jax.tree.map, lambda x: x.ndim > 1),
        ),
    )

    def initialise() -> tuple[nnx.State, optax.OptState]:
        parameters = nnx.state(make_model())
        return parameters, optimizer.init(parameters)

    graph = nnx.graphdef(nnx.eval_shape(make_model))
    shardings = state_shardings(jax.eval_shape(initialise), mesh)
    parameters, optimizer_state = jax.jit(initialise, out_shardings=shardings)()
    num_parameters = sum(x.size for x in jax.tree.leaves(parameters))
    report.line(f"model: {num_parameters / 1e6:.2f} million parameters")

    # Steps.
    def loss_of(parameters: nnx.State, batch: data.Batch) -> jax.Array:
        logits = nnx.merge(graph, parameters)(batch.tokens, batch.positions)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()

    compile_step = partial(jax.jit, compiler_options=st.compiler_options(mesh))

    @partial(compile_step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    def train_step(parameters, optimizer_state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss

    evaluation_step = compile_step(loss_of)

    def evaluate(parameters: nnx.State) -> float:
        return float(np.mean([evaluation_step(parameters, x).item() for x in validation_batches]))

    # Loop.
    train_losses = []
    with report:
        for step in range(1, config.steps + 1):
            windows = data.random_windows(
                corpus.train, length=length, count=config.batch_size, seed=config.seed, step=step
            )
            parameters, optimizer_state, loss = train_step(
                parameters, optimizer_state, place(windows)
            )
            train_losses.append(float(loss))
            recent = float(np.mean(train_losses[-config.log_every :]))
            report.advance(step, recent, line=step % config.log_every == 0)
            if step % config.evaluate_every == 0 and step < config.steps:
                report.line(f"step {step}: validation loss {evaluate(parameters):.4f} nats/byte")
    validation_loss = evaluate(parameters)
    report.line(f"validation loss {validation_loss:.4f} nats/byte")

    # Sample: the start of the held-out text, continued.
    if config.sample_length:
        context = attention.layout.padded_length(min(2 * config.sample_length, config.seq_len))
        start = context - config.sample_length
        windows = np.zeros((degrees.data, context + 1), np.uint8)
        windows[:, :start] = corpus.held_out[:start]

        @jax.jit
        def sample(parameters, batch):
            return continue_tokens(
                nnx.merge(graph, parameters),
                batch.tokens,
                batch.positions,
                start=start,
                temperature=config.temperature,
                key=jax.random.key(config.seed),
            )

        tokens = jax.device_get(sample(parameters, place(windows)))
        text = attention.layout.unpermute(tokens)[0].astype(np.uint8)
        report.line(f"--- held-out text\n{data.as_text(text[:start])}")
        report.line(f"--- continued by the model\n{data.as_text(text[start:])}")
    return Losses(train_losses, validation_loss)


if __name__ == "__main__":
    train(tyro.cli(TrainConfig, default=gpt_tiny(), description=__doc__))
