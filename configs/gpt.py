"""GPT recipes."""

from startrail_jax.training.config import GPTConfig, OptimizerConfig, TrainConfig


def gpt_tiny() -> TrainConfig:
    """Byte-level GPT on the source of the Python standard library: the default of `train.py`.

    Command: `python train.py`. StarTrail (arXiv 2407.00611) with C = 2 on 8 simulated devices.
    Expected: 1.65 nats per byte on held-out files after 1.6 MB of text, in 4 to 6 minutes on 2 CPU
    cores. More steps at this batch size help more than larger batches.
    """
    return TrainConfig(
        model=GPTConfig(width=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_width=384),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        steps=800,
        batch_size=2,
        seq_len=1024,
    )
