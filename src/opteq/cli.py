"""The command `opteq`."""

import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn

from opteq.configs import overlaid, presets, read_config, resolve_config
from opteq.data.places import PLACES
from opteq.errors import ConfigError, OpteqError
from opteq.evaluation.suites.names import suite_names
from opteq.interrupts import interrupted
from opteq.models.pretrained import pretrained
from opteq.spelling import did_you_mean
from opteq.system.files import check_folder
from opteq.system.memory import keep_freed_memory
from opteq.system.shortage import shortage

_HELP = """\
opteq trains and examines optimization-induced equilibrium models.

  opteq presets                        list the packaged configurations
  opteq fit --config NAME_OR_FILE      train; leaves runs/NAME with checkpoints and report.html
  opteq test RUN                       evaluate the best checkpoint on the test images
  opteq test RUN --suite NAMES         corruptions, attacks, ood, subclasses, saliency, equilibrium or
                                       segmentation, into RUN/evaluation
  opteq validate RUN                   the same on the validation images
  opteq predict RUN FOLDER_OR_IMAGE    classify images, into RUN/predictions.csv
  opteq show RUN                       watch equilibria form, on a page in the browser
  opteq export RUN                     write it as ONNX, or as a program of torch.export
  opteq reproduce --list               list the tables and figures of the papers, and what has been run
  opteq reproduce TABLE                train and compare its rows; a second call goes on

`opteq COMMAND --help` says how to use one of them, for example what options change a training.
`opteq info` prints versions, devices and whether compiled code is used, `opteq --version` the version.
Names of options are spelt with underscores; dashes in them are taken for underscores.
"""

_FIT_HELP = """\
Train a network; leaves runs/NAME with checkpoints, curves, weights and report.html.

  opteq fit --config NAME_OR_FILE [OPTIONS]

`opteq presets` lists the packaged configurations, which can be copied and edited. For example, handwritten
digits in half a minute, with another solver, and then again from where it was interrupted:

  opteq fit --config digits --run mine --model.network.body.solver Picard
  opteq fit --config digits --run mine --model.network.body.solver Picard --ckpt_path last

Options change the configuration, wherever they stand:

  --trainer.max_epochs 5                 length of the training
  --model.network.stem.channels 96       channels of the features, and of what follows from them
  --model.network.body.solver Anderson   the solver of its body, then any option of that,
  --model.network.body.solver.tol 1e-4   which has to come after its name
  --model.optimizer torch.optim.RAdam    sgd, adamw, or a class of optimizers, then any option of that
  --find_lr true                         find the learning rate first, and train with it
  --model.class_weights balanced         rare classes count as much as frequent ones in the loss,
  --data.balanced true                   or are drawn as often
  --data.root DIR                        where the data set is
  --data.batch_size 32                   images in a batch
  --trainer.logger wandb                 Weights & Biases too; csv: no logger but metrics.csv
  --trainer.gradient_clip_val 1          and every other option of Lightning's Trainer
  --run NAME                             name of the folder in runs/
  --ckpt_path last                       go on with an interrupted training

Classes of your own are named like --model.network.body mine.Body, for one in mine.py of the current folder.

`opteq fit --help_all` lists every option, `--print_config` behind the others the configuration that results.
"""

_TEST_HELP = """\
Evaluate the best checkpoint of a run on the test images, or by suites.

  opteq test RUN [OPTIONS]

For example

  opteq test runs/digits
  opteq test runs/digits --suite corruptions,attacks --suite_images 200

The suites are corruptions, attacks, ood, subclasses, saliency, equilibrium and segmentation; each leaves
tables and figures in RUN/evaluation, and goes on where it was stopped.

  --suite_images 200                     so many test images at most
  --epsilons 1/255,0.03                  attacks: the largest changes of a pixel, of 1
  --restarts 5                           attacks on each image
  --corrupted DIR                        corruptions: the folder of CIFAR-10-C; unless given, they are made
  --unknown DIR                          ood: a folder of images of other classes
  --ckpt_path last                       the last checkpoint in place of the best, or that of a file
  --data.root DIR                        where the data set is, and every other option of opteq fit

`opteq test --help_all` lists every option.
"""

_VALIDATE_HELP = """\
Evaluate the best checkpoint of a run on the validation images.

  opteq validate RUN [OPTIONS]

For example

  opteq validate runs/digits --data.batch_size 500

Options are those of opteq fit; `opteq validate --help_all` lists them.
"""

_HELP_OF = {
    "fit": _FIT_HELP,
    "test": _TEST_HELP,
    "validate": _VALIDATE_HELP,
    "presets": (
        "opteq presets lists the packaged configurations, with their results. It takes no options.\n"
        "What comes trained is shown by `opteq show NAME`, and is `opteq.load('NAME')` in Python.\n"
    ),
    "info": "opteq info prints versions, devices and whether compiled code is used. It takes no options.\n",
}

COMMANDS = ("fit", "validate", "test", "predict")
OTHERS = ("show", "presets", "reproduce", "export", "info")
# Options of data modules that hold for one data set alone.
OF_ONE_DATA_SET = ("root", "train_limit", "val_fraction", "classes", "superclasses", "fold")
USER_ERROR = 2
CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `opteq`.

    Args:
        arguments: What follows `opteq`; from the command line by default.

    Returns:
        Exit status: 0, 2 for a mistake that a sentence on stderr explains, 130 for an interrupt, 141 if
        nobody reads the output any more.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # So that options can name classes in files of the current folder.
        sys.path.append(os.getcwd())
        # Names of files need not be text that the terminal can show.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _run(list(map(_with_underscores, given)))
        # Here rather than at exit, where nothing can be done about a reader that has gone.
        sys.stdout.flush()
    except OpteqError as error:
        print(f"opteq: {error}", file=sys.stderr)
        return USER_ERROR
    except ModuleNotFoundError as error:
        if str(error.name).startswith("opteq"):
            raise
        more = "pip install 'opteq[train]' brings what commands need beyond the layers"
        print(f"opteq: The package {error.name} is not installed; {more}.", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What is left to write would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except OSError as error:
        # A full disk, a folder without permission, a name that is a folder.
        print(f"opteq: {error.filename or 'File system'}: {error.strerror or error}.", file=sys.stderr)
        return USER_ERROR
    except (RuntimeError, MemoryError) as error:
        if (lack := shortage(error)) is None:
            raise
        print(f"opteq: {lack}; lower --data.batch_size or the sizes of the network.", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt as interrupt:
        return interrupted(str(interrupt))
    return 0


def _with_underscores(argument: str) -> str:
    """An option as the parsers spell it: --no-browser is --no_browser; values keep their dashes."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _run(arguments: list[str]) -> None:
    command, options = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in (*COMMANDS, "reproduce"):
        keep_freed_memory()
    wants_help = bool({"-h", "--help"} & set(options))
    if command in ("-h", "--help"):
        print(_HELP, end="")
    elif command in _HELP_OF and wants_help:
        print(_HELP_OF[command], end="")
    elif command == "--version":
        from opteq import __version__

        print(f"opteq {__version__}")
    elif command in ("presets", "info"):
        if options:
            raise ConfigError(f"opteq {command} takes no options, got {' '.join(options)}.")
        _list_presets() if command == "presets" else _print_info()
    elif command == "export":
        _export(options)
    elif command == "reproduce":
        _reproduce(options)
    elif command == "show":
        _show(options)
    elif command == "predict" and (wants_help or (options and not options[0].startswith("-"))):
        _predict(options)
    elif command in COMMANDS:
        _train_or_evaluate(command, options)
    else:
        commands = (*COMMANDS, *OTHERS)
        hint = did_you_mean(command, commands, f"commands are {', '.join(commands)}.")
        raise ConfigError(f"There is no command {command}; {hint}")


def _list_presets() -> None:
    mark = dict.fromkeys(pretrained(), "; comes trained")
    _print_entries(
        [
            (p.name, p.description, f"{p.parameters:,} parameters; {p.expected}{mark.get(p.name, '')}")
            for p in presets()
        ]
    )


def _print_entries(entries: Sequence[tuple[str, str, str]]) -> None:
    """Print a name and two lines beside it for each entry."""
    width = max(len(name) for name, _, _ in entries) + 2
    for name, first, second in entries:
        print(f"{name:{width}}{first}")
        print(f"{'':{width}}{second}")


def _path(name: str) -> Path:
    """An empty name, as of a variable of the shell that is not set, would be the current folder."""
    if not name:
        raise ArgumentTypeError("expected the name of a file or a folder, got an empty one")
    return Path(name)


class _Parser(ArgumentParser):
    """Says what is wrong in one sentence, as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}; see {self.prog} --help.")


def _predict(options: list[str]) -> None:
    parser = _Parser(
        prog="opteq predict",
        description="Classify images with a finished run; images that cannot be read are named and left out.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=_path, help="folder of a finished run")
    parser.add_argument("images", type=_path, help="folder of images, or one image")
    parser.add_argument("--output", type=_path, help="CSV file to write; RUN/predictions.csv, or -2, -3, …")
    _add_trust(parser)
    chosen = parser.parse_args(options)
    if not chosen.images.is_file():
        check_folder(chosen.images)

    from opteq.models.loading import ModelCard, load
    from opteq.training.predict import default_output, predict_to_file

    network = load(chosen.run, chosen.trust == "true")
    output = chosen.output or default_output(chosen.run)
    print(predict_to_file(network, ModelCard.read(chosen.run), chosen.images, output))


def _show(options: list[str]) -> None:
    parser = _Parser(
        prog="opteq show",
        description="Show on a page how a network reaches its equilibria: iterates, certificates, attacks.",
        epilog="The page is for this machine alone, and needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=_path, help="folder of a finished run, or name of a pretrained network")
    parser.add_argument("--port", type=int, default=8321, help="port of the page, 0 for any free one; 8321")
    parser.add_argument("--no_browser", action="store_true", help="do not open the page in the browser")
    _add_trust(parser)
    chosen = parser.parse_args(options)

    # The imports and the test images take their seconds.
    print(f"Loading {chosen.run} …", file=sys.stderr, flush=True)
    from opteq.show.command import show

    # At once, for whoever waits in a pipe for the address.
    tell = partial(print, flush=True)
    show(chosen.run, chosen.port, not chosen.no_browser, chosen.trust == "true", tell)


def _export(options: list[str]) -> None:
    parser = _Parser(
        prog="opteq export",
        description="Write a run for other programs: a fixed number of iterations in place of a solve.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=_path, help="folder of a finished run, or a pretrained network")
    parser.add_argument(
        "--format", choices=("onnx", "torch"), default="onnx", help="onnx, or that of torch.export"
    )
    parser.add_argument("--steps", type=int, help="iterations; as many as --tol needs unless given")
    parser.add_argument("--tol", type=float, default=1e-3, help="largest relative error of the logits")
    parser.add_argument("--images", type=_path, help="folder of images to check it with; noise unless given")
    parser.add_argument("--output", type=_path, help="file to write; RUN/model.onnx or RUN/model.pt2")
    _add_trust(parser)
    chosen = parser.parse_args(options)

    from opteq.data.preprocess import Normalization
    from opteq.models.loading import ModelCard, load
    from opteq.training.export import check_pixels, default_output, export

    network, card = load(chosen.run, chosen.trust == "true"), ModelCard.read(chosen.run)
    output = chosen.output or default_output(chosen.run, chosen.format)
    pixels = check_pixels(card, chosen.images, lambda text: print(f"Skipped: {text}", file=sys.stderr))
    # Seconds for small networks, minutes for large ones.
    first = f"Exporting {chosen.run}: solving for its equilibria on {len(pixels)} images"
    then = "" if chosen.steps else f", then looking how many iterations come within {chosen.tol:g}"
    print(f"{first}{then} …", file=sys.stderr, flush=True)
    normalization = Normalization(card.mean, card.std)
    made = export(network, pixels, output, chosen.format, chosen.steps, chosen.tol, normalization)
    checked = f"{len(pixels)} images" if chosen.images else f"{len(pixels)} images of noise"
    print(
        f"Wrote {made.path}, {made.megabytes:.2f} MB: pixels in [0, 1] to logits, {made.steps} iterations."
        f" On {checked} its logits are within {made.error:.1e} of their size of those of the equilibria."
    )


def _print_info() -> None:
    from opteq.training.info import info

    for name, value in info().items():
        print(f"{name:16}{value}")


def _reproduce(options: list[str]) -> None:
    from opteq.experiments.tables import SCALES, read_table

    parser = _Parser(
        prog="opteq reproduce",
        description="Train and compare the rows of a table or figure; without one, list those there are.",
        epilog="Options of opteq fit apply to all rows, for example --data.root DIR.",
        allow_abbrev=False,
    )
    parser.add_argument("table", nargs="?", help="name of a table, or a YAML file of the same form")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="small",
        help="that of the paper (full), one for a few processor cores (small, the default), or noise (smoke)",
    )
    parser.add_argument("--list", action="store_true", help="list the tables, and what has been run of them")
    parser.add_argument(
        "--output",
        type=_path,
        help="folder of runs and table, reproduced/SCALE/TABLE; with --list that of all scales, reproduced",
    )
    chosen, of_fit = parser.parse_known_args(options)

    if chosen.list or chosen.table is None:
        from opteq.experiments.finished import listing

        if of_fit:
            raise ConfigError(
                f"Name the table that {' '.join(of_fit)} is for; opteq reproduce --list shows them."
            )
        _print_entries(listing(chosen.output or Path("reproduced")))
        return

    from opteq.experiments.output import write_results
    from opteq.experiments.reproduce import reproduce
    from opteq.experiments.smoke import smoke
    from opteq.training.console import silent_lightning

    table = read_table(chosen.table, chosen.scale)
    output = chosen.output or Path("reproduced") / chosen.scale / table.name
    if chosen.scale == "smoke":
        table = smoke(table, output / "images")
    # Advice on the images of noise is of no use.
    with silent_lightning() if chosen.scale == "smoke" else nullcontext():
        reproduce(table, output, of_fit, print)
    print(f"Wrote {write_results(table, output, of_fit)}.")


def _train_or_evaluate(command: str, options: list[str]) -> None:
    if options and not options[0].startswith("-"):
        if command == "fit":
            raise ConfigError(f"Expected options after opteq fit; did you mean --config {options[0]}?")
        if command == "test":
            _check_suites(options)
        parser = _Parser(prog=f"opteq {command}", add_help=False, allow_abbrev=False)
        parser.add_argument("run", type=_path)
        parser.add_argument("--ckpt_path")
        _add_trust(parser)
        chosen, options = parser.parse_known_args(options)

        from opteq.training.runs import checkpoint_options

        options = [*checkpoint_options(chosen.run, chosen.trust == "true", chosen.ckpt_path), *options]
    configs, options, config = _find_configs(options)
    if command == "fit":
        _check_place(configs, options)

    # Only now: it takes seconds, before which a wrong name is told of.
    from opteq.training.command import run_command
    from opteq.training.runs import CONFIG

    # The configuration in the folder of a run is named after the folder.
    name = config.resolve().parent.name if config.name == CONFIG else config.stem
    options = ["--help" if option == "--help_all" else option for option in options]
    # The configurations come first: the options change what they hold, wherever they stand.
    found = [f"--config={json.dumps(held)}" for held in configs]
    outcome = run_command([command, *found, *options], name)
    if outcome:
        print(outcome)


def _check_suites(options: list[str]) -> None:
    """Refuse unknown suites, before the seconds that it takes to be able to run known ones."""
    parser = _Parser(prog="opteq test", add_help=False, allow_abbrev=False)
    parser.add_argument("--suite")
    suite = parser.parse_known_args(options)[0].suite
    if suite is not None:
        suite_names(suite)


def _add_trust(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--trust", choices=("true", "false"), help="whether the run may use classes that are not opteq's"
    )


def _check_place(configs: list[dict[str, Any]], options: list[str]) -> None:
    """Refuse a data set that is not where it has to be, before the same seconds.

    Where options change more of the data than its folder, such as its class, the data set itself tells.
    """
    parser = _Parser(prog="opteq fit", add_help=False, allow_abbrev=False)
    parser.add_argument("--data.root", dest="root")
    parser.add_argument("--ckpt_path")
    parser.add_argument("--run", default="")
    parser.add_argument("--runs_dir", default="runs")
    chosen, others = parser.parse_known_args(options)
    if any(option.startswith(("--data", "--help_all", "--print_config")) for option in others):
        return
    match reduce(overlaid, configs, {}).get("data"):
        case {"class_path": str(name), **rest} if name in PLACES:
            place, arguments = PLACES[name], rest.get("init_args") or {}
        case _:
            return
    root = chosen.root or arguments.get("root", place.root)
    # What is downloaded, and classes without a test set, need not lie there.
    elsewhere = arguments.get("download") or arguments.get("test_fraction")
    if root and not elsewhere and not place.holds(root):
        raise ConfigError(f"{place.complaint(root)}{_of_the_earlier(chosen)}")


def _of_the_earlier(chosen: Namespace) -> str:
    """How to go on with the data of the training that a checkpoint is of."""
    if not chosen.ckpt_path:
        return ""
    at_last = chosen.ckpt_path == "last"
    folder = Path(chosen.runs_dir, chosen.run) if at_last else Path(chosen.ckpt_path).parent.parent
    config = folder / "config.yaml"
    return f" To go on with the data of {folder}, give --config {config}." if config.is_file() else ""


def _find_configs(options: list[str]) -> tuple[list[dict[str, Any]], list[str], Path]:
    """What the presets and files hold that the options name, the other options, and the last of the files."""
    parser = _Parser(prog="opteq", add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    chosen, others = parser.parse_known_args(options)
    paths = [resolve_config(name) for name in chosen.config]
    configs = [_for_other_data(read_config(str(path)), others) for path in paths]
    return configs, others, paths[-1] if paths else Path("run")


def _for_other_data(config: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """`config`, without what it says of its own data set where the options name another one."""
    parser = _Parser(prog="opteq", add_help=False, allow_abbrev=False)
    parser.add_argument("--data", "--data.class_path")
    named = parser.parse_known_args(options)[0].data
    data = config.get("data")
    if named is None or not isinstance(data, Mapping) or not isinstance(data.get("init_args"), Mapping):
        return config
    if str(data.get("class_path")).rpartition(".")[2] == named.rpartition(".")[2]:
        return config
    kept = {name: value for name, value in data["init_args"].items() if name not in OF_ONE_DATA_SET}
    return config | {"data": {**data, "init_args": kept}}
