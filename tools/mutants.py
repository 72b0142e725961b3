"""Mutation testing: which faults, planted one at a time in a folder of the source, its tests fail to notice.

python tools/mutants.py solvers gradients --count 60

In a copy of the repository, under `build/mutants/`, mutmut plants the faults and runs the tests that reach
them. Those of a folder are drawn at random, the same ones in every run. Faults that survive are printed as
changes; it is for the reader to say whether they make any difference.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = {
    "gradients": ["tests/gradients", "tests/conformance/test_gradients.py"],
    "maps": ["tests/maps", "tests/conformance/test_equations.py"],
    "objectives": ["tests/objectives", "tests/conformance/test_similarities.py"],
    "operators": [
        "tests/operators",
        "tests/conformance/test_operators.py",
        "tests/conformance/test_norms.py",
    ],
    "solvers": ["tests/solvers", "tests/conformance/test_solvers.py"],
    "theory": ["tests/theory"],
}
KEPT = ("abstractmethod", "staticmethod", "classmethod")
SURVIVED = (0, 5, 33)  # passed, or no test that reaches it


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
        survivors = [name for name in drawn if found[name] in SURVIVED]
        print(f"{folder}: {len(drawn) - len(survivors)} of {len(drawn)} noticed, of {len(names)} in all")
        for name in survivors:
            print(mutmut(place, "show", name))


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
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:xdist"],
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


def mutmut(place: Path, *arguments: str) -> str:
    """What mutmut says; also in a log, as it comes."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    log = place / f"{arguments[0]}.log"
    with log.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=place, env=environment, stdout=file, stderr=file)
    return log.read_text()


if __name__ == "__main__":
    main()
