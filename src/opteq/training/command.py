"""The commands that train and evaluate, on Lightning's command line interface."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LearningRateFinder, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_info

# Imported so that options can name their classes without the module.
import opteq.data.cifar
import opteq.data.cityscapes
import opteq.data.digits
import opteq.data.fashion_mnist
import opteq.data.folder
import opteq.data.segmentation
import opteq.models.baselines.deq
import opteq.models.baselines.feedforward
import opteq.models.baselines.hrnet
import opteq.models.baselines.mdeq
import opteq.models.baselines.mdeqhead
import opteq.models.baselines.monotonebody
import opteq.models.baselines.ode
import opteq.models.baselines.resnet
import opteq.models.bodies
import opteq.models.classifier
import opteq.models.heads
import opteq.models.stems  # noqa: F401
from opteq.configs import read_config
from opteq.data.facts import Facts
from opteq.errors import ConfigError, OpteqError
from opteq.models.loading import CARD, ModelCard, save_network
from opteq.models.parts import complete, fill_channels
from opteq.system.locks import exclusive
from opteq.training.checkpoints import (
    LAST,
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    read_checkpoint,
)
from opteq.training.checks import check_classes, check_match, check_rebuilt
from opteq.training.console import quiet_lightning
from opteq.training.epochs import SameEpochs
from opteq.training.findrate import find_learning_rate
from opteq.training.loggers import NamingTrainer, tensorboard, wandb
from opteq.training.meter import TrainingMeter
from opteq.training.metrics_csv import MetricsCSV
from opteq.training.module import ClassifierModule
from opteq.training.parse_errors import explain, reworded
from opteq.training.parser import OnceParser
from opteq.training.pictures import ValidationPictures
from opteq.training.predict import default_output, predict_to_file
from opteq.training.progress import progress_bar
from opteq.training.runs import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    Run,
    checkpoint_of,
    latest_run,
    resume_run,
    run_folder,
    save_config,
    start_run,
)
from opteq.training.suites import SuiteChoice, choose_suites
from opteq.training.summary import class_table, score_table, write_summary, write_versions
from opteq.training.taskscores import SCORES

# In the folder of a run: the curve of its range test.
RATES = "learning_rate.png"
# The commands, with the arguments of the `Trainer`'s methods that are not options.
COMMON = {"model", "datamodule", "dataloaders", "weights_only"}
COMMANDS = {
    "fit": COMMON | {"train_dataloaders", "val_dataloaders"},
    "validate": COMMON | {"verbose"},
    "test": COMMON | {"verbose"},
    "predict": COMMON | {"return_predictions"},
}
# The options that make a training what it is; the others name files of one run.
REPRODUCIBLE = ("seed_everything", "trainer", "model", "data")


def run_command(arguments: list[str], default_run: str = "run") -> str:
    """Run `fit`, `validate`, `test` or `predict`.

    Args:
        arguments: The command and its options.
        default_run: Name of the run for `fit`, unless `--run` gives one.

    Returns:
        What to tell the user at the end.

    Raises:
        OpteqError: Something is wrong with the options, the data or a checkpoint.
        KeyboardInterrupt: The training was interrupted; the message says how to go on.
    """
    quiet_lightning()
    try:
        return TrainingCLI(arguments, default_run).outcome
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    except ModuleNotFoundError as error:
        # Lightning's word for a device or a logger whose package is not installed.
        raise ConfigError(str(error)) from error
    except (OpteqError, ValueError) as error:
        raise reworded(error) from error


class TrainingCLI(LightningCLI):
    """Lightning's command line with run folders, safe checkpoints and a report at the end.

    Attributes:
        outcome: What to tell the user at the end.
    """

    model: ClassifierModule
    datamodule: LightningDataModule
    trainer: Trainer

    def __init__(self, arguments: list[str], default_run: str) -> None:
        self.outcome = ""
        self._command, self._default_run = arguments[0], default_run
        self._meter = TrainingMeter()
        # Errors become one sentence, and a prefix of an option is not taken for the option.
        parser_options: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        # The command runs inside the constructor; it holds the folder that it writes into.
        with ExitStack() as self._held:
            super().__init__(
                ClassifierModule,
                LightningDataModule,
                subclass_mode_data=True,
                trainer_class=NamingTrainer,
                parser_class=OnceParser,
                save_config_callback=None,
                seed_everything_default=0,
                trainer_defaults={"num_sanity_val_steps": 0, "enable_model_summary": False},
                parser_kwargs=parser_options | dict.fromkeys(self.subcommands(), parser_options),
                args=arguments,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The command that is run alone: a parser of each of the others would take as long as its own."""
        return {self._command: COMMANDS[self._command]}

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.add_argument("--run", type=str | None, default=None, help="Name of the run.")
            parser.add_argument("--runs_dir", type=str, default="runs", help="Folder of all runs.")
            parser.add_argument(
                "--find_lr",
                type=bool,
                default=False,
                help="Find the learning rate first by raising it for 100 steps, and train with it.",
            )
            parser.add_argument("--report", type=bool, default=True, help="Write report.html at the end.")
        if subcommand == "test":
            add = partial(parser.add_argument, type=str | None, default=None)
            add("--suite", help="Evaluations to run in place of the test, such as corruptions,attacks.")
            add("--suite_images", type=int | None, help="So many test images at most for a suite.")
            add("--corrupted", help="Folder of CIFAR-10-C for corruptions; unless given, they are made.")
            add("--unknown", help="Folder of images of unknown classes for ood.")
            add("--epsilons", help="Sizes of attacks, such as 1/255,0.03, of pixels in [0, 1].")
            add("--restarts", type=int | None, help="Attacks on each image.")
        if subcommand == "predict":
            parser.add_argument("--images", type=str, required=True, help="Folder of images, or one image.")
            parser.add_argument(
                "--output",
                type=str | None,
                default=None,
                help="CSV file to write; in the run by default.",
            )
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the options; what is wrong with them becomes one sentence."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            options = self._subcommand_parsers[args[0]].get_defaults().keys()
            raise ConfigError(explain(str(error), list(options))) from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the options stored in a checkpoint must not override the user's in silence."""

    def instantiate_classes(self) -> None:
        """Make the data, which says what was left open of the model, then the model and the trainer."""
        command = str(self.subcommand)
        options = self.config[command]
        # Looked at first: a wrong name should not cost reading the data.
        self._suite = choose_suites(options) if command == "test" else None
        parser = self._parser(command)
        fill_channels(options.data, options.model.network)
        data = parser.instantiate_classes(Namespace(data=options.data), instantiate_groups=False)["data"]
        stage = "test" if command == "predict" else command
        data.prepare_data()
        data.setup(stage)
        self.facts = Facts(data, stage)
        complete(options.model.network, self.facts.in_channels, len(self.facts.class_names))
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer; for `fit`, checks the data and opens the folder of the run before that."""
        # The module that has read its data already, in place of the parser's second one.
        self.datamodule = self.facts.data
        options = self._get(self.config_init, "trainer")
        kwargs["plugins"] = [*_listed(options["plugins"]), AtomicCheckpointIO()]
        named = options["logger"] if isinstance(options["logger"], str) else ""
        kwargs["logger"] = [] if named else _listed(options["logger"])
        kwargs["callbacks"] = _listed(options["callbacks"])
        if any(isinstance(callback, LearningRateFinder) for callback in kwargs["callbacks"]):
            raise ConfigError(
                "The schedule would not follow the rate that a LearningRateFinder sets; use --find_lr true."
            )
        has_bar = any(isinstance(callback, ProgressBar) for callback in kwargs["callbacks"])
        if options["enable_progress_bar"] is not False and not has_bar:
            kwargs["callbacks"].append(progress_bar())
        started = _started_by_torchrun()
        if started and options["devices"] == "auto":
            machines, kwargs["devices"] = started
            kwargs["num_nodes"] = machines
        self._check_data()
        if self.subcommand == "fit" and not self.facts.has_validation:
            kwargs["limit_val_batches"] = 0
        if self.subcommand == "fit" and not options["fast_dev_run"]:
            self.run = self._open_run()
            # What --find_lr saves for a moment belongs to the run.
            kwargs["default_root_dir"] = options["default_root_dir"] or self.run.folder
            if options["logger"] is not False:
                table = MetricsCSV(self.run.folder / METRICS, self.run.epochs)
                last = table.last if _is_first_process() else {}
                kwargs["logger"].append(table)
                if named != "csv":
                    kwargs["logger"].append(tensorboard(self.run.folder, last))
                if named == "wandb":
                    kwargs["logger"].append(wandb(self.run.folder))
            else:
                table = None
            kwargs["callbacks"] += [
                SameEpochs(),
                self._meter,
                ValidationPictures(self.facts),
                BestCheckpoint(self.run.checkpoints, f"val_{self._headline}"),
                LastCheckpoint(self.run.checkpoints, table),
            ]
        else:
            kwargs["enable_checkpointing"] = False
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"An option of --trainer does not fit: {' '.join(str(error).split())}"
            ) from error
        cores = os.cpu_count() or 1
        if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > cores:
            raise ConfigError(
                f"Expected --trainer.devices of at most {cores}, the processor cores of this machine, got"
                f" {trainer.num_devices}."
            )
        if started and trainer.world_size != started[0] * started[1]:
            raise ConfigError(
                f"torchrun started {started[0] * started[1]} processes, but --trainer.devices and"
                f" --trainer.num_nodes are for {trainer.world_size}; leave them out."
            )
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except KeyboardInterrupt as interrupt:
            raise interrupt if str(interrupt) else KeyboardInterrupt(self._how_to_go_on()) from None
        except SystemExit:
            # Lightning answers an interrupt with an exit status alone.
            if self.trainer.interrupted:
                raise KeyboardInterrupt(self._how_to_go_on()) from None
            raise

    def fit(self, ckpt_path: str | Path | None = None, **objects: Any) -> None:
        """Trains, tests the best checkpoint and writes the results into the folder of the run."""
        if self.trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            self.trainer.fit(**objects)
            self.outcome = "The quick run passed; nothing was saved."
            return
        if self.config.fit.find_lr and self.run.checkpoint is None:
            self._find_rate(objects["datamodule"])
        self.trainer.fit(**objects, ckpt_path=self.run.checkpoint, weights_only=True)
        # The first process alone knows its name.
        folder = self.trainer.strategy.broadcast(self.run.folder)
        tested = checkpoint_of(folder)
        if not tested.is_file():
            if self.run.checkpoint is None:
                raise ConfigError(
                    "Nothing was trained; raise --trainer.max_epochs and the limits on batches."
                )
            raise ConfigError(
                f"{self.run.checkpoint} has already run for --trainer.max_epochs; raise it to go on."
            )
        self._load(tested)
        rank_zero_info(f"Testing the {tested.stem} checkpoint …")
        metrics = _scores(self.trainer.test(**objects, verbose=False), "test")
        if self.trainer.is_global_zero:
            self._write_results(metrics, tested)

    def _find_rate(self, data: LightningDataModule) -> None:
        """Go on with the learning rate that a range test suggests, in the run's configuration too."""
        picture = self.run.folder / RATES
        rate = find_learning_rate(self.trainer, self.model, data, picture)
        self.model.learning_rate = self.config.fit.model.learning_rate = rate
        if self.trainer.is_global_zero:
            save_config(self.run.folder, self._resolved_config())
        rank_zero_info(f"Training with the learning rate {rate:.3g}, found where {picture} has its mark.")

    def validate(self, ckpt_path: str | Path | None = None, **objects: Any) -> None:
        """Evaluate a checkpoint on the validation images."""
        self._load(_required(ckpt_path, "validate"))
        metrics = _scores(self.trainer.validate(**objects, verbose=False), "val")
        if self.trainer.is_global_zero:
            self.outcome = score_table(metrics)

    def test(self, ckpt_path: str | Path | None = None, **objects: Any) -> None:
        """Evaluate a checkpoint on the test images, or by suites."""
        checkpoint = _required(ckpt_path, "test")
        self._load(checkpoint)
        if self._suite is not None:
            # Of several processes one evaluates.
            if self.trainer.is_global_zero:
                self.outcome = self._run_suites(self._suite, checkpoint)
            return
        metrics = _scores(self.trainer.test(**objects, verbose=False), "test")
        if self.trainer.is_global_zero:
            classes = class_table(self.model.confusion, self.facts.class_names)
            self.outcome = f"{score_table(metrics)}\n\n{classes}"

    def predict(self, ckpt_path: str | Path | None = None, **objects: Any) -> None:
        """Classify the images of a folder with a checkpoint."""
        path = _required(ckpt_path, "predict")
        self._load(path)
        options = self.config.predict
        output = Path(options.output) if options.output else default_output(run_folder(path))
        self.outcome = predict_to_file(self.model.network, self._card(), Path(options.images), output)

    def _check_data(self) -> None:
        """Refuse data that the network, or the run that is evaluated, does not fit."""
        checkpoint = None if self.subcommand == "fit" else self.config[str(self.subcommand)].ckpt_path
        if checkpoint and (run_folder(Path(checkpoint)) / CARD).is_file():
            check_classes(ModelCard.read(run_folder(Path(checkpoint))), self.facts)
        if self.subcommand == "fit":
            self.facts.test_dataloader()  # needed at the end, but better missed now
            check_rebuilt(self.model.network, self._resolved_config()["model"]["network"])
        check_match(self.model.network, self.facts)

    def _load(self, path: Path) -> None:
        """Load the weights that were validated, also where a callback averages them.

        Lightning's own way gives a training with averages the weights that it goes on with.
        """
        checkpoint = read_checkpoint(path)
        self.model.check_checkpoint(checkpoint)
        self.model.load_state_dict(checkpoint["state_dict"])

    @property
    def _headline(self) -> str:
        return SCORES[self.facts.task][0]

    def _open_run(self) -> Run:
        """The folder for this training; only the first process creates and writes it."""
        options = self.config.fit
        runs_dir, name = Path(options.runs_dir), options.run or self._default_run
        is_first_process = _is_first_process()
        if options.ckpt_path == "last":
            folder = runs_dir / name if options.run else latest_run(runs_dir, name)
            # Before its checkpoint is read, which the process that holds the folder would go on to change.
            if is_first_process and folder.is_dir():
                self._held.enter_context(exclusive(folder))
            if options.find_lr and (folder / CHECKPOINTS / LAST).is_file() and (folder / CONFIG).is_file():
                # Found already.
                earlier = read_config(str(folder / CONFIG))["model"]["learning_rate"]
                self.model.learning_rate = options.model.learning_rate = earlier
            run = resume_run(folder, self._resolved_config()["model"])
            epochs = "1 epoch" if run.epochs == 1 else f"{run.epochs} epochs"
            rank_zero_info(
                f"Resuming {folder} after {epochs} from {run.checkpoint}."
                if run.checkpoint
                else f"Beginning {folder} anew: it ended before its first checkpoint."
            )
        else:
            checkpoint = Path(options.ckpt_path) if options.ckpt_path else None
            if checkpoint and options.find_lr:
                raise ConfigError("--find_lr is for new weights; leave out --ckpt_path, or --find_lr.")
            run = Run(runs_dir / name, checkpoint)
            if is_first_process:
                run = start_run(runs_dir, name, checkpoint)
                self._held.push(partial(self._leave_no_trace, run.folder))
                self._held.enter_context(exclusive(run.folder))
            if checkpoint:
                rank_zero_info(f"Going on from {checkpoint} in {run.folder}.")
        if is_first_process:
            save_config(run.folder, self._resolved_config())
            write_versions(run.folder)
        return run

    def _leave_no_trace(self, folder: Path, kind: type[BaseException] | None, *_: Any) -> None:
        """Remove the folder of a training that was refused before its first step."""
        if kind is not None and issubclass(kind, Exception) and not self._meter.began:
            shutil.rmtree(folder, ignore_errors=True)

    def _card(self) -> ModelCard:
        """What the weights of the network belong to."""
        network, facts = self._resolved_config()["model"]["network"], self.facts
        names, size = facts.class_names, facts.image_size
        return ModelCard(network, names, facts.in_channels, size, *facts.normalization, facts.task)

    def _resolved_config(self) -> dict[str, Any]:
        """The options as they were understood, in plain values."""
        command = str(self.subcommand)
        # Options that are null are kept, defaults too, and what was parsed is not validated again; the
        # keywords of these differ between versions.
        dump = self._parser(command).dump(self.config[command], "yaml", False, False, True)
        return {key: value for key, value in yaml.safe_load(dump).items() if key in REPRODUCIBLE}

    def _write_results(self, metrics: Mapping[str, float], tested: Path) -> None:
        """Write summary, weights and report; called with the weights that were tested."""
        network = self.model.network.to(self.trainer.strategy.root_device)
        folder = self.run.folder
        seconds, images = self._meter.seconds, self._meter.images
        summary = write_summary(folder, network, self.facts, metrics, self.model.confusion, seconds, images)
        save_network(folder, network, self._card())
        if self.trainer.current_epoch == self.run.epochs:
            self.outcome = "Nothing was left to train; raise --trainer.max_epochs to go on. "
        score = summary[f"test_{self._headline}"]
        self.outcome += (
            f"Test {self._headline} {score:.2%} of the {tested.stem} checkpoint after "
            f"{summary['seconds_train']:.0f} s of training"
        )
        if self.config.fit.report:
            from opteq.evaluation.report import write_report

            rank_zero_info("Writing the report: predictions, certificates, what equilibria are worth …")
            self.outcome += f"; look at {write_report(folder, network, self.facts)}"
        self.outcome += "."

    def _run_suites(self, suite: SuiteChoice, checkpoint: Path) -> str:
        """Evaluate the tested network by suites; returns what they found as tables."""
        from opteq.evaluation.suites.run import digest, run_suites

        network = self.model.network.to(self.trainer.strategy.root_device)
        of = {"checkpoint": digest(checkpoint), "data": self._resolved_config()["data"]}
        try:
            return run_suites(suite.names, network, self.facts, run_folder(checkpoint), of, suite.options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Interrupted; the same command goes on.") from None

    def _how_to_go_on(self) -> str:
        if self.subcommand != "fit":
            return "Interrupted; nothing was written. The same command starts again."
        if (self.run.checkpoints / LAST).is_file():
            return (
                f"Interrupted; {self.run.checkpoints / LAST} is complete. Go on with the same command "
                f"and --ckpt_path last --run {self.run.folder.name}."
            )
        return "Interrupted before the first checkpoint; start again."


def _is_first_process() -> bool:
    """Whether this is the first of all processes, also before there is a trainer.

    On every machine the first one starts the others; of its own rank it knows only the number of the machine.
    """
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return getattr(rank_zero_only, "rank", 0) == 0 and node == "0"


def _started_by_torchrun() -> tuple[int, int] | None:
    """The number of machines, and of processes on each; None unless torchrun has started this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    everywhere, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return everywhere // here, here


def _listed(value: Any) -> list[Any]:
    """The values of an option that takes none, one or a list of them."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list) else [value]


def _scores(found: Sequence[Mapping[str, float]], split: str) -> Mapping[str, float]:
    """What Lightning found on the one set that it was given; nothing where it was to look at no batch."""
    if not found:
        raise ConfigError(f"No images were looked at; raise --trainer.limit_{split}_batches.")
    return found[0]


def _required(ckpt_path: str | Path | None, command: str) -> Path:
    if ckpt_path is None:
        raise ConfigError(
            f"opteq {command} needs a trained model: name a run (opteq {command} runs/digits) or a "
            "checkpoint with --ckpt_path FILE."
        )
    return Path(ckpt_path)
