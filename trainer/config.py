"""Settings that every training run has. Imports neither jax nor a model: `--help` must be fast."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from models.checks import check_minimum, check_range
from startrail_jax.errors import InputError
from trainer.places import check_folder, check_mirror
from trainer.printable import say

SHARDED_AXES = ("data", "ring", "group", "team", "head")
"""The mesh axes over which ZeRO may split the training state, slowest first."""
ROLES = (*SHARDED_AXES, "tensor")
"""All mesh axes, slowest first."""
SEQUENCE_ROLES = SHARDED_AXES[1:]
"""The mesh axes over which the devices of a sequence lie."""


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Whether this is one of several processes, and which. These settings are not part of a run."""

    on: Annotated[bool, tyro.conf.arg(name="")] = False
    """Whether this is one of several processes that SLURM, Open MPI or Kubernetes started. jax then
    detects the coordinator, the number of processes and the index of each."""
    coordinator: str | None = None
    """Host and port, such as "10.0.0.1:7777", at which process 0 waits for the others. If this is
    an address, process 0 listens only there; if it is the name of a host, at all addresses."""
    processes: int | None = None
    """Number of processes."""
    index: int | None = None
    """Number of this process, from 0."""
    start_timeout: float = 300.0
    """Seconds within which all processes must start."""
    timeout: float = 20.0
    """Seconds without a heartbeat after which a process counts as lost, and all others end."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("coordinator", "processes", "index")}
        if None in given.values() and any(value is not None for value in given.values()):
            raise InputError(
                "distributed.coordinator, .processes and .index must be given together; got "
                f"{', '.join(f'{name}={value}' for name, value in given.items())}. Give the "
                "missing ones, or only --distributed where SLURM, Open MPI or Kubernetes know them."
            )
        for name in ("start_timeout", "timeout"):
            check_minimum(f"distributed.{name}", getattr(self, name), 1)
        if self.coordinator is None or self.processes is None or self.index is None:
            return
        host, port = self.address
        if not host or not 0 < port < 65536:
            raise InputError(
                "distributed.coordinator must be a host and a port; got "
                f"coordinator={self.coordinator!r}. Use the address of process 0 and a port that "
                "is free there, such as 10.0.0.1:7777."
            )
        if not 0 <= self.index < self.processes:
            raise InputError(
                "distributed.index must be at least 0 and below distributed.processes; got "
                f"index={self.index}, processes={self.processes}. Number the processes from 0."
            )

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.on or self.coordinator is not None

    @property
    def known_processes(self) -> int | None:
        """Number of processes; None if only jax can tell."""
        return self.processes if self.several else 1

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator; an empty host, or port 0, if they are not given."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.strip("[]"), int(port) if port.isdecimal() else 0

    @property
    def has_literal_address(self) -> bool:
        """Whether the coordinator is given by an address, or as `localhost`."""
        host, _ = self.address
        with suppress(ValueError):
            return host == "localhost" or bool(ipaddress.ip_address(host))
        return False


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of parallelism, whose product must be the number of devices, and their order."""

    data: int | None = None
    """Number of shards of the batch. The default is the largest with which a step fits the memory
    of GPUs, and 1 where that is unknown."""
    c: int | None = None
    """C in the paper: number of devices in a team, and in a group. Sets both `team` and `group`."""
    team: int | None = None
    """Number of devices in a team, which share their queries. If team, group, ring and head are
    left out, they follow the rule of docs/planner.md; if some are given, those left out are 1, but
    for the ring."""
    group: int | None = None
    """Number of devices in a group, which gather the same keys and values."""
    ring: int | None = None
    """Number of devices in a ring, round which keys and values travel. The default uses all devices
    that the other degrees leave over."""
    head: int | None = None
    """Ulysses degree: number of devices that exchange tokens for heads."""
    tensor: int | None = None
    """Number of shards of the heads and of the MLP channels (tensor parallelism). The default is 1,
    or the one of a plan."""
    default_c: int | None = None
    """C in the paper for runs whose flags set none of team, group, ring and head, if the square of
    C divides the devices of a sequence. Otherwise they follow the rule."""
    fast_ports: bool = False
    """Whether each device of several nodes has a network port of 400 Gb/s or more, for the rule of
    docs/planner.md."""
    order: (
        tuple[
            Literal[
                "rings_inside",
                "collectives_inside",
                "head_first",
                "context_first",
                "data",
                "group",
                "ring",
                "team",
                "head",
                "tensor",
            ],
            ...,
        ]
        | None
    ) = None
    """Which axes share a node: a named order, or all six axes, slowest first; the last axes lie
    inside a node. The default sends the fewest bytes from node to node. Losses do not depend on
    it."""
    devices_per_node: int | None = None
    """Number of devices in a node. By default, the devices of one machine, or of one TPU slice, are
    a node."""

    def __post_init__(self) -> None:
        both = {"team": self.team, "group": self.group}
        if self.c is not None and (others := {k: v for k, v in both.items() if v is not None}):
            given = " and ".join(f"mesh.{name}={degree}" for name, degree in others.items())
            raise InputError(
                f"mesh.c sets both team and group; got mesh.c={self.c} and {given}. Give one of "
                "them; a flag with the value None, such as --mesh.c None, unsets what a "
                "config.json gives."
            )
        others = {name: getattr(self, name) for name in ("c", "default_c", "devices_per_node")}
        for name, degree in {**others, **self.degrees}.items():
            check_minimum(f"mesh.{name}", degree, 1)
        is_named = self.order is not None and len(self.order) == 1 and self.order[0] not in ROLES
        if self.order is not None and not is_named and sorted(self.order) != sorted(ROLES):
            raise InputError(
                f"mesh.order must be a named order, or each of {' '.join(ROLES)} once; got "
                f"mesh.order={' '.join(self.order)}. Use for example --mesh.order rings_inside."
            )

    @property
    def degrees(self) -> dict[str, int | None]:
        """The six degrees by their names; None where they are left open."""
        both = {} if self.c is None else {"team": self.c, "group": self.c}
        return {name: value for name, value in vars(self).items() if name in ROLES} | both

    @property
    def given(self) -> dict[str, int]:
        """The degrees that flags set, by their names."""
        return {role: degree for role, degree in self.degrees.items() if degree is not None}

    @property
    def follows_rule(self) -> bool:
        """Whether the rule decides how devices share a sequence: no flag says it in part."""
        return not self.given.keys() & {*SEQUENCE_ROLES}

    @property
    def leaves_data_open(self) -> bool:
        """Whether the shards of the batch are chosen too."""
        return self.data is None and self.default_c is None and self.follows_rule

    @staticmethod
    def of_older_file(values: dict[str, Any]) -> dict[str, Any]:
        """The settings of a config.json in which degrees of 1 were those that no flag had set."""
        if "fast_ports" in values:
            return values
        opened = ("data", "head", "tensor")
        return {name: None if name in opened and x == 1 else x for name, x in values.items()}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer with gradient clipping, and the schedule of the learning rate."""

    kind: Literal["adamw", "lion", "muon"] = "adamw"
    """How gradients become updates: "adamw" (https://arxiv.org/abs/1711.05101); "lion", with one
    moment, whose sign is the update (https://arxiv.org/abs/2302.06675); or "muon" for the matrices
    of the layers, with AdamW for all other weights (https://kellerjordan.github.io/posts/muon)."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """The schedule of the learning rate after the warm-up: "cosine" and "linear" fall from the peak
    until the end; "constant" stays there; "wsd" (warm-up, stable, decay;
    https://arxiv.org/abs/2404.06395) stays there and then falls linearly; "inverse_sqrt" falls as
    the root of (steps of the warm-up) / step (https://arxiv.org/abs/1706.03762)."""
    learning_rate: float
    """Peak learning rate."""
    final_share: float | None = None
    """Learning rate after the last step of "cosine", "linear" and "wsd", as a share of the peak.
    The default is 0."""
    warmup_fraction: float = 0.05
    """Fraction of the steps during which the learning rate rises from 0 to its peak."""
    warmup_steps: int | None = None
    """Number of steps during which it rises, in place of the fraction."""
    decay_fraction: float | None = None
    """Fraction of the steps, at the end, during which the learning rate of schedule "wsd" falls.
    The default is 0.2."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors are not decayed."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient; longer gradients are scaled down to it."""
    beta1: float = 0.9
    """Decay of the moving average of the gradient; for Lion, its share in an update."""
    beta2: float = 0.95
    """Decay of the moving average of the squared gradient; for Lion, of the gradient."""
    epsilon: float = 1e-8
    """What AdamW adds to the root of the averaged squared gradient."""
    momentum: float | None = None
    """Decay of the moving average of the gradients that Muon makes orthogonal. The default is
    0.95."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm", "epsilon"):
            check_range(f"optimizer.{name}", getattr(self, name), "above 0 and finite")
        for name in ("final_share", "weight_decay", "warmup_steps"):
            check_minimum(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("warmup_fraction", "beta1", "beta2", "momentum", "decay_fraction"):
            check_range(f"optimizer.{name}", getattr(self, name), "at least 0 and below 1")
        owners = ("decay_fraction", "schedule", "wsd"), ("momentum", "kind", "muon")
        for name, setting, needed in owners:
            if getattr(self, name) is not None and getattr(self, setting) != needed:
                raise InputError(
                    f"optimizer.{name} needs optimizer.{setting}={needed!r}; got {name}="
                    f"{getattr(self, name)}, {setting}={getattr(self, setting)!r}. Leave it out, "
                    f"or use --optimizer.{setting} {needed}."
                )
        if self.kind == "lion" and self.epsilon != type(self).epsilon:
            raise InputError(
                "optimizer.epsilon needs an optimizer that divides by a moment; got epsilon="
                f"{self.epsilon}, kind='lion'. Leave it out, or use --optimizer.kind adamw."
            )
        if self.final_share is not None and self.schedule in ENDLESS:
            raise InputError(
                "optimizer.final_share needs a schedule that ends with a share of the peak; got "
                f"final_share={self.final_share}, schedule={self.schedule!r}. Use "
                "--optimizer.final-share None, or --optimizer.schedule cosine, linear or wsd."
            )
        default = type(self).warmup_fraction
        if self.warmup_steps is not None and self.warmup_fraction != default:
            raise InputError(
                "optimizer.warmup_steps takes the place of optimizer.warmup_fraction; got "
                f"warmup_steps={self.warmup_steps}, warmup_fraction={self.warmup_fraction}. Leave "
                "one of them out."
            )
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_of_wsd > 1:
            raise InputError(
                "optimizer.warmup_fraction and optimizer.decay_fraction must be at most 1 "
                f"together; got warmup_fraction={self.warmup_fraction}, "
                f"decay_fraction={self.decay_of_wsd}. Use a smaller one."
            )

    @staticmethod
    def of_older_file(values: dict[str, Any]) -> dict[str, Any]:
        """The settings of a config.json whose final learning rate was a number of its own."""
        if type(values.get("final_learning_rate")) not in (int, float):
            return values
        peak, final = values.get("learning_rate"), values["final_learning_rate"]
        if type(peak) not in (int, float) or not peak:
            return values
        others = {name: x for name, x in values.items() if name != "final_learning_rate"}
        # 3e-5 of 3e-4 is 0.1, and not the 0.09999999999999999 of binary digits.
        return {**others, "final_share": float(f"{final / peak:.12g}") or None}

    def for_adapters(self) -> OptimizerConfig:
        """The same with the learning rate of adapters, which begin at zero, and need larger steps
        than the weights of a model."""
        return replace(self, learning_rate=max(self.learning_rate, LEAST_RATE_OF_ADAPTERS))

    def warmup(self, steps: int) -> int:
        """Number of steps of the warm-up of a run of some steps; at least one step follows."""
        given = self.warmup_steps
        return min(round(self.warmup_fraction * steps) if given is None else given, steps - 1)

    @property
    def decay_of_wsd(self) -> float:
        """Fraction of the steps during which the learning rate of schedule "wsd" falls."""
        return 0.2 if self.decay_fraction is None else self.decay_fraction


ENDLESS = ("constant", "inverse_sqrt")
"""Schedules that do not end with a share of the peak."""
LEAST_RATE_OF_ADAPTERS = 1e-4
"""Learning rate with `--lora.rank`, where no flag names one and the recipe has a lower one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is saved, and how many checkpoints are kept."""

    every: int = 200
    """Number of steps between checkpoints. The state is also saved after the last step, and when
    the program is interrupted by SIGTERM or Ctrl-C."""
    keep: int = 2
    """Number of checkpoints to keep: the newest ones."""
    strict: bool = False
    """Whether to stop with an error if the newest checkpoint is damaged. Otherwise this checkpoint
    is removed, and the run continues from the newest undamaged checkpoint."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            check_minimum(f"checkpoint.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Metrics for Weights & Biases, beside metrics.jsonl."""

    project: str | None = None
    """Project to write to. By default, nothing is written."""
    entity: str | None = None
    """User or team of the project. The default is that of the API key."""
    mode: Literal["online", "offline"] | None = None
    """Whether to send metrics while the run trains, or to keep them in its folder `wandb`, for
    `wandb sync`. The default is the value of WANDB_MODE, or "online" without it."""

    def __post_init__(self) -> None:
        others = {"entity": self.entity, "mode": self.mode}
        given = [name for name, value in others.items() if value is not None]
        if self.project is None and given:
            raise InputError(
                f"wandb.{given[0]} needs wandb.project; got {given[0]}={others[given[0]]!r} alone. "
                "Add --wandb.project NAME, or leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention runs: options of `startrail_jax.Attention` that change no exact result."""

    inner: int = 1
    """Number of devices in an inner cycle of a double ring; divides mesh.ring. Useful where the
    ring crosses nodes and inner cycles do not. 1 is a single ring."""
    head_chunks: int = 1
    """Number of parts in which a device computes the attention of its heads, one after another. It
    divides the key heads of a device, kv_heads / (mesh.head * mesh.tensor). Attention then needs
    memory for two parts at a time, and sends the same bytes in more messages."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which partial gradients of attention travel between devices. "bfloat16" takes half
    the bytes, but the gradients are less exact."""
    keep_gathered: bool = False
    """Whether layers keep the gathered queries, keys and values of team and group for the backward
    pass, which otherwise gathers them again. This needs more memory and sends fewer bytes. It
    cannot be combined with --remat full."""
    exchange: Literal["auto", "rings"] = "auto"
    """What devices send each other in layers with a window: "auto" (only the keys inside the
    window, where this takes fewer bytes) or "rings" (the units of the scheme)."""
    backend: Literal["auto", "fa4"] = "auto"
    """Kernels of the attention: "auto" (cuDNN's on GPUs) or "fa4" (those of FlashAttention-4, on
    Hopper and later, which need the extra fa4). With "fa4", two runs may differ in the last
    bits."""
    linear_backend: Literal["xla", "jla"] = "xla"
    """Kernels of linear attention: "xla" (plain XLA) or "jla" (those of jax-linear-attention, on
    Hopper, which need the extra jla)."""

    @property
    def options(self) -> dict[str, Any]:
        """Those of `startrail_jax.Attention`."""
        return {name: x for name, x in vars(self).items() if name != "linear_backend"}

    def __post_init__(self) -> None:
        for name in ("inner", "head_chunks"):
            check_minimum(f"attention.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the weights of the model (LoRA,
    https://arxiv.org/abs/2106.09685)."""

    rank: int | None = None
    """Rank of the adapters, such as 16. By default there are none, and all weights are trained."""
    alpha: float | None = None
    """The adapters add alpha / rank times their product. The default is twice the rank."""
    targets: tuple[str, ...] = ("query", "value")
    """Projections that have adapters, in every layer that has them: four of attention and of linear
    attention, three of the MLP or the expert of all tokens, three of linear attention alone, and
    three of every other expert."""
    base_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type in which the frozen matrices and biases of the model are kept. The default is the
    type of the activations, model.dtype, which changes no result. Norms stay float32."""

    def __post_init__(self) -> None:
        if self.rank is None:
            given = [x for x in ("alpha", "base_dtype") if getattr(self, x) is not None]
            given += ["targets"] * (self.targets != ("query", "value"))
            if given:
                raise InputError(
                    f"lora.{given[0]} needs adapters; got {given[0]}={getattr(self, given[0])} "
                    "without a rank. Add --lora.rank 16, or leave it out."
                )
            return
        check_minimum("lora.rank", self.rank, 1)
        if not 0 < self.scale < math.inf:
            raise InputError(
                f"lora.alpha must be above 0 and finite; got alpha={self.alpha}. Leave it out for "
                "the default."
            )
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(
                "lora.targets must name projections, each once; got "
                f"targets={' '.join(self.targets) or 'none'}. Use --lora.targets query value."
            )

    def check_targets(self, projections: Iterable[str]) -> None:
        """Raises if there are adapters for projections that a model has not."""
        names = [*projections]
        absent = [x for x in self.targets if x not in names]
        if self.rank is not None and absent:
            raise InputError(
                f"lora.targets must name projections of the model; got {absent[0]}, and no layer "
                f"has one. Use some of {' '.join(names)}."
            )

    @property
    def scale(self) -> float:
        """Factor of the product of the adapters."""
        assert self.rank is not None, "there are adapters"
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Samples of the model while it trains."""

    every: int | None = None
    """Number of steps between samples. The default is none before the end of the run."""

    def __post_init__(self) -> None:
        check_minimum("sample.every", self.every, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run. Each kind of model has a subclass, such as `GPTTrainConfig`."""

    kind: ClassVar[str]
    """Kind of the model: its name in `trainer.tasks.TASKS` and in config.json."""
    causal: ClassVar[bool]
    """Whether a token attends only to itself and to earlier tokens."""
    groups_of_flags: ClassVar[dict[str, tuple[str, ...]]] = {
        "run": (
            *(
                "steps",
                "batch_size",
                "seq_len",
                "size",
                "block_frames",
                "seed",
                "run_dir",
                "init_from",
                "init_text_only",
                "objective",
                "replay_experts",
                "frozen",
                "mirror",
            ),
            *("allow_changes", "devices", "plan", "verify", "log_every", "tensorboard", "profile"),
        ),
        "memory": (
            "zero",
            "zero_axes",
            "experts",
            "remat",
            "offload",
            "offload_optimizer",
            "tile",
            "gradient_accumulation",
        ),
        "evaluation": (*("validation_every", "validation_sequences", "ema_decay"),),
        "guards": ("non_finite", "non_finite_limit"),
    }
    """Title in the help -> settings without a prefix, of all kinds of runs, in this order."""

    model: Any
    """Sizes of the model."""
    optimizer: OptimizerConfig
    """Optimizer and learning rate."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Degrees of parallelism."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """What attention sends and keeps."""
    data: Any
    """Data to train on."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Metrics for Weights & Biases."""

    devices: int | None = None
    """Number of devices to use, of all processes together. The default is all real devices, or 8
    simulated ones on a machine that has only a CPU."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO level: 0 splits nothing over the devices, 1 splits the state of the optimizer, 2 also
    the gradients, 3 also the weights."""
    zero_axes: tuple[Literal["data", "ring", "group", "team", "head"], ...] = SHARDED_AXES
    """Mesh axes over which ZeRO splits. With only the last axes, weights are gathered among devices
    that are near each other (LoongTrain's hybrid ZeRO, https://arxiv.org/abs/2406.18485)."""
    remat: Literal[
        "auto", "none", "products_saved", "projections_saved", "attention_saved", "full"
    ] = "auto"
    """What the backward pass of a layer recomputes: nothing ("none"), the operations between matrix
    products ("products_saved"), these and the MLP ("projections_saved"), everything except
    attention ("attention_saved"), or everything ("full"). The default, "auto", takes the first of
    the last four with which a step fits the memory of the devices, by the estimate of
    docs/memory.md."""
    offload: bool = False
    """Whether to move what `remat` saves to the memory of the host. Needs GPUs, and a `remat` other
    than "auto" and "none"."""
    offload_optimizer: bool = False
    """Whether the optimizer's moments are in the memory of the host, which kernels of the update
    read and write."""
    tile: int | None = None
    """Largest number of tokens of a device that the loss processes at a time, and the MLP too if
    `remat` recomputes it; fewer tokens need less memory. The default is all tokens."""
    gradient_accumulation: int = 1
    """Number of parts of a batch that are processed one after another (gradient accumulation); more
    parts need less memory."""

    plan: Literal["off", "show", "use"] = "off"
    """What to do with a prediction of the fastest mesh (docs/planner.md): "use" trains with it, and
    "show" prints the ranking and ends. Links and kernels of the devices are measured first. If
    batches are whole documents, the data are opened for their lengths. Degrees that flags set stay
    as they are. A resumed run keeps its mesh. With "off", nothing is measured; --mesh.team
    describes the default mesh."""

    verify: bool = False
    """Whether to check the run on its own devices in place of training (docs/verify.md): its
    gradients against those of one device and of float64, its replicas, a checkpoint, links and
    speed. The program ends with status 1 if anything is wrong, and writes verify.json."""

    steps: int
    """Number of optimizer steps."""
    batch_size: int
    """Number of sequences or images in a batch, over all devices together."""
    seed: int = 0
    """Seed of the initial weights, the order of the data, the noise, and the final sample."""

    run_dir: Path
    """Folder for checkpoints, metrics and config. If it already holds a run, that run is
    resumed."""
    mirror: str | None = None
    """Store to which the checkpoints are copied while the run trains, as a URL such as
    gs://bucket/runs/mine. If the folder of the run is gone, the run continues from the store."""
    allow_changes: bool = False
    """Whether a run may be resumed with other data, batches, loss, steps, rotary positions, or
    numbers of its optimizer. The kind of the optimizer, and the settings of the model except rotary
    positions, can never change."""
    log_every: int | None = None
    """Number of steps between reports; each report gives the mean training loss since the last. The
    default is 50, or a twentieth of the steps if this is less."""
    tensorboard: bool = True
    """Whether to write metrics for TensorBoard in addition to metrics.jsonl."""
    validation_every: int = 200
    """Number of steps between evaluations. An evaluation always follows the last step."""
    validation_sequences: int = 64
    """Number of held-out sequences or images in an evaluation, rounded up to whole batches. If
    there are fewer, each is used once."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do when the loss or the gradient is not finite: end the program, or skip the step.
    The weights are never updated by such a step."""
    non_finite_limit: int = 10
    """Number of steps in a row that "skip" may skip; then the program ends."""
    profile: tuple[int, int] | None = None
    """First and last step to profile; the trace is written to the folder `profile` of the run."""
    frozen: tuple[str, ...] = ()
    """Weights that are not trained: shell patterns of their names, in quotes, such as
    --frozen 'embedding*' '*norm/scale'. A * also stands for slashes. The log lists the names of
    those that match. The weights of all layers of a kind are one array with one name, so that a
    pattern cannot name a single layer; a tied head is frozen with its embedding. They have no
    gradients and no state of the optimizer."""
    ema_decay: float | None = None
    """Decay of the moving average of the weights, which evaluation and samples then use; None for
    no average."""

    @staticmethod
    def of_older_file(values: dict[str, Any]) -> dict[str, Any]:
        """The settings of a config.json of when metrics could go to MLflow."""
        former = values.get("mlflow")
        if not isinstance(former, dict):
            return values
        if any(x is not None for x in former.values()):
            say(
                "NOTE: metrics of this run went to MLflow, and no longer do. Use --wandb.project "
                "NAME, or TensorBoard"
            )
        return {name: x for name, x in values.items() if name != "mlflow"}

    def __post_init__(self) -> None:
        for name in (
            *("batch_size", "gradient_accumulation", "log_every", "validation_every"),
            *("validation_sequences", "non_finite_limit", "devices", "tile"),
        ):
            check_minimum(name, getattr(self, name), 1)
        check_folder("run_dir", self.run_dir)
        if self.mirror is not None:
            check_mirror(self.mirror)
            if not self.steps:
                raise InputError(
                    "mirror copies the checkpoints of a run that trains; got steps=0. Leave it out."
                )
        # Without steps, a run holds the weights of a pretrained model alone.
        check_minimum("steps", self.steps, 1 if getattr(self, "init_from", None) is None else 0)
        check_minimum("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise InputError(f"seed must be below 2**32; got seed={self.seed}. Use another.")
        if self.frozen and self.has_adapters:
            raise InputError(
                "frozen names weights that are not trained, and with adapters none is; got frozen="
                f"{' '.join(self.frozen)} and lora.rank. Leave one of them out."
            )
        data = self.mesh.data or 1
        parts = data * self.gradient_accumulation
        if self.batch_size % parts:
            raise InputError(
                "batch_size must be divisible by mesh.data * gradient_accumulation; got "
                f"batch_size={self.batch_size}, mesh.data={data}, "
                f"gradient_accumulation={self.gradient_accumulation}. Use batch_size="
                f"{-(-self.batch_size // parts) * parts}."
            )
        way_out = "Use 0.999, or None for no average."
        check_range("ema_decay", self.ema_decay, "above 0 and below 1", way_out)
        warmup = self.optimizer.warmup_steps
        if self.steps and warmup is not None and warmup >= self.steps:
            raise InputError(
                "optimizer.warmup_steps must be below steps; got "
                f"warmup_steps={warmup}, steps={self.steps}. Use fewer, or more --steps."
            )
        if self.offload and self.remat in ("auto", "none"):
            raise InputError(
                "offload moves what remat saves, so it needs a remat by its name; got "
                f"offload=True, remat={self.remat!r}. Use --remat attention_saved."
            )
        if self.attention.keep_gathered and self.remat == "full":
            raise InputError(
                "attention.keep_gathered keeps what remat='full' recomputes; got both. Leave one "
                "of them out, or use --remat attention_saved."
            )
        if self.zero and not self.zero_axes:
            raise InputError(
                f"zero_axes must name an axis for zero={self.zero}; got none. Leave it out for all."
            )
        if not self.zero and set(self.zero_axes) != set(SHARDED_AXES):
            raise InputError(
                "zero_axes need a ZeRO level of at least 1; got zero=0, "
                f"zero_axes={self.zero_axes}. Use --zero 1, 2 or 3."
            )
        if len(set(self.zero_axes)) < len(self.zero_axes):
            raise InputError(
                f"zero_axes must name an axis once; got zero_axes={self.zero_axes}. "
                "Leave the second out."
            )
        if self.profile is not None:
            first, last = self.profile
            if not 1 <= first <= last <= self.steps:
                raise InputError(
                    "profile must be a first and a last step of the run; got "
                    f"profile={self.profile}, steps={self.steps}. Use, say, --profile 10 12."
                )

    @property
    def idle_settings(self) -> tuple[str, ...]:
        """Dotted names of the settings that have no effect because of other settings."""
        return ()

    @property
    def steps_between_samples(self) -> int | None:
        """Number of steps between samples during training; None for no such samples."""
        return None

    @property
    def documents_drawn(self) -> int | None:
        """Number of documents that are drawn at a time, where batches consist of whole documents,
        each on as few devices as hold it; None for batches of rows."""
        return None

    @property
    def whole_documents(self) -> bool:
        """Whether batches consist of whole documents."""
        return self.documents_drawn is not None

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained in place of the weights of the model."""
        return False

    @property
    def steps_between_reports(self) -> int:
        """What `log_every` stands for."""
        return self.log_every or min(50, max(self.steps // 20, 1))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a sequence or of an image."""
        raise NotImplementedError

    @property
    def attention_of_model(self) -> dict[str, Any]:
        """Options of `startrail_jax.Attention` that belong to the model, such as a window."""
        return {}

    @property
    def attention_call(self) -> dict[str, Any]:
        """What an attention of the model is called with, in the words of
        `startrail_jax.communication`; its default degrees and order follow from that. Where layers
        have windows, which leave out rounds of a ring or a ring as a whole, also `seq_len`,
        `exchange`, and `windows`: how many layers have each window, None for all earlier tokens.
        Where layers differ in their heads, `kinds` has what the layers of each kind have in place
        of that."""
        names = ("heads", "kv_heads", "head_dim", "dtype")
        layout = self.attention_of_model.get("layout")
        sizes = {name: getattr(self.model, name) for name in names}
        return {**sizes, "causal": self.causal, "layout": layout}
