"""The parser of nested classes gives what Lightning's gives, in fewer steps."""

import json
from unittest.mock import patch

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from opteq.training.parser import OnceParser


class Layer:
    """Something that may hold others of its kind."""

    def __init__(
        self, size: int, inside: "list[Layer] | Layer | None" = None, colour: str = "white"
    ) -> None: ...


def nested(depth: int, innermost: dict) -> dict:
    """The options of a layer with one inside it, with two of them inside it, and so on to `depth`."""
    if not depth:
        return {"class_path": f"{__name__}.Layer", "init_args": innermost}
    inside = nested(depth - 1, innermost)
    return {
        "class_path": f"{__name__}.Layer",
        "init_args": {"size": depth, "inside": [inside, inside] if depth == 2 else inside},
    }


def parse(kind: type[LightningArgumentParser], options: dict, *changes: str) -> dict:
    parser = kind(exit_on_error=False)
    parser.add_subclass_arguments(Layer, "layer")
    return parser.parse_args([f"--layer={json.dumps(options)}", *changes]).as_dict()


@pytest.mark.parametrize("changes", [[], ["--layer.colour=red"], ["--layer.inside.inside.size=7"]])
def test_it_gives_what_the_parser_of_lightning_gives(changes: list[str]) -> None:
    options = nested(3, {"size": 5, "colour": "blue"})
    assert parse(OnceParser, options, *changes) == parse(LightningArgumentParser, options, *changes)


def test_changing_a_result_leaves_its_twin_as_it_is() -> None:
    inside = parse(OnceParser, nested(2, {"size": 5}))["layer"]["init_args"]["inside"]
    inside[0]["init_args"]["size"] = 6
    assert inside[1]["init_args"]["size"] == 1


@pytest.mark.parametrize("innermost", [{}, {"size": "wide"}, {"size": 1, "color": "red"}])
def test_what_is_wrong_deep_inside_is_refused_as_by_the_parser_of_lightning(innermost: dict) -> None:
    options = nested(3, innermost)
    with pytest.raises(ArgumentError) as expected:
        parse(LightningArgumentParser, options)
    with pytest.raises(ArgumentError) as refused:
        parse(OnceParser, options)
    assert str(refused.value) == str(expected.value)


def parses(depth: int) -> int:
    """How many objects are parsed for layers `depth` deep."""
    with patch.object(
        ArgumentParser, "parse_object", autospec=True, side_effect=ArgumentParser.parse_object
    ) as spy:
        parse(OnceParser, nested(depth, {"size": 1}))
    return spy.call_count


def test_a_level_more_takes_as_many_steps_as_the_one_before() -> None:
    counts = [parses(depth) for depth in (5, 6, 7, 8)]
    assert counts[3] - counts[2] == counts[2] - counts[1] == counts[1] - counts[0]
