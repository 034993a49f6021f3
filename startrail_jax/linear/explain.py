"""Says what linear attention sends, keeps and computes, without running anything."""

from __future__ import annotations

from dataclasses import dataclass

from startrail_jax.linear.sizes import LayerSizes
from startrail_jax.traffic.cost import Communication


@dataclass(frozen=True, kw_only=True)
class LinearExplanation:
    """Messages and memory of linear attention; `print` shows them in a few lines."""

    devices: int
    """Devices along the sequence."""
    sizes: LayerSizes
    """Sizes on one device."""
    communication: Communication
    """What a device receives, in both passes."""

    @property
    def exchange_bytes(self) -> int | None:
        """What a device would receive in both passes if an all_to_all gave each device some of the
        heads, with all tokens; None where the devices do not divide the heads."""
        sizes = self.sizes
        if sizes.key_heads % self.devices or sizes.heads % self.devices:
            return None
        return 2 * (sizes.input_bytes + sizes.output_bytes) * (self.devices - 1) // self.devices

    @property
    def gathered_bytes(self) -> int:
        """What a device would receive in both passes if it gathered the maps of all others."""
        return 2 * (self.devices - 1) * self.sizes.map_bytes

    def __str__(self) -> str:
        sizes, there, back = self.sizes, self.communication.forward, self.communication.backward
        received = there.received_bytes + back.received_bytes
        lines = [
            f"rule {sizes.rule.name!r} on {self.devices} devices along the sequence, of "
            f"{sizes.tokens:,} tokens each",
            f"  states: each receives {there.received_bytes:,} bytes forward and "
            f"{back.received_bytes:,} backward, whatever the number of tokens",
        ]
        if self.exchange_bytes is None:
            lines.append("  heads: the devices do not divide them, so they cannot be split")
        elif self.devices > 1:
            least = -(-received * sizes.tokens // self.exchange_bytes)
            lines.append(
                f"  heads: an all_to_all would receive {self.exchange_bytes:,} bytes in both; "
                f"states are fewer from {least:,} tokens a device on"
            )
        if self.devices > 1:
            lines.append(f"  all maps: an all_gather would receive {self.gathered_bytes:,} bytes")
        lines += [
            f"  memory: {sizes.kept_bytes:,} bytes are kept beside the inputs; about "
            f"{sizes.forward_bytes:,} are in use forward and {sizes.backward_bytes:,} backward",
            f"  FLOPs: {sizes.model_flops:.3g} in the recurrence forward, twice that backward",
        ]
        return "\n".join(lines)
