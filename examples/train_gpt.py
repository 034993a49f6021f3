"""A GPT on packed documents in one file, to copy: Flax NNX, optax, orbax and the attention.

python examples/train_gpt.py --data FOLDER --c 2     # The same command resumes an interrupted run.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from orbax.checkpoint import v1 as ocp

import startrail_jax as st
from startrail_jax.errors import UserError


def rotate(x, positions):
    """Rotary positions of x [batch, seq, heads, head_dim]."""
    angles = jnp.multiply.outer(positions[..., None], 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2))
    (a, b), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, width, heads, kv_heads, attention, rngs):
        self.attention, self.splits = attention, (heads, heads + kv_heads)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, (heads + 2 * kv_heads) * width // heads, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, positions, segment_ids):
        qkv = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], -1, x.shape[2] // self.splits[0])
        query, key, value = jnp.split(qkv, self.splits, axis=2)
        query, key = rotate(query, positions), rotate(key, positions)
        seen = self.attention(query, key, value, segment_ids=segment_ids)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, attention, *, vocabulary=256, width=128, layers=4, heads=8, kv_heads=2):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        sizes = width, heads, kv_heads
        self.blocks = nnx.List(Block(*sizes, attention, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def loss(self, tokens, targets, positions, segment_ids, weights):
        """The mean over the tokens that count, in any order."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, segment_ids)
        logits = self.embed.attend(self.norm(x))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (losses * weights).sum() / weights.sum()


def batches(folder, seq_len, batch_size, run_dir=Path("runs")):
    """Files below a folder as bytes, packed in rows: batch i is the same in every run."""
    names = sorted(x.relative_to(folder) for x in folder.rglob("*") if x.is_file())
    shown = [x for x in names if not any(part.startswith((".", "__")) for part in x.parts)]
    others = [x for x in shown if run_dir.resolve() not in (folder / x).resolve().parents]
    texts = [(folder / x).read_bytes() + b"\0" for x in others]
    stream = np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)
    document = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
    start = np.flatnonzero(np.diff(document, prepend=-1))[document]
    rows, needed = (len(stream) - 1) // seq_len, batch_size * seq_len + 1
    if rows < batch_size:
        raise SystemExit(f"{folder} must hold at least {needed} bytes; got {len(stream)}.")

    def batch(number):
        """Tokens, targets, positions, segment ids and weights, each [batch, seq]."""
        epoch, first = divmod(number * batch_size, rows - rows % batch_size)
        chosen = np.random.default_rng(epoch).permutation(rows)[first : first + batch_size]
        at = chosen[:, None] * seq_len + np.arange(seq_len)
        ids, positions = document[at] - document[at[:, :1]], at - np.maximum(start[at], at[:, :1])
        weights = document[at + 1] == document[at]  # Not the first token of the next document.
        return stream[at], stream[at + 1], positions, ids, weights

    return batch


def main(arguments=None):
    parser = argparse.ArgumentParser()
    defaults = dict(steps=300, batch_size=4, seq_len=1024, c=1, head=1, save_every=100)
    defaults |= dict(data=Path(st.__file__).parent, run_dir=Path("runs/train_gpt"))
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--layout", choices=["zigzag", "contiguous"], default="zigzag")
    args = parser.parse_args(arguments)
    mesh = st.make_mesh(st.Degrees.startrail(len(jax.devices()), c=args.c, head=args.head))
    attention = st.Attention(mesh, causal=True, layout=args.layout)
    batch = batches(args.data, args.seq_len, args.batch_size, args.run_dir)
    model = GPT(attention)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, max(args.steps, 21))
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)))
    state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))

    def step(state, *batch):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(*batch))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    train_step = jax.jit(step, donate_argnums=0, compiler_options=st.compiler_options(mesh))
    with ocp.training.Checkpointer(args.run_dir.resolve()) as checkpoints:
        done, losses = (checkpoints.latest.step if checkpoints.latest else 0), []
        state = checkpoints.load(done, state) if done else state
        for number in range(done, args.steps):
            state, loss = train_step(state, *attention.shard(*batch(number)))
            losses.append(float(loss))
            print(f"step {number + 1}  loss {losses[-1]:.4f}", flush=True)
            if (number + 1) % args.save_every == 0 or number + 1 == args.steps:
                checkpoints.save(number + 1, state)  # The step is also the position in the data.
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # For machines without GPUs.
    try:
        main()
    except (UserError, OSError) as error:
        raise SystemExit(str(error)) from None
