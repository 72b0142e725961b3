"""Mutation testing: which faults, planted one at a time in a folder of the source, its tests fail to notice.

python tools/mutants.py solvers gradients --count 60

In a copy of the repository, under `build/mutants/`, mutmut plants the faults and runs the tests that reach
them. Those of a folder are drawn at random, the same ones in every run. What seems to survive, or takes too
long, is tried again in a process of its own with all tests of the folder, since mutmut forks from one where
they have run, so that caches, fixtures and what is built on import have no fault. Faults that survive even so
are printed as changes; it is for the reader to say whether they make any difference. The wording of messages
is left as it is.
"""

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = {
    "gradients": [
        "tests/gradients",
        "tests/layer",
        "tests/solvers/test_sam.py",
        "tests/conformance/test_gradients.py",
    ],
    "maps": ["tests/maps", "tests/conformance/test_equations.py"],
    "objectives": [
        "tests/objectives",
        "tests/maps/test_kernel.py",
        "tests/maps/test_own.py",
        "tests/maps/test_precision.py",
        "tests/maps/test_regularised.py",
        "tests/conformance/test_similarities.py",
    ],
    "operators": [
        "tests/operators",
        "tests/layer/test_hooks.py",
        "tests/layer/test_transforms.py",
        "tests/conformance/test_operators.py",
        "tests/conformance/test_norms.py",
    ],
    "solvers": ["tests/solvers", "tests/gradients/test_options.py", "tests/conformance/test_solvers.py"],
    "theory": ["tests/theory"],
}
KEPT = ("abstractmethod", "staticmethod", "classmethod")
# What limits the time is how much of it a process uses.
PLUGINS = ["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
NOTICED = (1, 3)  # a test failed, or pytest did
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SURVIVED = (0, 5)  # passed, or no test
MESSAGES = [r'^\s*f?"[^"]*\w \w', r'raise \w+\(f?"']


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults and print those that tests do not notice.")
    parser.add_argument("folders", nargs="*", choices=TESTS, default=list(TESTS))
    parser.add_argument("--count", type=int, default=60, help="faults to plant in each folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for folder in options.folders:
        place = prepared(folder)
        mutmut(place, "run", "--max-children", "1", "nothing*")
        names = sorted(verdicts(place))
        drawn = random.Random(options.seed).sample(names, min(options.count, len(names)))
        mutmut(place, "run", "--max-children", "1", *drawn)
        found = verdicts(place)
        if None in (found[name] for name in drawn):
            sys.exit(f"mutmut has not tried all of {folder}: {place}/run.log says why.")
        doubtful = [name for name in drawn if found[name] not in NOTICED]
        survivors = [name for name in doubtful if tried_alone(place, folder, name) in SURVIVED]
        print(f"{folder}: {len(drawn) - len(survivors)} of {len(drawn)} noticed, of {len(names)} in all")
        for name in survivors:
            print(mutmut(place, "show", name), flush=True)


def prepared(folder: str) -> Path:
    """A copy of the repository whose `folder` is to be mutated."""
    place = Path("build/mutants") / folder
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copy("pyproject.toml", place)
    for name in ("src", "tests"):
        shutil.copytree(name, place / name)
    for path in (place / "src/opteq" / folder).rglob("*.py"):
        path.write_text(unfolded(path.read_text()))
    options = {
        "source_paths": ["src"],
        "only_mutate": [f"src/opteq/{folder}/*"],
        "do_not_mutate_patterns": MESSAGES,
        "timeout_constant": 10.0,
        "timeout_multiplier": 4.0,
        "pytest_add_cli_args": PLUGINS,
        "pytest_add_cli_args_test_selection": TESTS[folder],
    }
    with (place / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in options.items()))
    return place


def unfolded(source: str) -> str:
    """The same with decorators applied afterwards: mutmut passes over functions that have one."""
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef)]
    functions = [part for node in nodes for part in node.body if isinstance(part, ast.FunctionDef)]
    for function in sorted(functions, key=lambda f: f.lineno, reverse=True):
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        if not decorators or any(name in KEPT or name.endswith("setter") for name in decorators):
            continue
        indent, name = " " * function.col_offset, function.name
        applied = [f"{indent}{name} = ({decorator})({name})" for decorator in reversed(decorators)]
        end = function.end_lineno or function.lineno
        lines[end:end] = applied
        del lines[function.decorator_list[0].lineno - 1 : function.lineno - 1]
    return "\n".join(lines) + "\n"


def verdicts(place: Path) -> dict[str, int | None]:
    """What became of every fault: the exit status of its tests."""
    found = {}
    for path in (place / "mutants").rglob("*.meta"):
        found |= json.loads(path.read_text())["exit_code_by_key"]
    return found


def tried_alone(place: Path, folder: str, name: str) -> int:
    """The exit status of all tests of the folder with one fault, in a process of its own."""
    seconds = json.loads((place / "mutants/mutmut-stats.json").read_text())["stats_time"]
    limit = 2 * int(seconds) + 60
    with (place / "alone.log").open("w") as log:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", *PLUGINS, *TESTS[folder]],
            cwd=place / "mutants",
            env=ENVIRONMENT | {"MUTANT_UNDER_TEST": name, "PYTHONPATH": "src"},
            stdout=log,
            stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        ).returncode


def mutmut(place: Path, *arguments: str) -> str:
    """What mutmut says; also in a log, as it comes."""
    path = place / f"{arguments[0]}.log"
    with path.open("w") as log:
        command = [sys.executable, "-m", "mutmut", *arguments]
        subprocess.run(command, cwd=place, env=ENVIRONMENT, stdout=log, stderr=log)
    return path.read_text()


if __name__ == "__main__":
    main()
