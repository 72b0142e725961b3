import pytest

from opteq.errors import ConfigError, ShapeError
from opteq.training.parse_errors import explain, own_error

OPTIONS = ["trainer.max_epochs", "trainer.devices", "model.learning_rate", "model.schedule", "data", "run"]


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (
            "unrecognized arguments: --max_epochs 3",
            "There is no option max_epochs; did you mean trainer.max_epochs?",
        ),
        (
            "unrecognized arguments: --model.lr=3",
            "There is no option model.lr; there are model.learning_rate, model.schedule.",
        ),
        (
            "Group 'trainer' does not accept option 'max_epoch'",
            "There is no option trainer.max_epoch; did you mean trainer.max_epochs?",
        ),
        (
            "unrecognized arguments: --foo",
            "There is no option foo; there are data, model, run, trainer.",
        ),
        (
            "Parser key \"model.network\":\n  Problem with given class_path 'opteq.data.digits.Digits':\n"
            "    Option 'batchsize' is not accepted",
            "opteq.data.digits.Digits has no option batchsize; did you mean batch_size?",
        ),
        (
            "Parser key \"model.schedule\":\n  Expected a typing.Literal['step', 'cosine']. Got value: x",
            "Wrong value of model.schedule: expected one of 'step', 'cosine'. Got value: x.",
        ),
        (
            'Parser key "trainer.max_epochs":\n  Does not validate against any of the Union subtypes\n'
            "  Subtypes: [<class 'int'>, <class 'NoneType'>]\n  Errors:\n    - Expected <class 'int'>\n"
            "    - Expected <class 'NoneType'>\n  Given value type: <class 'str'>\n  Given value: a",
            "Wrong value of trainer.max_epochs: expected int.",
        ),
        (
            'Parser key "data":\n  - Expected a path but Foo either not accessible or invalid\n'
            "  - Expected a dot import path string: Foo",
            "Wrong value of data: there is no class Foo.",
        ),
        (
            "the following arguments are required: fit.model.network, fit.data",
            "Missing model.network, data; give a preset or a configuration file with --config, "
            "or the options.",
        ),
        (
            "Problem with given class_path 'X':\n  Requirement 'wandb>=0.12' not met. HINT: Try running",
            "An option needs the package wandb>=0.12; install it with pip install 'wandb>=0.12'.",
        ),
        (
            "No module named 'timm'",
            "An option needs the module timm: no package of that name is installed, and there is no timm.py"
            " in the current folder.",
        ),
        ("Problems parsing config:\n  while parsing", "Problems parsing config: while parsing"),
    ],
)
def test_one_sentence(report, sentence):
    assert explain(report, OPTIONS) == sentence


def test_there_are_none():
    assert explain("unrecognized arguments: --foo", []) == "There is no option foo; there are none."


def test_own_error_is_found_behind_the_parsers():
    error, cause = ValueError("Does not validate"), ShapeError("wrong shape")
    error.__cause__ = cause
    assert own_error(error) is cause


def test_own_error_is_the_error_itself_even_if_it_has_a_cause():
    error = ConfigError("told to the user")
    error.__cause__ = ShapeError("detail")
    assert own_error(error) is error


def test_a_foreign_error_is_not_ours():
    assert own_error(ValueError("bug")) is None
