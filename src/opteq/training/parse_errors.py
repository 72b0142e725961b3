"""Turns the parser's reports, several lines in its own terms, into one sentence for the user."""

import re
from collections.abc import Collection
from pydoc import locate
from typing import cast

from jsonargparse import ArgumentParser

from opteq import api
from opteq.errors import ConfigError, OpteqError
from opteq.spelling import did_you_mean, question

# Lines that say how the parser went about it, not what is wrong with the value.
PARSER_TERMS = (
    "Parser key",
    "Problem with given class_path",
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Expected a path but",
)


def explain(report: str, options: Collection[str]) -> str:
    """Say in one sentence what is wrong with the options and what to do.

    Args:
        report: What the parser reports.
        options: Names of all options of the command, such as `trainer.max_epochs`.
    """
    if missing := re.search(r"Requirement '(.+?)' not met", report):
        return f"An option needs the package {missing[1]}; install it with pip install '{missing[1]}'."
    if missing := re.search(r"No module named '(.+?)'", report):
        return (
            f"An option needs the module {missing[1]}: no package of that name is installed, and there is no"
            f" {missing[1].replace('.', '/')}.py in the current folder."
        )
    if unknown := re.search(r"[Uu]nrecognized arguments: (?:--)?([^\s=]+)", report):
        return _unknown("There is no option", unknown[1], options)
    if unknown := re.search(r"Group '(.+)' does not accept option '(.+)'", report):
        return _unknown("There is no option", f"{unknown[1]}.{unknown[2]}", options)
    if unknown := re.search(r"Subcommand '.+' does not accept option '(.+)'", report):
        return _unknown("There is no option", unknown[1], options)
    if unchosen := _unchosen(report):
        return unchosen
    if unknown := re.search(r"Option '(.+)' is not accepted", report):
        classes = re.findall(r"class_path '(.+?)'", report[: unknown.start()])
        classes = classes or re.findall(r"class_path='(.+?)'", report)
        if classes:
            return _unknown(f"{classes[-1]} has no option", unknown[1], _options_of(classes[-1]))
        return _unknown("There is no option", unknown[1], options)
    keys = re.findall(r'Parser key "(.+?)"', report)
    if keys:
        complaint = _complaint(report)
        return f"Wrong value of {'.'.join(keys)}: {complaint}" + ("" if complaint.endswith("?") else ".")
    if missing := re.search(r"required: (.+)", report):
        names = re.sub(r"\b(fit|validate|test|predict)\.", "", missing[1])
        return f"Missing {names}; give a preset or a configuration file with --config, or the options."
    return " ".join(report.split())


def reworded(error: Exception) -> Exception:
    """What to tell the user of an error while options were read or followed; a bug remains what it is."""
    if own := own_error(error):
        return own
    report = str(error)
    of_parser = re.match(r"Does not validate against|Problem with given class_path|Parser key", report)
    return ConfigError(explain(report, ())) if of_parser else error


def own_error(error: BaseException | None) -> OpteqError | None:
    """The error of opteq that the parser or a worker process wrapped in its own, if any."""
    if isinstance(error, OpteqError):
        # An error in a worker process of a loader carries its traceback as text.
        in_worker = str(error).startswith("Caught ")
        return type(error)(str(error).rstrip().rpartition("Error: ")[2]) if in_worker else error
    if error is None:
        return None
    return own_error(error.__cause__ or error.__context__)


def _unknown(sentence: str, name: str, options: Collection[str]) -> str:
    """Name the options that look like an unknown one, or else all in its group."""
    group, _, last = name.rpartition(".")
    siblings = {option for option in options if group and option.rpartition(".")[0] == group}
    valid = sorted(siblings or {option.split(".")[0] for option in options})
    there_are = f"there are {', '.join(valid)}." if valid else "there are none."
    of_another_group = [option for option in options if option.rpartition(".")[2] == last]
    hint = did_you_mean(name, options, question(of_another_group, there_are), cutoff=0.8)
    return f"{sentence} {name}; {hint}"


def _unchosen(report: str) -> str | None:
    """What to say if an option belongs to a class that is still to be chosen, such as a solver."""
    option = re.search(r"Given value: NestedArg\(key='(.+?)'", report)
    base = re.search(r"but (\S+) is abstract|class_path '(\S+)':\s+Option '.+' is not accepted", report)
    if option is None or base is None:
        return None
    choices = _leaves(cast(type, locate(base[1] or base[2])))
    if not choices:
        return None
    name = "--" + ".".join(re.findall(r'Parser key "(.+?)"', report))
    others = f" (or {', '.join(choices[1:])})" if choices[1:] else ""
    return f"Choose a class before its options: {name} {choices[0]}{others} before {name}.{option[1]}."


def _leaves(base: type) -> list[str]:
    """Names of the classes of opteq below `base` that have none below them."""
    # One of a user's own may derive from any of them, also from one that is a choice itself.
    own = (cls for cls in base.__subclasses__() if cls.__module__.startswith("opteq."))
    found = (_leaves(cls) or [cls.__name__] for cls in own)
    return sorted({name for names in found for name in names})


def _options_of(class_path: str) -> list[str]:
    parser = ArgumentParser()
    parser.add_class_arguments(cast(type, locate(class_path)), "options", fail_untyped=False)
    names = parser.get_defaults().keys()
    return [name.removeprefix("options.") for name in names]


def _complaint(report: str) -> str:
    """What the parser says about the value, for each of the types that it may have."""
    lines = [line.strip().removeprefix("- ") for line in report.splitlines()]
    lines = [line for line in lines if line and not line.startswith(PARSER_TERMS) and "NoneType" not in line]
    text = " or ".join(dict.fromkeys(lines))
    text = re.sub(r"Expected a dot import path string: (\S+)", _no_class, text)
    text = re.sub(r"(?:a )?typing\.Literal\[(.+?)\]", r"one of \1", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"(or )?Expected (a )?", r"\1expected ", text)
    # Where words or classes are named, nobody has to hear that a list or a truth value would do as well.
    return re.sub(r" or expected (Iterable|bool)\b", "", text).rstrip(".")


def _no_class(found: re.Match[str]) -> str:
    name = found[1].rstrip(".")
    hint = did_you_mean(name, api.__all__, "")
    return f"there is no class {name}" + (f"; {hint}" if hint else "")
