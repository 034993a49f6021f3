"""The interface of a kind of training: all that differs between one kind of model and another.

Neither this module nor one that defines a task imports jax: `--help` must be fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from startrail_jax.errors import UnsupportedError
from trainer.config import MeshConfig, TrainConfig
from trainer.data.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of sample.py that every kind of run has."""

    devices: int | None = None
    """Number of devices to use. The default is that of the run, or all devices if there are
    fewer."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Degrees of parallelism. The defaults are those of the run, if they fit the devices."""

    @classmethod
    def of_run(cls, config: Any) -> SampleOptions:
        """The options that apply to a run where the command line gives no others.

        Args:
            config: config of the run.
        """
        return cls(devices=config.devices, mesh=config.mesh)


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """How much smaller a run is that verifies another. It has one layer of each kind."""

    tokens: int | None = None
    """Largest number of tokens of a row; windows and documents shrink in proportion. None for all
    tokens."""
    channels: int | None = None
    """Channels of the residual stream and of the MLPs, for a model that is narrow too, and has
    fewer words. None for those of the run."""
    head_dim: bool = False
    """Whether heads of a narrow model keep their channels, which kernels may need."""


class InitialWeights(ABC):
    """Weights that are read from elsewhere, such as those of a pretrained model."""

    description: str
    """A line for the log."""

    @abstractmethod
    def read(self, weights: Any) -> Any:
        """Reads the weights; each process reads only what its devices need.

        Args:
            weights: a tree of shapes, types and shardings.
        """

    @abstractmethod
    def keep(self, run_dir: Path) -> None:
        """Copies into the folder of a run what belongs to the weights, such as a tokenizer."""


def with_rate_of_adapters(config: Any, flag: Callable[[str], str | None]) -> Any:
    """A config with the learning rate of adapters, if a flag adds some to a model without any.
    Arguments as in `Task.before_flags`."""
    if config.lora.rank is None and flag("--lora.rank") not in (None, "None"):
        return replace(config, optimizer=config.optimizer.for_adapters())
    return config


class Sampler(Protocol):
    """Samples of a model while it trains. All processes call it, after the same steps."""

    def __call__(self, weights: Any, step: int, interrupted: Callable[[], bool]) -> Iterable[str]:
        """Paragraphs for the log that show what the model has learnt after a step. `interrupted`
        tells whether to stop early; all processes must call it equally often."""
        ...


class Exporter(Protocol):
    """Writes the weights of a run while it trains."""

    def is_due(self, step: int) -> bool:
        """Whether the weights after a step are exported; 0 is before the first one."""
        ...

    def __call__(self, weights: Any, step: int) -> None:
        """Writes the weights after a step. All processes call it, after the same steps; to write
        the same weights once more must do no harm."""
        ...


Config = TypeVar("Config", bound=TrainConfig)
Options = TypeVar("Options", bound=SampleOptions)


class Task(ABC, Generic[Config, Options]):
    """What train.py and sample.py need to know of one kind of model.

    `trainer.tasks.TASKS` lists the tasks. Methods import what needs jax when they are called.
    """

    config_class: ClassVar[type[Any]]
    """Class of the config of a run. Its `kind` is the name of the task, `causal` says whether a
    token attends only to earlier ones, and its field `model` has the fields `heads`, `kv_heads`,
    `head_dim` and `dtype`."""
    options_class: ClassVar[type[Any]]
    """Class of the options of sample.py."""
    example_flags: ClassVar[str] = "--help"
    """Flags of sample.py that it advises to try next."""

    def pretrained(self, folder: Path) -> Config | None:
        """The default of `train.py --init-from FOLDER`; None for a folder without such a model.

        Raises:
            ValueError: if it holds one that cannot be read.
            NotImplementedError: if it is not supported.
        """
        return None

    def before_flags(self, config: Config, flag: Callable[[str], str | None]) -> Config:
        """The defaults of the flags of train.py, where some flags decide about those of others.

        Args:
            config: a recipe, or the config of a run.
            flag: gives the value of a flag on the command line; None if it is not there.
        """
        return config

    def after_flags(self, config: Config, flag: Callable[[str], str | None]) -> Config:
        """A config with what follows from its flags together. Arguments as in `before_flags`."""
        return config

    @abstractmethod
    def make_objective(self, config: Config) -> Any:
        """The model, its loss and its FLOPs: a `trainer.objective.Objective`."""

    def sizes(self, config: Config) -> Any:
        """The `ModelSizes` of `Objective.sizes`, without jax where a plan must be fast."""
        return self.make_objective(config).sizes

    @abstractmethod
    def open_data(self, config: Config, layout: Any) -> Dataset:
        """Opens what a run trains on.

        Args:
            config: config of the run.
            layout: `startrail_jax.Layout`, the order of the tokens of a batch.

        Raises:
            OSError: if the data cannot be read.
            ValueError: if the data do not fit the config.
        """

    def smaller(self, config: Config, to: Smaller) -> Config:
        """A smaller run with the same kinds of layers and the same loss, for `--verify`."""
        del config, to
        raise self._no_verify

    def drawn_data(self, config: Config, layout: Any) -> Dataset:
        """Random data for such a run, whose documents begin and end anywhere. Arguments as in
        `open_data`."""
        del config, layout
        raise self._no_verify

    @property
    def _no_verify(self) -> UnsupportedError:
        return UnsupportedError(
            "--verify needs a task with `smaller` and `drawn_data`; got a "
            f"{type(self).__name__}, which has not both. Define them, or leave out --verify."
        )

    def settled(self, data: Dataset, config: Config, layout: Any) -> Dataset:
        """The data without choices that a rounding error may turn, such as that of experts."""
        return data

    def inputs(self, config: Config) -> Sequence[tuple[str, Path | None]]:
        """The files and folders that `open_data` reads, with the names of their settings: without
        them, the program ends before it looks for devices."""
        return ()

    def initial_weights(
        self, config: Config, weights: Any
    ) -> AbstractContextManager[InitialWeights | None]:
        """The weights with which a run begins; None for random ones, or if it has begun already.

        Args:
            config: config of the run.
            weights: a tree of the shapes of the weights of its model.

        Raises:
            ValueError: if they cannot be read or do not fit the model.
        """
        return nullcontext()

    @abstractmethod
    def sample(
        self, run_dir: Path, config: Config, options: Options, mesh: Any, session: Any
    ) -> None:
        """Draws samples from the newest checkpoint of a run, and prints or saves them.

        Args:
            run_dir: folder of the run.
            config: config of the run.
            options: what to draw.
            mesh: the mesh to draw on.
            session: `trainer.session.Session`, which prints in one process.

        Raises:
            ValueError: if the options do not fit the run or the devices.
            OSError: if a file cannot be written.
            CheckpointError: if there is no checkpoint, or it cannot be read.
        """

    def sampler(self, program: Any, data: Any) -> Sampler | None:
        """Draws samples while a run trains and after it; None for no samples.

        Args:
            program: `trainer.parallel.step.Program` of the run.
            data: what `open_data` returned.
        """
        return None

    def exporter(self, config: Config, note: Callable[[str], None]) -> Exporter | None:
        """Exports the weights while a run trains; None for no exports.

        Args:
            config: config of the run.
            note: is called with remarks for the log.
        """
        return None
