"""GPT recipes."""

from startrail_jax.training.config import GPTConfig, OptimizerConfig, TrainConfig


def gpt_tiny() -> TrainConfig:
    """Byte-level GPT on the source of the Python standard library: the default of `train.py`."""
    return TrainConfig(
        model=GPTConfig(width=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_width=384),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        steps=1000,
        batch_size=2,
        seq_len=1024,
    )
